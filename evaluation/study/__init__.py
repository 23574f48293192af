"""Blind studies in which raters choose the better of two images, with results that have 95 % intervals."""
