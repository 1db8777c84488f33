"""Tables of predictions, row by row, as CSV or Parquet. The file appears when it is complete."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
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
def _csv_table(path: str, names: Sequence[str]) -> Iterator[TableWriter]:
    with put_whole(path) as file:
        text = io.TextIOWrapper(
            file, "utf-8", errors="surrogateescape", newline="", write_through=True
        )
        table = _CsvTable(text)
        table.write(names)
        yield table
        text.detach()


class _ParquetTable:
    """Rows of texts, and of lists of float32 in the column "embedding"."""

    def __init__(self, file: Any, names: Sequence[str]) -> None:
        kinds = [pa.list_(pa.float32()) if name == "embedding" else pa.string() for name in names]
        self._schema = pa.schema(list(zip(names, kinds, strict=True)))
        self._writer = pq.ParquetWriter(file, self._schema)
        self._rows: list[Sequence[Any]] = []

    def write(self, row: Sequence[Any]) -> None:
        self._rows.append(
            [
                cell.encode("utf-8", "replace").decode() if isinstance(cell, str) else cell
                for cell in row
            ]
        )
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


@contextmanager
def _parquet_table(path: str, names: Sequence[str]) -> Iterator[TableWriter]:
    with put_whole(path) as file:
        table = _ParquetTable(file, names)
        yield table
        table.close()


# by the ending of the file: (path, names of the columns) -> writer
TABLES: dict[str, Callable[[str, Sequence[str]], AbstractContextManager[TableWriter]]] = {
    ".csv": _csv_table,
    ".parquet": _parquet_table,
}
