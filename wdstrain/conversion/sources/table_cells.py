"""Cells of tables: Arrow arrays, or lists of values where a column has several types.

A plain value is None, a bool, an int, a finite float, a text, bytes, or a list or dict of these.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import chain, islice
from pathlib import PurePath
from typing import Any, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.conversion.listing import Part, field_name, tidy
from wdstrain.errors import UsageError
from wdstrain.shards.formats import format_of
from wdstrain.shards.label_kinds import NUMBER, WHOLE

Cells = Any  # of one column: pa.ChunkedArray, which has no stubs, or a list
T = TypeVar("T")
Changes = Counter[str]  # what values that JSON lacks became -> how many

BATCH = 8192  # rows that are Python values at a time
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_WRITTEN = (Decimal, Fraction, PurePath, UUID, date, time, timedelta, np.datetime64, np.timedelta64)
# Texts of a CSV that are not only texts; the first row counts that fits all of a column.
_TYPES = (
    (WHOLE.pattern, pa.int64()),
    (NUMBER.pattern, pa.float64()),
    ("(?i:true|false)", pa.bool_()),
)
_PLAIN = {pa.string(), pa.large_string(), pa.bool_(), pa.int64(), pa.binary(), pa.null()}


def batched(values: Iterable[T]) -> Iterator[list[T]]:
    """Return batches of values, so that few of them are Python values at a time."""
    some = iter(values)
    return iter(lambda: list(islice(some, BATCH)), [])


def cells_of(values: Sequence[Any]) -> Cells:
    """Return values as an Arrow array, if that gives back the same values."""
    types = set(map(type, values)) - {type(None)}
    if len(types) <= 1 and types <= {bool, int, float, str}:
        # a number beyond 64 bits, or half a character
        with suppress(pa.ArrowException, OverflowError, UnicodeEncodeError):
            return pa.chunked_array([pa.array(values)])
    return list(values)


def joined(parts: Sequence[Cells]) -> Cells:
    """Return the cells of several parts of a column."""
    kinds: set[Any] = {None if isinstance(part, list) else part.type for part in parts}
    kinds = kinds - {pa.null()} or {pa.null()}
    if len(kinds) > 1 or None in kinds:
        return [value for part in parts for value in values_of(part)]
    kind = kinds.pop()
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.chunked_array([chunk for part in parts for chunk in part.cast(kind).chunks], kind)


def typed(texts: pa.ChunkedArray, decimal: str = ".") -> pa.ChunkedArray:
    """Return texts as numbers if all of them are, else as booleans, else as they are.

    Empty cells are null. 007 and 1e999 are texts. decimal: separates the fraction of a number.
    """
    bare = pc.utf8_trim_whitespace(texts)
    bare = pc.if_else(pc.equal(bare, ""), None, bare)
    # +5 is a number; +true is a text
    numbers = pc.replace_substring_regex(
        pc.replace_substring(bare, decimal, "."), r"^\+([0-9.])", r"\1"
    )
    for pattern, kind in _TYPES:
        if pc.all(pc.match_substring_regex(numbers, f"^({pattern})$"), min_count=0).as_py():
            made = numbers.cast(kind)
            if kind != pa.float64() or pc.all(pc.is_finite(made)).as_py():
                return made
    return pc.if_else(pc.is_null(bare), None, texts)


def distinct(cells: Cells) -> tuple[npt.NDArray[np.int32], list[Any]]:
    """Return (place of each cell among the distinct values: int32[n], these values)."""
    if isinstance(cells, pa.ChunkedArray) and not pa.types.is_nested(cells.type):
        coded = cells.dictionary_encode(null_encoding="encode").combine_chunks()
        return coded.indices.to_numpy(), coded.dictionary.to_pylist()
    values = values_of(cells)
    texts = list(map(repr, values))  # these tell 1 from 1.0 and True
    by_text = dict(zip(texts, values, strict=True))
    places = {text: place for place, text in enumerate(by_text)}
    return np.array([places[text] for text in texts], np.int32), list(by_text.values())


def values_of(cells: Cells) -> list[Any]:
    """Return cells as Python values."""
    return cells if isinstance(cells, list) else list(cells.to_pylist())


def each(cells: Cells) -> Iterator[Any]:
    """Return an iterator of cells as Python values. Only a batch of them exists at a time."""
    starts = range(0, len(cells), BATCH)
    return chain.from_iterable(values_of(cells[start : start + BATCH]) for start in starts)


# --- values that JSON knows -----------------------------------------------------------------------


def plain(cells: Cells, changes: Changes) -> Cells:
    """Return cells whose values are all plain. changes: counts the values that JSON cannot hold."""
    if not isinstance(cells, list) and _is_plain(cells):
        return cells
    values = (_plain(value, changes) for value in cells)
    return joined([cells_of(batch) for batch in batched(values)])


def _is_plain(cells: pa.ChunkedArray) -> bool:
    kind = cells.type
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return _is_plain(pc.list_flatten(cells))
    if pa.types.is_struct(kind):
        return all(map(_is_plain, cells.flatten()))
    if kind in (pa.float32(), pa.float64()):
        return bool(pc.all(pc.is_finite(cells), min_count=0).as_py())
    return kind in _PLAIN or pa.types.is_integer(kind)


def _plain(value: Any, changes: Changes) -> Any:
    if isinstance(value, pa.Scalar):
        try:
            value = value.as_py()
        except (OverflowError, ValueError):
            changes["a time beyond the years 1 to 9999 became null"] += 1
            return None
    if isinstance(value, (np.generic, np.ndarray)) and not isinstance(value, _WRITTEN):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        became = "NaN became null" if math.isnan(value) else f"{value} became the text '{value}'"
        changes[became] += 1
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, changes) for item in value]
    if isinstance(value, dict):
        names = [name if isinstance(name, str) else json.dumps(name, default=str) for name in value]
        if len(set(names)) < len(names):
            raise UsageError(
                f"a dict of the table names an entry twice in JSON: {', '.join(names)}."
            )
        return {n: _plain(item, changes) for n, item in zip(names, value.values(), strict=True)}
    is_pandas = type(value).__module__.startswith("pandas.")
    if isinstance(value, _WRITTEN) or is_pandas or hasattr(value, "isoformat"):
        return None if str(value) in ("NaT", "<NA>") else str(value)
    raise UsageError(
        f"a cell of the table is {type(value).__name__}, which cannot be stored.",
        "Give text, numbers, bytes, lists or dicts.",
    )


# --- fields of a sample ---------------------------------------------------------------------------


def json_fields(cells: dict[str, Any]) -> list[Part]:
    """Return the fields of columns: one json, and a field for each bytes value, which JSON lacks.

    In lists and dicts, bytes are replaced by the name of their field.
    """
    fields, nested = list[Part](), (bytes, list, dict)
    cells = {name: _image_bytes(value) for name, value in cells.items()}
    kept = {
        name: _without_bytes(v, _part_of_name(name), fields) if isinstance(v, nested) else v
        for name, v in cells.items()
    }
    kept = {name: v for name, v in kept.items() if not isinstance(cells[name], bytes)}
    return [*fields, *([("json", _JSON.encode(kept).encode())] if kept else [])]


def _image_bytes(value: Any) -> Any:
    """Return the bytes of an image of Hugging Face; other values as they are."""
    is_image = isinstance(value, dict) and set(value) == {"bytes", "path"}
    return value["bytes"] or value if is_image else value


def _without_bytes(value: Any, name: str, fields: list[Part]) -> Any:
    """Return a value whose bytes are replaced by names of fields, which are added to `fields`."""
    if isinstance(value, bytes):
        found = format_of(value)
        kind = "bin" if found is None else found.extensions[0]
        fields.append((field_name(f"{name}.{kind}"), value))
        return fields[-1][0]
    if isinstance(value, list):
        return [_without_bytes(item, f"{name}.{i}", fields) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {
            key: _without_bytes(item, f"{name}.{_part_of_name(key)}", fields)
            for key, item in value.items()
        }
    return value


@lru_cache(maxsize=1024)
def _part_of_name(column: str) -> str:
    """Return the name of a column as a part of a field's name."""
    return tidy(column.replace("/", "_"))
