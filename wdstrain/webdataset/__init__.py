"""Samples of shards for pipelines of webdataset, and its class `WebDataset` over our reader."""
