"""The demo's small picture world: one coloured shape per picture, its captions, its models and its judge."""
