"""Copy intact samples out of damaged shards."""
