"""The loss.

Inside: paths from data to noise, times, what stored latents mean, an aligned layer, losses by quarter, validation.
In: a `Batch` and its `Draws`.
Out: a loss per sample.
"""
