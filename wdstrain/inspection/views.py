"""`SampleView`: a sample as a person looks at it, with small images, labels and texts.

What is wrong with a sample is in its `error`. A mask is drawn in colors over the image beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from wdstrain.decode.codecs import decode_image, decode_mask
from wdstrain.decode.formats import is_image
from wdstrain.report.printing import printable
from wdstrain.runtime.options import format_size
from wdstrain.shards.declare import classes_in
from wdstrain.shards.kinds import ColumnInfo, npy_array, parsed_json, scalar

Pixels = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

_SIDE = 256  # pixels of the longer side of a thumbnail
_MAX_TEXT = 300  # characters of a text that are kept
_MIN_SIDE = 8  # pixels of the shorter side of an array that is shown as an image
_MAX_ASPECT = 64  # longer side / shorter side of such an array
_MAX_BYTES = 64 << 20  # of a member that is read
_MAX_UNKNOWN_BYTES = 1 << 10  # of a member of an unknown type, which may be text
_TEXTS = ("txt", "text", "caption", "transcript")
_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")  # as webdataset decodes them
_OPACITY = 0.6  # of a mask over its image

# The golden ratio sets the hues of class numbers that follow each other far apart.
_HUES = (np.arange(256) * 0.618 % 1 * 255).astype(np.uint8)
_FULL = np.full(256, 255, np.uint8)
COLORS: Pixels = np.array(
    Image.fromarray(np.stack([_HUES, _FULL, _FULL], axis=1)[None], "HSV").convert("RGB")
)[0]  # of class numbers, uint8[256, 3]


@dataclass(eq=False)
class SampleView:
    """Visible parts of a sample: images, labels, texts.

    shard, offset: where it is stored; "" and -1 if unknown. labels: values as text, by name.
    pictures: thumbnails uint8[h, w, 3], by field. fields: what each field is, as text.
    error: why it cannot be shown; "" if it can.
    """

    key: str
    shard: str = ""
    offset: int = -1
    split: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    text: str = ""
    pictures: dict[str, Pixels] = field(default_factory=dict, repr=False)
    fields: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def picture(self) -> Pixels | None:
        """The first picture, uint8[h, w, 3]; None if there is none."""
        return next(iter(self.pictures.values()), None)

    @property
    def label_text(self) -> str:
        """The labels as one line. The name of an only label is left out if its value is a word."""
        values = list(self.labels.values())
        if len(values) == 1 and not values[0].lstrip("-")[:1].isdecimal():
            return printable(values[0])
        return printable(", ".join(f"{name} {value}" for name, value in self.labels.items()))

    @property
    def field_text(self) -> str:
        """The fields that are no picture as one line."""
        others = [name for name in self.fields if name not in self.pictures]
        return printable(", ".join(f"{name}: {self.fields[name]}" for name in others))

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the pixels as JSON-able values."""
        text = json.dumps({**vars(self), "pictures": list(self.pictures)}, ensure_ascii=False)
        return dict(json.loads(text.encode("utf-8", "replace")))

    def add_error(self, name: str, reason: object) -> None:
        """Add an error of a field; of the sample if `name` is empty."""
        text = str(reason) or type(reason).__name__
        self.error += ("; " if self.error else "") + (f"{name}: {text}" if name else text)

    def add_bytes(self, name: str, data: bytes, labels: Sequence[ColumnInfo]) -> None:
        """Add a field as it is stored in a shard. labels: of the set, some of which it may hold."""
        mine = [label for label in labels if label.field == name]
        if all(label.entry for label in mine):
            self.fields[name] = format_size(len(data))
        try:
            for label in mine:
                if label.kind != "mask":
                    names = classes_in(memoryview(data), label.entry, label.classes)
                    is_number = label.kind == "number"
                    value = scalar(memoryview(data), label.entry) if is_number else "|".join(names)
                    self.labels[label.name] = (
                        value if isinstance(value, str) else number_text(value)
                    )
            self._add_stored(name, data, mine)
        except Exception as error:  # parsers raise anything; it is shown in the sample's place
            self.add_error(name, error)

    def add_value(self, name: str, value: Any, classes: Sequence[str] = ()) -> None:
        """Add a value of a field. classes: names of class numbers or class shares."""
        if isinstance(value, str):
            self._add_text(name, value)
        elif isinstance(value, (np.ndarray, np.generic, int, float)) and not np.ndim(value):
            number = np.asarray(value).item()
            is_class = type(number) is int and 0 <= number < len(classes)
            self.labels[name] = classes[number] if is_class else number_text(number)
        elif not isinstance(value, np.ndarray):
            text = json.dumps(value, ensure_ascii=False, default=lambda item: type(item).__name__)
            self.fields[name] = shortened(re.sub(r'"(\w+)":', r"\1:", text))
        elif shares := class_shares_text(value, classes):
            self.labels[name] = shares
        elif value.dtype == np.int64 and value.ndim == 2 and is_image_shape(value.shape):
            self._add_mask(name, value)
        else:
            self.fields[name] = array_text(value)
            pixels = to_image(value)
            if pixels is not None:
                self.pictures[name] = thumbnail(pixels)

    def _add_stored(self, name: str, data: bytes, labels: Sequence[ColumnInfo]) -> None:
        """Add the contents of a field, whose size is its text yet. labels: that it holds."""
        extension = name.rpartition(".")[2]
        if is_mask(name, labels):
            self._add_mask(name, decode_mask(data))
        elif is_image(name):
            pixels = decode_image(data)
            self.fields[name] = f"{pixels.shape[1]} x {pixels.shape[0]}, {format_size(len(data))}"
            self.pictures[name] = thumbnail(pixels)
        elif extension == "npy":
            self.add_value(name, npy_array(memoryview(data)))
        elif extension == "json":
            document, shown = parsed_json(data), {label.entry for label in labels}
            if isinstance(document, dict):
                document = {entry: of for entry, of in document.items() if entry not in shown}
            self.add_value(name, document)
        elif not labels:
            text = data.decode("utf-8-sig", "strict" if extension in _TEXTS else "surrogateescape")
            if extension in (*_TEXTS, *_NUMBERS) or text.isprintable():
                self._add_text(name, text)

    def _add_text(self, name: str, text: str) -> None:
        """Add a number or name as a label, and a first text as the caption."""
        extension = name.rpartition(".")[2]
        is_stored = name in self.fields  # a batch has no field of an unknown type
        if extension in _NUMBERS:
            self.labels[name] = shortened(text)
        elif self.text or (is_stored and extension not in _TEXTS):
            self.fields[name] = shortened(text)
            return
        else:
            self.text = shortened(text)
        self.fields.pop(name, None)

    def _add_mask(self, name: str, numbers: Array) -> None:
        """Add class numbers in colors, over the first picture. numbers: integers [h, w]"""
        height, width = numbers.shape
        classes = ", ".join(map(str, np.unique(numbers).tolist()))
        self.fields[name] = shortened(f"{width} x {height}, classes {classes}")
        below = self.picture
        if below is None:
            below = thumbnail(np.zeros((height, width, 3), np.uint8))
        small = Image.fromarray(numbers.astype(np.uint8)).resize(
            below.shape[1::-1], Image.Resampling.NEAREST
        )
        mixed = _OPACITY * COLORS[np.array(small)] + (1 - _OPACITY) * below
        is_background = np.array(small)[:, :, None] == 0
        self.pictures[name] = np.where(is_background, below, mixed).astype(np.uint8)


def is_mask(name: str, labels: Sequence[ColumnInfo] = ()) -> bool:
    """Return whether a field holds class numbers of pixels. labels: that it holds."""
    return name.split(".")[-2:] == ["mask", "png"] or any(label.kind == "mask" for label in labels)


def is_shown(name: str, size: int) -> bool:
    """Return whether a member of a shard is read to be shown."""
    known = (*_TEXTS, *_NUMBERS, "npy", "json")
    is_known = is_image(name) or name.rpartition(".")[2] in known
    return size <= (_MAX_BYTES if is_known else _MAX_UNKNOWN_BYTES)


# --- values as texts ------------------------------------------------------------------------------


def shortened(text: str) -> str:
    """Return the beginning of a text, as one line."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


def number_text(value: Any) -> str:
    """Return a number as short text."""
    return str(value) if isinstance(value, int) else f"{float(value):.6g}"


def array_text(value: Array) -> str:
    """Return type, shape and range of an array."""
    kind = f"{value.dtype}{list(value.shape)}"
    if value.dtype.kind not in "iuf" or not value.size:
        return kind
    low, high = value_range(value)
    return f"{kind}, {low:.4g} to {high:.4g}"


def class_shares_text(value: Array, classes: Sequence[str]) -> str:
    """Return a vector of class shares as text, or of 0 and 1 as class names; "" for others."""
    names = classes or [str(number) for number in range(len(value))]
    if value.ndim != 1 or value.dtype.kind != "f" or len(names) != len(value) or not len(value):
        return ""
    is_flags = bool(classes) and np.isin(value, (0, 1)).all()
    if not is_flags and not (value.min() >= 0 and abs(value.sum() - 1) <= 0.02):
        return ""
    largest = [i for i in np.argsort(-value, kind="stable").tolist() if value[i] >= 0.005]
    shares = [f"{names[i]} {value[i]:.0%}".removesuffix(" 100%") for i in largest]
    return shortened(", ".join(shares) or "none")


# --- values as small images -----------------------------------------------------------------------


def thumbnail(pixels: Pixels) -> Pixels:
    """Return a copy of at most 256 x 256 pixels. uint8[h, w, 3]"""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((_SIDE, _SIDE), reducing_gap=2.0)
    return np.array(image)


def is_image_shape(shape: Sequence[int]) -> bool:
    """Return whether an array [h, w], [h, w, 1 or 3] or [1 or 3, h, w] is shown as an image."""
    if len(shape) == 3 and shape[2] in (1, 3):
        shape = shape[:2]
    elif len(shape) == 3 and shape[0] in (1, 3):
        shape = shape[1:]
    return len(shape) == 2 and min(shape) >= _MIN_SIDE and max(shape) <= _MAX_ASPECT * min(shape)


def to_image(value: Array, of: Array | None = None) -> Pixels | None:
    """Return an array of numbers as an image uint8[h, w, 3]; None if it has not the shape of one.

    uint8 stays as it is. Other numbers are mapped linearly, so that the `display_range` of the array
    `of` (default: of this one) is black to white.
    """
    if value.dtype.kind not in "biuf" or not is_image_shape(value.shape):
        return None
    if value.ndim == 3 and value.shape[2] not in (1, 3):
        value = np.moveaxis(value, 0, -1)
    planes = value[:, :, None] if value.ndim == 2 else value
    step = max(1, max(planes.shape[:2]) // (2 * _SIDE))  # floats need 8 times the memory
    planes = planes[::step, ::step] if step > 2 else planes
    if planes.dtype != np.uint8:
        low, high = display_range(planes if of is None else of)
        floats = np.nan_to_num(planes.astype(np.float32), nan=low, posinf=high, neginf=low)
        scaled = (floats - low) * (255 / max(high - low, 1e-30))
        planes = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(planes, (*planes.shape[:2], 3)))


def display_range(value: Array) -> tuple[float, float]:
    """Return the numbers that are shown as black and white: 0 and 1, or the extremes of an array."""
    low, high = value_range(value)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def value_range(value: Array) -> tuple[float, float]:
    """Return the smallest and the largest finite number; (0, 0) if there is none."""
    finite = value[np.isfinite(value)] if value.dtype.kind == "f" else value
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
