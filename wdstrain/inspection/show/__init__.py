"""Decoded samples as a table, as figures of a page, or as one picture."""
