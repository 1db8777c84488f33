"""Contents of a field: image formats and sizes, array shapes, JSON entries, texts.

The type of a value follows from its first bytes, then from the name of its field. Image headers are
read without decoding pixels. Nothing is unpickled.
"""

from __future__ import annotations

import codecs
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from wdstrain.decode.codecs import open_picture
from wdstrain.decode.formats import JPEG, format_of, is_image
from wdstrain.report.printing import printable
from wdstrain.shards.values import npy_head, parsed_json

_PICKLES = ("pyd", "pkl", "pickle", "pth", "pt")
_MAGIC = {
    (0, b"\x93NUMPY"): "array",
    (8, b"WAVE"): "WAV audio",
    (0, b"fLaC"): "FLAC audio",
    (0, b"OggS"): "Ogg audio or video",
    (0, b"ID3"): "MP3 audio",
    (4, b"ftyp"): "MP4 video",
    (0, b"\x1aE\xdf\xa3"): "Matroska or WebM video",
    (0, b"\x1f\x8b"): "gzip",
    (0, b"PK\x03\x04"): "zip (npz)",
    (0, b"%PDF"): "PDF",
}
_BINARY = "binary data of unknown type"
_MAX_DEPTH = 4  # nested lists that are described
_MAX_ENTRIES = 12  # JSON entries that are named
_ORIENTATION = 274  # EXIF tag

Header = tuple[str, str, int, int, bool]  # format, mode, width, height, rotated by EXIF


class Value(NamedTuple):
    """A field of a sample. data: its first bytes; read_more: reads up to 4 MB of it."""

    size: int
    data: bytes
    read_more: Callable[[], bytes]


class Range(NamedTuple):
    """Smallest, median and largest of some numbers."""

    smallest: float
    median: float
    largest: float


@dataclass(frozen=True)
class ImageSummary:
    """Formats, modes and sizes in the headers of some images.

    width, height: in pixels, as stored. rotated: share of the images that EXIF rotates or mirrors.
    unreadable: images without a readable header; reason: why, for the first of them.
    """

    looked_at: int
    unreadable: int = 0
    reason: str = ""
    formats: dict[str, int] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    width: Range | None = None
    height: Range | None = None
    rotated: float = 0.0


@dataclass(frozen=True)
class Content:
    """Contents of a field, in words (`what`) and by type (`kinds`).

    entries: type of each entry of JSON objects.
    """

    what: str
    looked_at: int
    kinds: dict[str, int] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)
    images: ImageSummary | None = None


class FieldDescriber:
    """Describes the field `name` from some of its values."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._groups: dict[str, list[Any]] = {}

    def add(self, value: Value) -> None:
        """Look at a value. More of it may be read until this returns."""
        kind, detail = _kind(self._name, value)
        self._groups.setdefault(kind, []).append(detail)

    def content(self) -> Content:
        """Return the description of the values."""
        groups = dict(self._groups)
        if "number" in groups:
            groups["number"] = groups["number"] + groups.pop("integer", [])
        kinds = Counter({kind: len(details) for kind, details in groups.items()})
        texts, entries, images = [], dict[str, str](), None
        for kind, count in kinds.most_common():
            details, text = groups[kind], kind
            if kind == "image":
                images = _image_summary(details)
                text = " or ".join(images.formats) + " image" if images.formats else "image"
            elif kind == "array":
                text = _array_text(details)
            elif kind == "JSON":
                entries, text = _json_text(details)
            elif kind in ("integer", "number"):
                text = f"{kind}, {_short(min(details))} to {_short(max(details))}"
            elif kind == "text":
                text = f"text (UTF-8), {min(details)} to {max(details)} characters"
            texts.append(text if len(kinds) == 1 else f"{text} ({count} of {kinds.total()})")
        description = "; ".join(texts) or "not looked at"
        return Content(description, kinds.total(), dict(kinds), entries, images)


def range_of(values: Iterable[float]) -> Range | None:
    """Return the range of some numbers; None if there are none. The median is one of them."""
    ordered = sorted(values)
    return Range(ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1]) if ordered else None


# --- one value ------------------------------------------------------------------------------------


def _kind(name: str, value: Value) -> tuple[str, Any]:
    """Return (type of a value, what the description of its type needs)."""
    size, data, extension = value.size, value.data, name.rpartition(".")[2]
    if not size:
        return "empty", None
    matches = (kind for (at, magic), kind in _MAGIC.items() if data[at:].startswith(magic))
    magic = next(matches, None)
    if format_of(data) is not None or (magic is None and is_image(name)):
        return "image", _image_header(value)
    if magic == "array":
        return _array(data)
    if magic is not None:
        return magic, None
    looks_pickled = data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05"
    if extension in _PICKLES or (looks_pickled and extension not in ("json", "txt")):
        return "pickle (never loaded)", None
    if extension == "json" or data[:1] in (b"{", b"["):
        whole = data if len(data) == size else value.read_more()
        try:
            return "JSON", parsed_json(whole.decode("utf-8-sig"))
        except ValueError:
            if extension == "json":
                return "invalid JSON", None
    return _text(size, data)


def _text(size: int, data: bytes) -> tuple[str, Any]:
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, len(data) == size)
    except UnicodeDecodeError:
        return _BINARY, None
    if not all(char.isprintable() or char in "\t\r\n" for char in text):
        return _BINARY, None
    word = text.strip()
    if len(data) == size and len(word) < 32:
        if word.isdecimal() and len(word) < 16:
            return "integer", int(word)
        try:
            return "number", float(word)
        except ValueError:
            pass
    return "text", len(text)


def _array(data: bytes) -> tuple[str, Any]:
    """Return "array" and (dtype, shape, the number if it is a scalar)."""
    width = 2 if data[6:7] == b"\x01" else 4  # bytes of the field with the header's length
    length = int.from_bytes(data[8 : 8 + width], "little") + 8 + width
    try:
        dtype, _, shape = npy_head(bytes(data[:length]))
        if dtype.hasobject:
            return "array of Python objects (never loaded)", None
        is_number = shape == () and dtype.kind in "biuf"
        number = float(np.frombuffer(data, dtype, 1, length)[0]) if is_number else None
    except ValueError:
        return "invalid array", None
    return "array", (str(dtype), tuple(shape), number)


def _image_header(value: Value) -> Header | str:
    """Return the header of an image, or the reason that it cannot be read."""
    header = _header_in(value.data)
    if isinstance(header, str) and len(value.data) < value.size:
        header = _header_in(value.read_more())
    return header


def _header_in(data: bytes) -> Header | str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images and odd tags
            with open_picture(data) as image:
                exif = Image.Exif()
                if image.format in JPEG.plugins:
                    exif = image.getexif()  # of other formats it would decode the pixels
                elif image.info.get("exif"):
                    exif.load(image.info["exif"])
                tags = getattr(image, "tag_v2", exif)  # TIFF has tags of its own
                rotated = tags.get(_ORIENTATION, 1) in range(2, 9)
                return str(image.format), image.mode, image.width, image.height, rotated
    except UnidentifiedImageError:
        return "no image of a known format"
    except Exception as error:  # Pillow's plugins raise whatever their parsers meet
        return printable(str(error) or type(error).__name__)


# --- many values ----------------------------------------------------------------------------------


def _image_summary(headers: list[Header | str]) -> ImageSummary:
    good = [header for header in headers if not isinstance(header, str)]
    bad = [reason for reason in headers if isinstance(reason, str)]
    return ImageSummary(
        looked_at=len(headers),
        unreadable=len(bad),
        reason=bad[0] if bad else "",
        formats=dict(Counter(header[0] for header in good).most_common()),
        modes=dict(Counter(header[1] for header in good).most_common()),
        width=range_of(header[2] for header in good),
        height=range_of(header[3] for header in good),
        rotated=sum(header[4] for header in good) / max(1, len(good)),
    )


def _array_text(arrays: list[tuple[str, tuple[int, ...], float | None]]) -> str:
    dtypes = " or ".join(dict.fromkeys(dtype for dtype, _, _ in arrays))
    shapes = list(dict.fromkeys(shape for _, shape, _ in arrays))
    numbers = [number for _, _, number in arrays if number is not None]
    if len(shapes) == 1 and numbers:
        return f"number in .npy ({dtypes}), {_short(min(numbers))} to {_short(max(numbers))}"
    if len(shapes) == 1:
        return f"{dtypes} array [{', '.join(map(str, shapes[0]))}]"
    if len({len(shape) for shape in shapes}) > 1:
        return f"{dtypes} array, number of dimensions varies"
    sides = [
        f"{min(side)}-{max(side)}" if min(side) < max(side) else str(side[0])
        for side in zip(*shapes, strict=True)
    ]
    return f"{dtypes} array [{', '.join(sides)}], shape varies"


def _json_text(documents: list[Any]) -> tuple[dict[str, str], str]:
    """Return (type of each entry of the objects, description)."""
    objects = [document for document in documents if isinstance(document, dict)]
    if not objects:
        return {}, f"JSON: {_any_of(map(_json_kind, documents))}"
    counts = Counter(name for document in objects for name in document)
    entries = {}
    for name, count in counts.items():
        share = f", in {count / len(documents):.0%}" if count < len(documents) else ""
        kinds = _any_of(_json_kind(document[name]) for document in objects if name in document)
        entries[printable(name)] = kinds + share
    shown = [f"{name} ({kind})" for name, kind in list(entries.items())[:_MAX_ENTRIES]]
    more = f", and {len(entries) - _MAX_ENTRIES} more" if len(entries) > _MAX_ENTRIES else ""
    return entries, f"JSON: {', '.join(shown)}{more}"


def _any_of(kinds: Iterable[str]) -> str:
    names = list(dict.fromkeys(kinds))
    if "number" in names and "integer" in names:
        names.remove("integer")
    return " or ".join(sorted(names, key=lambda name: name == "null"))


def _json_kind(value: Any, depth: int = 0) -> str:
    if isinstance(value, list):
        inner = ""
        if depth < _MAX_DEPTH:
            inner = _any_of(_json_kind(item, depth + 1) for item in value[:100])
        return f"list of {inner}" if inner else "list"
    names = {bool: "flag", int: "integer", float: "number", str: "text", dict: "object"}
    return names.get(type(value), "null")


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.5g}"
