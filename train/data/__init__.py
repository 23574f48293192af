"""Latents roots as global batches, in an order of our own.

Inside: the order, files and their cache, filters, loader processes, draws keyed by sample.
In: latents roots.
Out: `Batch`es, the same on any number of ranks.
"""
