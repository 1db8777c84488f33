"""Tables from files and DataFrames to columns of plain values: CSV, TSV, JSON lines, parquet, pandas.

Whatever the file, a cell becomes None, a bool, an int, a float, a text, a list of these, or bytes; the rest of the package
knows no other kinds. CSV has no types, so a column of it is numbers, else booleans, else text, if all its cells are.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any, TextIO
from uuid import UUID

import numpy as np

from wdstrain.errors import SourceError, UsageError
from wdstrain.packing.kinds import NUMBER, WHOLE
from wdstrain.packing.listing import Bad, Quarantine, check_there, image_field

_WRITTEN = (Decimal, Fraction, PurePath, UUID, date, time, timedelta)  # values whose text says all
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True)
class Columns:
    """A table by columns. rows: the line or number of each row in its source, from 1. classes: names of class numbers by
    column, where the table says them itself. spellings: two texts of a CSV that are one fraction, such as 1.1 and 1.10, by
    column. changed: how many numbers of each column became something else, by what they became."""

    name: str
    values: dict[str, list[Any]]
    rows: list[int]
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    spellings: dict[str, tuple[str, str]] = field(default_factory=dict)
    changed: dict[str, Counter[str]] = field(default_factory=dict)


def read_table(table: Any, quarantine: Quarantine, *, header: bool = True) -> Columns:
    """A file by its extension (.csv, .tsv, .jsonl or .ndjson, .parquet), or a pandas DataFrame.

    header False: the first line of a CSV is data, and its columns are named "0", "1", ... Rows that cannot be read go to
    the quarantine. Raises SourceError for a table that is missing, empty or no table.
    """
    if hasattr(table, "columns") and hasattr(table, "to_dict"):
        return _frame(table, "the DataFrame")
    if not isinstance(table, (str, os.PathLike)):
        raise UsageError(
            f"table is {type(table).__name__}: must be the path of a file, or a pandas DataFrame."
        )
    name = os.fspath(table)
    kind = os.path.splitext(name)[1].lower()
    if not header and kind not in (".csv", ".tsv", ".txt"):
        raise UsageError(
            f"{name}: only CSV and TSV files can be without a header. Leave --no-header away."
        )
    if kind in (".jsonl", ".ndjson"):
        columns = _json_lines(name, quarantine)
    elif kind in (".parquet", ".pq"):
        columns = _parquet(name)
    else:
        columns = _csv(name, quarantine, header)
    if not columns.rows:
        raise SourceError(f"{name} has no rows that could be read.")
    return columns


def _csv(name: str, quarantine: Quarantine, has_header: bool) -> Columns:
    before = csv.field_size_limit(
        min(sys.maxsize, 2**31 - 1)
    )  # cells of any size; 131,072 characters by default
    try:
        with open(name, "rb") as opened:
            text = io.StringIO(opened.read().decode("utf-8-sig"), newline="")  # a pipe is read once
        first = text.readline()
        if "\0" in first:
            raise SourceError(
                f"{name} has NUL bytes in line 1, as UTF-16 has. A table must be UTF-8. Save it as UTF-8."
            )
        delimiter = _delimiter(name, first)
        table = _lines(text, delimiter, blanks=True)
        if quoted := _blank_and_quote(table):
            without = _lines(text, delimiter, blanks=False)
            if (
                _blank_and_quote(without) != quoted
            ):  # written with blanks after delimiters, also before quotes
                table = without
    except OSError as error:
        raise SourceError(f"{name} cannot be read: {error.strerror}. Check the path.") from error
    except UnicodeDecodeError as error:
        line = len(error.object[: error.start + 1].splitlines())
        raise SourceError(
            f"{name} is not UTF-8: line {line} has the byte 0x{error.object[error.start]:02x}. A table must be UTF-8. Save it as UTF-8."
        ) from error
    except csv.Error as error:
        raise SourceError(
            f"{name} is no CSV table ({error}). Look for a quote that is not closed."
        ) from error
    finally:
        csv.field_size_limit(before)
    if len(table) < 1 + has_header:
        raise SourceError(
            f"{name} has {len(table)} lines that are not blank; a header and at least one row are needed."
        )
    if has_header:
        header = [cell.strip() for cell in table[0][1]]
        if any(NUMBER.fullmatch(cell) or image_field(cell) for cell in header):
            raise SourceError(
                f"{name}: its first line looks like data ({header[0][:40]!r} ...). Add a line that names the columns, or "
                f"--no-header and name them by number: 0, 1, ..."
            )
        table = table[1:]
    else:
        header = [str(number) for number in range(len(table[0][1]))]
    if len(set(header)) < len(header):
        raise SourceError(
            f"{name} names a column twice: {', '.join(header)}. Give each its own name."
        )
    if all(len(row) != len(header) for _, row in table):
        line, row = table[0]
        raise SourceError(
            f"{name}: no row has as many cells as the header: it has {len(header)} ({', '.join(header)[:80]}), line {line} has "
            f"{len(row)}. Remove lines before the header, and separate all cells by {_named(delimiter)}, the header's too."
        )
    whole = []
    for line, row in table:
        if len(row) == len(header):
            whole.append((line, row))
        else:
            quarantine.put(
                Bad(name, line, "", f"it has {len(row)} cells where {len(header)} are columns")
            )
    values, spellings = {}, {}
    for i, column in enumerate(header):
        cells = [row[i] for _, row in whole]
        values[column] = _typed(cells)
        if two := _two_spellings(cells, values[column]):
            spellings[column] = two
    return Columns(name, values, [line for line, _ in whole], spellings=spellings)


def _lines(opened: TextIO, delimiter: str, *, blanks: bool) -> list[tuple[int, list[str]]]:
    """(number of its last line, cells) of each row. blanks: those that a cell begins with are a part of it."""
    opened.seek(0)
    reader = csv.reader(opened, delimiter=delimiter, skipinitialspace=not blanks, strict=True)
    return [(reader.line_num, row) for row in reader if row]


def _blank_and_quote(table: list[tuple[int, list[str]]]) -> list[str]:
    return [
        cell for _, row in table for cell in row if cell[:1] == " " and cell.lstrip(" ")[:1] == '"'
    ]


def _delimiter(name: str, first: str) -> str:
    """A comma, a tab in .tsv files, or a semicolon where the first line has no comma."""
    if name.lower().endswith(".tsv"):
        return "\t"
    return ";" if ";" in first and "," not in first else ","


def _named(delimiter: str) -> str:
    return {",": "commas", ";": "semicolons", "\t": "tabs"}[delimiter]


def joined_column(name: str, known: Iterable[str]) -> str:
    """What a column name lies in because the table has another delimiter than was read, in words; else nothing."""
    for column in known:
        for delimiter in "\t;|,: ":
            if delimiter in column and name in [part.strip() for part in column.split(delimiter)]:
                return (
                    f" That is a header with {delimiter!r} between its columns. Cells are separated by commas, by semicolons where the "
                    f"header has no comma, or by tabs in a .tsv file. Save the table so."
                )
    return ""


def _typed(cells: list[str]) -> list[Any]:
    """The cells of a column as numbers, else as booleans, else as they are; empty cells are None."""
    texts = [cell.strip() for cell in cells]
    if all(not text or (NUMBER.fullmatch(text) and math.isfinite(float(text))) for text in texts):
        return [
            (int(text) if WHOLE.fullmatch(text) else float(text)) if text else None
            for text in texts
        ]
    if all(not text or text.lower() in _TRUTH for text in texts):
        return [_TRUTH[text.lower()] if text else None for text in texts]
    return [cell if cell.strip() else None for cell in cells]


def _two_spellings(cells: list[str], values: list[Any]) -> tuple[str, str] | None:
    """The first two cells that differ as texts and are the same fraction."""
    first: dict[float, str] = {}
    for cell, value in zip(cells, values, strict=True):
        if isinstance(value, float) and not value.is_integer():
            text = cell.strip()
            if first.setdefault(value, text) != text:
                return first[value], text
    return None


def _json_lines(name: str, quarantine: Quarantine) -> Columns:
    found: list[tuple[int, dict[str, Any]]] = []
    try:
        with open(name, "rb") as opened:
            for line, text in enumerate(opened, 1):
                if not text.strip():
                    continue
                try:
                    row = json.loads(text, object_pairs_hook=_each_once)
                    if not isinstance(row, dict):
                        raise ValueError(f"{type(row).__name__} where an object is expected")
                    found.append((line, row))
                except (ValueError, RecursionError) as error:
                    quarantine.put(Bad(name, line, "", f"it is no JSON object ({error})"))
    except OSError as error:
        raise SourceError(f"{name} cannot be read: {error.strerror}. Check the path.") from error
    header = list(dict.fromkeys(column for _, row in found for column in row))
    return _columns(
        name, {c: [row.get(c) for _, row in found] for c in header}, [line for line, _ in found]
    )


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError where it names an entry twice: only the last would be kept."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it names {twice!r} {count} times")
    return found


def _parquet(name: str) -> Columns:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"{name}: parquet needs pyarrow. Install it: pip install 'wdstrain[tables]'"
        ) from None
    check_there(name)
    try:
        table = pyarrow.parquet.ParquetFile(name).read()
    except (OSError, pyarrow.ArrowException) as error:
        raise SourceError(
            f"{name} is no parquet file that can be read ({str(error).splitlines()[0]})."
        ) from error
    if len(set(table.column_names)) < len(table.column_names):
        raise SourceError(
            f"{name} names a column twice: {', '.join(table.column_names)}. Give each its own name."
        )
    values = {column: table[column].to_pylist() for column in table.column_names}
    return _columns(
        name, values, list(range(1, table.num_rows + 1)), _class_names(table.schema.metadata or {})
    )


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """The class names that a Hugging Face data set keeps in the metadata of its parquet files, by column."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        kinds = {
            name: one.get("feature", one) if isinstance(one, dict) else {}
            for name, one in features.items()
        }
        found = {
            name: one["names"] for name, one in kinds.items() if one.get("_type") == "ClassLabel"
        }
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
    return {
        name: tuple(names)
        for name, names in found.items()
        if isinstance(names, list)
        and all(isinstance(one, str) for one in names)
        and len(set(names)) == len(names)
    }


def _frame(frame: Any, name: str) -> Columns:
    header = [str(column) for column in frame.columns]
    if len(set(header)) < len(header):
        raise SourceError(
            f"{name} names a column twice: {', '.join(header)}. Give each its own name."
        )
    values = {title: frame[column] for title, column in zip(header, frame.columns, strict=True)}
    return _columns(name, values, list(range(1, len(frame) + 1)))


def _columns(
    name: str,
    cells: Mapping[str, Iterable[Any]],
    rows: list[int],
    classes: dict[str, tuple[str, ...]] | None = None,
) -> Columns:
    """The columns of a table that has types, as plain values."""
    changed: dict[str, Counter[str]] = {column: Counter() for column in cells}
    values = {
        column: [_plain(cell, changed[column]) for cell in found] for column, found in cells.items()
    }
    return Columns(name, values, rows, classes or {}, changed=changed)


def _plain(value: Any, changed: Counter[str]) -> Any:
    """A cell as the plain values that JSON knows, or bytes. changed: counts numbers that JSON does not know."""
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return None if np.isnat(value) else str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        changed[
            "NaN became null" if math.isnan(value) else f"{value} became the text '{value}'"
        ] += 1
        return None if math.isnan(value) else str(value)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(one, changed) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one, changed) for name, one in value.items()}
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if (
        isinstance(value, _WRITTEN)
        or hasattr(value, "isoformat")
        or type(value).__module__.startswith("pandas.")
    ):
        return str(value)  # as it is written
    raise UsageError(
        f"a cell of the table is {type(value).__name__}, which would be lost as text. Give text, numbers, bytes, lists or dicts."
    )
