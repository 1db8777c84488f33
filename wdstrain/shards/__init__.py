"""What shards hold: tar headers, the index and its files, labels, expressions, and how an address becomes an index."""
