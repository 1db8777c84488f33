"""Where bytes are: local files, HTTP, object stores, range requests in flight, the shard cache."""
