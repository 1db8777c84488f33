"""Rows of arrays: .npy files (memory-mapped), members of .npz files, arrays in memory.

HDF5 data sets are read by the same functions: a block of rows at a time from every array, forward.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.classes import Numbered, check_classes, stated_classes
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


class Rows(Protocol):
    """An array that is read by runs of rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, rows: slice) -> Any: ...


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
    files = {
        name: os.fspath(one) for name, one in arrays.items() if isinstance(one, (str, os.PathLike))
    }
    paths = [
        f"{path.partition('.npz:')[0]}.npz" if ".npz:" in path else path for path in files.values()
    ]
    asked = [list(files.items()), list(labels), list(classes), quality]
    source = {
        "kind": "arrays",
        "fields": list(arrays),
        "labels": list(labels),
        **stated_classes(check_classes(classes)),
    }
    return stream_rows(
        ", ".join(files.values()) or "arrays",
        opened,
        source,
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

    keys: name of the array of keys. mark: as in `Source`.
    """
    count = _row_count(title, arrays)
    if keys is not None:
        _check_keys(title, arrays[keys])
    fields = _field_names(title, {name: rows for name, rows in arrays.items() if name != keys})
    names = check_classes(classes)
    scalars = [
        _Scalar(
            name, arrays, fields, names if "cls" not in arrays or name.startswith("cls") else ()
        )
        for name in _asked_labels(arrays, labels)
    ]
    places = {name: place for place, name in enumerate(names)}
    classed = next((scalar for scalar in scalars if scalar.kind == "class"), None)

    def entries() -> Iterator[Sample | BadSample]:
        for first, block in blocks(arrays, count):
            for i in range(len(next(iter(block.values())))):
                try:
                    parts = [
                        encode(
                            field, _value(block[name][i], field), quality=quality, classes=places
                        )
                        for name, field in fields.items()
                    ]
                    for scalar in scalars:
                        scalar.see(block[scalar.name][i])
                except SampleError as error:
                    yield BadSample(title, first + i + 1, "", str(error))
                    continue
                key = None if keys is None else _text(block[keys][i])
                stratum = classed.stratum(block[classed.name][i]) if classed else ""
                yield Sample(key, parts, stratum=stratum, row=first + i + 1)

    return Source(
        title,
        entries,
        lambda: tuple(scalar.label() for scalar in scalars),
        source,
        count,
        mark,
        stratum=classed.title if classed else "",
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
        fields = {
            name: array_field(name, array)  # type: ignore[arg-type]
            for name, array in arrays.items()
        }
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


class _Scalar:
    """A scalar array that is a label: it checks each value and collects the classes.

    name: of the array. title: of the label.
    """

    def __init__(
        self,
        asked: str,
        arrays: Mapping[str, Rows],
        fields: Mapping[str, str],
        classes: Sequence[str],
    ) -> None:
        before, _, kind = asked.rpartition(":")
        is_stated = kind in ("class", "number") and before in arrays
        self.name = before if is_stated else asked
        if self.name not in fields:
            raise UsageError(
                f"the label '{self.name}' is not a field. Use one of: {', '.join(fields)}."
            )
        array = arrays[self.name]
        type_ = np.dtype(array.dtype)
        if len(array.shape) != 1 or type_.kind not in "biuf":
            raise UsageError(
                f"the label '{self.name}' is an array of {array.dtype} {list(array.shape)}. A "
                "label must be one number per row."
            )
        self.title, self._field = "label" if self.name == "cls" else self.name, fields[self.name]
        self.kind = kind if is_stated else "number" if type_.kind == "f" else "class"
        self._is_flag = not (is_stated or classes) and type_.kind == "b"
        self._classes, self._numbers = tuple(classes), Numbered(self.name, stated=is_stated)

    def see(self, value: Any) -> None:
        if self.kind == "number":
            if not np.isfinite(value):
                raise SampleError(f"its {self.name} is {value}")
            return
        number = int(value)
        if number < 0 or number != value:
            raise SampleError(
                f"its {self.name} is {value}, but a class must be a whole number >= 0"
            )
        if self._classes and number >= len(self._classes):
            raise SampleError(
                f"its {self.name} is {number}, but there are {len(self._classes)} classes"
            )
        if not self._classes:
            self._numbers.see(number)

    def stratum(self, value: Any) -> str:
        return self._classes[int(value)] if self._classes else str(int(value))

    def label(self) -> ColumnInfo:
        if self.kind == "number":
            return ColumnInfo(self.title, "number", self._field)
        classes = FLAG_CLASSES if self._is_flag else self._classes or self._numbers.classes()
        kind = "flag" if self._is_flag else "class"
        return ColumnInfo(self.title, kind, self._field, classes=classes)


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
            is_masked = isinstance(array, np.ma.MaskedArray)
            return np.asanyarray(array) if is_masked else np.asarray(array)
        except Exception as error:  # the methods of an array may raise anything
            kind = type(array).__name__
            raise UsageError(f"{name}: {kind} cannot be read as an array: {error}.") from None
    path, _, member = os.fspath(array).partition(".npz:")
    check_there(f"{path}.npz" if member else path, f"{name}={os.fspath(array)}")
    try:
        loaded = np.load(
            f"{path}.npz" if member else path,
            mmap_mode=None if member or path.endswith(".npz") else "r",
            allow_pickle=False,
        )
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return loaded  # type: ignore[no-any-return]
        with loaded as archive:
            members = list(archive.files)
            if member in members:
                return np.asarray(archive[member])
    except Exception as error:  # numpy's parsers raise many types for damaged files
        raise SourceError(
            f"{name}={os.fspath(array)} cannot be read as an array: {error}. Check the file."
        ) from error
    if member:
        raise UsageError(f"{path}.npz has no member '{member}'. Use one of: {', '.join(members)}")
    raise UsageError(
        f"{path} holds several arrays: {', '.join(members)}. Name one: {name}={path}:{members[0]}"
    )
