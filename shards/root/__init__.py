"""A root as it is written and read.

Inside: what all tars share, parts in writing, commits, indexes, reading part by part.
In: a `Store`.
Out: committed parts, and their samples.
"""
