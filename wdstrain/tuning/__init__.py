"""The rate of each stage, of the whole loader, and the bottleneck."""
