"""An index as an Arrow table, one row per sample in shard order, and the check of such a table.

Columns: key, shard, offset, size; for each field NAME.offset, NAME.size and NAME.crc32 (null if the
sample lacks the field; crc32 is also null if no data was read); then one column per label or
scalar. Arrow files come from anywhere: all their numbers are checked before they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
import pyarrow as pa

from wdstrain.report.printing import printable
from wdstrain.shards.columns import Column
from wdstrain.shards.kinds import KINDS, ColumnInfo
from wdstrain.shards.offsets import PARTS, Bools, Ints, Offsets, firsts
from wdstrain.storage.remote import name_of, shown_path

Info = TypeVar("Info", bound=ColumnInfo)

_BASE = ("key", "shard", "offset", "size")
_SHARD = pa.dictionary(pa.int32(), pa.string())


@dataclass(frozen=True)
class Shard:
    """One tar shard: address, number of samples, size in bytes and split.

    sha256: of its bytes; empty if only its headers were read. tag: its state when it was last
    examined: the server's ETag (empty if there is none), or `storage.local.state_of` for a file.
    """

    path: str
    samples: int
    bytes: int
    split: str = ""
    sha256: str = ""
    tag: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def shown(self) -> str:
        """The path for messages: without secrets in an address, and with printable characters."""
        return printable(shown_path(self.path))


def to_batch(shards: Sequence[Shard], offsets: Offsets) -> pa.RecordBatch:
    """Return the table of an index, as one record batch."""
    key, *others = offsets.rows.columns
    with suppress(pa.ArrowInvalid):  # some key is not UTF-8, and the column stays binary
        key = key.cast(pa.large_string())
    return pa.RecordBatch.from_arrays(
        [key, shard_words(shards, "name"), *others], names=_names(offsets.fields, offsets.infos)
    )


def named_columns(fields: Sequence[str], columns: Iterable[Info]) -> dict[str, Info]:
    """Return the label columns by their names in the table, in order. fields: of the samples.

    A name that is taken gets a prefix: `size` becomes `label.size`.
    """
    taken, named = {*_BASE, *_part_names(fields)}, dict[str, Info]()
    for column in columns:
        name = column.name
        while name in taken or name in named:
            name = f"label.{name}"
        named[name] = column
    return named


def from_batch(
    batch: pa.RecordBatch,
    shards: Sequence[Shard],
    fields: Sequence[str],
    infos: Sequence[ColumnInfo],
) -> Offsets:
    """Return the rows of an index file.

    infos: of the label columns, as index.json lists them. Raises ValueError for rows that do not
    fit the shards, or that lead outside a shard.
    """
    batch.validate(full=True)
    key, kinds = pa.large_string(), [KINDS[info.kind].arrow for info in infos]
    if batch.schema.types[:1] == [pa.large_binary()]:
        key = pa.large_binary()
    types = [key, _SHARD, pa.int64(), pa.int64(), *list(PARTS.values()) * len(fields), *kinds]
    if (batch.schema.names, batch.schema.types) != (_names(fields, infos), types):
        raise ValueError("its columns are not the ones of index.json")
    if any(column.null_count for column in batch.columns[: len(_BASE)]):
        raise ValueError("a column of its samples has empty cells")
    keys, shard, *others = batch.columns
    if sum(shard.samples for shard in shards) != len(batch):
        raise ValueError("its number of samples is not the one of index.json")
    if shard != shard_words(shards, "name"):
        raise ValueError("its samples are not in the order of the shards of index.json")
    last = len(others) - len(infos)
    columns = [Column.of(*pair) for pair in zip(infos, others[last:], strict=True)]
    arrays = [keys.cast(pa.large_binary()), *others[:last]]
    offsets = Offsets.of_arrays(fields, arrays, columns)
    _check_extents(offsets, shards)
    return offsets


def shard_words(shards: Sequence[Shard], attribute: str) -> pa.DictionaryArray:
    """Return the name, or another attribute, of the shard of each sample."""
    words = pa.array([utf8_text(getattr(shard, attribute)) for shard in shards], pa.string())
    counts = [shard.samples for shard in shards]
    numbers = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
    return words.dictionary_encode().take(pa.array(numbers))


def utf8_text(text: str) -> str:
    """Return a name as Arrow can hold it: bytes that are not UTF-8 are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# --- parts ----------------------------------------------------------------------------------------


def _names(fields: Sequence[str], infos: Iterable[ColumnInfo]) -> list[str]:
    """Return the names of all columns of the table."""
    return [*_BASE, *_part_names(fields), *named_columns(fields, infos)]


def _part_names(fields: Iterable[str]) -> list[str]:
    """Return the names of the columns of fields."""
    return [f"{utf8_text(name)}.{part}" for name in fields for part in PARTS]


def _check_extents(offsets: Offsets, shards: Sequence[Shard]) -> None:
    """Raise ValueError for numbers that lead outside a shard, and for samples that overlap."""
    for offset, size, _ in offsets.extents.values():
        if not offset.is_valid().equals(size.is_valid()):
            raise ValueError("a field has an offset without a size")
    edges = firsts([shard.samples for shard in shards]).tolist()
    for shard, (first, stop) in zip(shards, pairwise(edges), strict=True):
        own = slice(first, stop)
        low, extent = offsets.start[own], offsets.size[own]
        high = low + extent
        if not (_lies_in(low, extent, 0, shard.bytes) & (extent > 0)).all():
            raise ValueError("a sample lies outside its shard")
        if (low[1:] < high[:-1]).any():
            raise ValueError("its samples overlap or are not in the order of their shard")
        for start, length, _, has in offsets.views:
            if not (_lies_in(start[own], length[own], low, high) | ~has[own]).all():
                raise ValueError("a field lies outside its sample")


def _lies_in(offset: Ints, size: Ints, low: Ints | int, high: Ints | int) -> Bools:
    """Return whether [offset, offset + size) lies in [low, high), where low >= 0. Sums may wrap."""
    return (offset >= low) & (size >= 0) & (size <= high - offset)
