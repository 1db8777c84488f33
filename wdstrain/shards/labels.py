"""What labels say, read at their own places: of some samples, without the pictures between them.

An index knows where a label lies, not what it says, unless its conversion counted. What is wanted of all is asked of an even
part of a large set, and of a small one where each label is a request to a server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from wdstrain.errors import WdstrainError
from wdstrain.shards.index import Index, Ints, Label
from wdstrain.shards.values import scalar
from wdstrain.storage.local import LocalFile, open_source
from wdstrain.storage.remote import is_remote

MOST_FAR = 200  # labels of shards on a server that are read: each is a request


def even_part(index: Index, most: int) -> Ints:
    """Ids of at most so many samples, evenly spread over the set, ascending; of shards on a server not more than 200. int64[...]"""
    most = min(most, MOST_FAR) if any(is_remote(shard.path) for shard in index.shards) else most
    return np.linspace(0, len(index) - 1, min(len(index), most)).astype(np.int64)


def said_counts(index: Index, label: Label) -> dict[str, int]:
    """Samples of each class as the index has them from its conversion; nothing if it does not say."""
    said = index.info.get("samples", {})
    said = {split: said[split] for split in index.splits if split in said} if isinstance(said, dict) else {}
    sums: Counter[str] = Counter()
    for counts in said.values():
        sums.update(counts if isinstance(counts, dict) else {})
    if label.column is None and sums and set(sums) <= set(label.classes) and sums.total() == len(index):
        return {name: sums.get(name, 0) for name in label.classes}
    return {}


def label_bytes(index: Index, field: str, ids: Ints, *, through: bool = False) -> Iterator[tuple[int, memoryview]]:
    """(id, bytes of the field) of those of the samples that have it. ids: int64[...], ascending, so that reads go forward.

    through: a shard of a server is read as one stream with what lies between, where each would be a request.
    """
    if field not in index.fields:
        return
    number, table, shards = index.fields.index(field), index.table, index.shard_of(ids)
    for shard_number in np.unique(shards).tolist():
        shard = index.shards[shard_number]
        with open_source(shard.path, shard.bytes, index.expected_state(shard)) as source:
            for i in ids[shards == shard_number].tolist():
                for row in range(int(table.member_first[i]), int(table.member_first[i + 1])):
                    if table.member_field[row] == number:
                        offset, data = int(table.member_offset[row]), memoryview(bytearray(int(table.member_size[row])))
                        if through and not isinstance(source, LocalFile):
                            source.read_into([data], offset, last=shard.bytes)
                        else:
                            source.read_into([data], offset)
                        yield i, data
                        break


def classes_in(data: memoryview, column: str | None, classes: Sequence[str]) -> list[str]:
    """The classes that a label names, by name where `classes` have one; none where it cannot be read."""
    try:
        return named(scalar(data, column), column, classes)
    except (WdstrainError, ValueError):
        return []


def named(value: object, column: str | None, classes: Sequence[str]) -> list[str]:
    """The classes that the value of a label means."""
    if isinstance(value, list):
        return [str(one) for one in value]
    text = str(value)
    if column is not None and text in classes:  # an entry of a table is what the table said
        return [text]
    return [classes[int(text)]] if text.isdecimal() and int(text) < len(classes) else [text]
