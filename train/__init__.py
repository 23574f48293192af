"""Stage 2: a U-Net on latents.

Inside: the loop (`loop.py`), and how a run is prepared and put together before it.
In: a config, and the latents roots that it names.
Out: a run folder: checkpoints, metrics, and a diffusers pipeline.
"""
