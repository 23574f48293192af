"""Worked examples; the product does not import them.

Inside: `shapes`, the demo.
In: nothing but this repository.
Out: pictures that a small model has learnt to draw.
"""
