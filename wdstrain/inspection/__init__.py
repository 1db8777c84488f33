"""Look at shards: what they hold, samples, damage, and what an epoch will do."""
