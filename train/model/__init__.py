"""The network and what moves its weights.

Inside: the U-Net, norms, sharding, AdamW and its schedule, the EMA, FLOPs.
In: a diffusers config.
Out: a module to train.
"""
