"""Fields: objects that turn the bytes of a sample into one value of an example.

A field is a small picklable object (the `Field` protocol; users can write their own). It names the tar fields to look for;
the first that a sample has is used. A field whose values all have one shape says so in `example`: its values are written
straight into reused batch memory, and the batch holds a tensor. Other fields return their value, and the batch holds a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from wdstrain.decode import jpeg_batch
from wdstrain.decode.codecs import decode_image
from wdstrain.decode.image_formats import EXTENSIONS
from wdstrain.decode.jpeg_batch import EncodedImages
from wdstrain.decode.resize import fit
from wdstrain.decode.transforms import Augment, Draws, region
from wdstrain.errors import SampleError, UsageError
from wdstrain.shards.values import Array, npy_array, npy_head, parsed_json

_OF_TORCH = frozenset(
    ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
    + ["float16", "float32", "float64", "complex64", "complex128"]
)


@dataclass(frozen=True)
class Example:
    """Shape and dtype of one value. `channels_last`: laid down as [h, w, c], seen in the batch as [c, h, w]."""

    shape: tuple[int, ...]
    dtype: str
    channels_last: bool = False


@runtime_checkable
class Field(Protocol):
    """A part of an example. `isinstance(value, Field)` tells whether an object has what a field needs.

    names: tar fields to look for, in order of preference. example: shape and dtype of the value, which `read` writes into
    `out`; `out` is all zeros before. None if values differ in shape: then `out` is None and `read` returns the value.
    data: a read-only memoryview over bytes of its own, which no other field sees. A value that `read` returns may share their
    memory; torch.frombuffer(data) can be written to, as torch ignores that it is read-only. draws: float64[27] in [0, 1),
    this sample's own random numbers in this epoch, read-only, in memory of their own. Raise any exception for data that
    cannot be used; its text becomes the reason.
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
        part = decode_image(
            data,
            lambda h, w: region(h, w, size, self.augment, draws),
            into,
            blue_first=bool(mirrored),
        )
        fit(part, out, mirrored=bool(mirrored))
        self.augment.change(out, draws)
        return None

    def read_rows(
        self, images: EncodedImages, rows: Sequence[int], out: Array, draws: Draws, at: int
    ) -> set[int]:
        """Read these rows of a batch at once, as far as they are plain. Which were read; `read` has to be asked for the others."""
        return jpeg_batch.read(images, rows, out, self.augment, draws, at)


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
        return parsed_json(bytes(data))


@dataclass(frozen=True)
class NumpyArray:
    names: tuple[str, ...]
    example: Example | None = None

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Array | None:
        found = npy_array(data)
        if out is None:
            owned: Array = found.copy()  # the bytes it lies in are used again
            return owned
        if found.shape != out.shape or found.dtype != out.dtype:
            raise SampleError(
                f"it is {found.dtype}{list(found.shape)}, and {out.dtype}{list(out.shape)} was asked for"
            )
        out[...] = found
        return None

    def lies_as(self, head: bytes) -> bool:
        """Whether the bytes before the numbers say that these lie as `example` does, one after another in this machine's order."""
        if (
            self.example is None
            or head[:8] != b"\x93NUMPY\x01\x00"
            or int.from_bytes(head[8:10], "little") + 10 != len(head)
        ):
            return False
        try:
            dtype, fortran, shape = npy_head(head)
        except ValueError:
            return False
        return dtype == np.dtype(self.example.dtype) and shape == self.example.shape and not fortran


def image(
    names: str = ";".join(EXTENSIONS),
    *,
    size: int | tuple[int, int] | None = None,
    augment: str | None = None,
) -> Image:
    """An image as uint8 RGB: a batch tensor [b, 3, h, w] (channels_last), or a list of [3, h, w] without `size`.

    size: a side, or (height, width). augment: "rrc" (random resized crop), "flip", "trivialaugment" or "randaugment" (changes of colour and
    shape), or some of them as in "rrc+flip+trivialaugment"; without rrc the largest
    region in the middle with the asked shape is resized. EXIF orientation is applied.
    """
    given: Any = (size, size) if isinstance(size, (int, np.integer)) else size
    sides: Any = (
        tuple(int(one) if isinstance(one, np.integer) else one for one in given)
        if isinstance(given, tuple)
        else given
    )
    if sides is not None and not (
        isinstance(sides, tuple)
        and len(sides) == 2
        and all(isinstance(side, int) and side >= 1 for side in sides)
    ):
        raise UsageError(f"size={size!r} is no size. Give a side in pixels, or (height, width).")
    varied = Augment.parse(augment)
    if sides is None and varied.rrc:
        raise UsageError(
            f"augment={augment!r} cuts regions and needs a size. Give for example size=224."
        )
    return Image(field_names(names), sides, varied)


def text(names: str = "txt") -> Text:
    """UTF-8 text, a list of str."""
    return Text(field_names(names))


def json(names: str = "json") -> Json:
    """A parsed JSON document, a list."""
    return Json(field_names(names))


def array(
    names: str = "npy", *, shape: tuple[int, ...] | None = None, dtype: str | None = None
) -> NumpyArray:
    """A .npy array: a tensor [b, ...] where all have one shape, else a list. Arrays of Python objects are refused.

    shape, dtype: where they are the same for all ("uint8", "float32", ...), for values to land straight in batch memory, which
    is several times as fast; one that differs is a bad sample.
    """
    if (shape is None) != (dtype is None):
        raise UsageError(f"shape={shape}, dtype={dtype!r} belong together. Give both, or none.")
    if shape is None or dtype is None:
        return NumpyArray(field_names(names))
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise UsageError(
            f'dtype={dtype!r} is no kind of number. Give for example "uint8".'
        ) from None
    if not torch_has(kind) or any(not isinstance(side, int) or side < 0 for side in shape):
        raise UsageError(
            f"shape={shape}, dtype={dtype!r}: batch memory holds numbers of a dtype that torch has, such as float32, "
            "in a shape such as (3, 224, 224)."
        )
    return NumpyArray(field_names(names), Example(tuple(shape), kind.name))


def read_field(field: Field, name: str, data: memoryview, out: Array | None, draws: Draws) -> Any:
    """The value that a field has for one sample; None where it was written to `out`.

    A field of the user's own gets copies of the bytes and draws, and an `out` of zeros: torch writes to read-only memory, too.
    """
    if _is_ours(type(field)):
        return field.read(name, data, out, draws)
    data, draws = (
        memoryview(bytearray(data)).toreadonly(),
        draws.copy(),
    )  # Python may share a bytes object of one byte
    draws.flags.writeable = False
    if out is None:
        value = field.read(name, data, None, draws)
        return (
            bytes(value) if isinstance(value, memoryview) else value
        )  # a view cannot be sent from a worker process
    out[...] = 0
    value = field.read(name, data, out, draws)
    if value is not None and not (
        isinstance(value, np.ndarray) and np.may_share_memory(value, out)
    ):
        raise SampleError(
            f"read() returned {type(value).__name__}, and a field with an example writes its value to out. "
            "Write to out[...], or set example = None"
        )
    return None


@lru_cache(maxsize=256)
def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


@lru_cache(maxsize=256)
def torch_has(dtype: np.dtype[Any]) -> bool:
    """Whether torch has tensors of this dtype, in this machine's byte order."""
    return dtype.kind in "biufc" and dtype.newbyteorder("=").name in _OF_TORCH


def lies_in_batches(example: Example) -> bool:
    """Whether a tensor can lie over values like this one."""
    try:
        dtype = np.dtype(example.dtype)
    except TypeError:
        return False
    return torch_has(dtype) and dtype.isnative


def field_names(names: str) -> tuple[str, ...]:
    if not isinstance(names, str):
        raise UsageError(f'{names!r} names no field. Give for example "jpg;png".')
    found = tuple(name.strip().lower() for name in names.split(";") if name.strip())
    if not found:
        raise UsageError(f'{names!r} names no field. Give for example "jpg;png".')
    return found
