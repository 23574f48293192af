"""Metrics computed from features, with 95 % intervals: Fréchet and kernel distances, precision, recall, CLIP score."""
