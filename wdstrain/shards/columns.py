"""Label columns: one typed value per sample, made from the bytes of small fields.

A column holds a field (`cls`) or an entry of a JSON field (`json`, entry `kind`). The same function
makes it while shards are written, when `wdstrain index` reads shards made elsewhere, and when
`verify` compares a column with the bytes.

kind      Arrow type                     made from
class     dictionary<int32, string>      a label; codes are class numbers
integer   int64                          whole numbers
number    float64                        numbers
flag      bool                           true and false
multi     list<string>                   lists of names
text      string                         texts of at most 256 characters
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import WdstrainError
from wdstrain.shards.kinds import (
    KINDS,
    LONGEST_TEXT,
    NOT_A_COLUMN,
    ColumnInfo,
    Place,
    spelled,
)
from wdstrain.shards.values import npy_array, parsed_json, scalar

MOST_COLUMNS = 256  # of one set; further entries of its JSON stay in their field
PLAIN_FIELDS = ("cls", "cls2", "index", "inx", "id")  # fields that hold one number or name
CONTENT_FIELDS = ("txt", "text", "transcript", "bin")  # read whole, not scalars
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_NOT_FINITE = ("nan", "inf", "-inf")  # texts that are numbers among numbers
_LARGEST_NPY = 256  # bytes of a .npy file with one number


@dataclass(frozen=True)
class Column(ColumnInfo):
    """The values of one label or scalar. values: an Arrow array of its kind's type; null: no value."""

    values: pa.Array = dataclasses.field(kw_only=True)

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def stored(cls, row: dict[str, Any], values: pa.Array) -> Column:
        """Return the column of a row of index.json."""
        classes = tuple(values.dictionary.to_pylist()) if row["kind"] == "class" else ()
        return cls(**row, classes=classes, is_label=False, values=values)

    @property
    def row(self) -> dict[str, Any]:
        """The column without its values, as index.json lists it."""
        return {"name": self.name, "kind": self.kind, "field": self.field, "entry": self.entry}

    def take(self, ids: Any) -> Column:
        """Return the column of these samples (int64[k])."""
        return replace(self, values=self.values.take(pa.array(ids)))

    def cut(self, start: int, stop: int) -> Column:
        """Return the column of the samples [start, stop)."""
        return replace(self, values=self.values.slice(start, stop - start))


class ColumnBuilder:
    """Columns of the samples that are added, in order."""

    def __init__(self, places: Iterable[Place] | None = None, *, own_names: bool = False) -> None:
        """places: the columns to make. None: of every field and entry that holds one value.

        own_names: fields with names such as `price` count too, if all their values are short texts.
        Only for samples that are all added; an excerpt cannot tell.
        """
        self._own_names = own_names
        self._wanted = None if places is None else set(places)
        self._fields = None if self._wanted is None else {field for field, _ in self._wanted}
        self._values: dict[Place, list[Any]] = {place: [] for place in self._wanted or ()}
        self._count = 0

    def add(self, parts: Sequence[tuple[str, bytes | memoryview]]) -> None:
        """Add a sample. parts: (field, bytes) of its members."""
        for field, data in parts:
            self._put_all(self.read(field, data))
        self._count += 1

    def add_values(self, values: Iterable[tuple[Place, Any]]) -> None:
        """Add a sample. values: as `read` returned them for its members."""
        self._put_all(values)
        self._count += 1

    def finish(self) -> tuple[Column, ...]:
        """Return the columns of all samples that were added."""
        columns = []
        for place, values in self._values.items():
            values.extend([None] * (self._count - len(values)))
            columns.append(_inferred(place, values))
        return tuple(columns)

    def _put_all(self, values: Iterable[tuple[Place, Any]]) -> None:
        for place, value in values:
            column = self._values.get(place)
            if column is None:
                if len(self._values) >= MOST_COLUMNS:
                    continue
                column = self._values[place] = []
            if len(column) <= self._count:
                column.extend([None] * (self._count - len(column)))
                column.append(value)

    def reads(self, field: str) -> bool:
        """Return whether a field may hold values of the columns."""
        return self._fields is None or field in self._fields

    def read(self, field: str, data: bytes | memoryview) -> list[tuple[Place, Any]]:
        """Return (place, value) of the columns that a field holds; nothing if it cannot be read."""
        if not self.reads(field):
            return []
        values = self._values_in(field, data)
        wanted = self._wanted
        return values if wanted is None else [pair for pair in values if pair[0] in wanted]

    def _values_in(self, field: str, data: bytes | memoryview) -> list[tuple[Place, Any]]:
        try:
            if is_json(field):
                document = parsed_json(bytes(data))
                if isinstance(document, dict):
                    return [((field, name), value) for name, value in document.items()]
            elif self._fields is not None or field in PLAIN_FIELDS:
                return [((field, None), scalar(memoryview(data), None))]
            elif self._own_names and "." not in field and field not in CONTENT_FIELDS:
                return [((field, None), _short_value(data))]
            elif field.endswith("npy") and len(data) <= _LARGEST_NPY:
                array = npy_array(memoryview(data))
                if array.shape == ():
                    return [((field, None), array.item())]
        except (WdstrainError, ValueError):
            pass
        return []


def is_json(field: str) -> bool:
    """Return whether a field holds a JSON document, by its name."""
    return field.rpartition(".")[2] == "json"


def _as_numbers(values: list[Any]) -> list[Any]:
    """Return the texts of a field such as `cls` as numbers if all are; digits like 007 are not."""
    numbers = [_number_or_text(value) for value in values]
    texts = {value for value in numbers if isinstance(value, str)}
    return numbers if texts <= set(_NOT_FINITE) else values


def _number_or_text(value: Any) -> Any:
    if isinstance(value, str) and (match := _NUMBER.fullmatch(value)):
        return float(value) if match[1] or match[2] else int(value)
    return value


def _short_value(data: bytes | memoryview) -> Any:
    """Return the number or short text of a field; other bytes as a value that fits no column."""
    try:
        value = scalar(memoryview(data), None) if len(data) <= 4 * LONGEST_TEXT else b""
    except (WdstrainError, ValueError):
        return b""
    return b"" if isinstance(value, str) and not value.isprintable() else value


def column_name(place: Place) -> str:
    """Return the name of a column: `cls`, `kind` of the field json, `meta.json.kind` of others."""
    field, entry = place
    if entry is None:
        return field[: -len(".npy")] if field.endswith(".npy") else field
    return entry if field == "json" else f"{field}.{entry}"


def join_columns(parts: Sequence[tuple[int, Sequence[Column]]]) -> tuple[Column, ...]:
    """Return the columns of several sets together. parts: (number of samples, columns) of each.

    A set without a column gets nulls. Class columns are joined by the names of their classes; a
    column whose sets cannot be joined is left out. A set that has only nan and inf in a column of
    numbers has a column of texts; they become numbers.
    """
    by_place = [{column.place: column for column in columns} for _, columns in parts]
    joined = []
    for place in dict.fromkeys(place for part in by_place for place in part):
        columns = [part.get(place) for part in by_place]
        whole = _joined(columns, [count for count, _ in parts])
        if whole is not None:
            joined.append(whole)
    return tuple(joined)


def _joined(columns: Sequence[Column | None], counts: Sequence[int]) -> Column | None:
    columns = _with_not_finite_numbers(columns)
    present = [column for column in columns if column is not None]
    decided = ("class", NOT_A_COLUMN)  # kinds that count even without a value
    kinds = {c.kind for c in present if c.values.null_count < len(c) or c.kind in decided}
    first = next((c for c in present if c.kind in kinds), present[0])
    if NOT_A_COLUMN in kinds:
        return replace(first, kind=NOT_A_COLUMN, values=pa.nulls(sum(counts)))
    if kinds == {"class"}:
        classes = [c if c is not None and c.kind == "class" else None for c in columns]
        return _joined_classes(first, classes, counts)  # the other columns have no values
    if "class" in kinds or ("multi" in kinds and len(kinds) > 1):
        return None
    kind = next(iter(kinds)) if len(kinds) == 1 else "text"
    if kinds == {"integer", "number"}:
        kind = "number"
    if not kinds:
        kind = first.kind
    pieces = [
        pa.nulls(count, KINDS[kind].arrow) if column is None else _cast(column, kind)
        for column, count in zip(columns, counts, strict=True)
    ]
    return replace(first, kind=kind, values=pa.concat_arrays(pieces))


def _with_not_finite_numbers(columns: Sequence[Column | None]) -> Sequence[Column | None]:
    """Return columns with the texts nan and inf as numbers, if all other values are numbers."""
    texts = [
        c for c in columns if c is not None and c.kind == "text" and c.values.null_count < len(c)
    ]
    kinds = {c.kind for c in columns if c is not None and c.values.null_count < len(c)} - {"text"}
    values = {value for text in texts for value in pc.unique(text.values).to_pylist()}
    if (
        not texts
        or not kinds
        or not kinds <= {"integer", "number"}
        or values - {None, *_NOT_FINITE}
    ):
        return columns
    return [
        as_label(c, replace(c, kind="number")) if c is not None and c.kind == "text" else c
        for c in columns
    ]


def _joined_classes(
    first: Column, columns: Sequence[Column | None], counts: Sequence[int]
) -> Column | None:
    present = [column for column in columns if column is not None and column.classes]
    if len({c.classes for c in present}) > 1 and len({c.has_names for c in present}) > 1:
        return None  # 0 of one set may be another class than 0 of the other
    kind = KINDS["class"].arrow
    pieces = [
        pa.nulls(count, kind) if column is None else column.values
        for column, count in zip(columns, counts, strict=True)
    ]
    values = pa.concat_arrays(pa.chunked_array(pieces, kind).unify_dictionaries().chunks)
    return replace(first, classes=tuple(values.dictionary.to_pylist()), values=values)


def _cast(column: Column, kind: str) -> pa.Array:
    if column.kind == kind:
        return column.values
    if column.values.null_count == len(column):
        return pa.nulls(len(column), KINDS[kind].arrow)
    if kind == "text":
        return pa.array([spelled(value) for value in column.values.to_pylist()], pa.string())
    return column.values.cast(KINDS[kind].arrow, safe=False)


def as_label(column: Column, info: ColumnInfo) -> Column:
    """Return a column with the meaning of a label. A value that the label cannot have becomes null."""
    kind, values = KINDS[info.kind], column.values
    if info.kind == "class" or column.kind != info.kind:
        values = pa.nulls(len(column), kind.arrow)
        if kind.reader is not None:
            stored = pa.int32() if kind.is_class else kind.arrow
            values = _mapped(column, kind.reader(info), stored)
        if info.kind == "class":
            values = pa.DictionaryArray.from_arrays(values, pa.array(info.classes, pa.string()))
        values = values.cast(kind.arrow)
    typed = replace(column, name=info.name, kind=info.kind, values=values)
    return replace(typed, classes=info.classes)


def _mapped(column: Column, function: Callable[[Any], Any], kind: pa.DataType) -> pa.Array:
    """Return function(value) of each value, computed once for each different value."""
    if column.kind in ("multi", NOT_A_COLUMN):
        return pa.nulls(len(column), kind)
    coded = column.values if column.kind == "class" else column.values.dictionary_encode()
    numbers = []
    for value in coded.dictionary.to_pylist():
        try:
            numbers.append(function(value))
        except ValueError:
            numbers.append(None)
    return pa.array(numbers, kind).take(coded.indices)


def _inferred(place: Place, values: list[Any]) -> Column:
    """Return the column of raw values, with the kind that fits all of them."""
    values = _with_not_a_number(_as_numbers(values) if place[1] is None else values)
    kinds = {_kind(value) for value in values if value is not None}
    if kinds == {"integer", "number"}:
        kinds = {"number"}
    elif len(kinds) > 1 and not kinds & {NOT_A_COLUMN, "multi"}:
        kinds = {"text"}
    kind = kinds.pop() if len(kinds) == 1 else (NOT_A_COLUMN if kinds else "text")
    if kind == "text":
        values = [spelled(value) for value in values]
        if any(value is not None and len(value) > LONGEST_TEXT for value in values):
            kind = NOT_A_COLUMN
        values = [None if value is None else _valid_text(value) for value in values]
    elif kind == "multi":
        values = [None if v is None else [_valid_text(spelled(one)) for one in v] for v in values]
    elif kind == "number":
        values = [None if value is None else float(value) for value in values]
    array = pa.nulls(len(values)) if kind == NOT_A_COLUMN else pa.array(values, KINDS[kind].arrow)
    return Column(column_name(place), kind, *place, is_label=False, values=array)


def _with_not_a_number(values: list[Any]) -> list[Any]:
    """Return values with nan and inf as numbers, if all others are numbers."""
    texts = {value for value in values if isinstance(value, str)}
    numbers = any(_kind(value) in ("integer", "number") for value in values)
    if not texts or not numbers or not texts <= set(_NOT_FINITE):
        return values
    return [float(value) if isinstance(value, str) else value for value in values]


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, int):
        return "integer" if -(1 << 63) <= value < 1 << 63 else "text"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and all(
        isinstance(one, (str, int)) and not isinstance(one, bool) for one in value
    ):
        return "multi"
    return NOT_A_COLUMN


def _valid_text(text: str) -> str:
    """Return a text that UTF-8 can hold: a lone surrogate becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")
