"""Where each sample and each of its fields lies in its shard: numpy views of an Arrow record batch.

A million samples are a few columns, not a million objects. The columns of a mapped index file are
used where they lie, so that processes share their memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import ShardError
from wdstrain.runtime.cached import cached_property
from wdstrain.shards.tar import Sample

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MOST_FIELDS = 4096  # different fields of one index: each is three columns of index.arrow
_BASE = (
    pa.field("key", pa.large_binary()),
    pa.field("offset", pa.int64()),
    pa.field("size", pa.int64()),
)
PARTS = (("offset", pa.int64()), ("size", pa.int64()), ("crc32", pa.uint32()))  # of each field


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


class _Field(NamedTuple):
    """Views of the columns of one field. has: None if all samples have it; crc: None if unknown."""

    offset: Ints
    size: Ints
    crc: npt.NDArray[np.uint32] | None
    has: Bools | None


class Offsets:
    """Keys and offsets of n samples. Arrays are views of `rows` and must not be changed.

    rows: one row per sample: key, offset and size of the sample, then offset, size and crc32 of
    each of `fields`; null if the sample lacks the field, or the crc32 is unknown.
    start, size: int64[n], extent of a sample in its shard, headers included.
    """

    def __init__(self, fields: Sequence[str], rows: pa.RecordBatch) -> None:
        """Raises ShardError for more fields than an index can have."""
        check_field_count(len(fields))
        self.fields, self.rows = tuple(fields), rows

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rows alone, not the whole columns that they are slices of."""
        return Offsets.of_bytes, (self.fields, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the rows as bytes for `of_bytes`."""
        data: bytes = self.rows.serialize().to_pybytes()
        return data

    @classmethod
    def of_bytes(cls, fields: Sequence[str], data: Any) -> Offsets:
        """Return the offsets whose rows `to_bytes` wrote."""
        schema = rows_schema(range(len(fields)))
        return cls(fields, pa.ipc.read_record_batch(pa.py_buffer(data), schema))

    @cached_property
    def start(self) -> Ints:
        return np.asarray(numbers(self.rows.column(1)))

    @cached_property
    def size(self) -> Ints:
        return np.asarray(numbers(self.rows.column(2)))

    @cached_property
    def stop(self) -> Ints:
        """End of each sample. A new array, int64[n]"""
        return self.start + self.size

    @cached_property
    def has_checksums(self) -> bool:
        """Whether the crc32 of any member is known."""
        return any(field.crc is not None for field in self._fields)

    @cached_property
    def _fields(self) -> list[_Field]:
        fields = []
        for place in range(len(_BASE), self.rows.num_columns, len(PARTS)):
            offset, size, crc = self.rows.columns[place : place + len(PARTS)]
            has = np.asarray(offset.is_valid()) if offset.null_count else None
            crcs = numbers(crc.fill_null(0)) if crc.null_count < len(crc) else None
            fields.append(_Field(numbers(offset), numbers(size), crcs, has))
        return fields

    @cached_property
    def members(self) -> Members:
        """The members of all samples. New arrays."""
        return self.members_of(np.arange(len(self)))

    def members_of(self, ids: Ints, names: Collection[str] | None = None) -> Members:
        """Return the members of samples. ids: int64[n]. names: of the fields; None: all."""
        parts: list[tuple[Any, ...]] = [(ids[:0], ids[:0], ids[:0], ids[:0], ids[:0])]
        for number, field in enumerate(self._fields):
            if names is not None and self.fields[number] not in names:
                continue
            row = np.arange(len(ids)) if field.has is None else np.flatnonzero(field.has[ids])
            at = ids[row]
            crc = np.zeros(len(row), np.uint32) if field.crc is None else field.crc[at]
            parts.append((row, np.full(len(row), number), field.offset[at], field.size[at], crc))
        row, numbers_, offset, size, crc = map(np.concatenate, zip(*parts, strict=True))
        order = np.lexsort((offset, row))
        return Members(
            first=firsts(np.bincount(row, minlength=len(ids))),
            row=row[order],
            field=numbers_[order].astype(np.uint16),
            offset=offset[order],
            size=size[order],
            crc=crc[order].astype(np.uint32),
        )

    def members_at(self, number: int) -> list[tuple[str, int, int]]:
        """Return (field, offset in the shard, size) of each member of one sample."""
        named = zip(self.fields, self._fields, strict=True)
        members = [
            (name, int(field.offset[number]), int(field.size[number]))
            for name, field in named
            if field.has is None or field.has[number]
        ]
        return sorted(members, key=itemgetter(1))

    def extents_of(self, name: str) -> tuple[pa.Array, pa.Array]:
        """Return (offset, size) of a field in every sample; null where it is missing."""
        place = len(_BASE) + len(PARTS) * self.fields.index(name)
        return self.rows.column(place), self.rows.column(place + 1)

    def keys_of(self, ids: Ints) -> list[str]:
        """Return the keys of samples. ids: int64[n]"""
        edges, letters = key_parts(self.rows.column(0).take(pa.array(ids)))
        joined, cuts = letters.tobytes(), list(pairwise(edges.tolist()))
        if joined.isascii():  # decode once: faster than once per key
            text = joined.decode("ascii")
            return [text[a:b] for a, b in cuts]
        return [str(joined[a:b], "utf-8", "surrogateescape") for a, b in cuts]

    def key_texts(self) -> pa.Array:
        """Return the keys as text, or as bytes if any of them is not UTF-8."""
        try:
            return self.rows.column(0).cast(pa.large_string())
        except pa.ArrowInvalid:
            return self.rows.column(0)

    def slice(self, start: int, stop: int) -> Offsets:
        """Return the offsets of the samples [start, stop), without a copy."""
        return Offsets(self.fields, self.rows.slice(start, stop - start))

    def take(self, ids: Ints) -> Offsets:
        """Return the offsets of these samples, in the order of `ids` (int64[k])."""
        return Offsets(self.fields, pc.take(self.rows, pa.array(ids)))

    @classmethod
    def join(cls, parts: Sequence[Offsets]) -> Offsets:
        """Return the concatenation of offsets: nulls where a part lacks a field."""
        if len(parts) == 1:
            return parts[0]
        fields = tuple(dict.fromkeys(name for part in parts for name in part.fields))
        schema = rows_schema(range(len(fields)))
        places = {name: number for number, name in enumerate(fields)}
        tables = []
        for part in parts:
            named = rows_schema(places[name] for name in part.fields)
            tables.append(pa.Table.from_arrays(part.rows.columns, schema=named))
        joined = pa.concat_tables([schema.empty_table(), *tables], promote_options="default")
        return cls(fields, one_batch(joined.combine_chunks()))

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Offsets:
        """Return the offsets of samples of a shard, in order."""
        builder = OffsetsBuilder()
        for key, start, stop, members in samples:
            builder.put(key, start, stop, [(*member, 0) for member in members])
        return builder.offsets()

    def digest(self) -> str:
        """Return a short hash of the keys, offsets and sizes."""
        digest = blake2b(digest_size=8)
        for values in (*key_parts(self.rows.column(0)), self.members.offset, self.members.size):
            digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()

    def differences(self, other: Offsets) -> list[str]:
        """Return the columns in which the keys and offsets differ. Checksums are not compared."""
        mine, others = self._comparable(), other._comparable()
        return [name for name in {**mine, **others} if mine.get(name) != others.get(name)]

    def without_fields(self) -> Offsets:
        """Return keys and offsets of the samples alone, which take less memory."""
        return Offsets(
            (), pa.RecordBatch.from_arrays(self.rows.columns[:3], schema=rows_schema(()))
        )

    def _comparable(self) -> dict[str, tuple[pa.Array, ...]]:
        base = zip(("key", "offset", "size"), self.rows.columns, strict=False)
        fields = ((f"{name}.offset", self.extents_of(name)) for name in self.fields)
        present = {name: pair for name, pair in fields if pair[0].null_count < len(self)}
        return {name: (column,) for name, column in base} | present


class OffsetsBuilder:
    """Offsets of samples that are added one after another.

    stop: end of the last sample. fields: number of each field, in the order of the numbers.
    """

    def __init__(self) -> None:
        self.stop = 0
        self.fields: dict[str, int] = {}
        self._samples = array("q")  # start, size, length of the key, members: of each sample
        self._members = array("q")  # offset, size, crc32, number of the field: of each member
        self._keys = bytearray()

    def __len__(self) -> int:
        return len(self._samples) // 4

    def put(
        self, key: str, start: int, stop: int, members: Sequence[tuple[str, int, int, int]]
    ) -> None:
        """Add a sample in the bytes [start, stop): (field, offset, size, crc32) of each member.

        Raises ShardError if there are more fields than an index can hold.
        """
        for field, offset, size, crc in members:
            number = self.fields.get(field)
            if number is None:
                number = self.fields[field] = len(self.fields)
                check_field_count(len(self.fields))
            self._members.extend((offset, size, crc, number))
        raw = key.encode("utf-8", "surrogateescape")
        self._keys += raw
        self._samples.extend((start, stop - start, len(raw), len(members)))
        self.stop = stop

    def offsets(self) -> Offsets:
        """Return the offsets of all samples."""
        samples = np.array(self._samples, np.int64).reshape(-1, 4)
        members = np.array(self._members, np.int64).reshape(-1, 4)
        edges = pa.py_buffer(firsts(samples[:, 2]))
        keys = [None, edges, pa.py_buffer(bytes(self._keys))]
        columns = [pa.Array.from_buffers(pa.large_binary(), len(samples), keys)]
        columns += [pa.array(samples[:, part].copy()) for part in (0, 1)]
        row = np.repeat(np.arange(len(samples)), samples[:, 3])
        order = np.argsort(members[:, 3], kind="stable")
        edges = np.searchsorted(members[order, 3], np.arange(len(self.fields) + 1))
        for first, stop in pairwise(edges.tolist()):
            for part, (_, kind) in enumerate(PARTS):
                at = order[first:stop]
                at = at if part < 2 else at[members[at, 2] != 0]
                columns.append(_sparse(members[at, part], row[at], len(samples), kind))
        rows = pa.RecordBatch.from_arrays(columns, schema=rows_schema(range(len(self.fields))))
        return Offsets(tuple(self.fields), rows)


def check_field_count(count: int) -> None:
    """Raise ShardError if samples have more different fields than an index can have."""
    if count > MOST_FIELDS:
        raise ShardError(
            f"these samples have {count} different fields; {MOST_FIELDS} is the limit. "
            f"Check that the shards hold samples with repeating field names."
        )


def firsts(counts: Sequence[int] | Ints) -> Ints:
    """Return the position of the first element of each of n runs, then the end. int64[n + 1]"""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def numbers(values: pa.Array) -> Any:
    """Return the values of a column as a numpy view; the values of empty cells are undefined."""
    buffer = values.buffers()[1]
    dtype = np.dtype(values.type.to_pandas_dtype())
    if buffer is None:
        return np.zeros(0, dtype)
    return np.frombuffer(buffer, dtype, len(values), values.offset * dtype.itemsize)


def key_parts(keys: pa.Array) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Return (int64[n + 1], uint8[...]); key i is the letters from entry i to entry i + 1."""
    if not len(keys):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, edges, data = keys.buffers()
    first = np.frombuffer(edges, np.int64, len(keys) + 1, keys.offset * 8)
    letters = np.frombuffer(data or b"", np.uint8)[first[0] : first[-1]]
    return first - first[0], letters


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """Return the rows of a table with at most one chunk per column."""
    batches = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def rows_schema(places: Iterable[int]) -> pa.Schema:
    """Return the schema of rows whose fields have these numbers."""
    parts = (pa.field(f"{place}.{part}", kind) for place in places for part, kind in PARTS)
    return pa.schema([*_BASE, *parts])


# --- parts ----------------------------------------------------------------------------------------


def _sparse(values: Ints, rows: Ints, count: int, kind: pa.DataType) -> pa.Array:
    """Return a column with these values in these rows and nulls in the others."""
    column, missing = np.zeros(count, kind.to_pandas_dtype()), np.ones(count, bool)
    column[rows], missing[rows] = values, False
    return pa.array(column, kind, mask=missing if missing.any() else None)
