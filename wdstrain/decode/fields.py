"""Fields: objects that decode one value of a batch from the bytes of a sample.

A field names the tar fields (file extensions) to look for; the first that a sample has is decoded.
Values of a fixed shape are written straight into reused batch memory, and become a tensor. Other
values become a list.

`image`, `mask`, `json` and `array` make fields, as do `label`, `number` and `text` of
`wdstrain.decode.labels`. Users can write their own; see `Field`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from wdstrain.decode.codecs import (
    IGNORED,
    decode_image,
    decode_jpegs,
    decode_mask,
    is_jpeg,
    resize,
)
from wdstrain.decode.crops import RATIO, SCALE
from wdstrain.decode.transforms import Augment, Draws, Size, region
from wdstrain.errors import SampleError, UsageError
from wdstrain.native import kernels
from wdstrain.shards.formats import EXTENSIONS
from wdstrain.shards.kinds import Array, npy_array, npy_head, parsed_json
from wdstrain.shards.offsets import Ints

_LONGEST_HEAD = 1024  # bytes of a .npy file before its numbers; longer heads are read one by one

_TORCH_DTYPES = frozenset(
    ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
    + ["float16", "float32", "float64", "complex64", "complex128"]
)


@dataclass(frozen=True)
class Example:
    """Shape and dtype of one value of a field.

    shape: without the batch dimension, such as (3,). dtype: NumPy name of a dtype that torch
    supports, such as "float32".
    channels_last: the value is stored as [height, width, channels], and the batch tensor shows it
    as [channels, height, width] in torch's channels_last memory format.
    """

    shape: tuple[int, ...]
    dtype: str
    channels_last: bool = False


@runtime_checkable
class Field(Protocol):
    """Protocol of a field. Any object with these three attributes can be used as a field.

    names: tar fields to look for, in order of preference, such as ("jpg", "png").
    example: shape and dtype of every value, or None if they differ between samples.

    Objects are pickled for worker processes. A field must not depend on other samples.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def example(self) -> Example | None: ...
    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Any:
        """Decode one value. Any exception makes the sample a bad sample, with its text as reason.

        name: the tar field that the sample has.
        data: the value, as a read-only memoryview: bytes(data) copies it, for example to decode it
        as text. No other field shares this memory, so a returned value may refer to it.
        out: with `example`, zeroed array to write the value to; return None. Without `example`,
        None; return the value.
        draws: float64[27] in [0, 1), the sample's random numbers in this epoch, read-only.
        """
        ...


@dataclass(frozen=True)
class Image:
    """Field of `image`. size: (height, width), or None for images as they are stored.

    sizes: of the buckets of a loader, of which each batch has one; () if the loader is unknown; None
    without size="bucket".
    """

    names: tuple[str, ...]
    size: Size | None
    augment: Augment
    sizes: tuple[Size, ...] | None = None

    @property
    def example(self) -> Example | None:
        return Example((*self.size, 3), "uint8", channels_last=True) if self.size else None

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Any:
        if out is None or self.size is None:
            return self._read_whole(data, draws)
        if is_jpeg(data):
            source = np.frombuffer(data, np.uint8)
            place = np.array([source.ctypes.data]), np.array([len(source)])
            if self.read_rows(np.array([0]), *place, out[None], draws[None]):
                return None
        pixels = decode_image(data)
        stored_height, stored_width = pixels.shape[:2]
        top, left, height, width = region(
            stored_height, stored_width, self.size, self.augment, draws
        )
        resize(pixels[top : top + height, left : left + width], out)
        if self.augment.mirrors(draws):
            out[...] = out[:, ::-1].copy()
        self.augment.apply_policy(out, draws)
        return None

    def read_rows(
        self, rows: Ints, address: Ints, size: Ints, out: Array, draws: Draws
    ) -> set[int]:
        """Decode these rows of a batch together. Returns the rows that are done.

        `read` must decode the others. Arguments: see `decode_jpegs`.
        """
        return decode_jpegs(rows, address, size, out, self.augment, draws)

    def _read_whole(self, data: memoryview, draws: Draws) -> Array:
        """Return the image in its own size. uint8[3, height, width]"""
        pixels = decode_image(data)
        pixels = pixels[:, ::-1] if self.augment.mirrors(draws) else pixels
        self.augment.apply_policy(pixels, draws)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


@dataclass(frozen=True)
class Mask:
    """Field of `mask`. size: (height, width), or None for masks as they are stored.

    sizes: as those of an `Image`.
    """

    names: tuple[str, ...]
    size: Size | None
    augment: Augment
    classes: int | None = None
    ignored: int | None = None
    sizes: tuple[Size, ...] | None = None

    @property
    def example(self) -> Example | None:
        return Example(self.size, "int64") if self.size else None

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Array | None:
        numbers = self.numbers(data)
        if out is not None and self.size is not None:
            top, left, height, width = region(
                len(numbers), numbers.shape[1], self.size, self.augment, draws
            )
            rows = top + _nearest(height, self.size[0])
            columns = left + _nearest(width, self.size[1])
            numbers = numbers[rows[:, None], columns]
        if self.augment.mirrors(draws):
            numbers = numbers[:, ::-1]
        if out is None:
            return numbers.astype(np.int64)
        out[...] = numbers
        return None

    def numbers(self, data: bytes | memoryview) -> Array:
        """Return the numbers of a whole mask. Raises SampleError for numbers that are no class."""
        numbers = decode_mask(data, self.ignored)
        if self.classes is None:
            return numbers
        wrong = (numbers >= self.classes) | (numbers < 0)
        if wrong.any() and (wrong := wrong & (numbers != IGNORED)).any():
            raise SampleError(
                f"it has the class number {numbers[wrong][0]}: must be 0 to {self.classes - 1}, or "
                f"{IGNORED} for pixels without a class"
            )
        return numbers


@dataclass(frozen=True)
class Json:
    """Field of `json`."""

    names: tuple[str, ...]
    example: None = None

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Any:
        return parsed_json(bytes(data))


@dataclass(frozen=True)
class NumpyArray:
    """Field of `array`. example: shape and dtype of every array, or None if they differ."""

    names: tuple[str, ...]
    example: Example | None = None

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Array | None:
        array = npy_array(data)
        if out is None:
            return np.array(array)  # the arena reuses the memory of `data`
        if array.shape != out.shape or array.dtype != out.dtype:
            raise SampleError(
                f"it is {array.dtype}{list(array.shape)}, "
                f"and the field is {out.dtype}{list(out.shape)}"
            )
        out[...] = array
        return None

    def read_rows(
        self, rows: Ints, address: Ints, size: Ints, out: Array, draws: Draws
    ) -> set[int]:
        """Copy these rows of a batch by one call of C. Returns the rows that are done.

        They have the .npy head of the first row. Array by array, each copy would release the GIL
        and wait for it.
        """
        start = ctypes.string_at(int(address[0]), min(int(size[0]), _LONGEST_HEAD))
        head = start[: 10 + int.from_bytes(start[8:10], "little")]
        if npy_head(head) != (out.dtype, False, out.shape[1:]):
            return set()
        copied = np.zeros(len(rows), bool)
        places = out.ctypes.data + rows * out.strides[0]
        pointers = (address.ctypes.data, size.ctypes.data, head, len(head), places.ctypes.data)
        kernels.library.copy_arrays(len(rows), *pointers, out[0].nbytes, copied.ctypes.data)
        return set(rows[copied].tolist())


def image(
    names: str = ";".join(EXTENSIONS),
    *,
    size: int | tuple[int, int] | str | None = None,
    augment: str | None = None,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
    crop_pct: float = 1.0,
) -> Image:
    """Return a field of RGB images.

    With `size`, the batch holds one tensor, uint8[b, 3, height, width] in channels_last memory
    format. Without it, a list of b tensors uint8[3, height, width], as large as stored.

    names: tar fields to look for, separated by ";"; default: every supported image format.
    size: side in pixels, or (height, width). "bucket": each batch has the size of its bucket, see
    `Loader(buckets="aspect", pixels=...)`. The largest region in the center with this aspect ratio
    is resized (bilinear, with anti-aliasing), unless `augment` contains "rrc".
    augment: "rrc" (random resized crop), "flip" (left-right, with probability 0.5),
    "trivialaugment", "randaugment"; joined by "+", such as "rrc+flip". The result depends on the
    loader's seed, the epoch and the sample alone.
    scale, ratio: of "rrc": least and largest area as a share of the image, and width / height.
    crop_pct: without "rrc", side of the region in the center as a share of the largest, such as
    0.875: resizing to 256 pixels and cropping 224.

    EXIF orientation is applied. Images that share a sample get the same crop and flip. Damaged or
    truncated images are bad samples.

        wt.Loader(urls, {"image": wt.image(size=224, augment="rrc+flip"), "label": wt.label()})
    """
    is_bucket = isinstance(size, str) and size == "bucket"
    shape = None if is_bucket else sides(size)
    parsed = Augment.parse(augment, scale=scale, ratio=ratio, crop_pct=crop_pct)
    if size is None and (parsed.rrc or parsed.crop_pct != 1):
        name = "augment" if parsed.rrc else "crop_pct"
        raise UsageError(
            f"{{{name}}} needs a size.",
            "Give for example size=224.",
            {"augment": augment, "crop_pct": crop_pct},
        )
    return Image(field_names(names), shape, parsed, () if is_bucket else None)


def sides(size: Any) -> tuple[int, int] | None:
    """Return (height, width) of the option `size`. Raises UsageError."""
    if size is None:
        return None
    pair = size if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2 or not all(
        isinstance(side, (int, np.integer)) and side >= 1 for side in pair
    ):
        raise UsageError(
            "must be a side in pixels >= 1, or a tuple (height, width).",
            option="size",
            value=size,
        )
    return int(pair[0]), int(pair[1])


def mask(
    names: str = "mask.png",
    *,
    size: int | tuple[int, int] | str | None = None,
    augment: str | None = None,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
    crop_pct: float = 1.0,
    classes: int | None = None,
    ignore: int | None = None,
) -> Mask:
    """Return a field of masks: the class number of each pixel, 255 where there is none.

    With `size`, the batch holds one tensor, int64[b, height, width]. Without it, a list of b tensors
    int64[height, width]. Masks are PNGs or other lossless images of one channel, grayscale or with
    a palette.

    names: tar fields to look for, separated by ";".
    size, augment, scale, ratio, crop_pct: the same as for the image. The mask gets the same crop and flip, and is resized
    to the nearest pixel. Changes of color are for images only. "trivialaugment" and "randaugment"
    also rotate and shear, so they are refused.
    classes: number of classes; a mask with another number is a bad sample.
    ignore: number of the stored pixels without a class, beside 255. The batch has 255 for it.

        size, augment = 256, "rrc+flip"
        fields = {"image": wt.image(size=size, augment=augment), "mask": wt.mask(size=size, augment=augment)}
    """
    like = image(names, size=size, augment=augment, scale=scale, ratio=ratio, crop_pct=crop_pct)
    if classes is not None and not 1 <= classes <= IGNORED:
        raise UsageError(f"must be 1 to {IGNORED}.", option="classes", value=classes)
    return mask_like(like, field_names(names), classes, ignore)


def mask_like(
    source: Image, names: tuple[str, ...], classes: int | None, ignored: int | None
) -> Mask:
    """Return the field of masks that belong to images of this field."""
    check_can_follow(source, "masks")
    return Mask(names, source.size, source.augment, classes, ignored, source.sizes)


def check_can_follow(source: Image, what: str) -> None:
    """Raise UsageError for an augmentation that other values of a sample cannot follow."""
    if source.augment.policy:
        raise UsageError(
            f"it rotates and shears images, and {what} would not follow.",
            "Use rrc and flip.",
            option="augment",
            value=source.augment.policy,
        )


def json(names: str = "json") -> Json:
    """Return a field of JSON documents. The batch holds a list of b parsed documents.

    names: tar fields to look for, separated by ";".

    For one value of a document, use `wt.label`, `wt.number` or `wt.text`, such as wt.number("json.n").
    """
    return Json(field_names(names))


def array(
    names: str = "npy", *, shape: tuple[int, ...] | None = None, dtype: str | None = None
) -> NumpyArray:
    """Return a field of NumPy arrays (.npy files).

    The batch holds one tensor [b, ...] if all arrays have one shape and dtype, else a list of b
    tensors. Arrays of Python objects are bad samples: they are never unpickled.

    names: tar fields to look for, separated by ";".
    shape, dtype: shape of every array without the batch dimension, and its dtype ("float32").
    Give both if all arrays have the same: they are then copied into reused batch memory, which is
    several times as fast. An array with another shape or dtype is a bad sample. Without them,
    on_error="mark" gives a list in every batch.

        wt.array("npy", shape=(3, 112, 112), dtype="float32")
    """
    if (shape is None) != (dtype is None):
        raise UsageError(f"shape={shape}, dtype={dtype!r}: give both or neither.")
    if shape is None or dtype is None:
        return NumpyArray(field_names(names))
    given = Example(tuple(shape), dtype)
    if not fits_batch_memory(given) or any(not isinstance(n, int) or n < 0 for n in shape):
        raise UsageError(
            f"shape={shape}, dtype={dtype!r}: batch memory holds numbers of a dtype that torch has,"
            " such as float32, in a shape such as (3, 224, 224)."
        )
    return NumpyArray(field_names(names), replace(given, dtype=np.dtype(dtype).name))


def read_field(field: Field, name: str, data: memoryview, out: Array | None, draws: Draws) -> Any:
    """Return the value of a field for one sample; None if it was written to `out`.

    A user's field gets copies of the bytes and draws, because torch writes to read-only memory
    without an error. It also gets a zeroed `out`.
    """
    if _is_built_in(type(field)):
        return field.read(name, data, out, draws)
    # bytearray: Python may share a bytes object of one byte
    data = memoryview(bytearray(data)).toreadonly()
    draws = draws.copy()
    draws.flags.writeable = False
    if out is not None:
        out[...] = 0
    value = field.read(name, data, out, draws)
    if out is None:  # a memoryview cannot be pickled by a worker process
        return bytes(value) if isinstance(value, memoryview) else value
    is_out = isinstance(value, np.ndarray) and np.may_share_memory(value, out)
    if value is not None and not is_out:
        raise SampleError(
            f"read() returned {type(value).__name__}, and a field with an example writes its "
            "value to out.",
            "Write to out[...], or set example = None",
        )
    return None


@lru_cache(maxsize=256)
def _is_built_in(field_type: type) -> bool:
    """Return whether a class of fields belongs to this package."""
    return field_type.__module__.partition(".")[0] == __name__.partition(".")[0]


@lru_cache(maxsize=256)
def torch_has(dtype: np.dtype[Any]) -> bool:
    """Return whether torch supports this dtype, in this machine's byte order."""
    return dtype.kind in "biufc" and dtype.newbyteorder("=").name in _TORCH_DTYPES


def fits_batch_memory(example: Example) -> bool:
    """Return whether values like this example can be shown as a tensor without conversion."""
    try:
        dtype = np.dtype(example.dtype)
    except TypeError:
        return False
    return torch_has(dtype) and dtype.isnative


def field_names(names: str, *, lower: bool = True) -> tuple[str, ...]:
    """Return the names in "jpg;png", tar fields in lower case. Raises UsageError without any."""
    parts = names.split(";") if isinstance(names, str) else []
    stripped = tuple(part.strip() for part in parts if part.strip())
    if not stripped:
        raise UsageError(
            f"{names!r} names no field.",
            'Give tar fields such as "jpg;png".',
        )
    return tuple(map(str.lower, stripped)) if lower else stripped


def _nearest(stored: int, wanted: int) -> Ints:
    """Return the nearest of `stored` pixels for each of `wanted`: their centers coincide."""
    return ((2 * np.arange(wanted, dtype=np.int64) + 1) * stored) // (2 * wanted)
