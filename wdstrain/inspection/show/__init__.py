"""Samples for a person's eyes: which, decoded and in words, as a table, as figures of a page, as one picture."""
