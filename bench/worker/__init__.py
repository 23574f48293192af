"""Benchmarks of a stage 1 worker: its overhead, and a comparison with a simple script."""
