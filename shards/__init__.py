"""The latents root: its formats, the code that writes, commits and reads it, and its maintenance commands.

Stage 1 (`precompute`) writes roots, stage 2 (`train`) reads them, and neither imports the other. The receipts, one per
tar and bucket, are the only record of what a root contains.
"""
