"""The loss.

Inside: paths from data to noise, what stored latents mean, losses by quarter, validation.
In: a `Batch` and its `Draws`.
Out: a loss per sample.
"""
