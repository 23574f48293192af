"""What lies in a root, as types and bytes.

Inside: buckets, the encoding record, receipts, tables, MDS files, stored text latents, models by content.
In: bytes.
Out: objects, and the other way round.
"""
