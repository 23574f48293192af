"""The on-disk format of a latents root.

This package covers buckets, the encoding record, storage of image latents, text latents and features, receipts, parquet
tables and MDS files, and the hashing of model folders.
"""
