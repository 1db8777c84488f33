"""Tables of predictions, row by row, as CSV or Parquet. The file appears when it is complete."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from wdstrain.storage.files import put_whole

TABLES = (".csv", ".parquet")
_GROUP_ROWS = 4096  # rows of a row group of Parquet

Write = Callable[[Sequence[Any]], None]  # of a row: cells are texts, or lists of numbers


@contextmanager
def prediction_table(path: str, names: Sequence[str], numbers: Collection[str]) -> Iterator[Write]:
    """Yield a function that writes a row. numbers: columns of numbers, which Parquet has as such."""
    kind = _csv_rows if path.lower().endswith(".csv") else _parquet_rows
    with put_whole(path) as file, kind(file, names, numbers) as write:
        yield write


@contextmanager
def _csv_rows(file: Any, names: Sequence[str], numbers: Collection[str]) -> Iterator[Write]:
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    yield lambda row: writer.writerow(map(_csv_cell, row))
    text.detach()


def _csv_cell(cell: Any) -> str:
    is_list = isinstance(cell, list)
    return f"[{', '.join(f'{value:.9g}' for value in cell)}]" if is_list else cell


@contextmanager
def _parquet_rows(file: Any, names: Sequence[str], numbers: Collection[str]) -> Iterator[Write]:
    """A missing number, and the error of a row without one, are null."""
    kinds = {name: pa.float64() if name in numbers else pa.string() for name in names}
    if "embedding" in kinds:
        kinds["embedding"] = pa.list_(pa.float32())
    schema, rows = pa.schema(list(kinds.items())), list[Sequence[Any]]()

    def flush() -> None:
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        cells = [_parquet_column(*column) for column in zip(columns, schema, strict=True)]
        writer.write_table(pa.Table.from_arrays(cells, schema=schema))
        rows.clear()

    def write(row: Sequence[Any]) -> None:
        rows.append(row)
        if len(rows) == _GROUP_ROWS:
            flush()

    with pq.ParquetWriter(file, schema) as writer:
        yield write
        flush()


def _parquet_column(cells: Sequence[Any], field: pa.Field) -> pa.Array:
    if field.type == pa.float64():
        return pa.array([float(cell) if cell else None for cell in cells], field.type)
    if field.type == pa.string():
        empty = None if field.name == "error" else ""
        texts = (cell.encode("utf-8", "replace").decode() or empty for cell in cells)
        return pa.array(list(texts), field.type)
    return pa.array(cells, field.type)
