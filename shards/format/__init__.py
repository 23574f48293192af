"""What lies in a root, as types and bytes.

Inside: buckets, the encoding record, towers and how their numbers are stored, receipts, tables, MDS files,
models by content.
In: bytes.
Out: objects, and the other way round.
"""
