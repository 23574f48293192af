"""What the benchmarks share.

Inside: timing in turn, tables, commands as typed, latents roots of no content, a small U-Net.
In: functions to be timed.
Out: seconds, and Markdown.
"""
