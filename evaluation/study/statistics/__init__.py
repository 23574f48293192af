"""What votes say, and how surely.

Inside: a preference and its interval, equivalence, strengths of three and more, how raters and prompts lean, power.
In: scores with their prompt and rater. Out: estimates with 95 % intervals, tables of power.
"""
