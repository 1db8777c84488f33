"""Tables in CSV, TSV and JSON, with the line of each row.

They are read with the standard library. pyarrow's readers take the rows behind an unclosed quote
for one cell, turn texts that look like dates into times, and give no line numbers.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa

from wdstrain.conversion.labels import NUMBER
from wdstrain.conversion.listing import BadSample, BadSamples, image_field
from wdstrain.conversion.source_options import TableOptions
from wdstrain.conversion.sources.table_cells import BATCH, Cells, cells_of
from wdstrain.errors import SourceError

_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass
class Part:
    """Some rows of a file of a table.

    rows: the line or number of each, from 1. names: all columns. cells: of those in memory. texts:
    columns that have no types yet. types: of columns, where the file has them. classes: names of
    class numbers by column. may_lack: another part may have more columns.
    """

    path: str
    rows: Sequence[int]
    names: list[str]
    cells: dict[str, Cells] = field(default_factory=dict)
    texts: set[str] = field(default_factory=set)
    types: dict[str, pa.DataType] = field(default_factory=dict)
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    may_lack: bool = False


# --- CSV ------------------------------------------------------------------------------------------


def read_csv(path: str, data: bytes, options: TableOptions, bad: BadSamples) -> Iterator[Part]:
    """Yield the rows of a CSV or TSV file as texts."""
    encoding = "utf-8-sig" if options.encoding == "utf-8" else options.encoding
    dialect = _dialect(path, data, encoding, options.escape)
    first = [row for _, row in islice(_rows(path, data, encoding, **dialect), 2)]
    if len(first) < 1 + options.header:
        raise SourceError(
            f"{path} has {len(first)} lines that are not blank: must have a header and at least one "
            "row. Check the file."
        )
    names = [c.strip() for c in first[0]] if options.header else [*map(str, range(len(first[0])))]
    if options.header and any(NUMBER.fullmatch(name) or image_field(name) for name in names):
        raise SourceError(
            f"{path}: its first line looks like data ({names[0][:40]!r} ...). Add a line that names "
            "the columns, or use header=False, which names them 0, 1, ..."
        )
    rows = islice(_rows(path, data, encoding, **dialect), int(options.header), None)
    for place, batch in enumerate(iter(lambda: list(islice(rows, BATCH)), [])):
        good = [(line, row) for line, row in batch if len(row) == len(names)]
        if not place and not good:
            mark = dialect["delimiter"]
            raise SourceError(
                f"{path}: no row has as many cells as the header: it has {len(names)} "
                f"({', '.join(names)[:80]}), line {batch[0][0]} has {len(batch[0][1])}. Remove lines "
                f"before the header, and separate all cells by {_DELIMITERS.get(mark, repr(mark))}, "
                "also in the header."
            )
        for line, row in batch:
            if len(row) != len(names):
                reason = f"it has {len(row)} cells, but the table has {len(names)} columns"
                bad.put(BadSample(path, line, "", reason))
        columns = zip(*(row for _, row in good), strict=True) if good else ([],) * len(names)
        arrays = [pa.chunked_array([pa.array(cells, pa.string())]) for cells in columns]
        lines = array("q", [line for line, _ in good])
        yield Part(path, lines, list(names), dict(zip(names, arrays, strict=True)), set(names))


def _lines_of(path: str, data: bytes, encoding: str) -> Iterator[str]:
    try:
        yield from io.TextIOWrapper(io.BytesIO(data), encoding, newline="")
    except UnicodeError:
        raise _not_decoded(path, data, encoding) from None


def _rows(
    path: str, data: bytes, encoding: str, *, skipped: int, **dialect: Any
) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of its last line, cells) of each row that is not blank.

    skipped: lines before the header.
    """
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # cells of any size
    try:
        lines = islice(_lines_of(path, data, encoding), skipped, None)
        reader = csv.reader(lines, strict=True, **dialect)
        yield from ((reader.line_num + skipped, row) for row in reader if row)
    except csv.Error as error:
        raise SourceError(
            f"{path} is not a CSV table ({error}). Look for a quote that is not closed. If quotes "
            "are escaped by backslashes, give escape='\\\\'."
        ) from error
    finally:
        csv.field_size_limit(before)


def _dialect(path: str, data: bytes, encoding: str, escape: str | None) -> dict[str, Any]:
    """Return how a CSV is read. Its delimiter is the one that the first line has or names."""
    first = next(_lines_of(path, data, encoding), "")
    if "\0" in first:
        raise SourceError(f"{path} has NUL bytes in line 1, as UTF-16 has. {_NEXT_STEP}")
    delimiter = next((mark for mark in _DELIMITERS if mark in first), ",")
    delimiter = "\t" if path.lower().endswith(".tsv") else delimiter
    is_named = first.lower().startswith("sep=") and len(first.strip()) == 5
    dialect = {"delimiter": first[4] if is_named else delimiter, "escapechar": escape}
    plain: dict[str, Any] = {**dialect, "skipped": int(is_named)}
    skipping = {**plain, "skipinitialspace": True}  # as in 1, "a"
    quoted = [
        sum(cell[:1] == " " and cell.lstrip(" ")[:1] == '"' for _, row in rows for cell in row)
        for rows in (
            _rows(path, data, encoding, **one) for one in (plain, skipping) if b' "' in data
        )
    ]
    return plain if len(set(quoted)) < 2 else skipping


_NEXT_STEP = (
    "A table must be UTF-8. Save it as UTF-8, or give its encoding, such as encoding='cp1252'. "
    "Tables are .csv, .tsv, .jsonl, .json, .parquet and .arrow files that are not compressed."
)


def _not_decoded(path: str, data: bytes, encoding: str) -> SourceError:
    name = "UTF-8" if encoding.startswith("utf-8") else f"in the encoding {encoding}"
    try:
        data.decode(encoding)
        where = ""
    except UnicodeDecodeError as error:
        line = len(error.object[: error.start + 1].splitlines())
        where = f": line {line} has the byte 0x{error.object[error.start]:02x}"
    return SourceError(f"{path} is not {name}{where}. {_NEXT_STEP}")


# --- JSON -----------------------------------------------------------------------------------------


def read_json(path: str, data: bytes, bad: BadSamples) -> Iterator[Part]:
    """Yield the rows of JSON lines, or of one JSON array of objects. A row may lack columns."""
    rows = _array(path, data) if data.lstrip()[:1] == b"[" else _lines(path, data, bad)
    while batch := list(islice(rows, BATCH)):
        names = list(dict.fromkeys(name for _, row in batch for name in row))
        cells = {name: cells_of([row.get(name) for _, row in batch]) for name in names}
        lines = array("q", [line for line, _ in batch])
        yield Part(path, lines, names, cells, may_lack=True)


def _array(path: str, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        yield from enumerate(map(_object, _parsed(path, data, data)), 1)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not a JSON array of objects ({error}). Check it.") from None


def _lines(path: str, data: bytes, bad: BadSamples) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(io.BytesIO(data), 1):
        if not text.strip():
            continue
        try:
            row = _object(_parsed(path, text, data))
        except (ValueError, RecursionError) as error:
            reason = f"it is not a JSON object ({error}); JSON lines have one object on each line"
            bad.put(BadSample(path, line, "", reason))
            continue
        yield line, row


def _parsed(path: str, text: bytes, data: bytes) -> Any:
    try:
        # Decoded here: `json.loads` would take UTF-16 for some of the lines.
        return json.loads(text.decode("utf-8-sig"), object_pairs_hook=_each_once)
    except UnicodeDecodeError:
        raise _not_decoded(path, data, "utf-8") from None


def _object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__} where an object is expected")
    if row and all(isinstance(value, dict) and "0" in value for value in row.values()):
        raise ValueError("a column in each entry; pandas writes rows with orient='records'")
    return row


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if it names an entry twice: only the last is kept."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it names {twice!r} {count} times")
    return row
