"""The rows of LAION-like metadata that are worth downloading.

Inside: the job in passes, the filters, what is read of the metadata, the funnel that is printed.
In: parquet files of URLs, captions and scores.
Out: parquet files of selected rows, and a count of what was dropped and why.
"""
