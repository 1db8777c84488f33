"""HDF5 and PyTables files to a stream: data sets of one length, read forward in runs of whole chunks.

A chunk is decompressed once. What h5py cannot decompress by itself (PyTables' blosc and others) it learns from hdf5plugin.
A column of a compound data set (a PyTables table) is named below it: /events/table/energy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from wdstrain.conversion.classes import check_classes, stated_classes
from wdstrain.conversion.listing import Stream, check_there, file_mark
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
) -> Stream:
    """Rows of data sets. fields: {name: path in the file}; key: the path of a data set that names the samples.

    Raises SourceError for a file that is no HDF5 file, UsageError for paths that lead to no data set, naming those there are.
    """
    h5py = _h5py()
    check_there(file)
    try:
        opened = h5py.File(file, "r")
    except OSError as error:
        raise SourceError(
            f"{file} is no HDF5 file that can be read ({str(error).partition('(')[2].rstrip(')') or error})."
        ) from error
    if "__key__" in fields:
        raise UsageError(
            f'{file}: __key__ cannot be the name of a field. Name the data set that holds the keys with key="/path".'
        )
    wanted = dict(fields) | ({"__key__": key} if key else {})
    if not fields:
        raise UsageError(
            f'{file}: no data sets were named. Give for example fields={{"image": "/images"}}. There are: {_known(opened)}'
        )
    found = {name: _find(opened, file, path) for name, path in wanted.items()}
    source = {
        "kind": "hdf5",
        "fields": dict(fields),
        "labels": list(labels),
        "key": key,
        **stated_classes(check_classes(classes)),
    }
    stream = stream_rows(
        file,
        found,
        source,
        labels=labels,
        classes=classes,
        quality=quality,
        keys="__key__" if key else None,
    )
    files = sorted({place for one in found.values() for place in one.files} - {file})
    return replace(
        stream,
        mark=f"{file_mark(file, *files)} {list(wanted.items())} {list(labels)} {list(classes)} {quality}",
    )


class _DataSet:
    """A data set, or one column of a compound one, read in whole chunks: each is decompressed once, however rows are asked."""

    def __init__(self, opened: Any, file: str, column: str | None) -> None:
        self._opened, self._file, self._column = opened, file, column
        self.files = _files(opened, file)
        if opened.shape is None:
            raise UsageError(
                f"{file}{opened.name} holds nothing (its data space is null). Name a data set of rows."
            )
        self.dtype = opened.dtype if column is None else opened.dtype[column].base
        inner = () if column is None else opened.dtype[column].shape
        self.shape: tuple[int, ...] = (*opened.shape, *inner)
        self.chunk = int(opened.chunks[0]) if opened.chunks else 1
        self._first, self._held = 0, np.zeros(0)

    def __getitem__(self, rows: slice) -> Any:
        if not self._first <= rows.start or rows.stop > self._first + len(self._held):
            # what is held of the last chunk goes on; the rest is read in whole chunks
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
                f"{self._file}{self._opened.name} cannot be read at rows {rows.start} to {rows.stop}: {error}. If its "
                f"compression is not known, install: pip install 'wdstrain[hdf5]'"
            ) from error
        return block if self._column is None else block[self._column]


def _find(opened: Any, file: str, path: str) -> _DataSet:
    h5py = _h5py()
    try:
        node = opened.get(path)
    except (OSError, RuntimeError) as error:
        raise SourceError(
            f"{file}: {path} cannot be opened ({error}). Look at the links in the file."
        ) from error
    if isinstance(node, h5py.Dataset):
        if node.dtype.names:
            raise UsageError(
                f"{file}{path} is a table; name one of its columns: {', '.join(f'{path}/{c}' for c in node.dtype.names)}"
            )
        return _DataSet(node, file, None)
    above, _, column = path.rstrip("/").rpartition("/")
    table = opened.get(above) if above else None
    if isinstance(table, h5py.Dataset) and column in (table.dtype.names or ()):
        return _DataSet(table, file, column)
    what = "is a group" if node is not None else "is not there"
    raise UsageError(f"{file}: {path} {what}. Data sets in it: {_known(opened)}")


def _files(node: Any, file: str) -> list[str]:
    """The files that the values of a data set lie in.

    Raises SourceError if one that a virtual data set is made of is gone: HDF5 would give fill values in its place.
    """
    h5py, found = _h5py(), [file, node.file.filename]
    folder = os.path.dirname(os.path.abspath(node.file.filename))
    found += [os.path.join(folder, os.fsdecode(name)) for name, _, _ in node.external or ()]
    for name, path in sorted(
        {(one.file_name, one.dset_name) for one in node.virtual_sources()}
        if node.is_virtual
        else ()
    ):
        if "%" in f"{name}{path}":  # a series of files: as many rows as there are files
            continue
        # where HDF5 looks for it, in its order
        prefix = os.environ.get("HDF5_VDS_PREFIX", "").replace("${ORIGIN}", folder)
        places = [name] if os.path.isabs(name) else []
        base = os.path.basename(name) if os.path.isabs(name) else name
        places += [os.path.join(one, base) for one in (prefix, folder, "") if one or not prefix]
        place = node.file.filename if name == "." else next(filter(os.path.isfile, places), None)
        try:
            if place is None:
                raise OSError("there is no such file")
            with h5py.File(place, "r") as source:
                inner = source.get(path)
                if not isinstance(inner, h5py.Dataset):
                    raise OSError(f"it holds no data set {path}")
                found += _files(inner, place)
        except OSError as error:
            raise SourceError(
                f"{file}{node.name} is made of data sets in other files, and {name} cannot be read ({error}). Its rows would be "
                f"fill values. Put that file where it belongs."
            ) from error
    return [name for name in dict.fromkeys(found) if os.path.isfile(name)]


def _known(opened: Any) -> str:
    h5py, found = _h5py(), []

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            found.append(
                f"/{name} {list(node.shape)} {node.dtype if not node.dtype.names else 'table of ' + ', '.join(node.dtype.names)}"
            )

    opened.visititems(visit)
    return "; ".join(found[:20]) + ("; ..." if len(found) > 20 else "") or "none"


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise UsageError("HDF5 needs h5py. Install it: pip install 'wdstrain[hdf5]'") from None
    with suppress(ImportError):
        import hdf5plugin  # noqa: F401, registers its filters
    return h5py
