"""A blind study in which raters choose the better of two images, analysed with 95 % intervals."""
