"""Tables of predictions, row by row, as CSV or Parquet. The file appears when it is complete."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from wdstrain.storage.files import put_whole

_CHUNK_ROWS = 4096  # rows of a row group of Parquet


class TableWriter(Protocol):
    """Writer of one table. Cells are texts, or lists of numbers."""

    def write(self, row: Sequence[Any]) -> None: ...


class _CsvTable:
    def __init__(self, text: io.TextIOBase) -> None:
        self._writer = csv.writer(text, lineterminator="\n")

    def write(self, row: Sequence[Any]) -> None:
        cells = [
            "[" + ", ".join(f"{value:.9g}" for value in cell) + "]"
            if isinstance(cell, list)
            else cell
            for cell in row
        ]
        self._writer.writerow(cells)


@contextmanager
def _csv_table(path: str, names: Sequence[str], numbers: Collection[str]) -> Iterator[TableWriter]:
    with put_whole(path) as file:
        text = io.TextIOWrapper(
            file, "utf-8", errors="surrogateescape", newline="", write_through=True
        )
        table = _CsvTable(text)
        table.write(names)
        yield table
        text.detach()


class _ParquetTable:
    """Rows of texts and numbers, and of lists of float32 in the column "embedding".

    A missing number, and the error of a row without one, are null.
    """

    def __init__(self, file: Any, names: Sequence[str], numbers: Collection[str]) -> None:
        self._is_number = [name in numbers for name in names]
        kinds = [pa.float64() if is_number else pa.string() for is_number in self._is_number]
        if "embedding" in names:
            kinds[names.index("embedding")] = pa.list_(pa.float32())
        self._is_null = [n in numbers or n == "error" for n in names]  # where it is empty
        self._schema = pa.schema(list(zip(names, kinds, strict=True)))
        self._writer = pq.ParquetWriter(file, self._schema)
        self._rows: list[Sequence[Any]] = []

    def write(self, row: Sequence[Any]) -> None:
        cells = zip(row, self._is_number, self._is_null, strict=True)
        self._rows.append([_parquet_cell(*cell) for cell in cells])
        if len(self._rows) == _CHUNK_ROWS:
            self.flush()

    def flush(self) -> None:
        columns = list(zip(*self._rows, strict=True)) or [()] * len(self._schema)
        arrays = [
            pa.array(values, kind) for values, kind in zip(columns, self._schema.types, strict=True)
        ]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        self.flush()
        self._writer.close()


def _parquet_cell(cell: Any, is_number: bool, is_null: bool) -> Any:
    """Return a cell as Parquet takes it. is_null: an empty one is None."""
    if not isinstance(cell, str):
        return cell
    if not cell and is_null:
        return None
    return float(cell) if is_number else cell.encode("utf-8", "replace").decode()


@contextmanager
def _parquet_table(
    path: str, names: Sequence[str], numbers: Collection[str]
) -> Iterator[TableWriter]:
    with put_whole(path) as file:
        table = _ParquetTable(file, names, numbers)
        yield table
        table.close()


# by the ending of the file: (path, names of the columns, those with numbers) -> writer
_Table = Callable[[str, Sequence[str], Collection[str]], AbstractContextManager[TableWriter]]
TABLES: dict[str, _Table] = {
    ".csv": _csv_table,
    ".parquet": _parquet_table,
}
