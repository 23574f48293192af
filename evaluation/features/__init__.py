"""Pictures to features, once.

Inside: extractors by local path, where pictures come from, references, the job that stores features in parts.
In: a sample set, tars or a folder of pictures; an extractor's weights.
Out: (N, D) features with an id, and of a reference its moments.
"""
