"""A fleet of workers on Ray, for any work.

Inside: the fleet, what it asks of Ray, where and when to try again, which nodes will do, how far it is.
In: keyed units of work, and a function that a worker applies to each.
Out: for each unit a result, or why there is none, in whatever order they come.
"""
