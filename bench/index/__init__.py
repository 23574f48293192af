"""Benchmarks of indexes at the size of LAION: opening, publishing and reading them."""
