"""An index as an Arrow table, one row per sample in shard order, and the check of such a table.

Columns: key, shard, offset, size; for each field NAME.offset, NAME.size and NAME.crc32 (null if the
sample lacks the field; crc32 is also null if no data was read); then one column per label or
scalar. Arrow files come from anywhere: all their numbers are checked before they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from wdstrain.report.printing import printable
from wdstrain.shards.columns import Column
from wdstrain.shards.kinds import KINDS
from wdstrain.shards.offsets import PARTS, Bools, Ints, Offsets, firsts, numbers, rows_schema
from wdstrain.storage.remote import name_of, shown_path

_BASE = ("key", "shard", "offset", "size")
_SHARD = pa.dictionary(pa.int32(), pa.string())
_CHECKED = 1 << 16  # samples that are checked together: their numbers stay in the CPU's cache


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


def to_table(shards: Sequence[Shard], offsets: Offsets, columns: Iterable[Column]) -> pa.Table:
    """Return the table of an index."""
    counts, names = [shard.samples for shard in shards], [utf8_text(s.name) for s in shards]
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    codes = np.repeat(np.array([places[name] for name in names], np.int32), counts)
    shard = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(list(places), pa.string()))
    labels = named_columns(offsets.fields, columns)
    arrays = [offsets.key_texts(), shard, *offsets.rows.columns[1:]]
    arrays += [column.values for column in labels.values()]
    return pa.table(arrays, names=[*_BASE, *_part_names(offsets.fields), *labels])


def named_columns(fields: Sequence[str], columns: Iterable[Column]) -> dict[str, Column]:
    """Return the label columns by their names in the table, in order. fields: of the samples."""
    columns = list(columns)
    names = _label_names(fields, [column.name for column in columns])
    return dict(zip(names, columns, strict=True))


def from_batch(
    batch: pa.RecordBatch,
    shards: Sequence[Shard],
    fields: Sequence[str],
    described: Sequence[dict[str, Any]],
) -> tuple[Offsets, tuple[Column, ...]]:
    """Return the offsets and columns in the rows of an index file.

    described: the label columns, as index.json lists them. Raises ValueError for rows that do not
    fit the shards, or that lead outside a shard.
    """
    batch.validate(full=True)
    _check_schema(batch.schema, fields, described)
    key, shard, *extents = batch.columns[: len(_BASE) + len(PARTS) * len(fields)]
    for name, column in zip(_BASE, batch.columns, strict=False):
        if column.null_count:
            raise ValueError(f"its column {name} has empty cells")
    codes = _checked_shards(shard, shards)
    limits = np.array([shard.bytes for shard in shards], np.int64)
    _check_extents(codes, limits, extents)
    columns = [key.cast(pa.large_binary()), *extents]
    rows = pa.RecordBatch.from_arrays(columns, schema=rows_schema(range(len(fields))))
    labels = batch.columns[len(_BASE) + len(PARTS) * len(fields) :]
    described_columns = [
        Column.stored({name: row[name] for name in ("name", "kind", "field", "entry")}, values)
        for row, values in zip(described, labels, strict=True)
    ]
    return Offsets(fields, rows), tuple(described_columns)


def utf8_text(text: str) -> str:
    """Return a name as Arrow can hold it: bytes that are not UTF-8 are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# --- parts ----------------------------------------------------------------------------------------


def _part_names(fields: Iterable[str]) -> Iterator[str]:
    """Yield the names of the columns of fields."""
    return (f"{utf8_text(name)}.{part}" for name in fields for part, _ in PARTS)


def _label_names(fields: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the names of labels' columns: `size` becomes `label.size`, as `size` is taken."""
    taken = dict.fromkeys([*_BASE, *_part_names(fields)])
    first = len(taken)
    for name in names:
        while name in taken:
            name = f"label.{name}"
        taken[name] = None
    return list(taken)[first:]


def _check_schema(
    schema: pa.Schema, fields: Sequence[str], described: Sequence[dict[str, Any]]
) -> None:
    key = pa.large_binary() if schema.types[:1] == [pa.large_binary()] else pa.large_string()
    kinds = [key, _SHARD, pa.int64(), pa.int64(), *(kind for _ in fields for _, kind in PARTS)]
    kinds += [KINDS[row["kind"]].arrow for row in described]
    labels = _label_names(fields, [row["name"] for row in described])
    expected = list(zip([*_BASE, *_part_names(fields), *labels], kinds, strict=True))
    actual = list(zip(schema.names, schema.types, strict=True))
    if len(actual) != len(expected):
        raise ValueError(f"it has {len(actual)} columns, {len(expected)} are listed")
    for (name, kind), wanted in zip(actual, expected, strict=True):
        if (name, kind) != wanted:
            raise ValueError(f"its column {name!r} ({kind}) should be {wanted[0]!r} ({wanted[1]})")


def _checked_shards(column: pa.DictionaryArray, shards: Sequence[Shard]) -> Any:
    """Return the shard number of each row, int32[n]. Raises ValueError for another order."""
    if column.dictionary.to_pylist() != [utf8_text(shard.name) for shard in shards]:
        raise ValueError("its shards are not the ones of index.json")
    codes = numbers(column.indices)
    counts = np.array([shard.samples for shard in shards], np.int64)
    # Each count is checked before their sum, which may wrap.
    if (counts > len(codes)).any() or int(counts.sum()) != len(codes):
        raise ValueError("its number of samples is not the one of index.json")
    edges, filled = firsts(counts), np.flatnonzero(counts)
    changes = np.flatnonzero(codes[1:] != codes[:-1]) + 1
    if not (
        np.array_equal(changes, edges[filled][1:]) and np.array_equal(codes[edges[filled]], filled)
    ):
        raise ValueError("its samples are not in the order of the shards")
    return codes


def _check_extents(codes: Any, limits: Ints, extents: Sequence[pa.Array]) -> None:
    """Raise ValueError for numbers that lead outside a shard.

    extents: offset and size of the samples, then offset, size and crc32 of each field.
    """
    start, size = numbers(extents[0]), numbers(extents[1])
    fields = []
    for offset, length in zip(extents[2::3], extents[3::3], strict=True):
        has = np.asarray(offset.is_valid())
        if not np.array_equal(has, np.asarray(length.is_valid())):
            raise ValueError("a field has an offset without a size")
        fields.append((numbers(offset), numbers(length), has))
    for first in range(0, len(start), _CHECKED):
        part = slice(first, first + _CHECKED)
        low, length = start[part], size[part]
        room = limits[codes[part]] - low
        if not ((low >= 0).all() and (length > 0).all() and (length <= room).all()):
            raise ValueError("a sample lies outside its shard")
        for offsets, sizes, has in fields:
            _check_field(offsets[part], sizes[part], has[part], low, low + length)
    if ((start[1:] < start[:-1] + size[:-1]) & (codes[1:] == codes[:-1])).any():
        raise ValueError("its samples overlap or are not in the order of their shard")


def _check_field(offset: Ints, size: Ints, has: Bools, low: Ints, high: Ints) -> None:
    """Raise ValueError for a field outside its sample. has: bool[n], samples that have it."""
    if (has & ((offset < low) | (size < 0) | (size > high - offset))).any():
        raise ValueError("a field lies outside its sample")
