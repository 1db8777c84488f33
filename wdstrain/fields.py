"""What becomes of a sample's fields: the parts of an example.

A field is a small picklable object (the `Field` protocol below; write your own the same way). It names the tar fields it
reads, the first that a sample has wins, and turns its bytes into a value. A field whose values all have one shape says so
in `example`; its values are then written straight into batch memory that is reused, and the batch holds a tensor. Others
return their value, and the batch holds a list, or a tensor where all values are arrays of one shape.
"""

from __future__ import annotations

import io
import json as json_module
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wdstrain import pictures
from wdstrain.augment import Augment, Draws, region
from wdstrain.decode import decode_image
from wdstrain.errors import SampleError, UsageError
from wdstrain.fitting import fit
from wdstrain.formats import EXTENSIONS
from wdstrain.indexing import Label as IndexLabel
from wdstrain.pictures import Members

Array = npt.NDArray[Any]

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Example:
    """Shape and dtype of one value. `channels_last`: laid down as [h, w, c], seen in the batch as [c, h, w]."""

    shape: tuple[int, ...]
    dtype: str
    channels_last: bool = False


class Field(Protocol):
    """A part of an example.

    names: tar fields to look for, in order of preference. example: what `read` writes into `out`, or None if values differ
    in shape; then `out` is None and `read` returns the value. draws: float64[27] in [0, 1), this sample's own random
    numbers in this epoch. Raise any exception for data that cannot be used; its text becomes the reason.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def example(self) -> Example | None: ...
    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Any: ...


@dataclass(frozen=True)
class Image:
    names: tuple[str, ...]
    size: tuple[int, int] | None
    augment: Augment

    @property
    def example(self) -> Example | None:
        return Example((*self.size, 3), "uint8", channels_last=True) if self.size else None

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Any:
        size = self.size
        if out is None or size is None:
            pixels = decode_image(data)
            pixels = pixels[:, ::-1] if self.augment.flip and draws[22] < 0.5 else pixels
            if self.augment.policy:
                pixels = np.ascontiguousarray(pixels)
                self.augment.change(pixels, draws)
            return np.ascontiguousarray(pixels.transpose(2, 0, 1))
        mirrored = self.augment.flip and draws[22] < 0.5
        into = np.empty(out.shape, np.uint8) if mirrored else out
        part = decode_image(data, lambda h, w: region(h, w, size, self.augment, draws), into, blue_first=bool(mirrored))
        fit(part, out, mirrored=bool(mirrored))
        self.augment.change(out, draws)
        return None

    def read_rows(self, members: Members, rows: Sequence[int], out: Array, draws: Draws, at: int) -> set[int]:
        """Read these rows of a batch at once, as far as they are plain. Which were read; `read` has to be asked for the others."""
        return pictures.read(members, rows, out, self.augment, draws, at)


@dataclass(frozen=True)
class Label:
    names: tuple[str, ...]
    column: str | None
    classes: tuple[str, ...]

    @property
    def example(self) -> Example:
        return Example((), "int64")

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> None:
        assert out is not None
        if self.column is None and (digits := bytes(data)).isdigit() and (not self.classes or int(digits) < len(self.classes)):
            out[()] = int(digits)  # as nearly always
            return
        value = scalar(data, self.column)
        # a text of its own is the class's number, also where classes have numbers for names; an entry of a table is what
        # the table said, so there the name comes first
        number = isinstance(value, int) or (isinstance(value, str) and value.isdecimal() and int(value) < len(self.classes))
        named = str(value) in self.classes and (self.column is not None or not number)
        out[()] = self.classes.index(str(value)) if named else _whole(value, self.classes)


@dataclass(frozen=True)
class Labels:
    names: tuple[str, ...]
    column: str | None
    classes: tuple[str, ...]

    @property
    def example(self) -> Example:
        return Example((len(self.classes),), "float32")

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> None:
        value = scalar(data, self.column)
        if not isinstance(value, list):
            raise SampleError(f"{str(value)[:80]!r} is no list of classes")
        assert out is not None
        out[()] = 0
        for one in value:
            if str(one) not in self.classes:
                raise SampleError(f"{str(one)[:80]!r} is none of the {len(self.classes)} classes")
            out[self.classes.index(str(one))] = 1


@dataclass(frozen=True)
class Number:
    names: tuple[str, ...]
    column: str | None

    @property
    def example(self) -> Example:
        return Example((), "float32")

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> None:
        value = scalar(data, self.column)
        assert out is not None
        try:
            found = float(_plain(value))
        except (TypeError, ValueError, OverflowError):
            raise SampleError(f"{str(value)[:80]!r} is not a number") from None
        if _LARGEST < abs(found) < math.inf:
            raise SampleError(f"{found!r} is more than a float32 holds")
        out[()] = found


@dataclass(frozen=True)
class Text:
    names: tuple[str, ...]
    example: None = None

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> str:
        return bytes(data).decode("utf-8-sig")


@dataclass(frozen=True)
class Json:
    names: tuple[str, ...]
    example: None = None

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Any:
        return json_module.loads(bytes(data))


@dataclass(frozen=True)
class NumpyArray:
    names: tuple[str, ...]
    example: Example | None = None

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Array | None:
        found = _npy(data)
        if out is None:
            owned: Array = found.copy()  # the bytes it lies in are used again
            return owned
        if found.shape != out.shape or found.dtype != out.dtype:
            raise SampleError(f"it is {found.dtype}{list(found.shape)}, and {out.dtype}{list(out.shape)} was asked for")
        out[...] = found
        return None

    def lies_as(self, head: bytes) -> bool:
        """Whether the bytes before the numbers say that these lie as `example` does, one after another in this machine's order."""
        if self.example is None or head[:8] != b"\x93NUMPY\x01\x00" or int.from_bytes(head[8:10], "little") + 10 != len(head):
            return False
        try:
            dtype, fortran, shape = _npy_head(head)
        except Exception:  # numpy's parser of heads raises whatever it meets
            return False
        return dtype == np.dtype(self.example.dtype) and shape == self.example.shape and not fortran


# --- as people type them ---------------------------------------------------------------------------------------------


def image(names: str = ";".join(EXTENSIONS), *, size: int | tuple[int, int] | None = None, augment: str | None = None) -> Image:
    """An image as uint8 RGB: a batch tensor [b, 3, h, w] (channels_last), or a list of [3, h, w] without `size`.

    size: a side, or (height, width). augment: "rrc" (random resized crop), "flip", "trivialaugment" or "randaugment" (changes of colour and
    shape), or some of them as in "rrc+flip+trivialaugment"; without rrc the largest
    region in the middle with the asked shape is resized. EXIF orientation is applied.
    """
    sides = (size, size) if isinstance(size, int) else size
    if sides is not None and not (
        isinstance(sides, tuple) and len(sides) == 2 and all(isinstance(side, int) and side >= 1 for side in sides)
    ):
        raise UsageError(f"size={size!r} is no size. Give a side in pixels, or (height, width).")
    varied = Augment.parse(augment)
    if sides is None and varied.rrc:
        raise UsageError(f"augment={augment!r} cuts regions and needs a size. Give for example size=224.")
    return Image(_names(names), sides, varied)


def label(
    names: str = "cls", *, column: str | None = None, classes: tuple[str, ...] | list[str] = (), multi: bool = False
) -> Label | Labels:
    """A class number as an int64 tensor [b]. A text that is one of `classes` counts as its place there.

    classes: default those that the index of the shards names. column: for a JSON field, the entry to read. multi: a list of classes, as a float32 tensor [b, classes] of ones and zeros.
    """
    if multi and column is None:
        raise UsageError("a label of several classes is an entry of a JSON field: give column=.")
    return (Labels if multi else Label)(_names(names), column, tuple(classes))


def with_classes(field: Field, labels: Sequence[IndexLabel]) -> Field:
    """A label without classes with those that an index names for what it reads; any other field as it is.

    Raises UsageError for a label of several classes that nobody names.
    """
    if not isinstance(field, (Label, Labels)) or field.classes:
        return field
    for one in labels:
        if one.field in field.names and one.column == field.column and (one.kind == "multi") == isinstance(field, Labels):
            return replace(field, classes=one.classes)
    if isinstance(field, Labels):
        raise UsageError(f"the index names no classes for {field.names[0]}, column {field.column!r}. Give classes=[...].")
    return field


def is_light(field: Field) -> bool:
    """Whether reading it takes less than sending it to another process."""
    return isinstance(field, (Label, Number))


def field_of(label: IndexLabel) -> Label | Labels | Number:
    """The field that reads a label of an index."""
    if label.kind == "number":
        return Number((label.field,), label.column)
    return (Labels if label.kind == "multi" else Label)((label.field,), label.column, label.classes)


def reader_of(label: IndexLabel) -> str:
    """How a label of an index is read, as people type it."""
    where = f'"{label.field}"' + (f', column="{label.column}"' if label.column is not None else "")
    if label.kind == "number":
        return f"wt.number({where})"
    return "wt.label()" if where == '"cls"' else f"wt.label({where}{', multi=True' if label.kind == 'multi' else ''})"


def number(names: str, *, column: str | None = None) -> Number:
    """A number as a float32 tensor [b]. column: for a JSON field, the entry to read."""
    return Number(_names(names), column)


def text(names: str = "txt") -> Text:
    """UTF-8 text, a list of str."""
    return Text(_names(names))


def json(names: str = "json") -> Json:
    """A parsed JSON document, a list."""
    return Json(_names(names))


def array(names: str = "npy", *, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> NumpyArray:
    """A .npy array: a tensor [b, ...] where all have one shape, else a list. Arrays of Python objects are refused.

    shape, dtype: where they are the same for all ("uint8", "float32", ...), for values to land straight in batch memory, which
    is several times as fast; one that differs is a bad sample.
    """
    if (shape is None) != (dtype is None):
        raise UsageError(f"shape={shape}, dtype={dtype!r} belong together. Give both, or none.")
    if shape is None or dtype is None:
        return NumpyArray(_names(names))
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise UsageError(f'dtype={dtype!r} is no kind of number. Give for example "uint8".') from None
    if kind.kind not in "biufc" or any(not isinstance(side, int) or side < 0 for side in shape):
        raise UsageError(f"shape={shape}, dtype={dtype!r}: batch memory holds numbers in a shape such as (3, 224, 224).")
    return NumpyArray(_names(names), Example(tuple(shape), kind.name))


def _names(names: str) -> tuple[str, ...]:
    if not isinstance(names, str):
        raise UsageError(f'{names!r} names no field. Give for example "jpg;png".')
    found = tuple(name.strip().lower() for name in names.split(";") if name.strip())
    if not found:
        raise UsageError(f'{names!r} names no field. Give for example "jpg;png".')
    return found


def _npy(data: memoryview) -> Array:
    """The array of a .npy file, over the same bytes."""
    length = int.from_bytes(data[8:10], "little") + 10
    if bytes(data[:8]) != b"\x93NUMPY\x01\x00":
        found: Array = np.load(io.BytesIO(data), allow_pickle=False)
        return found
    dtype, fortran, shape = _npy_head(bytes(data[:length]))
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not loaded (allow_pickle=False)")
    if min(shape, default=0) < 0:  # -1 is all that is there, to frombuffer and to reshape
        raise ValueError(f"it claims the shape {shape}")
    flat = np.frombuffer(data, dtype, math.prod(shape), length)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


@lru_cache(maxsize=256)
def _npy_head(head: bytes) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    """(dtype, whether the first axis runs fastest, shape); reading it takes longer than copying 48 KB."""
    stream = io.BytesIO(head)
    npy: Any = np.lib.format  # whose functions have no types before numpy 2.3
    npy.read_magic(stream)
    shape, fortran, dtype = npy.read_array_header_1_0(stream)
    return dtype, fortran, shape


def scalar(data: memoryview, column: str | None) -> Any:
    if column is None and bytes(data[:6]) == b"\x93NUMPY":  # a number of an HDF5 or array source
        return _npy(data).item()
    text = bytes(data).decode("utf-8-sig").strip()
    if column is None:
        return text
    document = json_module.loads(text)
    if not isinstance(document, dict) or column not in document:
        has = ", ".join(list(document)[:20]) if isinstance(document, dict) else type(document).__name__
        raise SampleError(f"it has no entry {column!r}, but {has}")
    return document[column]


def _plain(value: Any) -> Any:
    """The value itself. Raises ValueError for "1_0", a name to people and 10 to Python."""
    if isinstance(value, str) and "_" in value:
        raise ValueError
    return value


def _whole(value: Any, classes: tuple[str, ...]) -> int:
    try:
        number = int(_plain(value))
        if isinstance(value, float) and number != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        known = f" and none of the {len(classes)} classes" if classes else ""
        raise SampleError(f"{str(value)[:80]!r} is not a whole number{known}") from None
    if number < 0 or (classes and number >= len(classes)):
        raise SampleError(f"{number} is not a class: they are 0 to {len(classes) - 1 if classes else 'n'}")
    return number
