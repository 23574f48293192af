"""Metrics over features, with 95 % intervals: Fréchet and kernel distances, precision and recall, CLIP score."""
