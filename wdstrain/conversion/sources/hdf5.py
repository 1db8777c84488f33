"""Rows of HDF5 and PyTables data sets.

Data sets are read forward in whole chunks, so each chunk is decompressed once. hdf5plugin adds the
compressions that h5py lacks, such as PyTables' blosc. A column of a compound data set (a PyTables
table) has a path below it: /events/table/energy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from wdstrain.conversion.classes import check_classes, stated_classes
from wdstrain.conversion.listing import Source, check_there, file_mark
from wdstrain.conversion.sources.arrays import stream_rows
from wdstrain.errors import SourceError, UsageError


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
    h5py = _h5py()
    check_there(file)
    try:
        opened = h5py.File(file, "r")
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
    source = {
        "kind": "hdf5",
        "fields": dict(fields),
        "labels": list(labels),
        "key": key,
        **stated_classes(check_classes(classes)),
    }
    stream = stream_rows(
        file,
        data_sets,
        source,
        labels=labels,
        classes=classes,
        quality=quality,
        keys="__key__" if key else None,
    )
    files = sorted({place for rows in data_sets.values() for place in rows.files} - {file})
    return replace(
        stream,
        mark=f"{file_mark(file, *files)} {list(wanted.items())} {list(labels)} {list(classes)} "
        f"{quality}",
    )


class _DataSet:
    """A data set, or one column of a compound data set, read in whole chunks.

    files: the files that hold its values.
    """

    def __init__(self, opened: Any, file: str, column: str | None) -> None:
        self._opened, self._file, self._column = opened, file, column
        self.files = _files(opened, file)
        if opened.shape is None:
            raise UsageError(
                f"{file}{opened.name} holds nothing (its data space is null). Name a data set with "
                f"rows."
            )
        self.dtype = opened.dtype if column is None else opened.dtype[column].base
        inner = () if column is None else opened.dtype[column].shape
        self.shape: tuple[int, ...] = (*opened.shape, *inner)
        self.chunk = int(opened.chunks[0]) if opened.chunks else 1
        self._first, self._held = 0, np.zeros(0)

    def __getitem__(self, rows: slice) -> Any:
        if not self._first <= rows.start or rows.stop > self._first + len(self._held):
            # Rows of the last chunk are kept, so that no chunk is decompressed twice.
            first = rows.start // self.chunk * self.chunk
            stop = -(-rows.stop // self.chunk) * self.chunk
            kept = (
                self._held[max(0, first - self._first) :]
                if first >= self._first
                else self._held[:0]
            )
            begun = first + len(kept)
            new = self._read(slice(begun, min(stop, self.shape[0])))
            self._first, self._held = first, np.concatenate([kept, new]) if len(kept) else new
        return self._held[rows.start - self._first : rows.stop - self._first]

    def _read(self, rows: slice) -> Any:
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
    h5py = _h5py()
    try:
        node = opened.get(path)
    except (OSError, RuntimeError) as error:
        raise SourceError(
            f"{file}: {path} cannot be opened ({error}). Check the links in the file."
        ) from error
    if isinstance(node, h5py.Dataset):
        if node.dtype.names:
            raise UsageError(
                f"{file}{path} is a table. Name one of its columns: "
                f"{', '.join(f'{path}/{c}' for c in node.dtype.names)}"
            )
        return _DataSet(node, file, None)
    above, _, column = path.rstrip("/").rpartition("/")
    table = opened.get(above) if above else None
    if isinstance(table, h5py.Dataset) and column in (table.dtype.names or ()):
        return _DataSet(table, file, column)
    reason = "is a group" if node is not None else "does not exist"
    raise UsageError(f"{file}: {path} {reason}. Use one of its data sets: {_known(opened)}")


def _files(node: Any, file: str) -> list[str]:
    """Return the files that hold the values of a data set.

    Raises SourceError if a file of a virtual data set is missing: HDF5 would return fill values.
    """
    h5py, files = _h5py(), [file, node.file.filename]
    folder = os.path.dirname(os.path.abspath(node.file.filename))
    files += [os.path.join(folder, os.fsdecode(name)) for name, _, _ in node.external or ()]
    parts = node.virtual_sources() if node.is_virtual else ()
    for name, path in sorted({(part.file_name, part.dset_name) for part in parts}):
        if "%" in f"{name}{path}":  # a series of files: its rows are those of the existing files
            continue
        # The places where HDF5 looks for the file, in its order.
        prefix = os.environ.get("HDF5_VDS_PREFIX", "").replace("${ORIGIN}", folder)
        places = [name] if os.path.isabs(name) else []
        base = os.path.basename(name) if os.path.isabs(name) else name
        places += [os.path.join(at, base) for at in (prefix, folder, "") if at or not prefix]
        place = node.file.filename if name == "." else next(filter(os.path.isfile, places), None)
        try:
            if place is None:
                raise OSError("there is no such file")
            with h5py.File(place, "r") as source:
                inner = source.get(path)
                if not isinstance(inner, h5py.Dataset):
                    raise OSError(f"it holds no data set {path}")
                files += _files(inner, place)
        except OSError as error:
            raise SourceError(
                f"{file}{node.name} is made of data sets in other files, and {name} cannot be read "
                f"({error}). Its rows would be fill values. Put that file where it belongs."
            ) from error
    return [name for name in dict.fromkeys(files) if os.path.isfile(name)]


def _known(opened: Any) -> str:
    h5py, lines = _h5py(), []

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            columns = node.dtype.names
            kind = f"table of {', '.join(columns)}" if columns else node.dtype
            lines.append(f"/{name} {list(node.shape)} {kind}")

    opened.visititems(visit)
    return "; ".join(lines[:20]) + ("; ..." if len(lines) > 20 else "") or "none"


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise UsageError("HDF5 needs h5py. Install it: pip install 'wdstrain[hdf5]'") from None
    with suppress(ImportError):
        import hdf5plugin  # noqa: F401, registers its filters
    return h5py
