"""Which rows stay.

Inside: the rules, the hosts, and their tallies.
In: a table of rows and the filter config.
Out: for each row whether it stays, and how many each rule dropped.
"""
