"""wdstrain: train from WebDataset tar shards."""

__version__ = "0.1.0"
