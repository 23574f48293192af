"""A check of a new GPU: correctness, speed, and where a step's time goes."""
