"""What comes out of the product, and what it is worth.

Inside: the error of text storages, how often metrics' intervals hold, the speed of sampling, a save's memory.
In: known distributions, a trained text encoder, an exported pipeline.
Out: tables for docs/evidence/text-storage.md and docs/evidence/intervals.md.
"""
