"""What votes say, and how surely.

Inside: a preference and its interval, equivalence, strengths of three and more, simulated studies, power.
In: scores with their prompt and rater. Out: estimates with 95 % intervals, tables of power.
"""
