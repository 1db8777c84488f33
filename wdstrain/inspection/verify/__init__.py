"""Read shards completely and compare them with their index."""
