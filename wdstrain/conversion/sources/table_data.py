"""A table in memory: every column but the images in Parquet files, which are streamed.

A table is one or several files of one form, or a frame of another library, read once. Cells of a
column are an Arrow array, or a list of plain values where a column has several types. A plain value
is None, a bool, an int, a finite float, a text, bytes, or a list or dict of these.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.conversion.labels import check_classes
from wdstrain.conversion.listing import (
    BadSamples,
    Part,
    field_name,
    reject,
    tidy,
)
from wdstrain.conversion.options import TableOptions
from wdstrain.conversion.sources.table_files import (
    BATCH,
    NEXT_STEP,
    READERS,
    Cells,
    Rows,
    TableFiles,
    arrow_part,
    batched,
    cells_of,
    check_names,
    find_files,
    form_of,
    open_parquet,
    parts_of_rows,
)
from wdstrain.errors import UsageError
from wdstrain.runtime.options import refuse
from wdstrain.shards.formats import format_of
from wdstrain.shards.label_kinds import NUMBER, WHOLE
from wdstrain.storage.remote import shown_path

_FRAMES = ("iloc", "__arrow_c_stream__", "__arrow_c_array__")  # attributes of frames
_IMAGE_BATCH = 128  # rows of a batch with images
Changes = Counter[str]  # what values that JSON lacks became -> how many
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_WRITTEN = (Decimal, Fraction, PurePath, UUID, date, time, timedelta, np.datetime64, np.timedelta64)
# Texts of a CSV that are not only texts; the first row counts that fits all of a column.
_TYPES = (
    (WHOLE.pattern, pa.int64()),
    (NUMBER.pattern, pa.float64()),
    ("(?i:true|false)", pa.bool_()),
)
_PLAIN = {pa.string(), pa.large_string(), pa.bool_(), pa.int64(), pa.binary(), pa.null()}


class Table:
    """Rows and columns of a table.

    columns: all names, in order. cells: plain ones, of columns in memory. classes: names of class
    numbers by column, where the table has them. changes: by column, of values that JSON lacks.
    """

    def __init__(
        self, files: TableFiles, parts: list[Rows], untyped: Collection[str], decimal: str
    ) -> None:
        """untyped: columns of texts that have no types yet."""
        self.files, self._parts = files, parts
        self._rows = sum(len(part.rows) for part in parts)
        reject(
            not self._rows,
            f"{files.name} has no rows that can be read.",
            NEXT_STEP,
            encoding="cp1252",
        )
        self.classes = _class_names(parts[0].schema)
        self.columns = list(dict.fromkeys(column for part in parts for column in part.cells))
        self.cells, self.changes = dict[str, Cells](), dict[str, Changes]()
        self._texts = dict[str, Cells]()  # numbers of a CSV, as they were written
        for column in self.columns:
            some = [p.cells.pop(column, pa.chunked_array([pa.nulls(len(p.rows))])) for p in parts]
            if some[0] is None:
                continue  # images
            texts = cells = joined(some)
            if column in untyped:
                cells = typed(texts, decimal)
                self._texts |= {} if cells.type == pa.string() else {column: texts}
            self.changes[column] = Changes()
            self.cells[column] = plain(cells, self.changes[column])

    def __len__(self) -> int:
        return self._rows

    def batches(
        self, names: Sequence[str]
    ) -> Iterator[tuple[str, Sequence[int], dict[str, list[Any]]]]:
        """Yield (file, number of each row in it, plain cells by column) of consecutive rows."""
        stored, first = [name for name in names if name not in self.cells], 0
        for part in self._parts:
            with self.files.reading(part.path):
                at = 0
                for batch in _batches(part, stored):
                    rows = slice(first + at, first + at + len(batch))
                    cells = {name: self.cells[name][rows] for name in names if name in self.cells}
                    for name in stored:
                        cells[name] = plain(pa.chunked_array([batch.column(name)]), Changes())
                    values = {name: values_of(cells[name]) for name in names}
                    yield part.path, part.rows[at : at + len(batch)], values
                    at += len(batch)
            first += len(part.rows)

    def column(self, name: str, *, written: bool = False) -> Cells:
        """Return the cells of a column, also of one that is not in memory.

        written: numbers of a CSV are texts, as they were written.
        """
        if name in self.cells:
            return self._texts.get(name, self.cells[name]) if written else self.cells[name]
        return [cell for _, _, cells in self.batches([name]) for cell in cells[name]]


def _batches(part: Rows, stored: list[str]) -> Iterator[Any]:
    """Yield batches as long as those of the rows of a part. stored: columns to read in them."""
    if stored:
        yield from open_parquet(part.path).iter_batches(_IMAGE_BATCH, columns=stored)
    else:
        yield from (part.rows[at : at + BATCH] for at in range(0, len(part.rows), BATCH))


def read_table(options: TableOptions, bad: BadSamples) -> Table:
    """Return the table that is or lies at `options.table`.

    Raises SourceError for files that cannot be read, that are no table or that do not fit together.
    """
    table, parts, untyped = options.table, list[Rows](), set[str]()
    is_rows = isinstance(table, list) and bool(table) and isinstance(table[0], dict)
    if is_rows or any(hasattr(table, name) for name in _FRAMES):
        files = TableFiles("the table", ["the table"], None)
        return Table(files, list(_frame_parts(files.name, table)), (), "")
    files = find_files(table)
    form = form_of(files.paths[0])
    refuse(
        not options.header and form != "csv",
        f"{files.name}: only CSV and TSV files can be without a header.",
        "Leave out {header}.",
        header=False,
    )
    for path in files.paths:
        with files.reading(path):
            read = list(READERS[form](path, options, bad))
        for part in read:
            folders = {n: v for n, v in files.partitions(path).items() if n not in part.cells}
            untyped.update(folders, part.cells if form == "csv" else ())
            part.cells.update({n: cells_of([v] * len(part.rows)) for n, v in folders.items()})
            if form != "json":  # where a row may lack columns
                _check_columns([*parts, part][0], part)
            parts.append(part)
    return Table(files, parts, untyped, options.decimal)


def _check_columns(first: Rows, part: Rows) -> None:
    """Raise SourceError if a file has other columns, types or class names than the first one."""
    differing = [
        *(f"has no column '{name}'" for name in first.cells if name not in part.cells),
        *(f"has a column '{name}' more" for name in part.cells if name not in first.cells),
    ]
    if part.schema is not None and not differing:
        try:
            pa.unify_schemas([part.schema, first.schema])
        except pa.ArrowException as error:
            differing.append(f"differs: {str(error).removeprefix('Unable to merge: ')}")
    if _class_names(part.schema) != _class_names(first.schema):
        differing.append("names the classes of its numbers differently")
    reject(
        differing,
        f"{shown_path(part.path)} {' and '.join(differing)}, unlike {shown_path(first.path)}. Files "
        "of one table must have the same columns, types and class names.",
        "Convert each by itself, or write them again.",
    )


def _class_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """Return the class names that Hugging Face writes into the metadata of a schema, by column."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        kinds = {n: k.get("feature", k) for n, k in features.items() if isinstance(k, dict)}
        kinds = {n: k for n, k in kinds.items() if isinstance(k, dict) and "names" in k}
        return {
            n: check_classes(k["names"]) for n, k in kinds.items() if k["_type"] == "ClassLabel"
        }
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _frame_parts(name: str, frame: Any) -> Iterator[Rows]:
    """Yield the rows of a frame of pandas, an object that offers Arrow data, or a list of dicts."""
    if isinstance(frame, list):
        yield from parts_of_rows(name, enumerate(frame, 1))
    elif hasattr(frame, "iloc"):
        names = list(map(str, frame.columns))
        check_names(name, names)
        series = [frame.iloc[:, place] for place in range(len(names))]
        columns = (
            pa.chunked_array([pa.array(one.array)])
            if type(one.array).__name__ == "ArrowExtensionArray"
            else cells_of(list(one))
            for one in series
        )
        yield Rows(name, range(1, len(frame) + 1), dict(zip(names, columns, strict=True)))
    else:
        yield arrow_part(name, pa.table(frame))


# --- cells ----------------------------------------------------------------------------------------


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
    if isinstance(value, (list, tuple)):
        return [_plain(item, changes) for item in value]
    if isinstance(value, dict):
        names = [name if isinstance(name, str) else json.dumps(name, default=str) for name in value]
        refuse(
            len({*names}) < len(names),
            f"a dict of the table names an entry twice in JSON: {', '.join(names)}.",
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
