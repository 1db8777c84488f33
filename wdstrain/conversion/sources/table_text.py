"""Tables in CSV, TSV and JSON lines, with the line of each row.

They are read with the standard library. pyarrow's readers take the rows behind an unclosed quote
for one cell, turn texts that look like dates into times, and give no line numbers.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import stat
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TextIO

from wdstrain.conversion.label_values import NUMBER, WHOLE
from wdstrain.conversion.listing import BadSample, BadSamples, image_field
from wdstrain.conversion.sources.table_cells import (
    BATCH_ROWS,
    Batch,
    Changes,
    check_names,
    check_same_columns,
    plain_list,
)
from wdstrain.errors import SourceError
from wdstrain.storage.remote import gopen, is_remote

_TRUTH = {"true": True, "false": False}
_NAMED_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}


class _Bytes:
    """The bytes of text files. Those of pipes and servers are kept, for the second reading."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def open(self, path: str) -> io.BufferedReader | io.BytesIO:
        try:
            if path not in self._kept and is_remote(path):
                with gopen(path) as remote:
                    self._kept[path] = remote.read()
            elif path not in self._kept and not stat.S_ISREG(os.stat(path).st_mode):
                with open(path, "rb") as pipe:
                    self._kept[path] = pipe.read()
            return io.BytesIO(self._kept[path]) if path in self._kept else open(path, "rb")
        except OSError as error:
            raise SourceError(
                f"{path} cannot be read: {error.strerror}. Check the path and its permissions."
            ) from error


class CsvTable:
    """CSV or TSV files with the same columns, in any order."""

    binary: frozenset[str] = frozenset()

    def __init__(
        self, name: str, files: Sequence[str], bad_samples: BadSamples, header: bool
    ) -> None:
        self.name, self._files, self._bytes = name, files, _Bytes()
        self.classes: dict[str, tuple[str, ...]] = {}
        self._readers = [_CsvFile(path, self._bytes, header) for path in files]
        self.columns = self._readers[0].header
        for reader in self._readers[1:]:
            check_same_columns(self.columns, files[0], reader.header, reader.path)
        self._types = {column: _CellType() for column in self.columns}
        self._scan(bad_samples)

    def batches(
        self, columns: Sequence[str], *, raw: Collection[str] = (), changes: Changes | None = None
    ) -> Iterator[Batch]:
        types = {c: _CellType(text=True) if c in raw else self._types[c] for c in columns}
        for reader in self._readers:
            places = {c: reader.header.index(c) for c in columns}
            width = len(reader.header)
            whole = ((line, row) for line, row in reader.rows() if len(row) == width)
            while batch := list(islice(whole, BATCH_ROWS)):
                cells = {
                    c: types[c].values([row[i] for _, row in batch]) for c, i in places.items()
                }
                yield Batch(reader.path, [line for line, _ in batch], cells)

    def _scan(self, bad_samples: BadSamples) -> None:
        """Find the types of all columns, and the rows that have another number of cells."""
        for reader in self._readers:
            width, rows, whole = len(reader.header), reader.rows(), 0
            while batch := list(islice(rows, BATCH_ROWS)):
                good = [row for _, row in batch if len(row) == width]
                for column, cells in zip(reader.header, zip(*good, strict=True), strict=False):
                    self._types[column].see(cells)
                if not whole and not good:
                    raise reader.misfit(*batch[0])
                whole += len(good)
                for line, row in batch:
                    if len(row) != width:
                        reason = f"it has {len(row)} cells, but the table has {width} columns"
                        bad_samples.put(BadSample(reader.path, line, "", reason))


class _CsvFile:
    """One CSV file: its delimiter, its header, and its rows."""

    def __init__(self, path: str, source: _Bytes, has_header: bool) -> None:
        self.path, self._source, self._has_header = path, source, has_header
        with self._open() as file:
            first = file.readline()
        if "\0" in first:
            raise SourceError(
                f"{path} has NUL bytes in line 1, as UTF-16 has. A table must be UTF-8. Save it as "
                f"UTF-8."
            )
        # A comma, a tab in .tsv files, or a semicolon if the first line has no comma.
        self._delimiter = ";" if ";" in first and "," not in first else ","
        if path.lower().endswith(".tsv"):
            self._delimiter = "\t"
        self._skip_blanks = False
        if quoted := self._blanks_and_quotes():  # may have blanks before quotes, as in 1, "a"
            self._skip_blanks = True
            self._skip_blanks = self._blanks_and_quotes() != quoted
        lines = len(list(islice(self._lines(), 2)))
        if lines < 1 + has_header:
            raise SourceError(
                f"{path} has {lines} lines that are not blank: must have a header and at least one "
                f"row. Check the file."
            )
        row = next(self._lines())[1]
        self.header = (
            [cell.strip() for cell in row] if has_header else list(map(str, range(len(row))))
        )
        self._check_header()

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (number of its last line, cells) of each row that is not blank."""
        return islice(self._lines(), 1 if self._has_header else 0, None)

    def misfit(self, line: int, row: list[str]) -> SourceError:
        """Return the error of a file whose rows all have other numbers of cells than its header."""
        return SourceError(
            f"{self.path}: no row has as many cells as the header: it has {len(self.header)} "
            f"({', '.join(self.header)[:80]}), line {line} has {len(row)}. Remove lines before the "
            f"header, and separate all cells by {_NAMED_DELIMITERS[self._delimiter]}, also in the "
            f"header."
        )

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # cells of any size
        try:
            with self._open() as file:
                reader = csv.reader(
                    file,
                    delimiter=self._delimiter,
                    skipinitialspace=self._skip_blanks,
                    strict=True,
                )
                yield from ((reader.line_num, row) for row in reader if row)
        except csv.Error as error:
            raise SourceError(
                f"{self.path} is not a CSV table ({error}). Look for a quote that is not closed."
            ) from error
        except UnicodeDecodeError:
            raise self._not_utf8() from None
        finally:
            csv.field_size_limit(before)

    @contextmanager
    def _open(self) -> Iterator[TextIO]:
        with (
            self._source.open(self.path) as data,
            io.TextIOWrapper(data, encoding="utf-8-sig", newline="") as file,
        ):
            try:
                yield file
            except UnicodeDecodeError:
                raise self._not_utf8() from None

    def _not_utf8(self) -> SourceError:
        with self._source.open(self.path) as data:
            try:
                data.read().decode("utf-8-sig")
            except UnicodeDecodeError as error:
                line = len(error.object[: error.start + 1].splitlines())
                return _not_utf8(self.path, line, error.object[error.start])
        return SourceError(f"{self.path} changed while it was read. Convert it again.")

    def _blanks_and_quotes(self) -> int:
        """Return the number of cells that begin with blanks and a quote."""
        with self._source.open(self.path) as data:
            if not any(b'"' in chunk for chunk in iter(lambda: data.read(1 << 20), b"")):
                return 0
        return sum(
            cell[:1] == " " and cell.lstrip(" ")[:1] == '"'
            for _, row in self._lines()
            for cell in row
        )

    def _check_header(self) -> None:
        odd = [cell for cell in self.header if NUMBER.fullmatch(cell) or image_field(cell)]
        if self._has_header and odd:
            raise SourceError(
                f"{self.path}: its first line looks like data ({self.header[0][:40]!r} ...). Add a "
                f"line that names the columns, or use header=False, which names them 0, 1, ..."
            )
        check_names(self.path, self.header)


class _CellType:
    """The type of a CSV column: numbers, else booleans, else text. Empty cells are None."""

    def __init__(self, *, text: bool = False) -> None:
        self._numbers = self._truths = not text

    def see(self, cells: Iterable[str]) -> None:
        """Take cells of the column into account."""
        if not (self._numbers or self._truths):
            return
        texts = [text for cell in cells if (text := cell.strip())]
        self._numbers = self._numbers and all(
            NUMBER.fullmatch(text) and math.isfinite(float(text)) for text in texts
        )
        self._truths = self._truths and all(text.lower() in _TRUTH for text in texts)

    def values(self, cells: list[str]) -> list[Any]:
        """Return cells as values of the type."""
        if self._numbers:
            return [_number(text) if (text := cell.strip()) else None for cell in cells]
        if self._truths:
            return [_TRUTH.get(cell.strip().lower()) for cell in cells]
        return [cell if cell.strip() else None for cell in cells]


def _number(text: str) -> int | float:
    return int(text) if WHOLE.fullmatch(text) else float(text)


class JsonTable:
    """Files with a JSON object on each line. An object may lack columns."""

    binary: frozenset[str] = frozenset()

    def __init__(self, name: str, files: Sequence[str], bad_samples: BadSamples) -> None:
        self.name, self._files, self._bytes = name, files, _Bytes()
        self.classes: dict[str, tuple[str, ...]] = {}
        columns: dict[str, None] = {}
        for path in files:
            for _, row in self._rows(path, bad_samples):
                columns.update(dict.fromkeys(row))
        if not columns:
            raise SourceError(f"{name} has no rows that can be read. Check the file.")
        self.columns = list(columns)

    def batches(
        self, columns: Sequence[str], *, raw: Collection[str] = (), changes: Changes | None = None
    ) -> Iterator[Batch]:
        for path in self._files:
            # Bad rows were reported when the table was opened.
            rows = self._rows(path, BadSamples(collect=True))
            while batch := list(islice(rows, BATCH_ROWS)):
                cells = {
                    c: plain_list((row.get(c) for _, row in batch), c, changes) for c in columns
                }
                yield Batch(path, [line for line, _ in batch], cells)

    def _rows(self, path: str, bad_samples: BadSamples) -> Iterator[tuple[int, dict[str, Any]]]:
        with self._bytes.open(path) as file:
            for line, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    # Decoded here: `json.loads` would take UTF-16 for some of the lines.
                    decoded = text.decode("utf-8-sig" if line == 1 else "utf-8")
                    row = json.loads(decoded, object_pairs_hook=_each_once)
                    if not isinstance(row, dict):
                        raise ValueError(f"{type(row).__name__} where an object is expected")
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, line, error.object[error.start]) from None
                except (ValueError, RecursionError) as error:
                    bad_samples.put(BadSample(path, line, "", f"it is not a JSON object ({error})"))
                    continue
                yield line, row


def _not_utf8(path: str, line: int, byte: int) -> SourceError:
    return SourceError(
        f"{path} is not UTF-8: line {line} has the byte 0x{byte:02x}. A table must be UTF-8. Save "
        "it as UTF-8."
    )


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if it names an entry twice: only the last is kept."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it names {twice!r} {count} times")
    return row
