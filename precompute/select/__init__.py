"""Selection of the rows of LAION-style metadata that are worth downloading."""
