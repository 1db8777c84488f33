"""Indexes with other numbers than their shards have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa

from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Offsets, Row


def with_column(index: Index, field: str | None, part: str, values: Any) -> Index:
    """Return the index with other values in a column of a field; of the samples if it is None."""
    place = 1 + ("offset", "size", "crc32").index(part)
    if field is not None:
        place += 2 + 3 * index.fields.index(field)
    rows = index.offsets.rows
    rows = rows.set_column(
        place, rows.schema.field(place), pa.array(values, rows.schema.types[place])
    )
    return replace(index, offsets=replace(index.offsets, rows=rows))


def with_checksums(index: Index) -> Index:
    """Return the index with the checksums of the bytes in its shards."""
    rows = list[Row]()
    for number, values in index.read(np.arange(len(index))):
        members = [(*member, crc32(values[member[0]])) for member in index.members(number)]
        start, stop = int(index.offsets.start[number]), int(index.offsets.stop[number])
        rows.append((index.key(number), start, stop, members))
    return replace(index, offsets=Offsets.of_samples(rows))
