"""What labels say, read at their own places: of some samples, without the pictures between them.

An index knows where a label lies, not what it says, unless its conversion counted. What is wanted of all is asked of an even
part of a large set, and of a small one where each label is a request to a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from wdstrain.errors import WdstrainError
from wdstrain.fields import scalar
from wdstrain.indexing import Index, Ints
from wdstrain.remote import is_remote
from wdstrain.storage import open_source

MOST_FAR = 200  # labels of shards on a server that are read: each is a request


def even_part(index: Index, most: int) -> Ints:
    """Ids of at most so many samples, evenly spread over the set, ascending; of shards on a server not more than 200. int64[...]"""
    most = min(most, MOST_FAR) if any(is_remote(shard.path) for shard in index.shards) else most
    return np.linspace(0, len(index) - 1, min(len(index), most)).astype(np.int64)


def label_bytes(index: Index, field: str, ids: Ints) -> Iterator[tuple[int, memoryview]]:
    """(id, bytes of the field) of those of the samples that have it. ids: int64[...], ascending, so that reads go forward."""
    if field not in index.fields:
        return
    number, table, shards = index.fields.index(field), index.table, index.shard_of(ids)
    for shard_number in np.unique(shards).tolist():
        shard = index.shards[shard_number]
        with open_source(shard.path, shard.bytes) as source:
            for i in ids[shards == shard_number].tolist():
                for row in range(int(table.member_first[i]), int(table.member_first[i + 1])):
                    if table.member_field[row] == number:
                        data = memoryview(bytearray(int(table.member_size[row])))
                        source.read_into([data], int(table.member_offset[row]))
                        yield i, data
                        break


def classes_in(data: memoryview, column: str | None, classes: Sequence[str]) -> list[str]:
    """The classes that a label names, by name where `classes` have one; none where it cannot be read."""
    try:
        value = scalar(data, column)
    except (WdstrainError, ValueError):
        return []
    if isinstance(value, list):
        return [str(one) for one in value]
    if column is None and str(value).isdecimal() and int(value) < len(classes):
        return [classes[int(value)]]
    return [str(value)]
