"""What an epoch will do: reads and memory of each rank, and how well it is shuffled."""
