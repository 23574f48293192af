"""What a selection did, for people.

Inside: the funnel in words and as a picture.
In: each step's counts.
Out: Markdown, JSON and a PNG.
"""
