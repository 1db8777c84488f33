"""Rows of arrays: .npy files (memory-mapped), members of .npz files, arrays in memory.

HDF5 data sets are read by the same functions: a block of rows at a time from every array, forward.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.classes import (
    MOST_CLASSES,
    RANGE,
    check_classes,
    class_rule,
    counted_classes,
    stated_classes,
)
from wdstrain.conversion.encode import array_field, encode
from wdstrain.conversion.listing import (
    BadSample,
    Sample,
    Source,
    check_there,
    file_mark,
)
from wdstrain.errors import SampleError, SourceError, UsageError
from wdstrain.shards.kinds import FLAG_CLASSES, ColumnInfo

_BLOCK = 16 << 20  # bytes of rows read at a time, about


# An array that is read by runs of rows: it has a shape, a dtype, and rows by slices.
Rows = Any


def stream_arrays(
    arrays: Mapping[str, Any],
    *,
    labels: Sequence[str] = (),
    classes: Sequence[str] = (),
    quality: int = 95,
) -> Source:
    """Return the rows of arrays of equal length as samples.

    arrays: {name: array, or a .npy file, or FILE.npz:member}. labels: names of scalar arrays to
    learn, also as `name:class` or `name:number`; an array named cls always is a label. Raises
    SourceError for files that are not arrays, UsageError for lengths that differ.
    """
    opened = {name: _open(name, array) for name, array in arrays.items()}
    files = {n: os.fspath(one) for n, one in arrays.items() if isinstance(one, (str, os.PathLike))}
    paths = [_file_of(one)[0] for one in files.values()]
    asked = [list(files.items()), list(labels), list(classes), quality]
    return stream_rows(
        ", ".join(files.values()) or "arrays",
        opened,
        {
            "kind": "arrays",
            "fields": list(arrays),
            "labels": list(labels),
            **stated_classes(classes),
        },
        labels=labels,
        classes=classes,
        quality=quality,
        mark=f"{file_mark(*paths)} {asked}" if len(files) == len(arrays) else None,
    )


def stream_rows(
    title: str,
    arrays: Mapping[str, Rows],
    source: dict[str, Any],
    *,
    labels: Sequence[str],
    classes: Sequence[str],
    quality: int,
    keys: str | None = None,
    mark: str | None = None,
) -> Source:
    """Return the rows of arrays of equal length as samples.

    keys: name of the array of keys. mark: as in `Source`. Arrays of labels are read first.
    """
    count = _row_count(title, arrays)
    if keys is not None:
        _check_keys(title, arrays[keys])
    fields = _field_names(title, {name: rows for name, rows in arrays.items() if name != keys})
    names = check_classes(classes)
    only_cls = names if "cls" in arrays else ()
    scalars = [
        _scalar(title, one, arrays, fields, names if one.startswith("cls") or not only_cls else ())
        for one in _asked_labels(arrays, labels)
    ]
    arrays = {**arrays, **{scalar.name: scalar.values for scalar in scalars}}
    places = {name: place for place, name in enumerate(names)}
    classed = next((scalar for scalar in scalars if scalar.info.kind != "number"), None)

    def sample(block: Mapping[str, Any], row: int, i: int) -> Sample:
        parts = [
            encode(field, _value(block[name][i], field), quality=quality, classes=places)
            for name, field in fields.items()
        ]
        for scalar in scalars:
            if scalar.is_bad[row]:
                raise SampleError(f"its {scalar.name} is {scalar.values[row]}{scalar.rule}")
        key = None if keys is None else _text(block[keys][i])
        stratum = "" if classed is None else classed.stratum(row)
        return Sample(key, parts, stratum=stratum, row=row + 1)

    def entries() -> Iterator[Sample | BadSample]:
        for first, block in blocks(arrays, count):
            for i in range(len(next(iter(block.values())))):
                try:
                    yield sample(block, first + i, i)
                except SampleError as error:
                    yield BadSample(title, first + i + 1, "", str(error))

    return Source(
        title,
        entries,
        lambda: tuple(scalar.info for scalar in scalars),
        source,
        count,
        mark,
        stratum=classed.info.name if classed else "",
    )


def _row_count(title: str, arrays: Mapping[str, Rows]) -> int:
    """Return the number of rows. Raises UsageError if the arrays differ in it."""
    if not arrays:
        raise UsageError('no array was named. Give arrays={"NAME": array}.')
    lengths = {int(array.shape[0]) if array.shape else -1 for array in arrays.values()}
    if -1 in lengths or len(lengths) > 1:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise UsageError(
            f"{title}: all arrays must have one row for each sample, but their shapes are {shapes}."
        )
    return lengths.pop()


def _check_keys(title: str, keys: Rows) -> None:
    """Raise UsageError for an array whose values cannot be keys."""
    if len(keys.shape) != 1 or np.dtype(keys.dtype).kind not in "SUOiu":
        raise UsageError(
            f"{title}: the keys are an array of {keys.dtype} {list(keys.shape)}. They must be one "
            "text or whole number per row."
        )


def _field_names(title: str, arrays: Mapping[str, Rows]) -> dict[str, str]:
    """Return the name of the field of each array."""
    try:
        fields = {name: array_field(name, array) for name, array in arrays.items()}
    except SampleError as error:
        raise UsageError(f"{error}. Choose another name.") from None
    if len(set(fields.values())) < len(fields):
        raise UsageError(
            f"{title}: two fields would have the same name: {', '.join(fields.values())}. Rename "
            "one."
        )
    return fields


def _asked_labels(arrays: Mapping[str, Rows], labels: Sequence[str]) -> list[str]:
    """Return the labels with `cls`, which is one if no other is named or if it counts classes."""
    if "cls" not in arrays:
        return list(labels)
    cls = arrays["cls"]
    counts = len(cls.shape) == 1 and np.dtype(cls.dtype).kind in "biu"
    is_asked = bool({"cls", "cls:class", "cls:number"} & set(labels))
    return [*labels, *(["cls"] if not labels or (counts and not is_asked) else [])]


def row_bytes(array: Rows) -> int:
    """Return the bytes of a row; an estimate from the first rows if rows differ in length."""
    values = max(1, int(np.prod(array.shape[1:], dtype=np.int64)))
    if np.dtype(array.dtype).hasobject:
        some = [
            len(row) if hasattr(row, "__len__") else 8
            for row in np.asarray(array[slice(0, 16)]).ravel()
        ]
        return 64 + values * 2 * (sum(some) // max(1, len(some)))
    return values * max(1, int(np.dtype(array.dtype).itemsize))


def blocks(
    arrays: Mapping[str, Rows], count: int
) -> Iterator[tuple[int, dict[str, npt.NDArray[Any]]]]:
    """Yield (first row, {name: rows}) of each block of rows."""
    size = max(1, _BLOCK // sum(map(row_bytes, arrays.values())))
    step = math.lcm(*(getattr(array, "chunk", 1) for array in arrays.values()))
    size -= size % step if size >= step else 0  # no chunk is decompressed twice
    for first in range(0, count, size):
        rows = slice(first, min(first + size, count))
        yield first, {name: np.asanyarray(array[rows]) for name, array in arrays.items()}


class _Scalar(NamedTuple):
    """A label of an array of one number per row. is_bad: bool[n]. rule: that bad numbers break."""

    name: str
    info: ColumnInfo
    values: npt.NDArray[Any]
    is_bad: npt.NDArray[np.bool_]
    rule: str = ""

    def stratum(self, row: int) -> str:
        number = int(self.values[row])
        return self.info.classes[number] if self.info.kind == "class" else str(number)


def _scalar(
    title: str,
    asked: str,
    arrays: Mapping[str, Rows],
    fields: Mapping[str, str],
    classes: Sequence[str],
) -> _Scalar:
    """Return a label. asked: NAME or NAME:KIND. Raises UsageError for an array that is none."""
    before, _, kind = asked.rpartition(":")
    is_stated = kind in ("class", "number") and before in arrays
    name = before if is_stated else asked
    if name not in fields:
        raise UsageError(f"the label '{name}' is not a field. Use one of: {', '.join(fields)}.")
    array = arrays[name]
    type_ = np.dtype(array.dtype).kind
    if len(array.shape) != 1 or type_ not in "biuf":
        raise UsageError(
            f"the label '{name}' is an array of {array.dtype} {list(array.shape)}. A "
            "label must be one number per row."
        )
    rows = np.asanyarray(array[slice(0, array.shape[0])])
    values, is_masked = np.ma.getdata(rows), np.ma.getmaskarray(rows)  # encoding refuses the mask
    info = ColumnInfo("label" if name == "cls" else name, "class", fields[name])
    is_whole = (values >= 0) & (values == np.floor(values)) & ~is_masked
    if not is_stated and type_ == "f" and is_whole.all() and (values < RANGE).all():
        raise UsageError(
            f"{title}: '{name}' holds whole numbers as floats, which may have been class numbers. "
            f'State the kind: label="{name}:class" or label="{name}:number".'
        )
    if kind == "number" if is_stated else type_ == "f":
        return _Scalar(name, replace(info, kind="number"), rows, ~np.isfinite(values))
    if type_ == "b" and not is_stated and not classes:
        return _Scalar(name, replace(info, kind="flag", classes=FLAG_CLASSES), rows, ~is_whole)
    is_class = is_whole & (values < (len(classes) or MOST_CLASSES))
    rule = f", but a class must be {class_rule(len(classes))}"
    seen = set(map(int, np.unique(values[is_class])))
    known = tuple(classes) or counted_classes(name, seen, stated=is_stated)
    return _Scalar(name, replace(info, classes=known), rows, ~is_class, rule)


def _value(value: Any, field: str) -> Any:
    if isinstance(value, (bytes, np.bytes_)):  # texts of HDF5 and of S arrays
        if field.rpartition(".")[2] == "npy" and not value.startswith(b"\x93NUMPY"):
            raise SampleError(
                f"its {field} is text, but a .npy holds an array; name the field "
                f"{field.removesuffix('.npy')}.txt"
            )
        return bytes(value)
    if (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and value.ndim == 1
        and field.rpartition(".")[2] != "npy"
    ):
        return value.tobytes()  # the bytes of an encoded file
    return value


def _text(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _open(name: str, array: Any) -> Rows:
    if not isinstance(array, (str, os.PathLike)):
        try:
            return np.asanyarray(array)
        except Exception as error:  # the methods of an array may raise anything
            kind = type(array).__name__
            raise UsageError(f"{name}: {kind} cannot be read as an array: {error}.") from None
    path, member = _file_of(array)
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
            f"{name}={os.fspath(array)} cannot be read as an array: {error}. Check the file."
        ) from error
    if member:
        raise UsageError(f"{path} has no member '{member}'. Use one of: {', '.join(members)}")
    raise UsageError(
        f"{path} holds several arrays: {', '.join(members)}. Name one: {name}={path}:{members[0]}"
    )


def _file_of(array: str | os.PathLike[str]) -> tuple[str, str]:
    """Return (file, member) of an address of an array."""
    path, _, member = os.fspath(array).partition(".npz:")
    return path + ".npz" * bool(member), member
