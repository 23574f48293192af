"""The planner's sums, without any input or output.

Inside: FLOPs, scaling, costs, restarts.
In: numbers.
Out: numbers.
"""
