"""Worked examples. The rest of the code does not import them."""
