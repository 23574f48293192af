"""The demo's own VAE and text encoder, trained once and kept in `models/`.

Inside: how each was trained.
In: pictures and captions of the demo's world.
Out: the weights in `models/`.
"""
