"""Sampling: draw images for a list of prompts, from noise keyed by sample, and store them as a sample set."""
