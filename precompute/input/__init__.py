"""Read samples from webdataset tars.

Contents: listing and checking tars, parsing tar headers, cleaning captions, the `Reject` exception.
Input: a folder of tars, as a local path or an fsspec URL.
Output: undecoded samples; a sample lost to damage carries the reason.
"""
