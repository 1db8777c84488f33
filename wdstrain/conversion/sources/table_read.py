"""A table in memory: every column but the images in Parquet files, which are streamed.

A table is one or several files of one form, or a frame of another library, read once. Columns are
Arrow arrays, or lists of plain values where a column has several types. `table_text` reads CSV and
JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from wdstrain.conversion.listing import BadSamples
from wdstrain.conversion.source_options import TableOptions
from wdstrain.conversion.sources.table_cells import (
    BATCH,
    Cells,
    Changes,
    cells_of,
    changes_of,
    joined,
    plain,
    typed,
)
from wdstrain.conversion.sources.table_files import TableFiles, form_of, read_file, unchanged
from wdstrain.conversion.sources.table_text import Part, read_csv, read_json
from wdstrain.errors import SourceError, UsageError
from wdstrain.storage.remote import gopen, is_remote, shown_path

_IMAGE_BATCH = 128  # rows of a batch with images


@dataclass
class Table:
    """Rows and columns of a table.

    columns: all names, in order. parts: rows of each file. states: of the files. cells: of columns
    in memory. texts: cells of a CSV as they were written, where these are numbers. classes: names
    of class numbers by column, where the table has them. changes: by column.
    """

    name: str
    columns: list[str]
    parts: list[Part]
    states: dict[str, Any]
    cells: dict[str, Cells] = field(default_factory=dict)
    texts: dict[str, pa.ChunkedArray] = field(default_factory=dict)
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    changes: dict[str, Changes] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    def batches(
        self, names: Sequence[str]
    ) -> Iterator[tuple[str, Sequence[int], dict[str, list[Any]]]]:
        """Yield (file, number of each row in it, plain cells by column) of consecutive rows."""
        stored, first = [name for name in names if name not in self.cells], 0
        for part in self.parts:
            start = 0
            for count, images in self._steps(part, stored):
                cells = {
                    name: plain(
                        images.column(name)
                        if name in stored
                        else self.cells[name][first : first + count]
                    )
                    for name in names
                }
                yield part.path, part.rows[start : start + count], cells
                start, first = start + count, first + count

    def _steps(self, part: Part, stored: list[str]) -> Iterator[tuple[int, Any]]:
        """Yield (number of rows, the named columns) of a part. stored: columns not in memory."""
        with unchanged(part.path, self.states):
            if stored:
                with _reading(part.path, "parquet"):
                    batches = _parquet(part.path).iter_batches(_IMAGE_BATCH, columns=stored)
                    yield from ((len(batch), batch) for batch in batches)
            else:
                for start in range(0, len(part.rows), BATCH):
                    yield min(BATCH, len(part.rows) - start), None

    def column(self, name: str, *, written: bool = False) -> Cells:
        """Return the cells of a column, also of one that is not in memory.

        written: numbers of a CSV are texts, as they were written.
        """
        if name in self.cells:
            return self.texts.get(name, self.cells[name]) if written else self.cells[name]
        return [cell for _, _, cells in self.batches([name]) for cell in cells[name]]

    def check_column(self, name: str) -> None:
        """Raise UsageError if the table lacks a column."""
        if name not in self.columns:
            raise UsageError(
                f"{self.name} has no column '{name}'. Use one of its columns: "
                f"{', '.join(self.columns)}."
            )


def is_frame(table: Any) -> bool:
    """Return whether an object is a table itself, not the address of one."""
    if isinstance(table, list):
        return bool(table) and isinstance(table[0], dict)
    return any(hasattr(table, n) for n in ("iloc", "__arrow_c_stream__", "__arrow_c_array__"))


def read_frame(frame: Any) -> Table:
    """Return a frame of pandas, an object that offers Arrow data, or a list of dicts as a table."""
    if not isinstance(frame, list) and not hasattr(frame, "iloc"):
        return _one_table("the table", [_arrow_part("the table", pa.table(frame))], {})
    if isinstance(frame, list):
        names = list(dict.fromkeys(name for row in frame for name in row))
        columns = [cells_of([row.get(name) for row in frame]) for name in names]
    else:
        names = list(map(str, frame.columns))
        columns = [_column_of(frame.iloc[:, place]) for place in range(len(names))]
    rows, cells = range(1, len(frame) + 1), dict(zip(names, columns, strict=True))
    return _one_table("the DataFrame", [Part("the DataFrame", rows, names, cells)], {})


def _column_of(series: Any) -> Cells:
    if type(series.array).__name__ == "ArrowExtensionArray":
        return pa.chunked_array([pa.array(series.array)])
    return cells_of(list(series))


def read_files(files: TableFiles, options: TableOptions, bad: BadSamples) -> Table:
    """Return the table in some files of one form.

    Raises SourceError for files that cannot be read, that are no table or that do not fit together.
    """
    if not options.header and form_of(files.paths[0]) != "csv":
        raise UsageError(
            f"{files.name}: only CSV and TSV files can be without a header. Leave out header=False."
        )
    parts, states = list[Part](), dict[str, Any]()
    for path in files.paths:
        with unchanged(path, states):
            read = list(_read_file(path, options, bad))
        for part in read:
            for name, value in files.partitions(path).items():
                if name not in part.names:
                    part.names.append(name)
                    part.cells[name] = pa.chunked_array([pa.repeat(value, len(part.rows))])
                    part.texts.add(name)
        parts += read
    return _one_table(files.name, parts, states, options.decimal)


def _read_file(path: str, options: TableOptions, bad: BadSamples) -> Iterable[Part]:
    form = form_of(path)
    if form in ("parquet", "arrow"):
        with _reading(path, form):
            return [_read_arrow(path) if form == "arrow" else _read_parquet(path)]
    data = read_file(path)
    if form == "json" or data.startswith(b'{"'):
        return read_json(path, data, bad)
    return read_csv(path, data, options, bad)


def _one_table(name: str, parts: list[Part], states: dict[str, Any], decimal: str = ".") -> Table:
    columns = list(dict.fromkeys(column for part in parts for column in part.names))
    made = Table(name, columns, parts, states)
    if not len(made):
        raise SourceError(f"{name} has no rows that can be read. Check the table.")
    for part in parts:
        _check_columns(parts[0], part)
    made.classes = parts[0].classes
    for column in (column for column in columns if any(column in part.cells for part in parts)):
        nulls = [pa.chunked_array([pa.nulls(len(part.rows))]) for part in parts]
        cells = joined([p.cells.pop(column, n) for p, n in zip(parts, nulls, strict=True)])
        made.cells[column] = typed(cells, decimal) if column in parts[0].texts else cells
        if made.cells[column] is not cells and made.cells[column].type in (
            pa.int64(),
            pa.float64(),
        ):
            made.texts[column] = cells
        made.changes[column] = changes_of(made.cells[column])
    return made


def _check_columns(first: Part, part: Part) -> None:
    """Raise SourceError if a file has other columns, types or class names than the first one."""
    shown = shown_path(part.path)
    if len(set(part.names)) < len(part.names):
        raise SourceError(
            f"{shown} names a column twice: {', '.join(part.names)}. Give each its own name."
        )
    differing = [f"has no column '{name}'" for name in first.names if name not in part.names]
    differing += [f"has a column '{name}' more" for name in part.names if name not in first.names]
    differing = [] if part.may_lack else differing
    for name, kind in part.types.items():
        other = first.types.get(name, kind)
        try:
            pa.unify_schemas([pa.schema({name: kind}), pa.schema({name: other})])
        except pa.ArrowException:
            differing.append(f"differs: the column '{name}' is {kind} and {other}")
    if part.classes != first.classes:
        differing.append("names the classes of its numbers differently")
    if differing:
        raise SourceError(
            f"{shown} {differing[0]}, unlike {shown_path(first.path)}. Files of one table must have "
            "the same columns, types and class names. Convert each by itself, or write them again."
        )


# --- Parquet and Arrow ----------------------------------------------------------------------------


def _arrow_part(path: str, table: pa.Table, images: Sequence[pa.Field] = ()) -> Part:
    """Return the rows of an Arrow table. images: columns that are read later."""
    types = {field.name: field.type for field in (*table.schema, *images)}
    names = [*table.schema.names, *(field.name for field in images)]
    cells = dict(zip(table.schema.names, table.columns, strict=True))
    classes = _class_names(table.schema.metadata or {})
    return Part(path, range(1, len(table) + 1), names, cells, types=types, classes=classes)


def _read_parquet(path: str) -> Part:
    file = _parquet(path)
    images = [field for field in file.schema_arrow if _may_hold_images(field.type)]
    names = [field.name for field in file.schema_arrow if field not in images]
    return _arrow_part(path, file.read(columns=names).select(names), images)


def _parquet(path: str) -> pq.ParquetFile:
    source = gopen(path) if is_remote(path) else path
    return pq.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False)


def _read_arrow(path: str) -> Part:
    """Return the rows of an Arrow file or stream. Data sets of Hugging Face are saved as streams."""
    file = pa.BufferReader(read_file(path)) if is_remote(path) else pa.memory_map(path)
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    return _arrow_part(path, (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file).read_all())


@contextmanager
def _reading(path: str, form: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise SourceError(
            f"{shown_path(path)} cannot be read as {form.capitalize()} ({reason}). Check the file "
            "and its permissions, or copy or write it again."
        ) from error


def _may_hold_images(kind: pa.DataType) -> bool:
    """Return whether a column is bytes, or Hugging Face's struct of bytes and path."""
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _may_hold_images(field.type) for field in kind)
    return "binary" in str(kind)


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Return the class names that Hugging Face writes into the metadata of a schema, by column."""
    names: dict[str, tuple[str, ...]] = {}
    with suppress(KeyError, ValueError, TypeError, AttributeError):
        for column, kind in json.loads(metadata[b"huggingface"])["info"]["features"].items():
            kind = kind.get("feature", kind) if isinstance(kind, dict) else {}
            classes: Any = kind.get("names") if kind.get("_type") == "ClassLabel" else None
            is_names = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
            if is_names and len(set(classes)) == len(classes):
                names[column] = tuple(classes)
    return names
