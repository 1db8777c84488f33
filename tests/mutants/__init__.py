"""Fixed one-token faults of the package, and the command that counts how many of them tests see."""
