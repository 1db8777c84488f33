"""Contents of shards: tar headers, the index and its files, labels, conditions, addresses."""
