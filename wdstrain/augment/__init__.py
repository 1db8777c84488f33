"""Augmentation of whole batches where they are: on a GPU or in memory."""
