"""Stage 1, and what comes before it: metadata → selected rows → tars → a latents root.

Inside: the command, its config, the job that runs it; a room for each thing on the way, and `select` and `download`.
In: a folder or address of tars of captioned pictures; the frozen encoders.
Out: a latents root. `python -m precompute --config configs/precompute.yaml`
"""
