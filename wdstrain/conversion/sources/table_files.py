"""The files of a table, and their rows: CSV, JSON, Parquet and Arrow.

The files are those of a path, folder, glob or address on the Hub, or of several of these. Columns of
their rows are Arrow arrays, or lists of values where a column has several types.

CSV and JSON are read with the standard library. pyarrow's readers take the rows behind an unclosed
quote for one cell, turn texts that look like dates into times, and give no line numbers.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from stat import S_ISREG
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from wdstrain.conversion.listing import (
    BadSample,
    BadSamples,
    check_there,
    each_once,
    image_field,
    is_litter,
    readable,
    reject,
    split_of,
    walk,
)
from wdstrain.conversion.options import TableOptions
from wdstrain.errors import SourceError
from wdstrain.runtime.options import refuse
from wdstrain.shards.label_kinds import NUMBER
from wdstrain.storage.addresses import is_hub, list_hub_files, matching_paths
from wdstrain.storage.remote import gopen, is_remote, shown_path

# Extensions of tables in folders. Of a file that is named alone, .json and .ipc count too.
_FORMS = {
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
}
_DELIMITERS = ",;\t|"
NEXT_STEP = (
    "A table must be UTF-8. Save it as UTF-8, or give its encoding with {encoding}. "
    "Tables are .csv, .tsv, .jsonl, .json, .parquet and .arrow files that are not compressed."
)
BATCH = 8192  # rows that are Python values at a time
Cells = Any  # of one column: pa.ChunkedArray, which has no stubs, or a list
Row = tuple[int, Any]  # number of a row in its file, and its cells
T = TypeVar("T")


@dataclass(frozen=True)
class TableFiles:
    """The files of a table.

    base: where relative paths of images begin; None: of a frame. states: of the files that were
    read, which differ if one was changed.
    """

    name: str
    paths: list[str]
    base: str | None
    states: dict[str, Any] = field(default_factory=dict)

    def key_prefix(self, file: str) -> str:
        """Return the beginning of the keys of a file's rows; "" if it is the only file."""
        return "" if len(self.paths) < 2 else f"{os.path.splitext(self._below(file))[0]}/"

    def splits(self) -> dict[str, str]:
        """Return the split of each file, by its name or folders; {} unless all of several have one."""
        names = {file: reversed(self._below(file).split("/")) for file in self.paths}
        splits = {file: next(filter(None, map(split_of, n)), "") for file, n in names.items()}
        return splits if len(splits) > 1 and all(splits.values()) else {}

    def partitions(self, file: str) -> dict[str, str]:
        """Return the cells that folders such as kind=cat give to all rows of a file."""
        pairs = [part.partition("=") for part in self._below(file).split("/")[:-1]]
        return {
            unquote(name): "" if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
            for name, equals, value in pairs
            if name and equals
        }

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Raise SourceError for a file that is no table of its form, or that changes."""
        state = self.states.setdefault(path, _state(path))
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise SourceError(
                f"{shown_path(path)} cannot be read as {form_of(path).capitalize()} ({reason}).",
                "Check the file and its permissions, or copy or write it again.",
            ) from error
        reject(
            _state(path) != state,
            f"{path} changed while it was converted.",
            "Convert it again.",
        )

    def _below(self, file: str) -> str:
        path = unquote(file) if is_remote(file) else file
        return path.removeprefix(os.path.join(self.base or "", "")).replace(os.sep, "/")


def find_files(table: Any) -> TableFiles:
    """Return the files of one or several addresses of a table.

    Raises SourceError if there are none, or if they are of several formats.
    """
    named = [table] if isinstance(table, (str, os.PathLike)) else table
    refuse(
        not isinstance(named, (list, tuple)) or not named,
        f"table is {type(table).__name__}: must be the path of a file or folder, a glob, "
        "several of them, a list of dicts, or a DataFrame or table that offers Arrow data "
        "(pandas, polars, DuckDB, pyarrow). Collect a lazy frame first.",
    )
    addresses = [str(os.fspath(address)) for address in named]
    name = ", ".join(addresses)
    bases, matches = zip(*map(_find, addresses), strict=True)
    paths = list(dict.fromkeys(path for paths in matches for path in paths))
    reject(
        not paths,
        f"{name} holds no tables.",
        f"Check the path. Tables end in {', '.join(_FORMS)}. Shards of webdataset need no "
        f"conversion: wdstrain info {name}",
    )
    forms = {form_of(path): path for path in paths}
    reject(
        len(forms) > 1,
        f"{name} holds tables of several formats, such as {' and '.join(forms.values())}.",
        "Name the files of one format.",
    )
    base = bases[0] if len(set(bases)) == 1 else os.path.commonpath(map(os.path.abspath, bases))
    return TableFiles(name, paths, base)


def form_of(path: str) -> str:
    """Return csv, json, parquet or arrow, by the extension of a file; csv for others."""
    forms = {**_FORMS, ".json": "json", ".ipc": "arrow"}
    return forms.get(os.path.splitext(path)[1].lower(), "csv")


def _is_table(path: str) -> bool:
    return path.lower().endswith(tuple(_FORMS))


def _find(address: str) -> tuple[str, list[str]]:
    """Return (folder, files) of one address."""
    if is_hub(address):
        base, files = list_hub_files(address)
        tables = list(filter(_is_table, files))
        return base, [path for path in tables if form_of(path) == "parquet"] or tables
    if is_remote(address):
        return address.rpartition("/")[0], [address]
    if os.path.isdir(address):
        found = (
            os.path.join(folder, name)
            for _, folder, _, names, _ in walk(address, _is_leftover, links=False)
            for name in names
        )
        return address, list(filter(_is_table, found))
    if glob.has_magic(address) and not os.path.lexists(address):
        with readable(address, "the permissions of the folder"):
            paths = list(filter(os.path.isfile, matching_paths(address)))
        refuse(not paths, f"{address}: no file matches this pattern.", "Check the path.")
        return os.path.commonpath(map(os.path.dirname, paths)), paths
    check_there(address)
    return os.path.dirname(address), [address]


def _is_leftover(name: str) -> bool:
    """Return whether a name is of no table: Spark, pandas and Arrow ignore `_temporary`, too."""
    return is_litter(name) or name.startswith("_")


def read_file(path: str) -> bytes:
    """Return the bytes of a local file, a pipe, or a file of a server."""
    with (
        readable(path, "the path and its permissions"),
        gopen(path) if is_remote(path) else open(path, "rb") as file,
    ):
        return bytes(file.read())


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None  # a file of a server
    state = status.st_ino, status.st_size, status.st_mtime_ns
    return state if S_ISREG(status.st_mode) else None


# --- rows ------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Some rows of a file.

    rows: the line or number of each, from 1. cells: by column; None: they are read later. schema:
    of a file whose columns have types.
    """

    path: str
    rows: Sequence[int]
    cells: dict[str, Cells]
    schema: pa.Schema | None = None


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


def parts_of_rows(path: str, rows: Iterable[Row]) -> Iterator[Rows]:
    """Yield rows that are dicts as parts. Cells that a row lacks are empty."""
    for batch in batched(rows):
        names = dict.fromkeys(name for _, row in batch for name in row)
        cells = {name: cells_of([row.get(name) for _, row in batch]) for name in names}
        yield Rows(path, array("q", [number for number, _ in batch]), cells)


def check_names(path: str, names: Sequence[str]) -> None:
    """Raise SourceError if two columns have one name."""
    reject(
        len(set(names)) < len(names),
        f"{shown_path(path)} names a column twice: {', '.join(names)}.",
        "Give each its own name.",
    )


def arrow_part(path: str, table: pa.Table, schema: pa.Schema | None = None) -> Rows:
    """Return the rows of an Arrow table. schema: with the columns that are read later."""
    schema = schema or table.schema
    check_names(path, schema.names)
    read = dict(zip(table.schema.names, table.columns, strict=True))
    return Rows(path, range(1, len(table) + 1), {n: read.get(n) for n in schema.names}, schema)


# --- formats ---------------------------------------------------------------------------------------


def _read_parquet(path: str, options: TableOptions, bad: BadSamples) -> Iterator[Rows]:
    """Yield the rows of a Parquet file. Columns that may hold images are read later."""
    file = open_parquet(path)
    names = [field.name for field in file.schema_arrow if "binary" not in str(field.type)]
    yield arrow_part(path, file.read(columns=names).select(names), file.schema_arrow)


def open_parquet(path: str) -> pq.ParquetFile:
    """Return a Parquet file, local or on a server."""
    return pq.ParquetFile(
        gopen(path) if is_remote(path) else path, buffer_size=1 << 20, pre_buffer=False
    )


def _read_arrow(path: str, options: TableOptions, bad: BadSamples) -> Iterator[Rows]:
    """Yield the rows of an Arrow file or stream. Data sets of Hugging Face are saved as streams."""
    file = pa.BufferReader(read_file(path)) if is_remote(path) else pa.memory_map(path)
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    opened = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
    yield arrow_part(path, opened.read_all())


def _read_csv(path: str, options: TableOptions, bad: BadSamples) -> Iterator[Rows]:
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
    check_names(path, names)

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
        yield Rows(path, array("q", lines), dict(zip(names, columns, strict=True)))


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
            f"{{escape}}. {NEXT_STEP}",
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
            NEXT_STEP,
            {"encoding": "cp1252"},
        ) from None


def _read_json(path: str, options: TableOptions, bad: BadSamples) -> Iterator[Rows]:
    """Yield the rows of JSON lines, or of one JSON array of objects. A row may lack columns."""
    data = read_file(path)
    rows = _array if data.lstrip()[:1] == b"[" else _objects
    yield from parts_of_rows(path, rows(path, _lines(path, data, "utf-8"), bad))


def _array(path: str, texts: Iterator[str], bad: BadSamples) -> Iterator[Row]:
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


READERS: dict[str, Callable[[str, TableOptions, BadSamples], Iterator[Rows]]] = {
    "csv": _read_csv,
    "json": _read_json,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
