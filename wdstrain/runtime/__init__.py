"""This process and machine: usable cores and memory, deferred signals, file locks, child processes, the stall watchdog."""
