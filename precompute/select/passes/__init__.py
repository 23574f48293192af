"""What goes over all rows, one after the other.

Inside: filtering, opt-outs, duplicates, and the files that come out.
In: the tables of the pass before.
Out: the tables of the next, and at last the output files.
"""
