"""The contract between the stages: a latents root.

Inside: its formats, the code that writes, reads and commits, the tools that look after it.
In: encoded samples.
Out: a root that both stages trust by its receipts.
"""
