"""Benchmarks, each a separate command. `python -m bench` runs those of both stages."""
