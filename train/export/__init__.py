"""The result.

Inside: the pipeline's assembly, its model card, the pipeline for trimmed captions, averages rebuilt from snapshots.
In: a run folder, and the encoders of its latents.
Out: a folder that `from_pretrained` loads.
"""
