"""Select: LAION-like metadata → the rows worth downloading, with a count of what was dropped and why."""
