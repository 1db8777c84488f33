"""Defaults of random crops, apart from what makes them: help texts must not load NumPy."""

SCALE = (0.08, 1.0)  # area, as a share of the image
RATIO = (3 / 4, 4 / 3)  # width / height
