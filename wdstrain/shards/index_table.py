"""An index as an Arrow table, one row per sample in shard order, and back.

Columns: key, shard, offset, size; for each field NAME.offset, NAME.size and NAME.crc32 (null if the
sample lacks the field; crc32 is also null if no data was read); then one column per label or
scalar. Arrow files come from anywhere: all their numbers are checked before they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from wdstrain.shards.columns import Column
from wdstrain.shards.kinds import KINDS
from wdstrain.shards.offsets import Ints, Members, Offsets, firsts

_BASE = ("key", "shard", "offset", "size")
_PARTS = (("offset", pa.int64()), ("size", pa.int64()), ("crc32", pa.uint32()))  # of each field
_CHECKED = 1 << 16  # samples that are checked together: their numbers stay in the CPU's cache

Bools = npt.NDArray[np.bool_]


class _Shard(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def samples(self) -> int: ...
    @property
    def bytes(self) -> int: ...


def to_table(
    shards: Sequence[_Shard], fields: Sequence[str], offsets: Offsets, columns: Iterable[Column]
) -> pa.Table:
    """Return the table of an index."""
    counts = [shard.samples for shard in shards]
    codes = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
    names = pa.array([utf8_text(shard.name) for shard in shards], pa.string())
    arrays = {
        "key": key_array(offsets),
        "shard": pa.DictionaryArray.from_arrays(pa.array(codes), names),
        "offset": pa.array(offsets.start),
        "size": pa.array(offsets.stop - offsets.start),
    }
    for name, parts in zip(fields, _field_arrays(offsets, len(fields)), strict=True):
        for (part, _), array in zip(_PARTS, parts, strict=True):
            arrays[f"{utf8_text(name)}.{part}"] = array
    arrays |= {name: column.values for name, column in named_columns(fields, columns).items()}
    return pa.table(arrays)


def named_columns(fields: Sequence[str], columns: Iterable[Column]) -> dict[str, Column]:
    """Return the label columns by their names in the table, in order. fields: of the samples."""
    taken = {*_BASE, *(f"{utf8_text(name)}.{part}" for name in fields for part, _ in _PARTS)}
    named: dict[str, Column] = {}
    for column in columns:
        name = free_name(column.name, taken)
        taken.add(name)
        named[name] = column
    return named


def key_array(offsets: Offsets) -> pa.Array:
    """Return the keys as text, or as bytes if any of them is not UTF-8."""
    buffers = [None, pa.py_buffer(offsets.key_first), pa.py_buffer(offsets.keys)]
    keys = pa.Array.from_buffers(pa.large_string(), len(offsets), buffers)
    try:
        keys.validate(full=True)
    except pa.ArrowInvalid:
        keys = pa.Array.from_buffers(pa.large_binary(), len(offsets), buffers)
    return keys


def free_name(name: str, taken: Iterable[str]) -> str:
    """Return the name of a label's column: `size` becomes `label.size`, as `size` is taken."""
    while name in taken:
        name = f"label.{name}"
    return name


@dataclass(frozen=True)
class _Field:
    """Numbers of one field of n samples. has: None if all samples have it; crc: None if unknown."""

    offset: Ints
    size: Ints
    crc: npt.NDArray[np.uint32] | None
    has: Bools | None


def from_batch(
    batch: pa.RecordBatch,
    shards: Sequence[_Shard],
    fields: Sequence[str],
    described: Sequence[dict[str, Any]],
) -> tuple[Offsets, tuple[Column, ...]]:
    """Return the offsets and columns in the rows of an index file.

    described: the label columns, as index.json lists them. Raises ValueError for rows that do not
    fit the shards, or that lead outside a shard.
    """
    batch.validate(full=True)
    _check_schema(batch.schema, fields, described)
    base = dict(zip(_BASE, batch.columns, strict=False))
    for name in _BASE:
        if base[name].null_count:
            raise ValueError(f"its column {name} has empty cells")
    _check_shards(base["shard"], shards)
    start, size = _numbers(base["offset"]), _numbers(base["size"])
    after = batch.columns[len(_BASE) :]
    members = [_field(after[3 * i : 3 * i + 3]) for i in range(len(fields))]
    stop = _checked(start, size, members, shards)
    key_first, keys = _key_bytes(base["key"])
    offsets = Offsets(
        start=start,
        stop=stop,
        key_first=key_first,
        keys=keys,
        members=_members(members, len(start)),
    )
    labels = batch.columns[len(_BASE) + 3 * len(fields) :]
    columns = [
        Column.stored({name: row[name] for name in ("name", "kind", "field", "entry")}, values)
        for row, values in zip(described, labels, strict=True)
    ]
    return offsets, tuple(columns)


# --- writing --------------------------------------------------------------------------------------


def utf8_text(text: str) -> str:
    """Return a name as Arrow can hold it: bytes that are not UTF-8 are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _field_arrays(offsets: Offsets, count: int) -> Iterator[tuple[pa.Array, pa.Array, pa.Array]]:
    """Yield (offset, size, crc32) of each field, one value per sample."""
    n, numbers = len(offsets), offsets.member_field
    rows = np.repeat(np.arange(n), np.diff(offsets.member_first))
    order = np.argsort(numbers, kind="stable")
    edges = np.searchsorted(numbers[order], np.arange(count + 1))
    for number in range(count):
        members = order[edges[number] : edges[number + 1]]
        missing = np.ones(n, bool)
        missing[rows[members]] = False
        values = []
        for source, dtype in ((offsets.member_offset, "<i8"), (offsets.member_size, "<i8")):
            column = np.zeros(n, dtype)
            column[rows[members]] = source[members]
            values.append(pa.array(column, mask=missing if missing.any() else None))
        crc = np.zeros(n, np.uint32)
        if len(offsets.member_crc):
            crc[rows[members]] = offsets.member_crc[members]
        unknown = crc == 0
        yield values[0], values[1], pa.array(crc, mask=unknown if unknown.any() else None)


# --- reading --------------------------------------------------------------------------------------


def _check_schema(
    schema: pa.Schema, fields: Sequence[str], described: Sequence[dict[str, Any]]
) -> None:
    shard_type = pa.dictionary(pa.int32(), pa.string())
    expected: list[tuple[str, pa.DataType]] = [
        (
            "key",
            pa.large_binary() if schema.types[:1] == [pa.large_binary()] else pa.large_string(),
        ),
        *(("shard", shard_type), ("offset", pa.int64()), ("size", pa.int64())),
        *((f"{utf8_text(name)}.{part}", kind) for name in fields for part, kind in _PARTS),
    ]
    taken = {name for name, _ in expected}
    for row in described:
        name = free_name(row["name"], taken)
        taken.add(name)
        expected.append((name, KINDS[row["kind"]].arrow))
    actual = list(zip(schema.names, schema.types, strict=True))
    if actual != expected:
        odd = next(
            (pair for pair in zip(actual, expected, strict=False) if pair[0] != pair[1]), None
        )
        raise ValueError(
            f"it has {len(actual)} columns, {len(expected)} are listed"
            if odd is None
            else f"its column {odd[0][0]!r} ({odd[0][1]}) should be {odd[1][0]!r} ({odd[1][1]})"
        )


def _check_shards(column: pa.DictionaryArray, shards: Sequence[_Shard]) -> None:
    """Raise ValueError unless the rows are the samples of the shards, in order."""
    if column.dictionary.to_pylist() != [utf8_text(shard.name) for shard in shards]:
        raise ValueError("its shards are not the ones of index.json")
    codes = _numbers(column.indices)
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


def _checked(start: Ints, size: Ints, members: Sequence[_Field], shards: Sequence[_Shard]) -> Ints:
    """Return the end of each sample. Raises ValueError for numbers that lead outside a shard."""
    stop = np.empty_like(start)
    limits = np.array([shard.bytes for shard in shards], np.int64)
    edges = firsts([shard.samples for shard in shards])
    for a in range(0, len(start), _CHECKED):
        part = slice(a, min(len(start), a + _CHECKED))
        numbers = np.searchsorted(edges, np.arange(part.start, part.stop), side="right") - 1
        low, length = start[part], size[part]
        sound = (low >= 0).all() and (length > 0).all()
        sound = sound and (length <= limits[numbers] - low).all()
        if not sound:
            raise ValueError("a sample lies outside its shard")
        high = np.add(low, length, out=stop[part])
        for field in members:
            _check_field(field, part, low, high)
    same_shard = np.ones(max(0, len(start) - 1), bool)
    inner = edges[1:-1]
    same_shard[inner[(inner > 0) & (inner < len(start))] - 1] = False
    if (start[1:] < stop[:-1])[same_shard].any():
        raise ValueError("its samples overlap or are not in the order of their shard")
    return stop


def _check_field(field: _Field, part: slice, low: Ints, high: Ints) -> None:
    offset, size = field.offset[part], field.size[part]
    wrong = (offset < low) | (size < 0) | (size > high - offset)
    if field.has is not None:
        wrong &= field.has[part]
    if wrong.any():
        raise ValueError("a field lies outside its sample")


def _numbers(array: pa.Array) -> Any:
    """Return the values of a column as a numpy view; the values of empty cells are undefined."""
    buffer = array.buffers()[1]
    dtype = array.type.to_pandas_dtype()
    if buffer is None:
        return np.zeros(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * np.dtype(dtype).itemsize)


def _field(parts: Sequence[pa.Array]) -> _Field:
    offset, size, crc = parts
    has = None
    if offset.null_count:
        has = np.asarray(offset.is_valid())
    if size.null_count != offset.null_count or (
        has is not None and not np.array_equal(has, np.asarray(size.is_valid()))
    ):
        raise ValueError("a field has an offset without a size")
    sums = None if crc.null_count == len(crc) else _numbers(crc.fill_null(0))
    return _Field(_numbers(offset), _numbers(size), sums, has)


def _key_bytes(keys: pa.Array) -> tuple[Ints, npt.NDArray[np.uint8]]:
    _, first, data = keys.buffers()
    if not len(keys):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    edges = np.frombuffer(first, np.int64, len(keys) + 1, keys.offset * 8)
    letters = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return edges - edges[0] if edges[0] else edges, letters[int(edges[0]) : int(edges[-1])]


def _members(fields: Sequence[_Field], count: int) -> Callable[[], Members]:
    """Return a function that returns the members of all samples, by sample and offset."""

    def members() -> Members:
        if fields and all(field.has is None for field in fields):
            return _uniform_members(fields, count)
        return _mixed_members(fields, count)

    return members


def _uniform_members(fields: Sequence[_Field], count: int) -> Members:
    """Return the members of samples that have all fields."""
    width = len(fields)
    numbers = np.broadcast_to(np.arange(width, dtype=np.uint16), (count, width))
    offset = np.stack([field.offset for field in fields], axis=1)
    size = np.stack([field.size for field in fields], axis=1)
    crc = np.zeros((count if any(f.crc is not None for f in fields) else 0, width), np.uint32)
    for number, field in enumerate(fields):
        if field.crc is not None:
            crc[:, number] = field.crc
    if (offset[:, 1:] < offset[:, :-1]).any():
        order = np.argsort(offset, axis=1)
        numbers = np.take_along_axis(numbers, order, axis=1)
        offset = np.take_along_axis(offset, order, axis=1)
        size = np.take_along_axis(size, order, axis=1)
        crc = np.take_along_axis(crc, order, axis=1) if len(crc) else crc
    return Members(
        first=np.arange(count + 1, dtype=np.int64) * width,
        field=numbers.ravel(),
        offset=offset.ravel(),
        size=size.ravel(),
        crc=crc.ravel(),
    )


def _mixed_members(fields: Sequence[_Field], count: int) -> Members:
    """Return the members of samples of which some lack a field."""
    every = np.arange(count)
    rows = [every if f.has is None else np.flatnonzero(f.has) for f in fields] or [every[:0]]
    numbers = np.repeat(np.arange(len(rows), dtype=np.uint16), [len(row) for row in rows])
    row = np.concatenate(rows)
    offset = np.concatenate([f.offset[at] for f, at in zip(fields, rows, strict=False)] or [row])
    size = np.concatenate([f.size[at] for f, at in zip(fields, rows, strict=False)] or [row])
    crc = np.zeros(0, np.uint32)
    if any(field.crc is not None for field in fields):
        crc = np.concatenate(
            [
                np.zeros(len(at), np.uint32) if f.crc is None else f.crc[at]
                for f, at in zip(fields, rows, strict=True)
            ]
        )
    order = np.lexsort((offset, row))
    return Members(
        first=firsts(np.bincount(row, minlength=count)),
        field=numbers[order],
        offset=offset[order],
        size=size[order],
        crc=crc[order] if len(crc) else crc,
    )
