"""A table in files of one format: CSV, TSV, JSON lines or Parquet; or in a pandas DataFrame.

A table is one file, or several with the same columns. It is read several times, each time only the
columns that are needed, in batches, so memory does not grow with the images in it. Parquet is read
through pyarrow.dataset; `table_text` says why the other formats are not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from wdstrain.conversion.listing import BadSamples
from wdstrain.conversion.sources.table_cells import (
    BATCH_ROWS,
    Batch,
    Changes,
    Table,
    check_names,
    check_same_columns,
    plain_list,
)
from wdstrain.conversion.sources.table_text import CsvTable, JsonTable
from wdstrain.errors import SourceError, UsageError
from wdstrain.storage.remote import gopen, is_remote, shown_path

_IMAGE_BATCH = 128  # rows of a batch with images


def read_files(
    name: str, files: Sequence[str], bad_samples: BadSamples, *, header: bool = True
) -> Table:
    """Return the table in some files of one format, by the extension of the first.

    header False: the first line of a CSV is data; its columns are named "0", "1", ...
    Raises SourceError for files that cannot be read, that are no table or that do not fit together.
    """
    kind = format_of(files[0])
    if not header and kind != "csv":
        raise UsageError(
            f"{name}: only CSV and TSV files can be without a header. Leave out header=False."
        )
    if kind == "parquet":
        return _ParquetTable(name, files)
    if kind == "json":
        return JsonTable(name, files, bad_samples)
    return CsvTable(name, files, bad_samples, header)


def format_of(path: str) -> str:
    """Return csv, json or parquet, by the extension of a file; csv for others."""
    extension = os.path.splitext(path)[1].lower()
    if extension in (".parquet", ".pq"):
        return "parquet"
    return "json" if extension in (".jsonl", ".ndjson", ".json") else "csv"


# --- Parquet --------------------------------------------------------------------------------------


class _ParquetTable:
    """Parquet files with one schema."""

    def __init__(self, name: str, files: Sequence[str]) -> None:
        self.name, self._files = name, files
        options = ds.ParquetFragmentScanOptions(use_buffered_stream=True, pre_buffer=False)
        self._format = ds.ParquetFileFormat(default_fragment_scan_options=options)
        schemas = [self._schema_of(path) for path in files]
        self._schema = _one_schema(files, schemas)
        self.columns = self._schema.names
        self.classes = _class_names(self._schema.metadata or {})
        for path, schema in zip(files, schemas, strict=True):
            if _class_names(schema.metadata or {}) != self.classes:
                raise SourceError(
                    f"{shown_path(path)} and {shown_path(files[0])} name the classes of their "
                    f"numbers differently. Convert each by itself."
                )
        self.binary = frozenset(
            field.name for field in self._schema if _may_hold_images(field.type)
        )

    def batches(
        self, columns: Sequence[str], *, raw: Collection[str] = (), changes: Changes | None = None
    ) -> Iterator[Batch]:
        count = BATCH_ROWS if self.binary.isdisjoint(columns) else _IMAGE_BATCH
        for path in self._files:
            row = 1
            with self._reading(path):
                for batch in self._fragment(path).to_batches(
                    schema=self._schema,
                    columns=list(columns),
                    batch_size=count,
                    batch_readahead=1,
                    fragment_readahead=1,
                ):
                    numbers = range(row, row + batch.num_rows)
                    row += batch.num_rows
                    cells = {
                        c: plain_list(batch.column(i).to_pylist(), c, changes)
                        for i, c in enumerate(columns)
                    }
                    yield Batch(shown_path(path), numbers, cells)

    def _fragment(self, path: str) -> ds.Fragment:
        if is_remote(path):
            return self._format.make_fragment(gopen(path))
        return self._format.make_fragment(os.path.abspath(path), LocalFileSystem())

    def _schema_of(self, path: str) -> pa.Schema:
        with self._reading(path):
            schema = self._fragment(path).physical_schema
        check_names(shown_path(path), schema.names)
        return schema

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            if not is_remote(path):  # Arrow's errors have no strerror
                os.close(os.open(path, os.O_RDONLY))
            yield
        except pa.ArrowException as error:
            raise SourceError(
                f"{shown_path(path)} cannot be read as Parquet ({str(error).splitlines()[0]}). "
                f"Copy or write it again."
            ) from error
        except OSError as error:
            reason = error.strerror or str(error).splitlines()[0]
            raise SourceError(
                f"{shown_path(path)} cannot be read as Parquet ({reason}). Check the file and its "
                f"permissions."
            ) from error


def _one_schema(files: Sequence[str], schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the schema of all files; a column that is null in a file takes the type of another."""
    made = schemas[0]
    for path, schema in zip(files, schemas, strict=True):
        check_same_columns(made.names, shown_path(files[0]), schema.names, shown_path(path))
        for place, name in enumerate(made.names):
            types = schema.field(name).type, made.field(name).type
            merged = _merged_type(*types)
            if merged is None:
                raise SourceError(
                    f"{shown_path(path)} and {shown_path(files[0])} differ: the column '{name}' is "
                    f"{types[0]} and {types[1]}. Files of one table must have one schema. Convert "
                    f"each by itself, or write them again."
                )
            made = made.set(place, pa.field(name, merged))
    return made


def _merged_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """Return the type of two that are equal but for nulls; None if there is none."""
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    if pa.types.is_list(a) and pa.types.is_list(b):
        inner = _merged_type(a.value_type, b.value_type)
        return None if inner is None else pa.list_(inner)
    if not (pa.types.is_struct(a) and pa.types.is_struct(b)):
        return None
    if {field.name for field in a} != {field.name for field in b}:
        return None
    types = {field.name: _merged_type(field.type, b.field(field.name).type) for field in a}
    return None if None in types.values() else pa.struct(list(types.items()))


def _may_hold_images(kind: pa.DataType) -> bool:
    """Return whether a column is bytes, or Hugging Face's struct of bytes and path."""
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _may_hold_images(field.type) for field in kind)
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Return the class names that Hugging Face writes into the metadata of Parquet, by column."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        kinds = {
            name: kind.get("feature", kind) if isinstance(kind, dict) else {}
            for name, kind in features.items()
        }
        names = {c: kind["names"] for c, kind in kinds.items() if kind.get("_type") == "ClassLabel"}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
    return {
        column: tuple(classes)
        for column, classes in names.items()
        if isinstance(classes, list)
        and all(isinstance(name, str) for name in classes)
        and len(set(classes)) == len(classes)
    }


# --- DataFrames -----------------------------------------------------------------------------------


class FrameTable:
    """A pandas DataFrame."""

    name = "the DataFrame"

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self.columns = [str(column) for column in frame.columns]
        self.classes: dict[str, tuple[str, ...]] = {}
        self.binary: frozenset[str] = frozenset()
        check_names(self.name, self.columns)
        if not len(frame):
            raise SourceError(f"{self.name} has no rows. Check the table.")

    def batches(
        self, columns: Sequence[str], *, raw: Collection[str] = (), changes: Changes | None = None
    ) -> Iterator[Batch]:
        for first in range(0, len(self._frame), BATCH_ROWS):
            rows = self._frame.iloc[first : first + BATCH_ROWS]
            cells = {
                c: plain_list(rows.iloc[:, self.columns.index(c)], c, changes) for c in columns
            }
            yield Batch(self.name, range(first + 1, first + 1 + len(rows)), cells)
