"""A table in memory: every column but the images in Parquet files, which are streamed.

A table is one or several files of one form, or a frame of another library, read once. Columns are
Arrow arrays, or lists of plain values where a column has several types.

CSV and JSON are read with the standard library. pyarrow's readers take the rows behind an unclosed
quote for one cell, turn texts that look like dates into times, and give no line numbers.
"""

from __future__ import annotations

import csv
import io
import json
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from wdstrain.conversion.labels import check_classes
from wdstrain.conversion.listing import BadSample, BadSamples, each_once, image_field
from wdstrain.conversion.options import TableOptions
from wdstrain.conversion.sources.table_cells import (
    BATCH,
    Cells,
    Changes,
    batched,
    cells_of,
    joined,
    plain,
    typed,
    values_of,
)
from wdstrain.conversion.sources.table_files import TableFiles, find_files, form_of, read_file
from wdstrain.errors import SourceError, UsageError
from wdstrain.shards.label_kinds import NUMBER
from wdstrain.storage.remote import gopen, is_remote, shown_path

_FRAMES = ("iloc", "__arrow_c_stream__", "__arrow_c_array__")  # attributes of frames
_DELIMITERS = ",;\t|"
_NEXT_STEP = (
    "A table must be UTF-8. Save it as UTF-8, or give its encoding with {encoding}. "
    "Tables are .csv, .tsv, .jsonl, .json, .parquet and .arrow files that are not compressed."
)
_IMAGE_BATCH = 128  # rows of a batch with images

Row = tuple[int, Any]  # number of a row in its file, and its cells


class Part(NamedTuple):
    """Some rows of a file.

    rows: the line or number of each, from 1. cells: by column; None: they are read later. schema:
    of a file whose columns have types.
    """

    path: str
    rows: Sequence[int]
    cells: dict[str, Cells]
    schema: pa.Schema | None = None


class Table:
    """Rows and columns of a table.

    columns: all names, in order. cells: plain ones, of columns in memory. classes: names of class
    numbers by column, where the table has them. changes: by column, of values that JSON lacks.
    """

    def __init__(
        self, files: TableFiles, parts: list[Part], untyped: Collection[str], decimal: str
    ) -> None:
        """untyped: columns of texts that have no types yet."""
        self.files, self._parts = files, parts
        self._rows = sum(len(part.rows) for part in parts)
        if not self._rows:
            raise SourceError(
                f"{files.name} has no rows that can be read.", _NEXT_STEP, {"encoding": "cp1252"}
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


def _batches(part: Part, stored: list[str]) -> Iterator[Any]:
    """Yield batches as long as those of the rows of a part. stored: columns to read in them."""
    if stored:
        yield from open_parquet(part.path).iter_batches(_IMAGE_BATCH, columns=stored)
    else:
        yield from (part.rows[at : at + BATCH] for at in range(0, len(part.rows), BATCH))


def read_table(options: TableOptions, bad: BadSamples) -> Table:
    """Return the table that is or lies at `options.table`.

    Raises SourceError for files that cannot be read, that are no table or that do not fit together.
    """
    table, parts, untyped = options.table, list[Part](), set[str]()
    is_rows = isinstance(table, list) and bool(table) and isinstance(table[0], dict)
    if is_rows or any(hasattr(table, name) for name in _FRAMES):
        files = TableFiles("the table", ["the table"], None)
        return Table(files, list(_frame_parts(files.name, table)), (), "")
    files = find_files(table)
    form = form_of(files.paths[0])
    if not options.header and form != "csv":
        raise UsageError(
            f"{files.name}: only CSV and TSV files can be without a header.",
            "Leave out {header}.",
            {"header": False},
        )
    for path in files.paths:
        with files.reading(path):
            read = list(_READERS[form](path, options, bad))
        for part in read:
            folders = {n: v for n, v in files.partitions(path).items() if n not in part.cells}
            untyped.update(folders, part.cells if form == "csv" else ())
            part.cells.update({n: cells_of([v] * len(part.rows)) for n, v in folders.items()})
            if form != "json":  # where a row may lack columns
                _check_columns([*parts, part][0], part)
            parts.append(part)
    return Table(files, parts, untyped, options.decimal)


def _check_columns(first: Part, part: Part) -> None:
    """Raise SourceError if a file has other columns, types or class names than the first one."""
    differing = [f"has no column '{name}'" for name in first.cells if name not in part.cells]
    differing += [f"has a column '{name}' more" for name in part.cells if name not in first.cells]
    if part.schema is not None and not differing:
        try:
            pa.unify_schemas([part.schema, first.schema])
        except pa.ArrowException as error:
            differing.append(f"differs: {str(error).removeprefix('Unable to merge: ')}")
    if _class_names(part.schema) != _class_names(first.schema):
        differing.append("names the classes of its numbers differently")
    if differing:
        raise SourceError(
            f"{shown_path(part.path)} {differing[0]}, unlike {shown_path(first.path)}. Files of "
            "one table must have the same columns, types and class names.",
            "Convert each by itself, or write them again.",
        )


def _check_names(path: str, names: Sequence[str]) -> None:
    """Raise SourceError if two columns have one name."""
    if len(set(names)) < len(names):
        raise SourceError(
            f"{shown_path(path)} names a column twice: {', '.join(names)}.",
            "Give each its own name.",
        )


# --- frames and Arrow -----------------------------------------------------------------------------


def _frame_parts(name: str, frame: Any) -> Iterator[Part]:
    """Yield the rows of a frame of pandas, an object that offers Arrow data, or a list of dicts."""
    if isinstance(frame, list):
        yield from _parts_of_rows(name, enumerate(frame, 1))
    elif hasattr(frame, "iloc"):
        names = list(map(str, frame.columns))
        _check_names(name, names)
        series = [frame.iloc[:, place] for place in range(len(names))]
        columns = (
            pa.chunked_array([pa.array(one.array)])
            if type(one.array).__name__ == "ArrowExtensionArray"
            else cells_of(list(one))
            for one in series
        )
        yield Part(name, range(1, len(frame) + 1), dict(zip(names, columns, strict=True)))
    else:
        yield _arrow_part(name, pa.table(frame))


def _arrow_part(path: str, table: pa.Table, schema: pa.Schema | None = None) -> Part:
    """Return the rows of an Arrow table. schema: with the columns that are read later."""
    schema = schema or table.schema
    _check_names(path, schema.names)
    read = dict(zip(table.schema.names, table.columns, strict=True))
    cells = {name: read.get(name) for name in schema.names}
    return Part(path, range(1, len(table) + 1), cells, schema)


def _read_parquet(path: str, options: TableOptions, bad: BadSamples) -> Iterator[Part]:
    """Yield the rows of a Parquet file. Columns that may hold images are read later."""
    file = open_parquet(path)
    names = [field.name for field in file.schema_arrow if "binary" not in str(field.type)]
    yield _arrow_part(path, file.read(columns=names).select(names), file.schema_arrow)


def open_parquet(path: str) -> pq.ParquetFile:
    """Return a Parquet file, local or on a server."""
    return pq.ParquetFile(
        gopen(path) if is_remote(path) else path, buffer_size=1 << 20, pre_buffer=False
    )


def _read_arrow(path: str, options: TableOptions, bad: BadSamples) -> Iterator[Part]:
    """Yield the rows of an Arrow file or stream. Data sets of Hugging Face are saved as streams."""
    file = pa.BufferReader(read_file(path)) if is_remote(path) else pa.memory_map(path)
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    opened = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
    yield _arrow_part(path, opened.read_all())


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


# --- texts ----------------------------------------------------------------------------------------


def _parts_of_rows(path: str, rows: Iterable[Row]) -> Iterator[Part]:
    """Yield rows that are dicts as parts. Cells that a row lacks are empty."""
    for batch in batched(rows):
        names = dict.fromkeys(name for _, row in batch for name in row)
        cells = {name: cells_of([row.get(name) for _, row in batch]) for name in names}
        yield Part(path, array("q", [number for number, _ in batch]), cells)


def _read_csv(path: str, options: TableOptions, bad: BadSamples) -> Iterator[Part]:
    """Yield the rows of a CSV or TSV file as texts."""
    rows = _csv_rows(path, options)
    first = next(rows, (0, []))
    names = [name.strip() for name in first[1]]
    if not options.header:
        names, rows = list(map(str, range(len(names)))), chain([first], rows)
    elif any(NUMBER.fullmatch(name) or image_field(name) for name in names):
        raise SourceError(
            f"{path}: its first line looks like data ({names[0][:40]!r} ...).",
            "Add a line that names the columns, or use {header}, which names them 0, 1, ...",
            {"header": False},
        )
    _check_names(path, names)

    def complete() -> Iterator[Row]:
        for line, row in rows:
            if len(row) == len(names):
                yield line, row
            else:
                reason = f"it has {len(row)} cells, but the table has {len(names)} columns"
                bad.put(BadSample(path, line, "", reason))

    for batch in batched(complete()):
        lines, cells = zip(*batch, strict=True)
        columns = map(cells_of, zip(*cells, strict=True))
        yield Part(path, array("q", lines), dict(zip(names, columns, strict=True)))


def _csv_rows(path: str, options: TableOptions) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of its last line, cells) of each row that is not blank.

    The delimiter is the one that the first line has, or names: sep=;
    """
    lines = _lines(path, read_file(path), options.encoding)
    first = next(lines, "")
    is_named = first.lower().startswith("sep=") and len(first.strip()) == 5
    marks = first[4] if is_named else "\t" if path.lower().endswith(".tsv") else _DELIMITERS
    before = csv.field_size_limit(2**31 - 1)  # cells of any size
    try:
        reader = csv.reader(
            lines if is_named else chain([first], lines),
            delimiter=next((mark for mark in marks if mark in first), marks[0]),
            escapechar=options.escape,
            skipinitialspace=True,
            strict=True,
        )
        yield from ((reader.line_num + is_named, row) for row in reader if row)
    except csv.Error as error:
        raise SourceError(
            f"{path} is not a CSV table ({error}).",
            "Look for a quote that is not closed. If quotes are escaped by backslashes, give "
            f"{{escape}}. {_NEXT_STEP}",
            {"escape": "\\", "encoding": "cp1252"},
        ) from error
    finally:
        csv.field_size_limit(before)


def _lines(path: str, data: bytes, encoding: str) -> Iterator[str]:
    """Yield the lines of a text. Raises SourceError for bytes of another encoding."""
    encoding = "utf-8-sig" if encoding == "utf-8" else encoding
    try:
        yield from io.TextIOWrapper(io.BytesIO(data), encoding, newline="")
    except UnicodeError:
        text = data.decode(encoding, "replace").partition("\ufffd")[0]
        name = "UTF-8" if encoding == "utf-8-sig" else f"in the encoding {encoding}"
        raise SourceError(
            f"{path} is not {name}: see line {len(f'{text}.'.splitlines())}.",
            _NEXT_STEP,
            {"encoding": "cp1252"},
        ) from None


def _read_json(path: str, options: TableOptions, bad: BadSamples) -> Iterator[Part]:
    """Yield the rows of JSON lines, or of one JSON array of objects. A row may lack columns."""
    data = read_file(path)
    texts = _lines(path, data, "utf-8")
    is_array = data.lstrip()[:1] == b"["
    yield from _parts_of_rows(path, _array(path, texts) if is_array else _objects(path, texts, bad))


def _array(path: str, texts: Iterator[str]) -> Iterator[Row]:
    """Yield (number, object) of each row of a JSON array. Raises SourceError if one is none."""
    try:
        rows = json.loads("".join(texts), object_pairs_hook=each_once)
        yield from enumerate(map(_checked, rows), 1)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{path} is not a JSON array of objects ({error}).",
            "Check it.",
        ) from None


def _objects(path: str, texts: Iterator[str], bad: BadSamples) -> Iterator[Row]:
    """Yield (number of the line, object) of each row of JSON lines."""
    for line, text in enumerate(texts, 1):
        try:
            if text.strip():
                yield line, _checked(json.loads(text, object_pairs_hook=each_once))
        except (ValueError, RecursionError) as error:
            reason = f"it is not a JSON object ({error}); JSON lines have one object on each line"
            bad.put(BadSample(path, line, "", reason))


def _checked(row: Any) -> dict[str, Any]:
    """Return an object that is a row. Raises ValueError for other values."""
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__} where an object is expected")
    if row and all(isinstance(value, dict) and "0" in value for value in row.values()):
        raise ValueError("a column in each entry; pandas writes rows with orient='records'")
    return row


_READERS: dict[str, Callable[[str, TableOptions, BadSamples], Iterator[Part]]] = {
    "csv": _read_csv,
    "json": _read_json,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
