"""What an epoch would do before anything is read: reads, seeks and memory of each rank, and how well it is shuffled."""
