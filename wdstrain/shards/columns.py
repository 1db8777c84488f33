"""Label columns: one typed value per sample, made from the bytes of small fields.

A column holds a field (`cls`), or an entry of a JSON field (`json`, entry `kind`) or of an image
(`jpg`, entry `width`: pixels, upright). The same function
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

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import SampleError, WdstrainError
from wdstrain.runtime.cached import cached_property
from wdstrain.shards.formats import SIDES, header_of, is_image
from wdstrain.shards.kinds import (
    KINDS,
    LONGEST_TEXT,
    NOT_A_COLUMN,
    ColumnInfo,
    Place,
    kind_of_value,
    npy_array,
    parsed_json,
    scalar,
)
from wdstrain.shards.value_files import gathered
from wdstrain.storage.remote import name_of

FILE_TYPES = {"text": pa.large_string(), "vector": KINDS["vector"].arrow}  # of values in files
MOST_COLUMNS = 256  # of one set; further entries of its JSON stay in their field
PLAIN_FIELDS = ("cls", "cls2", "index", "inx", "id")  # fields that hold one number or name
CONTENT_FIELDS = ("txt", "text", "transcript", "bin")  # read whole, not scalars
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_NOT_FINITE = ("nan", "inf", "-inf")  # texts that are numbers among numbers
_LARGEST_NPY = 256  # bytes of a .npy file with one number


@dataclass(frozen=True)
class Column(ColumnInfo):
    """The values of one label or scalar; null: no value.

    stored: an Arrow array of its kind's type, or the rows of the values in `files`.
    """

    stored: pa.Array = field(kw_only=True)

    def __len__(self) -> int:
        return len(self.stored)

    @cached_property
    def values(self) -> pa.Array:
        """The values of all samples. Those that lie in files are read into memory."""
        return self.take()

    def take(self, ids: Any = None) -> pa.Array:
        """Return the values of some samples. ids: their numbers; None: all samples."""
        rows = self.stored if ids is None else self.stored.take(ids)
        arrow = FILE_TYPES.get(self.kind, KINDS[self.kind].arrow)
        return gathered(self.files, rows, arrow) if self.files else rows

    @classmethod
    def of(cls, info: ColumnInfo, values: pa.Array) -> Column:
        """Return a column with these values. The classes default to the ones of the values."""
        classes = info.classes
        if info.kind == "class" and not classes:
            classes = tuple(values.dictionary.to_pylist())
        return cls(**vars(info) | {"classes": classes}, stored=values)

    @property
    def info(self) -> ColumnInfo:
        """The column without its values."""
        return ColumnInfo(
            *(self.name, self.kind, self.field, self.entry, self.classes, self.is_label),
            files=self.files,
        )

    @property
    def row(self) -> dict[str, Any]:
        """The column without its values, as index.json lists it."""
        row = {"name": self.name, "kind": self.kind, "field": self.field, "entry": self.entry}
        files = [{"file": name_of(file.path), "rows": file.count} for file in self.files[:1]]
        return {**row, **dict(*files)}


class ColumnBuilder:
    """Columns of the samples that are added, in order."""

    def __init__(self, places: Collection[Place] | None = None, *, own_names: bool = False) -> None:
        """places: the columns to make. None: of every field and entry that holds one value.

        own_names: fields with names such as `price` count too, if all their values are short texts.
        Only for samples that are all added; an excerpt cannot tell.
        """
        self._own_names, self._count = own_names, 0
        self._fields = None if places is None else {field for field, _ in places}
        self._values: dict[Place, list[Any]] = {place: [] for place in places or ()}
        self._left_out = dict[Place, None]()  # entries beyond MOST_COLUMNS

    def add(self, parts: Iterable[tuple[str, bytes | memoryview]]) -> None:
        """Add a sample. parts: (field, bytes) of its members. Values that cannot be read are left out."""
        values = (
            pair
            for field, data in parts
            if self.reads(field)
            for pair in self._values_in(field, data)
            if self._fields is None or pair[0] in self._values
        )
        for place, value in values:
            if place not in self._values and len(self._values) >= MOST_COLUMNS:
                self._left_out[place] = None
                continue
            column = self._values.setdefault(place, [])
            if len(column) <= self._count:  # the first of several members with this name counts
                column.extend([None] * (self._count - len(column)))
                column.append(value)
        self._count += 1

    def finish(self) -> tuple[Column, ...]:
        """Return the columns of all samples that were added."""
        columns = []
        for place, values in self._values.items():
            values.extend([None] * (self._count - len(values)))
            columns.append(inferred(place, values))
        # Another shard may have a column of the entry, which would lack the values of this one.
        return (*columns, *(no_column(place, pa.nulls(self._count)) for place in self._left_out))

    def reads(self, field: str) -> bool:
        """Return whether a field may hold values of the columns."""
        return self._fields is None or field in self._fields

    def _values_in(self, field: str, data: bytes | memoryview) -> list[tuple[Place, Any]]:
        """Return (place, value) of what a field holds; nothing if it cannot be read."""
        try:
            if is_json(field):
                document = parsed_json(bytes(data))
                if isinstance(document, dict):
                    return [((field, name), value) for name, value in document.items()]
            elif self._fields is not None and is_image(field):
                return [
                    ((field, side), n) for side, n in zip(SIDES, header_of(data).size, strict=True)
                ]
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


def _as_numbers(values: list[Any], *, is_text: bool) -> list[Any]:
    """Return values with texts as numbers if all values are numbers, some of them as texts.

    is_text: of a field such as `cls`, where all are texts; digits like 007 are not numbers. In JSON,
    only nan and inf are texts.
    """
    numbers = [_number_or_text(value) for value in values] if is_text else values
    texts = {value for value in numbers if isinstance(value, str)}
    if not texts or not texts <= set(_NOT_FINITE):
        return values if texts else numbers
    is_number = any(kind_of_value(value) in ("integer", "number") for value in numbers)
    return [float(v) if isinstance(v, str) else v for v in numbers] if is_number else values


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
    return entry if field in ("json", "") else f"{field}.{entry}"


def join_columns(parts: Sequence[tuple[int, Sequence[Column]]]) -> tuple[Column, ...]:
    """Return the columns of several sets together. parts: (number of samples, columns) of each.

    A set without a column gets nulls. Class columns are joined by the names of their classes; a
    column whose sets cannot be joined is left out. A set that has only nan and inf in a column of
    numbers has a column of texts; they become numbers.
    """
    first = {column.place: column for _, columns in reversed(parts) for column in columns}
    by_place = [{column.place: column for column in columns} for _, columns in parts]
    joined = []
    for place in dict.fromkeys(place for part in by_place for place in part):
        absent = replace(first[place], kind="text", classes=(), files=())
        columns = [
            part.get(place, replace(absent, stored=pa.nulls(count, pa.string())))
            for part, (count, _) in zip(by_place, parts, strict=True)
        ]
        joined.append(_joined(first[place], columns))
    return tuple(column for column in joined if column is not None)


def _joined(first: Column, columns: Sequence[Column]) -> Column | None:
    """Return columns of one place as one; None if their values fit into no kind of column."""
    decided = ("class", NOT_A_COLUMN)  # kinds that count even without a value
    filled = [c for c in columns if c.kind in decided or c.stored.null_count < len(c)] or [first]
    kinds = {column.kind for column in filled}
    if len(kinds) == 1 and all(column.files for column in filled):
        return _with_all_files(filled[0], columns)
    texts = chain(*(pc.unique(c.values).to_pylist() for c in filled if c.kind == "text"))
    if len(kinds) > 1 and {*texts} <= {None, *_NOT_FINITE}:
        kinds = kinds - {"text"} | {"number"}
    kind = _common_kind(kinds)
    present = [column for column in filled if kind == "class" and column.classes]
    # 0 of one set may be another class than 0 of the other.
    is_ambiguous = len({c.classes for c in present}) > 1 and len({c.has_names for c in present}) > 1
    if is_ambiguous or (kind == NOT_A_COLUMN and kind not in kinds):
        return None
    classes = () if kind == "class" else filled[0].classes
    info = replace(filled[0].info, kind=kind, classes=classes, files=())
    return Column.of(info, pa.concat_arrays([_cast(column, info) for column in columns]))


def _with_all_files(first: Column, columns: Sequence[Column]) -> Column:
    """Return columns whose values lie in files as one. Its rows count through the files of all."""
    groups = list(dict.fromkeys(column.files for column in columns))
    counts = [sum(file.count for file in files) for files in groups]
    shifts = dict(zip(groups, accumulate([0, *counts]), strict=False))
    rows = [pc.add(c.stored.cast(pa.int64()), shifts[c.files]) for c in columns]
    return replace(first, files=tuple(chain(*groups)), stored=pa.concat_arrays(rows))


def _common_kind(kinds: Collection[str]) -> str:
    """Return the kind of column that holds values of all these kinds."""
    if len(kinds) == 1:
        return next(iter(kinds))
    if set(kinds) == {"integer", "number"}:
        return "number"
    return "text" if {"class", "multi", "vector", NOT_A_COLUMN}.isdisjoint(kinds) else NOT_A_COLUMN


def _cast(column: Column, info: ColumnInfo) -> pa.Array:
    """Return the values of a column as values of the kind of `info`."""
    if column.kind == info.kind or (column.kind, info.kind) == ("integer", "number"):
        return column.values.cast(KINDS[info.kind].arrow, safe=False)
    return as_label(column, info).values


def as_label(column: Column, info: ColumnInfo) -> Column:
    """Return a column with the meaning of a label. A value that the label cannot have becomes null."""
    kind, values = KINDS[info.kind], column.values
    if info.kind == "class" or column.kind != info.kind:
        values = mapped(values, info.read, pa.int32() if kind.is_class else kind.arrow)
        if info.kind == "class":
            values = pa.DictionaryArray.from_arrays(values, pa.array(info.classes, pa.string()))
        values = values.cast(kind.arrow)
    return replace(
        column,
        name=info.name,
        kind=info.kind,
        classes=info.classes,
        stored=values,
        files=(),
    )


def typed(columns: Iterable[Column], labels: Iterable[ColumnInfo]) -> tuple[Column, ...]:
    """Return columns with the meaning of the labels that are stored at the same places."""
    by_place = {label.place: label for label in labels if label.has_column}
    return tuple(as_label(c, by_place[c.place]) if c.place in by_place else c for c in columns)


def mapped(values: pa.Array, function: Callable[[Any], Any], arrow: pa.DataType) -> pa.Array:
    """Return function(value) of each value, computed once for each different value.

    Null where it raises SampleError, and for lists. arrow: type of the result.
    """
    if pa.types.is_nested(values.type):
        return pa.nulls(len(values), arrow)
    coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    results = []
    for value in coded.dictionary.to_pylist():
        try:
            results.append(function(value))
        except SampleError:
            results.append(None)
    return pa.array(results, arrow).take(coded.indices)


def counted(values: pa.Array) -> dict[Any, int]:
    """Return the number of each value, of lists of each member."""
    values = values.flatten() if pa.types.is_list(values.type) else values
    return {row["values"]: row["counts"] for row in pc.value_counts(values).to_pylist()}


def no_column(place: Place, nulls: pa.Array) -> Column:
    """Return the column of values that no column can hold."""
    return Column(column_name(place), NOT_A_COLUMN, *place, is_label=False, stored=nulls)


def inferred(place: Place, values: list[Any]) -> Column:
    """Return the column of raw values, with the kind that fits all of them."""
    values = _as_numbers(values, is_text=place[1] is None)
    kind = _common_kind({kind_of_value(value) for value in values if value is not None})
    read = KINDS[kind].read
    values = [None if value is None else read(value) for value in values]
    if kind == "text" and any(text is not None and len(text) > LONGEST_TEXT for text in values):
        return no_column(place, pa.nulls(len(values)))
    array = pa.array(values, KINDS[kind].arrow)
    return Column(column_name(place), kind, *place, is_label=False, stored=array)
