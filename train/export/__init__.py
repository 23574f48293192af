"""Export of a run as a diffusers pipeline with a model card, and post-hoc averages of its weights."""
