"""Conversion of data sets into shards, for each kind of source.

api            the functions of the package: one for each kind of source
listing        what a source gives: samples, labels, and how names become keys
sources        the sources: folder, table, arrays, HDF5, iterable, tars, torchvision
runner         one conversion from its source to the finished set
collect        the samples of a source as a catalog
packing        order, splits, which sample goes into which shard, and the writers of shards
shard_pool     tasks in this process, in worker processes, or on a Ray cluster
staging        the staging folder, and how a set is put in place
changes        samples that are appended to a finished set or removed, and columns that are joined
"""
