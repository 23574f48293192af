"""Pictures to pixels.

Inside: decoding, colour, cutting and scaling, child processes for what kills a decoder, which buckets there are.
In: a picture's bytes, as hostile as any.
Out: (height, width, 3) uint8 for each bucket that it goes to, or a `Reject`.
"""
