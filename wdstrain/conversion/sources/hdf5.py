"""Rows of HDF5 and PyTables data sets.

Data sets are read forward, in whole chunks or through h5py's cache of chunks, so each chunk is
decompressed once. hdf5plugin adds the compressions that h5py lacks, such as PyTables' blosc. A
column of a compound data set (a PyTables table) has a path below it: /events/table/energy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from wdstrain.conversion.classes import stated_classes
from wdstrain.conversion.listing import Source, check_there, file_mark
from wdstrain.conversion.sources.arrays import stream_rows
from wdstrain.errors import SourceError, UsageError

# Attributes of netCDF that change what the stored numbers mean.
_MEANING = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")
_CACHE = 64 << 20  # bytes of chunks of one data set that h5py keeps


def stream_hdf5(
    file: str,
    fields: Mapping[str, str],
    *,
    labels: Sequence[str] = (),
    classes: Sequence[str] = (),
    key: str | None = None,
    quality: int = 95,
) -> Source:
    """Return the rows of data sets as samples.

    fields: {name: path in the file}. key: path of a data set with the keys of the samples. Raises
    SourceError for a file that is not HDF5, UsageError for a path that is not a data set.
    """
    try:
        import h5py
    except ImportError:
        raise UsageError("HDF5 needs h5py. Install it: pip install 'wdstrain[hdf5]'") from None
    with suppress(ImportError):
        import hdf5plugin  # noqa: F401, registers its filters
    check_there(file)
    try:
        opened = h5py.File(file, "r", rdcc_nbytes=_CACHE)
    except OSError as error:
        raise SourceError(
            f"{file} cannot be read as HDF5: {str(error).partition('(')[2].rstrip(')') or error}. "
            f"Check the file."
        ) from error
    if "__key__" in fields:
        raise UsageError(
            f"{file}: __key__ cannot be the name of a field. Name the data set of the keys with "
            f'key="/path".'
        )
    wanted = dict(fields) | ({"__key__": key} if key else {})
    if not fields:
        raise UsageError(
            f'{file}: no data sets were named. Give for example fields={{"image": "/images"}}. '
            f"Use one of its data sets: {_known(opened)}"
        )
    data_sets = {name: _find(opened, file, path) for name, path in wanted.items()}
    decided = [
        f"{name}: stored numbers are packed, without {', '.join(one.meaning)}"
        for name, one in data_sets.items()
        if one.meaning
    ]
    source = {
        "kind": "hdf5",
        "fields": dict(fields),
        "labels": list(labels),
        "key": key,
        **stated_classes(classes),
        **({"decided": decided} if decided else {}),
    }
    return stream_rows(
        file,
        data_sets,
        source,
        labels=labels,
        classes=classes,
        quality=quality,
        keys="__key__" if key else None,
        mark=f"{file_mark(file)} {[list(wanted.items()), list(labels), list(classes), quality]}",
    )


class _DataSet:
    """A data set, or one column of a compound data set. chunk: rows of one of its chunks."""

    def __init__(self, opened: Any, file: str, column: str | None = None) -> None:
        self._opened, self._file, self._column = opened, file, column
        if opened.shape is None:
            raise UsageError(
                f"{file}{opened.name} holds nothing (its data space is null). Name a data set with "
                f"rows."
            )
        folder = os.path.dirname(os.path.abspath(file))
        for _, name, *_ in opened.virtual_sources() if opened.is_virtual else ():
            # HDF5 returns fill values for a missing file. A name with % is a series of files: its
            # rows are those of the existing ones.
            if "%" not in name and not any(map(os.path.exists, (name, os.path.join(folder, name)))):
                raise SourceError(
                    f"{file}{opened.name} is virtual, and {name} cannot be read (there is no such "
                    f"file). Its rows would be fill values. Put the file beside {file}."
                )
        self.dtype = opened.dtype if column is None else opened.dtype[column].base
        inner = () if column is None else opened.dtype[column].shape
        self.shape: tuple[int, ...] = (*opened.shape, *inner)
        self.chunk = int(opened.chunks[0]) if opened.chunks else 1
        self.meaning = [name for name in _MEANING if name in opened.attrs]

    def __getitem__(self, rows: slice) -> Any:
        try:
            block = self._opened[rows]
        except OSError as error:
            raise SourceError(
                f"{self._file}{self._opened.name} cannot be read at rows {rows.start} to "
                f"{rows.stop}: {error}. If its compression is unknown, install: "
                f"pip install 'wdstrain[hdf5]'"
            ) from error
        return block if self._column is None else block[self._column]


def _find(opened: Any, file: str, path: str) -> _DataSet:
    try:
        node = opened.get(path)
    except (OSError, RuntimeError) as error:
        raise SourceError(
            f"{file}: {path} cannot be opened ({error}). Check the links in the file."
        ) from error
    if hasattr(node, "dtype"):
        if node.dtype.names:
            raise UsageError(
                f"{file}{path} is a table. Name one of its columns: "
                f"{', '.join(f'{path}/{c}' for c in node.dtype.names)}"
            )
        return _DataSet(node, file)
    above, _, column = path.rstrip("/").rpartition("/")
    table: Any = opened.get(above) if above else None
    if hasattr(table, "dtype") and column in (table.dtype.names or ()):
        return _DataSet(table, file, column)
    reason = "is a group" if node is not None else "does not exist"
    raise UsageError(f"{file}: {path} {reason}. Use one of its data sets: {_known(opened)}")


def _known(opened: Any) -> str:
    lines = []

    def visit(name: str, node: Any) -> None:
        if hasattr(node, "dtype"):
            columns = node.dtype.names
            kind = f"table of {', '.join(columns)}" if columns else node.dtype
            lines.append(f"/{name} {list(node.shape)} {kind}")

    opened.visititems(visit)
    return "; ".join(lines[:20]) + ("; ..." if len(lines) > 20 else "") or "none"
