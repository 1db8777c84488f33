"""Conversion of data sets into shards, for each kind of source.

api            the functions of the package: one for each kind of source
listing        what a source gives: samples, labels, and how names become keys
sources        the sources: folder, table, arrays, HDF5, iterable, tars, torchvision
runner, packer one conversion from its source to the finished set
shard_plan     order, splits, and which sample goes into which shard
shard_writer   one shard: written, flushed, renamed
output_dir     the staging directory, and how a set is put in place
"""
