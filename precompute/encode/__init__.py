"""One tar in one worker: `tar.py` reads top to bottom.

Inside: its stages, the encoders, the parts that are written, how stages overlap, who made it all.
In: a tar, an open latents root, the recipe that all tars of a job share.
Out: the tar's receipt.
"""
