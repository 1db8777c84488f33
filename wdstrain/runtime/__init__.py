"""This process and machine: cores, memory, signals, file locks, child processes, the watchdog."""
