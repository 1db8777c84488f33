"""Rows of arrays: .npy files (memory-mapped), members of .npz files, arrays in memory, HDF5.

A block of rows at a time is read from every array, forward. Data sets of HDF5 and PyTables are read
in whole chunks or through h5py's cache of chunks, so each chunk is decompressed once. hdf5plugin
adds the compressions that h5py lacks, such as PyTables' blosc. A column of a compound data set (a
PyTables table) has a path below it: /events/table/energy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.encode import array_field
from wdstrain.conversion.labels import (
    MOST_CLASSES,
    class_rule,
    counted_classes,
    given_classes,
    stated_classes,
)
from wdstrain.conversion.listing import Source, check_there, reject
from wdstrain.conversion.options import ArraysOptions, Hdf5Options, RowOptions
from wdstrain.conversion.sources.iterable import stream
from wdstrain.errors import SampleError, SourceError, UsageError
from wdstrain.runtime.options import as_list, refuse
from wdstrain.shards.kinds import FLAG_CLASSES, ColumnInfo
from wdstrain.shards.label_kinds import FEW, rule_of

_BLOCK = 16 << 20  # bytes of rows read at a time, about
_CACHE = 64 << 20  # bytes of chunks of one HDF5 data set that h5py keeps
# Attributes of netCDF that change what the stored numbers mean.
_MEANING = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")
_KEYS = "__key__"  # name of the array of keys; no field has it

# An array that is read by runs of rows: it has a shape, a dtype, and rows by slices.
Rows = Any


def stream_arrays(options: ArraysOptions) -> Source:
    """Return the rows of arrays of equal length as samples.

    Raises SourceError for files that are not arrays, UsageError for lengths that differ.
    """
    arrays = {name: _open(name, array) for name, array in options.arrays.items()}
    files = [os.fspath(a) for a in options.arrays.values() if isinstance(a, (str, os.PathLike))]
    about = {"kind": "arrays", "fields": list(arrays), "labels": as_list(options.label)}
    return _stream_rows(", ".join(files) or "arrays", arrays, about, options)


def stream_hdf5(options: Hdf5Options) -> Source:
    """Return the rows of data sets of a file as samples.

    Raises SourceError for a file that is not HDF5, UsageError for a path that is not a data set.
    """
    try:
        import h5py
    except ImportError:
        raise UsageError(
            "HDF5 needs h5py.",
            "Install it: pip install 'wdstrain[hdf5]'",
        ) from None
    with suppress(ImportError):
        import hdf5plugin  # noqa: F401, registers its filters
    file, fields = os.fspath(options.file), options.fields
    check_there(file)
    try:
        opened = h5py.File(file, "r", rdcc_nbytes=_CACHE)
        data_sets = {name: _find(opened, file, path) for name, path in fields.items()}
        keys = _find(opened, file, options.key) if options.key else None
    except (OSError, RuntimeError) as error:  # RuntimeError: for links in a circle
        raise SourceError(
            f"{file} cannot be read as HDF5 ({error}).",
            "Check the file.",
        ) from error
    refuse(
        not fields,
        f"{file}: no data sets were named.",
        f"Give for example {{fields}}. Use one of its data sets: {_known(opened)}",
        fields={"image": "/images"},
    )
    about = {
        "kind": "hdf5",
        "fields": dict(fields),
        "labels": as_list(options.label),
        "key": options.key,
    }
    decided = [
        f"{name}: stored numbers are packed, without {', '.join(one.meaning)}"
        for name, one in data_sets.items()
        if one.meaning
    ]
    about |= {"decided": decided} if decided else {}
    return _stream_rows(file, data_sets, about, options, keys)


def _stream_rows(
    title: str,
    arrays: Mapping[str, Rows],
    about: dict[str, Any],
    options: RowOptions,
    keys: Rows = None,
) -> Source:
    """Return the rows of arrays of equal length as samples. Arrays of labels are read first."""
    stored = dict(arrays) if keys is None else {**arrays, _KEYS: keys}
    count = _row_count(title, stored)
    if keys is not None and (len(keys.shape) != 1 or np.dtype(keys.dtype).kind not in "SUOiu"):
        raise UsageError(
            f"{title}: the keys are an array of {keys.dtype} {list(keys.shape)}. They must be one "
            "text or whole number per row."
        )
    fields = _field_names(title, arrays)
    names = given_classes(options.classes, options.like)
    labels = [
        _label(title, one, arrays, fields, () if "cls" in arrays and one[:3] != "cls" else names)
        for one in _asked_labels(arrays, as_list(options.label))
    ]
    stored |= {label.name: label.rows for label in labels}
    bad = {row: reason for label in reversed(labels) for row, reason in label.bad_rows().items()}
    classed = next((label for label in labels if label.info.is_class), None)

    def values(place: tuple[Mapping[str, Any], int, int]) -> dict[str, Any]:
        block, row, first = place
        if row in bad:
            raise SampleError(bad[row])
        sample = {f: _value(block[name][row - first], f) for name, f in fields.items()}
        if keys is not None:
            key = block[_KEYS][row - first]
            sample[_KEYS] = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
        return sample

    source = stream(
        title,
        {"": _rows(stored, count)},
        values,
        about | stated_classes(names),
        names=names,
        labels=[label.info for label in labels],
        strata=classed.strata() if classed is not None else [""] * count,
        quality=options.pixel_quality,
    )
    return replace(source, total=count, stratum=classed.info.name if classed else "")


def _row_count(title: str, arrays: Mapping[str, Rows]) -> int:
    """Return the number of rows. Raises UsageError if the arrays differ in it."""
    refuse(
        not arrays,
        "no array was named.",
        "Give for example {arrays}.",
        arrays={"image": "images.npy"},
    )
    lengths = {int(array.shape[0]) if array.shape else -1 for array in arrays.values()}
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
    refuse(
        -1 in lengths or len(lengths) > 1,
        f"{title}: all arrays must have one row for each sample, but their shapes are {shapes}.",
    )
    return lengths.pop()


def _field_names(title: str, arrays: Mapping[str, Rows]) -> dict[str, str]:
    """Return the name of the field of each array."""
    try:
        fields = {name: array_field(name, array) for name, array in arrays.items()}
    except SampleError as error:
        raise UsageError(
            f"{error}.",
            "Choose another name.",
        ) from None
    refuse(
        len(set(fields.values())) < len(fields),
        f"{title}: two fields would have the same name: {', '.join(fields.values())}.",
        "Rename one.",
    )
    return fields


def _rows(
    arrays: Mapping[str, Rows], count: int
) -> Iterator[tuple[dict[str, npt.NDArray[Any]], int, int]]:
    """Yield (block of rows by name, row, first row of the block) of each row."""
    size = max(1, _BLOCK // sum(map(_row_bytes, arrays.values())))
    step = math.lcm(*(getattr(array, "chunk", 1) for array in arrays.values()))
    size -= size % step if size >= step else 0  # no chunk is decompressed twice
    for first in range(0, count, size):
        stop = min(first + size, count)
        block = {name: np.asanyarray(array[first:stop]) for name, array in arrays.items()}
        yield from ((block, row, first) for row in range(first, stop))


def _row_bytes(array: Rows) -> int:
    """Return the bytes of a row; an estimate from the first rows if rows differ in length."""
    values = max(1, int(np.prod(array.shape[1:], dtype=np.int64)))
    if not np.dtype(array.dtype).hasobject:
        return values * max(1, int(np.dtype(array.dtype).itemsize))
    some = np.asarray(array[slice(0, 16)]).ravel()
    sizes = [len(row) if hasattr(row, "__len__") else 8 for row in some]
    return 64 + values * 2 * (sum(sizes) // max(1, len(sizes)))


def _value(value: Any, field: str) -> Any:
    """Return a value of a row; texts of HDF5, and encoded files in rows of uint8, as bytes."""
    is_npy = field.endswith(".npy")
    if isinstance(value, bytes):
        if is_npy and not value.startswith(b"\x93NUMPY"):
            raise SampleError(
                f"its {field} is text, but a .npy holds an array; name the field "
                f"{field.removesuffix('.npy')}.txt"
            )
        return bytes(value)
    is_row = isinstance(value, np.ndarray) and value.ndim == 1
    return value.tobytes() if is_row and value.dtype == np.uint8 and not is_npy else value


# --- labels ---------------------------------------------------------------------------------------


def _asked_labels(arrays: Mapping[str, Rows], labels: Sequence[str]) -> list[str]:
    """Return the labels with `cls`, which is one if no other is named or if it counts classes."""
    if "cls" not in arrays or {"cls", "cls:class", "cls:number"} & set(labels):
        return list(labels)
    cls = arrays["cls"]
    counts = len(cls.shape) == 1 and np.dtype(cls.dtype).kind in "biu"
    return [*labels, "cls"] if counts or not labels else list(labels)


class _Label(NamedTuple):
    """A label of an array of one number per row. fits: bool[n]. rule: that other numbers break."""

    name: str
    info: ColumnInfo
    rows: npt.NDArray[Any]
    fits: npt.NDArray[np.bool_]
    rule: str = ""

    def bad_rows(self) -> dict[int, str]:
        """Return why a row cannot be used, by its number. Encoding refuses masked rows."""
        wrong = np.flatnonzero(~self.fits & ~np.ma.getmaskarray(self.rows))
        return {row: f"its {self.name} is {self.rows[row]}{self.rule}" for row in wrong.tolist()}

    def strata(self) -> list[str]:
        """Return the class of each row; that of a flag is its number."""
        names = self.info.classes if self.info.kind == "class" else ("0", "1")
        numbers = np.where(self.fits, np.ma.getdata(self.rows), 0).astype(np.int64)
        return list(np.array([*names, ""], object)[numbers])


def _label(
    title: str,
    asked: str,
    arrays: Mapping[str, Rows],
    fields: Mapping[str, str],
    classes: Sequence[str],
) -> _Label:
    """Return a label. asked: NAME or NAME:KIND. Raises UsageError for an array that is none."""
    before, _, kind = asked.rpartition(":")
    is_stated = kind in ("class", "number") and before in arrays
    name = before if is_stated else asked
    refuse(
        name not in fields,
        f"the label '{name}' is not a field.",
        f"Use one of: {', '.join(fields)}.",
    )
    array = arrays[name]
    type_ = np.dtype(array.dtype).kind
    refuse(
        len(array.shape) != 1 or type_ not in "biuf",
        f"the label '{name}' is an array of {array.dtype} {list(array.shape)}. A "
        "label must be one number per row.",
    )
    rows = np.asanyarray(array[slice(0, array.shape[0])])
    values = np.ma.masked_invalid(rows, copy=False)
    if not is_stated:
        is_class = type_ in "iu" and (name == "cls" or bool(classes))
        kind = "class" if is_class else _kind(title, name, values.compressed())
    info = ColumnInfo("label" if name == "cls" else name, kind, fields[name])
    if kind == "number":
        return _Label(name, info, rows, ~np.ma.getmaskarray(values))
    is_flag = kind == "flag" and not classes
    most = 2 if is_flag else len(classes) or MOST_CLASSES
    fits = np.ma.filled((values >= 0) & (values < most) & (values == np.floor(values)), False)
    if is_flag:
        return _Label(name, replace(info, classes=FLAG_CLASSES), rows, fits)
    seen = set(map(int, np.unique(rows[fits])))
    known = tuple(classes) or counted_classes(name, seen, stated=is_stated)
    info = replace(info, kind="class", classes=known)
    return _Label(name, info, rows, fits, f", but a class must be {class_rule(len(classes))}")


def _kind(title: str, name: str, values: npt.NDArray[Any]) -> str:
    """Return the kind of a label whose user states none: "class", "flag" or "number"."""
    if values.dtype != bool and np.count_nonzero(values % 1) > FEW * len(values):
        return "number"  # most have a fraction; they need not be counted
    counted = np.unique(values, return_counts=True)
    rule = rule_of(title, name, *map(np.ndarray.tolist, counted)) if len(values) else "class"
    return "number" if rule == "quantity" else rule


# --- files ----------------------------------------------------------------------------------------


def _open(name: str, array: Any) -> Rows:
    """Return an array, or the one in a file."""
    if not isinstance(array, (str, os.PathLike)):
        try:
            return np.asanyarray(array)
        except Exception as error:  # the methods of an array may raise anything
            raise UsageError(
                f"{name}: {type(array).__name__} cannot be read as an array: {error}."
            ) from None
    path, _, member = os.fspath(array).partition(".npz:")
    path += ".npz" * bool(member)
    check_there(path, f"{name}={os.fspath(array)}")
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return loaded
        with loaded as archive:
            members = list(archive.files)
            if member in members:
                return np.asarray(archive[member])
    except Exception as error:  # numpy's parsers raise many types for damaged files
        raise SourceError(
            f"{name}={os.fspath(array)} cannot be read as an array: {error}.",
            "Check the file.",
        ) from error
    raise UsageError(
        f"{path} has no member '{member}'.",
        f"Name one of its arrays, such as {name}={path}:{members[0] if members else 'NAME'}: "
        f"{', '.join(members)}",
    )


class _DataSet:
    """A data set, or one column of a compound data set. chunk: rows of one of its chunks."""

    def __init__(self, opened: Any, file: str, column: str | None = None) -> None:
        self._opened, self._file, self._column = opened, file, column
        folder = os.path.dirname(os.path.abspath(file))
        for _, name, *_ in opened.virtual_sources() if opened.is_virtual else ():
            # HDF5 returns fill values for a missing file. A name with % is a series of files: its
            # rows are those of the existing ones.
            reject(
                "%" not in name
                and not any(map(os.path.exists, (name, os.path.join(folder, name)))),
                f"{file}{opened.name} is virtual, and {name} cannot be read (there is no "
                "such file). Its rows would be fill values.",
                f"Put the file beside {file}.",
            )
        self.dtype = opened.dtype if column is None else opened.dtype[column].base
        inner = () if column is None else opened.dtype[column].shape
        self.shape: tuple[int, ...] = (*(opened.shape or ()), *inner)
        self.meaning = [name for name in _MEANING if name in opened.attrs]
        self.chunk = int(opened.chunks[0]) if opened.chunks else 1

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
    node = opened.get(path)
    if hasattr(node, "dtype") and not node.dtype.names:
        return _DataSet(node, file)
    above, _, column = path.rstrip("/").rpartition("/")
    table: Any = opened.get(above) if above else None
    if hasattr(table, "dtype") and column in (table.dtype.names or ()):
        return _DataSet(table, file, column)
    reason = "does not exist" if node is None else "is a group, or a table of several columns"
    raise UsageError(
        f"{file}: {path} {reason}.",
        f"Use one of its data sets: {_known(opened)}",
    )


def _known(opened: Any) -> str:
    """Return the groups and data sets of a file, for messages."""
    names = list[str]()
    opened.visit(names.append)
    return ", ".join(names[:20]) + ", ..." * (len(names) > 20) or "none"
