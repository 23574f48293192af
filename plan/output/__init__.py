"""Renderers of a report: text tables, the comparison of several plans, and the figure."""
