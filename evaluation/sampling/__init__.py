"""Sampling: draw pictures for a list of prompts, with noise keyed by sample, and store them as a sample set."""
