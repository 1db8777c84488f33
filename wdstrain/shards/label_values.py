"""Label values of samples, read at their offsets without the images between them.

Labels with a column in the index are counted there. For others the index has only the offset of
each label.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

import numpy as np
import pyarrow.compute as pc

from wdstrain.errors import SampleError, WdstrainError
from wdstrain.shards.columns import Column, ColumnBuilder
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo, Place, classes_of, names_of
from wdstrain.shards.offsets import Ints
from wdstrain.shards.values import scalar
from wdstrain.storage.remote import is_remote

MOST_FAR = 200  # labels that are read from a server; each is a request


def even_part(index: Index, most: int) -> Ints:
    """Return ids of at most `most` samples, evenly spread over the set, ascending. int64[n]

    At most MOST_FAR ids if any shard is on a server.
    """
    most = min(most, MOST_FAR) if any(is_remote(shard.path) for shard in index.shards) else most
    return np.linspace(0, len(index) - 1, min(len(index), most)).astype(np.int64)


def complete_column(index: Index, label: ColumnInfo) -> Column | None:
    """Return the column of a label if it has a value for every sample."""
    for column in index.columns:
        if column.place == label.place and column.kind == label.kind and len(column):
            return None if column.values.null_count else column
    return None


def recorded_counts(index: Index, label: ColumnInfo) -> dict[str, int]:
    """Return the number of samples of each class, from the label's column.

    {} without a complete column. A sample of several classes counts for each of them.
    """
    column = complete_column(index, label)
    if column is None or not label.classes:
        return {}
    values = column.values.flatten() if label.kind == "multi" else column.values
    counts = {str(row["values"]): row["counts"] for row in pc.value_counts(values).to_pylist()}
    is_known = set(counts) <= set(label.classes)
    return {name: counts.get(name, 0) for name in label.classes} if is_known else {}


def label_bytes(index: Index, field: str, ids: Ints) -> Iterator[tuple[int, memoryview]]:
    """Yield (id, bytes of the field) for each sample that has the field.

    ids: int64[n], ascending, so that reads go forward. Raises ShardError and StorageError for
    shards that cannot be read.
    """
    for number, fields in index.read(ids, [field]):
        if field in fields:
            yield number, memoryview(fields[field])


def read_columns(index: Index, places: Collection[Place]) -> Index:
    """Return `index` with columns of these fields and entries only, read forward from the shards."""
    builder = ColumnBuilder(places)
    for _, fields in index.read(np.arange(len(index)), {field for field, _ in places}):
        builder.add(fields.items())
    return index.with_columns(builder.finish())


def classes_in(data: memoryview, entry: str | None, classes: Sequence[str]) -> list[str]:
    """Return the class names in the bytes of a label; [] if they are invalid.

    The value is a list of names, a name, or a number, which counts in `classes`. entry: of JSON, None
    if the value is a whole field.
    """
    try:
        value = scalar(data, entry)
    except (WdstrainError, ValueError):
        return []
    if isinstance(value, list):
        return names_of(value)
    with suppress(SampleError, IndexError):  # tables store names, which may look like numbers
        return [classes[classes_of(tuple(classes), by_name=entry is not None).number(value)]]
    return [str(value)]
