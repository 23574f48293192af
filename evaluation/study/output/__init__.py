"""The result, for people and for scripts.

Inside: the bars, the page, the files and the table on the terminal.
In: the analysis. Out: results.json, results.html, results.png.
"""
