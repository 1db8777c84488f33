"""Forward reader: shards to memory, one reader per rank, in the order of the plan."""
