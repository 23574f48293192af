"""Worked examples, which the product itself does not import."""
