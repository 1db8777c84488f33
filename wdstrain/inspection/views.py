"""`SampleView`: a sample as a person looks at it, with small images, labels and texts.

What is wrong with a sample is in its `error`. A mask is drawn in colors over the image beside it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from wdstrain.decode.codecs import decode_image, decode_mask
from wdstrain.decode.formats import is_image
from wdstrain.report.printing import printable
from wdstrain.runtime.options import format_size
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.label_values import classes_in
from wdstrain.shards.values import npy_array, parsed_json, scalar

Pixels = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

_SIDE = 256  # pixels of the longer side of a thumbnail
_MAX_TEXT = 300  # characters of a text that are kept
_MIN_SIDE = 8  # pixels of the shorter side of an array that is shown as an image
_MAX_ASPECT = 64  # longer side / shorter side of such an array
_MAX_SHARES = 3  # classes of a mixed label that are named
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
        others = {name: text for name, text in self.fields.items() if name not in self.pictures}
        return printable(", ".join(f"{name}: {value}" for name, value in others.items()))

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the pixels as JSON-able values."""
        text = json.dumps({**vars(self), "pictures": list(self.pictures)}, ensure_ascii=False)
        values: dict[str, Any] = json.loads(text.encode("utf-8", "replace"))
        return values

    def add_error(self, name: str, reason: object) -> None:
        """Add an error of a field; of the sample if `name` is empty."""
        text = str(reason) or type(reason).__name__
        self.error += ("; " if self.error else "") + (f"{name}: {text}" if name else text)

    def add_bytes(self, name: str, data: bytes, labels: Sequence[ColumnInfo]) -> None:
        """Add a field as it is stored in a shard. labels: of the set, some of which it may hold."""
        mine = [label for label in labels if label.field == name]
        for label in mine:
            if label.kind != "mask":
                self._attempt(f"label {label.name}", self._add_label, label, data)
        self.fields[name] = format_size(len(data))
        self._attempt(name, self._add_content, name, data, mine)

    def add_value(self, name: str, value: Any, classes: Sequence[str] = ()) -> None:
        """Add a field as a batch has it. classes: names of class numbers or class shares."""
        if isinstance(value, str):
            self.text = self.text or shortened(value)
        elif isinstance(value, np.ndarray) and value.ndim:
            if shares := class_shares_text(value, classes):
                self.labels[name] = shares
            elif value.dtype == np.int64 and value.ndim == 2 and is_image_shape(value.shape):
                self._add_mask(name, value)
            else:
                self._add_array(name, value)
        elif isinstance(value, (np.ndarray, np.generic, int, float)):
            number = value.item() if isinstance(value, (np.ndarray, np.generic)) else value
            is_class = type(number) is int and 0 <= number < len(classes)
            self.labels[name] = classes[int(number)] if is_class else number_text(number)
        elif value is not None:
            self.fields[name] = shortened(_json_text(value))

    def _attempt(self, name: str, add: Callable[..., None], *values: Any) -> None:
        try:
            add(*values)
        except Exception as error:  # parsers raise anything; it is shown in the sample's place
            self.add_error(name, error)

    def _add_label(self, label: ColumnInfo, data: bytes) -> None:
        value = scalar(memoryview(data), label.entry)
        names = classes_in(memoryview(data), label.entry, label.classes)
        self.labels[label.name] = number_text(value) if label.kind == "number" else "|".join(names)

    def _add_content(self, name: str, data: bytes, labels: Sequence[ColumnInfo]) -> None:
        """Add the contents of a field, whose size is its text yet. labels: that it holds."""
        extension = name.rpartition(".")[2]
        if is_mask(name, labels):
            self._add_mask(name, decode_mask(data))
        elif is_image(name):
            pixels = decode_image(data)
            height, width = pixels.shape[:2]
            self.fields[name] = f"{width} x {height}, {format_size(len(data))}"
            self.pictures[name] = thumbnail(pixels)
        elif extension == "npy":
            value = npy_array(memoryview(data))
            self.fields[name] = array_text(value) if value.ndim else number_text(value.item())
            self._add_array(name, value)
        elif extension == "json":
            self._add_json(name, data, {label.entry for label in labels})
        elif not labels:
            self._add_text(name, data, extension)
        if any(label.entry is None for label in labels) and name not in self.pictures:
            del self.fields[name]

    def _add_array(self, name: str, value: Array) -> None:
        pixels = to_image(value)
        self.fields.setdefault(name, array_text(value))
        if pixels is not None:
            self.pictures[name] = thumbnail(pixels)

    def _add_mask(self, name: str, numbers: Array) -> None:
        """Add class numbers in colors, over the first picture. numbers: integers [h, w]"""
        height, width = numbers.shape
        classes = ", ".join(map(str, np.unique(numbers).tolist()))
        self.fields[name] = shortened(f"{width} x {height}, classes {classes}")
        below = self.picture if self.pictures else thumbnail(np.zeros((height, width, 3), np.uint8))
        assert below is not None
        small = Image.fromarray(numbers.astype(np.uint8)).resize(
            below.shape[1::-1], Image.Resampling.NEAREST
        )
        mixed = _OPACITY * COLORS[np.array(small)] + (1 - _OPACITY) * below
        is_background = np.array(small)[:, :, None] == 0
        self.pictures[name] = np.where(is_background, below, mixed).astype(np.uint8)

    def _add_json(self, name: str, data: bytes, shown: set[str | None]) -> None:
        """Add a JSON document without the entries that are shown as labels."""
        document = parsed_json(bytes(data))
        if isinstance(document, dict):
            document = {entry: value for entry, value in document.items() if entry not in shown}
        self.fields[name] = shortened(re.sub(r'"(\w+)":', r"\1:", _json_text(document)))
        if not document and shown:
            del self.fields[name]

    def _add_text(self, name: str, data: bytes, extension: str) -> None:
        try:
            text = shortened(bytes(data).decode("utf-8-sig"))
        except UnicodeDecodeError:
            if extension in _TEXTS:
                self.add_error(name, "it is not UTF-8 text")
            return
        if extension in _NUMBERS:
            self.labels[name] = text
            del self.fields[name]
        elif extension in _TEXTS and not self.text:
            self.text = text
            del self.fields[name]
        elif extension in _TEXTS or text.isprintable():
            self.fields[name] = text


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
    if isinstance(value, (bool, int)):
        return str(value)
    number = float(value)
    is_whole = math.isfinite(number) and number == int(number) and abs(number) < 1e15
    return str(int(number)) if is_whole else f"{number:.4g}"


def array_text(value: Array) -> str:
    """Return type, shape and range of an array."""
    kind = f"{value.dtype}{list(value.shape)}"
    if value.dtype.kind not in "iuf" or not value.size:
        return kind
    if value.size <= 4:
        return f"{kind} {' '.join(number_text(number) for number in value.ravel().tolist())}"
    low, high = value_range(value)
    return f"{kind}, {low:.4g} to {high:.4g}"


def class_shares_text(value: Array, classes: Sequence[str]) -> str:
    """Return a vector of class shares as text, or of 0 and 1 as class names; "" for others."""
    if value.ndim != 1 or value.dtype.kind != "f" or len(value) < 2:
        return ""
    shares = value.astype(np.float64)
    is_share = ((shares >= 0) & (shares <= 1.001)).all()
    if not is_share or (classes and len(classes) != len(value)):
        return ""
    names = classes or [str(number) for number in range(len(shares))]
    if np.isin(shares, (0, 1)).all() and (classes or shares.sum() == 1):
        return "|".join(names[i] for i in np.flatnonzero(shares).tolist()) or "none"
    largest = np.argsort(-shares, kind="stable")[:_MAX_SHARES].tolist()
    text = ", ".join(f"{names[i]} {shares[i]:.0%}" for i in largest if shares[i] >= 0.005)
    return text if abs(shares.sum() - 1) <= 0.02 else ""


def _json_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=lambda item: type(item).__name__)
    except RecursionError:
        return "nested too deeply to be shown"


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


def to_image(value: Array, low: float | None = None, high: float | None = None) -> Pixels | None:
    """Return an array of numbers as an image uint8[h, w, 3]; None if it has not the shape of one.

    uint8 stays as it is. Other numbers are mapped linearly, from `low` (black) to `high` (white).
    Default: 0 to 1 if they all are, else the smallest to the largest.
    """
    if value.dtype.kind not in "biuf" or not is_image_shape(value.shape):
        return None
    if value.ndim == 3 and value.shape[2] not in (1, 3):
        value = np.moveaxis(value, 0, -1)
    planes = value[:, :, None] if value.ndim == 2 else value
    step = max(1, max(planes.shape[:2]) // (2 * _SIDE))
    planes = planes[::step, ::step] if step > 2 else planes  # floats need 8 times the memory
    if planes.dtype != np.uint8:
        if low is None or high is None:
            low, high = display_range(*value_range(planes))
        floats = np.nan_to_num(planes.astype(np.float32), nan=low, posinf=high, neginf=low)
        scaled = (floats - low) * (255 / max(high - low, 1e-30))
        planes = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(planes, (*planes.shape[:2], 3)))


def display_range(low: float, high: float) -> tuple[float, float]:
    """Return the numbers that are shown as black and white, for numbers from `low` to `high`."""
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def value_range(value: Array) -> tuple[float, float]:
    """Return the smallest and the largest finite number; (0, 0) if there is none."""
    finite = value[np.isfinite(value)] if value.dtype.kind == "f" else value
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
