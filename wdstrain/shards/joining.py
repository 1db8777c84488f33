"""New columns for an index, from a table whose rows are found by a key.

`joined` takes columns of Arrow; `Index.join` and `wt.join` call it. Texts and lists
may be larger than memory: with a folder, they are copied block by block into a file there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import UsageError
from wdstrain.report.printing import counted
from wdstrain.runtime.options import refuse
from wdstrain.shards.columns import FILE_TYPES, Column, typed
from wdstrain.shards.kinds import LARGEST, place_of_entry
from wdstrain.shards.value_files import ValueFile, write_values
from wdstrain.shards.where import Samples, column_values

Cells = Any  # pa.ChunkedArray

_BLOCK = 1 << 16  # rows that are copied at a time
_RESERVED = ("key", "shard", "split", "offset", "size")  # names that every index has
_BOXES = {"boxes", "labels"}  # of objects, as a field boxes.json has them
_LISTS = {"text": "multi", "integer": "vector", "number": "vector"}  # by the kind of the items
_RULE = "A column holds numbers, texts, true and false, boxes, or lists of names or of numbers."


@dataclass(frozen=True)
class JoinCounts:
    """What a join did.

    samples: of the set. matched: samples that have a row. unknown: rows whose key no sample has, or
    that have none. unknown_keys: the first of these keys. columns: number of samples without a value,
    by column. replaced: columns that were there before.
    """

    samples: int
    matched: int
    unknown: int
    unknown_keys: list[str]
    columns: dict[str, int]
    replaced: list[str]


def as_cells(table: Any) -> dict[str, Cells]:
    """Return the columns of a table in memory: of Arrow, of pandas or another library, or of dicts."""
    try:
        table = pa.Table.from_pylist(table) if isinstance(table, list) else pa.table(table)
    except (pa.ArrowException, TypeError, AttributeError, OverflowError) as error:
        raise UsageError(
            f"this is no table whose columns hold values of one type each ({error}).",
            "Give a DataFrame, an Arrow table or a list of dicts. wt.join also reads files.",
        ) from None
    columns = zip(map(str, table.column_names), table.columns, strict=True)
    return {name: cells for name, cells in columns if not name.startswith("__index_level_")}


def joined(
    index: Samples, table: Mapping[str, Cells], on: str, folder: str | None = None
) -> tuple[Samples, JoinCounts]:
    """Return the index with the columns of a table, except for that of the keys, and counts.

    on: name of the column of keys, in the table and in the index; "key" is the key of the samples.
    folder: of the files of texts and lists; None: they stay in memory. A joined column of the same
    name is replaced; if it is a label, the new values must be among its classes. Raises UsageError
    for keys that are doubled or all unknown, and for columns that no index can have.
    """
    names = [name for name in table if name != on]
    refuse(
        on not in table or not names,
        f"the table has the columns {', '.join(table)}: it needs {on!r}, which names the "
        "samples, and another one.",
        "Name the column of the keys with {on}.",
        on=...,
    )
    _check_names(index, names)
    rows, unknown = _matched(index, table[on], on)
    raw = [_column(name, table[name], rows, folder) for name in names]
    columns = typed(raw, index.labels)
    for column, before in zip(columns, raw, strict=True):
        refuse(
            column.stored.null_count > before.stored.null_count,
            f"the column {column.name!r} of the table has values that do not fit the label of "
            f"this name, which is {column.summary}.",
            "Join them under another name.",
        )
    former = {column.place: column for column in index.columns}
    counts = JoinCounts(
        samples=len(index),
        matched=len(index) - rows.null_count,
        unknown=len(unknown),
        unknown_keys=_texts(unknown),
        columns={column.name: column.stored.null_count for column in columns},
        replaced=[column.name for column in columns if column.place in former],
    )
    made = former | {column.place: column for column in columns}
    return index.with_columns([*made.values()]), counts


def _check_names(index: Samples, names: Sequence[str]) -> None:
    """Raise UsageError for a name that means something else in an index."""
    for name in names:
        refuse(
            not can_join(index, name),
            f"the column {name!r} of the table cannot be joined: the samples or the index "
            "use this name, or it means an entry of a field.",
            "Give it another name in the table, or leave it out.",
        )


def can_join(index: Samples, name: str) -> bool:
    """Return whether a column of this name can be added to an index, or replaces a joined one."""
    taken = {
        *(*_RESERVED, *index.fields),
        *(info.name for info in (*index.labels, *index.columns) if not info.is_joined),
    }
    return (
        taken.isdisjoint((name, f"{name.lower()}.npy"))  # for lists, as `convert tars` names them
        and bool(name.strip())
        and ";" not in name
        and place_of_entry(name)[1] is None
    )


# --- keys -----------------------------------------------------------------------------------------


def _matched(index: Samples, cells: Cells, on: str) -> tuple[pa.Array, pa.Array]:
    """Return the row of each sample (int64; null: none), and the keys that no sample has.

    Raises UsageError for keys that do not name one sample each.
    """
    own = index.offsets.rows.column(0) if on == "key" else column_values(index, on)
    known, keys = _as_keys(own, on), _as_keys(cells, on)
    # A number for each key, the same for equal ones.
    codes = np.asarray(pa.concat_arrays([known, keys]).dictionary_encode("encode").indices)
    wanted, given = np.split(codes, [len(known)])
    has_key = np.asarray(keys.is_valid())
    times = np.bincount(given[has_key], minlength=codes.max() + 1)
    if (shared := has_key & (np.bincount(wanted, minlength=len(times))[given] > 1)).any():
        raise UsageError(
            "several samples have the same value, such as "
            f"{_texts(keys.filter(pa.array(shared)))[0]}.",
            "Join by a column whose values differ.",
            option="on",
            value=on,
        )
    doubled = np.flatnonzero(has_key & (times[given] > 1))
    if len(doubled):
        raise UsageError(
            f"{np.count_nonzero(times > 1)} keys are in several rows of the table, such as "
            f"{', '.join(_texts(keys.take(doubled[:1])))}.",
            "Keep one row of each.",
        )
    row_of = np.full(len(times), -1)
    row_of[given[has_key]] = np.flatnonzero(has_key)
    rows = row_of[wanted]
    used = np.bincount(rows[rows >= 0], minlength=len(keys))
    unknown = keys.filter(pa.array(used == 0))
    if not used.any():
        raise UsageError(
            f"none of {counted(len(keys), 'key')} of the table ({', '.join(_texts(keys))}) is in "
            f"the set, whose values of {on!r} are such as {', '.join(_texts(known))}.",
            "Name another column of keys with {on}.",
            {"on": on},
        )
    return pa.array(rows, mask=rows < 0), unknown


def _as_keys(values: Any, on: str) -> pa.Array:
    """Return keys as bytes: texts, or whole numbers as they are written."""
    values = _decoded(values)
    if _kind_of(values.type) not in ("text", "integer") and values.type != pa.large_binary():
        raise UsageError(
            f"its values are of the type {values.type}; keys are texts or whole numbers.",
            option="on",
            value=on,
        )
    texts = values.cast(pa.string()) if pa.types.is_integer(values.type) else values
    return (
        pa.chunked_array([*getattr(texts, "chunks", [texts])], texts.type)
        .cast(pa.large_binary())
        .combine_chunks()
    )


def _texts(keys: pa.Array) -> list[str]:
    """Return the first keys for messages."""
    return [
        "(none)" if key is None else repr(key.decode("utf-8", "replace"))[:80]
        for key in keys[:5].to_pylist()
    ]


# --- columns --------------------------------------------------------------------------------------


def _column(name: str, cells: Cells, rows: pa.Array, folder: str | None) -> Column:
    """Return the column of the samples. rows: of each sample. Raises UsageError for other values."""
    cells = _as_texts(name, _decoded(cells))
    kind = _kind_of(cells.type)
    if kind is None or cells.null_count == len(cells):
        raise UsageError(
            f"the column {name!r} of the table has the type {cells.type}, and no value that a column "
            f"can hold. {_RULE}",
            "Leave it out.",
        )
    items = pc.list_flatten(cells) if kind in _LISTS.values() else pa.chunked_array([], cells.type)
    refuse(
        items.null_count,
        f"the column {name!r} of the table has lists with empty items.",
        "Fill them.",
    )
    refuse(
        kind == "vector" and any(map(_overflows, items.chunks)),
        f"the column {name!r} of the table has numbers beyond {LARGEST:g}, the largest of "
        "float32, as which lists of numbers are kept.",
        "Scale them.",
    )
    rows = pc.if_else(cells.is_valid().take(rows).combine_chunks(), rows, None)
    files = (ValueFile("", len(cells), cells),)
    column = Column(name, kind, "", name, is_label=False, files=files, stored=rows)
    try:
        if kind not in FILE_TYPES:
            return replace(column, files=(), stored=column.values)
        return column if folder is None else _in_file(column, folder)
    except (pa.ArrowException, UnicodeError) as error:
        raise UsageError(
            f"the column {name!r} of the table has values that no column can hold ({error}). {_RULE}"
        ) from None


def _as_texts(name: str, cells: Cells) -> Cells:
    """Return boxes, {"boxes": [[x0, y0, x1, y1], ...], "labels": [...]}, as JSON; others unchanged.

    Raises UsageError for a value of another form.
    """
    if not pa.types.is_struct(cells.type) or {field.name for field in cells.type} != _BOXES:
        return cells
    texts: list[str | None] = []
    for row in chain.from_iterable(chunk.to_pylist() for chunk in cells.chunks):
        boxes, labels = (row[part] for part in ("boxes", "labels")) if row else ([], [])
        is_right = None not in (boxes, labels) and len(boxes) == len(labels)
        if not is_right or any(len(box or ()) != 4 for box in boxes):
            raise UsageError(
                f"the column {name!r} of the table has {row!r:.80}: boxes are [x0, y0, x1, y1], in "
                "pixels of the upright image, and there are as many labels."
            )
        texts.append(row and json.dumps(row))
    return pa.chunked_array([pa.array(texts, pa.large_string())])


def _overflows(numbers: pa.Array) -> bool:
    """Return whether a number is finite, but not as float32."""
    values = np.asarray(numbers)
    return bool((np.isfinite(values) & (np.abs(values) > LARGEST)).any())


def _in_file(column: Column, folder: str) -> Column:
    """Return a column whose values are written into a file in a folder, in the order of samples."""
    has_value = np.asarray(column.stored.is_valid())
    ids, arrow = np.flatnonzero(has_value), FILE_TYPES[column.kind]
    blocks = (column.take(pa.array(ids[at : at + _BLOCK])) for at in range(0, len(ids), _BLOCK))
    path = write_values(blocks, arrow, folder)
    rows = pa.array(np.cumsum(has_value) - 1, mask=~has_value)
    return replace(column, files=(ValueFile(path, len(ids)),), stored=rows)


def _decoded(values: Any) -> Any:
    """Return values as they are, without a dictionary."""
    return values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values


def _kind_of(arrow: pa.DataType) -> str | None:
    """Return the kind of the column for values of an Arrow type; None if there is none."""
    tests = {
        "flag": pa.types.is_boolean(arrow),
        "integer": pa.types.is_integer(arrow),
        "number": pa.types.is_floating(arrow),
        "text": arrow in (pa.string(), pa.large_string(), pa.string_view()),
    }
    kind = next((kind for kind, holds in tests.items() if holds), None)
    if kind is None and hasattr(arrow, "value_type"):
        return _LISTS.get(_kind_of(arrow.value_type) or "")
    return kind
