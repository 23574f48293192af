"""What comes in: tars and their samples.

Inside: the tars of a folder, what their headers say, clean captions, why a sample is rejected.
In: an address, which is a path or whatever fsspec opens.
Out: undecoded samples, each with why it is lost where it is.
"""
