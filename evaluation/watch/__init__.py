"""A run, followed: each new checkpoint is evaluated on other machines while training goes on.

Inside: the loop, what becomes of a checkpoint, what trackers are told.
In: a run folder or its address, which is only read but for RUN/evaluations; how to evaluate one step.
Out: sample sets and records, evaluations.jsonl, curves and pictures in the run's tracker.
"""
