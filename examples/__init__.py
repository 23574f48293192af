"""Worked examples; the product does not import them."""
