"""A run's reports: metrics.jsonl, samples.jsonl, the tracker, evaluations, the progress bar and loss.png."""
