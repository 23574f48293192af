"""A run folder, and the processes that share a run.

Inside: checkpoints, who holds the folder, the fingerprint, logs and meters, the loss alarm, checks before the start.
In: what steps gave.
Out: files below `run_dir`, and errors for people.
"""
