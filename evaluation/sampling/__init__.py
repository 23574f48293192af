"""Prompts to pictures.

Inside: readers of prompt files, noise by sample, the model made ready, what draws on a worker, the sample set on disk.
In: a model and prompts.
Out: a sample set: pictures in parts, each with its receipt.
"""
