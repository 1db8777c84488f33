"""Counts, sizes, values, images, labels and provenance of shards, estimated or exact."""
