"""What the benchmarks share.

Inside: timing in turn, tables, commands as typed, latents roots of no content, simulated studies.
In: functions to be timed.
Out: seconds, and Markdown.
"""
