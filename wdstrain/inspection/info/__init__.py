"""What is in shards, at once or exactly: counts and sizes, what values are, pictures, labels, how they were made."""
