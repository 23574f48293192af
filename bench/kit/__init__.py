"""What the benchmarks share.

Inside: timing in turn, tables, commands as typed, latents roots of no content.
In: functions to be timed.
Out: seconds, and Markdown.
"""
