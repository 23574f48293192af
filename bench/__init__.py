"""What is measured, each by its own command; `python -m bench` runs them all.

Inside: a module for each part of the product that has a speed or a size to lose.
In: the product itself, and stand-ins for GPUs where none is needed.
Out: sections of Markdown for docs/evidence/benchmarks.md.
"""
