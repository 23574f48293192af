"""What a run says of itself, and what it is told of its checkpoints' evaluations.

Inside: the log, its lines, the tracker, evaluations for the tracker, loss.png.
In: what each step gave; sheets that `evaluation watch` left in the run.
Out: metrics.jsonl, samples.jsonl, the tracker's run, the progress bar.
"""
