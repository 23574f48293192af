"""What is known of runs, on one page: losses, speed, cost, data, metrics with their intervals, pictures.

Inside: records of evaluations, pictures of prompts, charts, tables, the page, the comparison of two runs.
In: run folders or their addresses.
Out: report.html, which needs no other file.
"""
