"""The rows of an index: keys, offsets and columns of samples, in one Arrow record batch.

A million samples are a few columns, not a million objects. The columns of a mapped index file are
used where they lie, so that processes share their memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import ShardError
from wdstrain.runtime.cached import cached_property
from wdstrain.shards.columns import Column, join_columns
from wdstrain.shards.kinds import ColumnInfo

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MOST_FIELDS = 4096  # different fields of one index: each is three columns of index.arrow
PARTS = {"offset": pa.int64(), "size": pa.int64(), "crc32": pa.uint32()}  # columns of a field
_BASE = ("key", "shard", "offset", "size")  # columns of a sample in the table of an index
_KINDS: tuple[Any, ...] = (np.int64, np.int64, np.uint32, np.bool_)  # of `Offsets.views`
_UNKNOWN = np.uint32(0)  # crc32 of members without one
_METADATA = b"wdstrain"  # key in the metadata of an Arrow file

# A sample in the bytes [start, stop): its key, start, stop, and field, offset, size and crc32 (0 if
# unknown) of each member.
Row = tuple[str, int, int, Sequence[tuple[str, int, int, int]]]


class Members(NamedTuple):
    """The m members (files) of n samples, by sample and then by offset.

    first: int64[n + 1]; sample i has the members first[i] to first[i + 1]. row: int64[m], i of each
    member. field: uint16[m], number of its field. offset, size: int64[m], bytes in the shard.
    crc: uint32[m], crc32 of its data; 0 if unknown, or if it happens to be 0.
    """

    first: Ints
    row: Ints
    field: npt.NDArray[np.uint16]
    offset: Ints
    size: Ints
    crc: npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Offsets:
    """Keys, offsets and columns of n samples. Arrays are views of `rows` and must not be changed.

    rows: one row per sample: key, offset and size of the sample; offset, size and crc32 of each of
    `fields`, null if the sample lacks the field, or the crc32 is unknown; a value of each column.
    infos: of the columns.
    """

    fields: tuple[str, ...]
    rows: pa.RecordBatch = field(repr=False)
    infos: tuple[ColumnInfo, ...] = ()

    @classmethod
    def of_arrays(
        cls, fields: Sequence[str], arrays: Iterable[pa.Array], columns: Sequence[Column] = ()
    ) -> Offsets:
        """Return the rows with these arrays: of the samples, and of each field.

        Raises ShardError for more fields than an index can have.
        """
        check_field_count(len(fields))
        arrays = [*arrays, *(column.stored for column in columns)]
        rows = pa.RecordBatch.from_arrays(arrays, names=list(map(str, range(len(arrays)))))
        return cls(tuple(fields), rows, tuple(column.info for column in columns))

    @classmethod
    def of_samples(cls, samples: Iterable[Row], columns: Sequence[Column] = ()) -> Offsets:
        """Return the rows of samples, with these columns.

        Raises ShardError if there are more fields than an index can hold.
        """
        keys, extents = list[bytes](), array("q")  # start and size of each sample
        # By field: number of the sample, offset, size and crc32 of each member.
        cells: dict[str, array[int]] = {}
        for key, start, stop, members in samples:
            for name, *extent in members:
                cells.setdefault(name, array("q")).extend((len(keys), *extent))
            check_field_count(len(cells))
            keys.append(key.encode("utf-8", "surrogateescape"))
            extents.extend((start, stop - start))
        places = np.array(extents, np.int64).reshape(-1, 2)
        arrays = [pa.array(keys, pa.large_binary()), *map(as_arrow, places.T)]
        for own in cells.values():
            row, *parts = np.array(own, np.int64).reshape(-1, 4).T
            for part, least, kind in zip(parts, (0, 0, 1), PARTS.values(), strict=True):
                values = np.full(len(keys), -1)
                values[row] = part
                arrays.append(pa.array(values, kind, mask=values < least))
        return cls.of_arrays(tuple(cells), arrays, columns)

    @classmethod
    def of_bytes(cls, fields: Sequence[str], data: Any, infos: Sequence[ColumnInfo]) -> Offsets:
        """Return the rows in an Arrow file."""
        return cls(tuple(fields), read_arrow_file(data)[0], tuple(infos))

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rows alone, not the whole columns that they are slices of."""
        return Offsets.of_bytes, (self.fields, arrow_file(self.rows).to_pybytes(), self.infos)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Labels and other scalars."""
        return tuple(map(Column.of, self.infos, self.rows.columns[3 + 3 * len(self.fields) :]))

    @cached_property
    def start(self) -> Ints:
        """Where each sample begins in its shard, with its headers. int64[n]"""
        return np.asarray(as_numpy(self.rows.column(1)))

    @cached_property
    def size(self) -> Ints:
        """Bytes of each sample, with its headers. int64[n]"""
        return np.asarray(as_numpy(self.rows.column(2)))

    @cached_property
    def stop(self) -> Ints:
        """End of each sample. A new array, int64[n]"""
        return self.start + self.size

    @cached_property
    def extents(self) -> dict[str, list[pa.Array]]:
        """Offset, size and crc32 of each field; null where it is missing."""
        arrays = self.rows.columns[3:]
        return {name: arrays[3 * i : 3 * i + 3] for i, name in enumerate(self.fields)}

    @property
    def has_checksums(self) -> bool:
        """Whether the crc32 of any member is known."""
        return any(crc.null_count < len(self) for _, _, crc in self.extents.values())

    @cached_property
    def views(self) -> list[tuple[Any, ...]]:
        """(offset, size, crc32 or 0, whether the sample has it) of each field. Arrays of n each."""
        views = []
        for offset, size, crc in self.extents.values():
            crcs = np.broadcast_to(_UNKNOWN, len(self))
            every = np.broadcast_to(np.True_, len(self))
            has = np.asarray(offset.is_valid()) if offset.null_count else every
            if crc.null_count < len(crc):
                crcs = as_numpy(crc.fill_null(0) if crc.null_count else crc)
            views.append((as_numpy(offset), as_numpy(size), crcs, has))
        return views

    @cached_property
    def members(self) -> Members:
        """The members of all samples. New arrays."""
        return self.members_of(np.arange(len(self)))

    def members_of(self, ids: Ints, names: Collection[str] | None = None) -> Members:
        """Return the members of samples. ids: int64[n]. names: of the fields; None: all."""
        chosen = [n for n, name in enumerate(self.fields) if names is None or name in names]
        shape = (len(chosen), len(ids))
        offset, size, crc, has = (
            np.array([self.views[number][part][ids] for number in chosen], kind).reshape(shape)
            for part, kind in enumerate(_KINDS)
        )
        row, place = np.nonzero(has.T)
        order = np.lexsort((offset[place, row], row))
        row, place = row[order], place[order]
        return Members(
            first=firsts(has.sum(axis=0)),
            row=row,
            field=np.array(chosen, np.uint16)[place],
            offset=offset[place, row],
            size=size[place, row],
            crc=crc[place, row],
        )

    def slice(self, start: int, stop: int) -> Offsets:
        """Return the rows of the samples [start, stop), without a copy."""
        return replace(self, rows=self.rows.slice(start, stop - start))

    def take(self, ids: Ints) -> Offsets:
        """Return the rows of these samples, in the order of `ids` (int64[k])."""
        return replace(self, rows=pc.take(self.rows, as_arrow(ids)))

    @classmethod
    def join(cls, parts: Sequence[Offsets]) -> Offsets:
        """Return the rows of all parts: nulls where a part lacks a field or a column."""
        if len(parts) == 1:
            return parts[0]
        fields = tuple(dict.fromkeys(name for part in parts for name in part.fields))
        rows = []
        for part in parts:
            absent = [pa.nulls(len(part), kind) for kind in PARTS.values()]
            extents = [part.extents.get(name, absent) for name in fields]
            rows.append([*part.rows.columns[:3], *chain(*extents)])
        arrays = [pa.concat_arrays(column) for column in zip(*rows, strict=True)]
        columns = join_columns([(len(part), part.columns) for part in parts])
        return cls.of_arrays(fields, arrays, columns)

    def digest(self) -> str:
        """Return a short hash of the keys, offsets and sizes."""
        keys, members = self.rows.column(0), self.members
        digest = blake2b(firsts(pc.binary_length(keys)).tobytes(), digest_size=8)
        for data in (b"".join(keys.to_pylist()), members.offset.tobytes(), members.size.tobytes()):
            digest.update(data)
        return digest.hexdigest()

    def differences(self, other: Offsets) -> list[str]:
        """Return the columns in which the keys and offsets differ. Checksums are not compared."""
        mine, others = self._comparable(), other._comparable()
        return [name for name in mine | others if mine.get(name) != others.get(name)]

    def _comparable(self) -> dict[str, list[pa.Array]]:
        base = zip(("key", "offset", "size"), self.rows.columns, strict=False)
        return {name: [column] for name, column in base} | {
            f"{name}.offset": arrays[:2]
            for name, arrays in self.extents.items()
            if arrays[0].null_count < len(self)
        }


def check_field_count(count: int) -> None:
    """Raise ShardError if samples have more different fields than an index can have."""
    if count > MOST_FIELDS:
        raise ShardError(
            f"these samples have {count} different fields; {MOST_FIELDS} is the limit.",
            "Check that the shards hold samples with repeating field names.",
        )


def table_names(fields: Sequence[str], columns: Iterable[ColumnInfo]) -> list[str]:
    """Return the names of the columns of the table of an index, in order. The last are those of labels.

    A label whose name is taken gets a prefix: `size` becomes `label.size`.
    """
    names = [*_BASE, *(f"{utf8_text(field)}.{part}" for field in fields for part in PARTS)]
    for column in columns:
        name = column.name
        while name in names:
            name = f"label.{name}"
        names.append(name)
    return names


def utf8_text(text: str) -> str:
    """Return a name as Arrow can hold it: bytes that are not UTF-8 are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def firsts(counts: Sequence[int] | Ints) -> Ints:
    """Return the position of the first element of each of n runs, then the end. int64[n + 1]"""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def as_numpy(values: pa.Array) -> Any:
    """Return the values of a column as a numpy view; the values of empty cells are undefined.

    Its first conversion to or from numpy would take pyarrow 0.3 s, because it imports pandas.
    """
    kind = np.dtype(values.type.to_pandas_dtype())
    return np.ndarray(len(values), kind, values.buffers()[1], values.offset * kind.itemsize)


def as_arrow(ids: Ints) -> pa.Array:
    """Return int64 numbers as an Arrow array; see `as_numpy`."""
    data = pa.py_buffer(np.ascontiguousarray(ids, np.int64))
    return pa.Array.from_buffers(pa.int64(), len(ids), [None, data])


def arrow_file(rows: pa.RecordBatch, metadata: bytes = b"") -> pa.Buffer:
    """Return an Arrow IPC file of one record batch, so that its columns are mapped in one piece."""
    rows, sink = rows.replace_schema_metadata({_METADATA: metadata}), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return sink.getvalue()


def read_arrow_file(data: Any) -> tuple[pa.RecordBatch, bytes]:
    """Return (rows, metadata) of such a file: views of `data`. Raises ValueError for other files."""
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        if reader.num_record_batches != 1:
            raise ValueError(f"it has {reader.num_record_batches} record batches, not 1")
        return reader.get_batch(0), (reader.schema.metadata or {})[_METADATA]
    except OSError as error:  # pyarrow's error for damaged files
        raise ValueError(str(error)) from error
