"""Everything that a run reports: metrics.jsonl, samples.jsonl, the tracker, evaluations, progress and loss.png."""
