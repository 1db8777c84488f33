"""Preview of an epoch: reads and memory of each rank, and quality of the shuffle."""
