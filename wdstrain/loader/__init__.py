"""Batches to the training loop: the loader, epochs, devices, statistics, webdataset."""
