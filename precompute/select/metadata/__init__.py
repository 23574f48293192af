"""Reading metadata as people publish it.

Inside: its files, and its columns under their many names.
In: a file or folder of parquet.
Out: tables whose columns have one name each.
"""
