"""Benchmarks, each a command of its own. `python -m bench` runs those of both stages."""
