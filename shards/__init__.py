"""The latents root: its formats, the code that writes, commits and reads it, and its maintenance commands.

Stage 1 (`precompute`) writes roots, stage 2 (`train`) reads them, and neither imports the other. A receipt per tar and
bucket is the only record of what a root contains.
"""
