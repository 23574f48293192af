"""Benchmarks of results: how well intervals hold, and what mixed precision costs."""
