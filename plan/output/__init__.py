"""How a plan is shown.

Inside: words and tables, plans side by side, the figure.
In: the report's rows.
Out: text, and a PNG.
"""
