"""Bytes into memory, forward only: one reader per rank that executes the plan."""
