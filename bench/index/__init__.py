"""Indexes at the size of LAION: opened by ranks, and published by jobs.

Inside: a benchmark of each.
In: synthetic roots.
Out: sections of docs/evidence/benchmarks.md.
"""
