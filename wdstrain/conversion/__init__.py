"""Making shards: each kind of source lists its items, and `convert` packs what is listed.

listing.py   what a source lists: items, labels, and how names become keys
folder.py    class folders, or flat files
table.py     CSV and TSV tables with a column of image paths
shard.py     one shard: written, flushed, renamed
convert.py   order, splits, shard boundaries, jobs, and the index last
"""
