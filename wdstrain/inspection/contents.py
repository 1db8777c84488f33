"""Contents of a field: image formats and sizes, array shapes, JSON entries, texts.

The type of a value follows from its first bytes, then from the name of its field. Image headers are
read without decoding pixels. Nothing is unpickled.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from PIL import Image, UnidentifiedImageError

from wdstrain.decode.codecs import open_picture
from wdstrain.decode.formats import JPEG, format_of, is_image
from wdstrain.report.printing import printable
from wdstrain.shards.values import npy_array, parsed_json

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
_PICKLES = ("pyd", "pkl", "pickle", "pth", "pt")
_PICKLED = tuple(b"\x80" + bytes([version]) for version in range(2, 6))
_MAX_DEPTH = 4  # nested lists that are described
_MAX_ENTRIES = 12  # JSON entries that are named
_ORIENTATION = 274  # EXIF tag

Header = tuple[str, str, int, int, bool]  # format, mode, width, height, rotated by EXIF


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
    unreadable: int
    reason: str
    formats: dict[str, int]
    modes: dict[str, int]
    width: Range | None
    height: Range | None
    rotated: float


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


def described(name: str, values: Iterable[bytes]) -> Content:
    """Return the contents of the field `name`, from some of its values."""
    groups: dict[str, list[Any]] = {}
    for value in values:
        kind, detail = _kind(name, value)
        groups.setdefault(kind, []).append(detail)
    if "number" in groups:
        groups["number"] = groups["number"] + groups.pop("integer", [])
    kinds = Counter({kind: len(details) for kind, details in groups.items()})
    texts, entries, images = [], dict[str, str](), None
    for kind, count in kinds.most_common():
        details, text = groups[kind], kind
        if kind == "image":
            images = _image_summary(details)
            text = _image_text(images)
        elif kind == "array":
            text = _array_text(details)
        elif kind == "JSON":
            entries = _entries(details)
            text = f"JSON: {_json_text(entries) or _any_of(map(_json_kind, details))}"
        elif kind in ("integer", "number"):
            text = f"{kind}, {_short(min(details))} to {_short(max(details))}"
        elif kind == "text":
            text = f"text (UTF-8), {min(details)} to {max(details)} characters"
        texts.append(text if len(kinds) == 1 else f"{text} ({count} of {kinds.total()})")
    what = "; ".join(texts) or "not looked at"
    return Content(what, kinds.total(), dict(kinds), entries, images)


def range_of(values: Iterable[float]) -> Range | None:
    """Return the range of some numbers; None if there are none. The median is one of them."""
    ordered = sorted(values)
    return Range(ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1]) if ordered else None


# --- one value ------------------------------------------------------------------------------------


def _kind(name: str, data: bytes) -> tuple[str, Any]:
    """Return (type of a value, what the description of its type needs)."""
    extension = name.rpartition(".")[2]
    if not data:
        return "empty", None
    matches = (kind for (at, magic), kind in _MAGIC.items() if data.startswith(magic, at))
    magic = next(matches, None)
    if format_of(data) is not None or (magic is None and is_image(name)):
        return "image", _image_header(data)
    if magic == "array":
        return _array(data)
    if magic is not None:
        return magic, None
    if extension in _PICKLES or (data.startswith(_PICKLED) and extension not in ("json", "txt")):
        return "pickle (never loaded)", None
    if extension == "json" or data.startswith((b"{", b"[")):
        try:
            return "JSON", parsed_json(data.decode("utf-8-sig"))
        except ValueError:
            if extension == "json":
                return "invalid JSON", None
    return _text(data)


def _text(data: bytes) -> tuple[str, Any]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if not all(char.isprintable() or char in "\t\r\n" for char in text):
        return "binary data of unknown type", None
    word = text.strip()
    if word.isdecimal() and len(word) < 16:
        return "integer", int(word)
    try:
        return "number", float(word if len(word) < 32 else "")
    except ValueError:
        return "text", len(text)


def _array(data: bytes) -> tuple[str, Any]:
    """Return "array" and (dtype, shape, the number if it is a scalar)."""
    try:
        array = npy_array(memoryview(data))
    except ValueError as error:
        is_object = "Python objects" in str(error)
        return "array of Python objects (never loaded)" if is_object else "invalid array", None
    is_number = array.shape == () and array.dtype.kind in "biuf"
    return "array", (str(array.dtype), array.shape, float(array) if is_number else None)


def _image_header(data: bytes) -> Header | str:
    """Return the header of an image, or the reason that it cannot be read."""
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


def _image_summary(headers: Sequence[Header | str]) -> ImageSummary:
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


def _image_text(images: ImageSummary) -> str:
    width, height = images.width, images.height
    if width is None or height is None:
        return f"image; none can be read: {images.reason}"
    sides = f"{width.median} x {height.median}"
    if width.smallest < width.largest or height.smallest < height.largest:
        extremes = f"{width.smallest}-{width.largest} x {height.smallest}-{height.largest}"
        sides = f"{extremes} pixels, median {sides}"
    total = sum(images.modes.values())
    modes = [f"{name} {count / total:.0%}" for name, count in images.modes.items()]
    parts = [
        " or ".join(images.formats) + " image",
        sides,
        ", ".join(modes if len(modes) > 1 else images.modes),
        *[f"{images.rotated:.0%} rotated by EXIF"] * (images.rotated > 0),
        *[f"{images.unreadable} unreadable ({images.reason})"] * (images.unreadable > 0),
        f"by {images.looked_at} headers",
    ]
    return "; ".join(parts)


def _array_text(arrays: Sequence[tuple[str, tuple[int, ...], float | None]]) -> str:
    dtypes = " or ".join(dict.fromkeys(dtype for dtype, _, _ in arrays))
    shapes = {shape for _, shape, _ in arrays}
    numbers = [number for _, _, number in arrays if number is not None]
    if len(shapes) == 1 and numbers:
        return f"number in .npy ({dtypes}), {_short(min(numbers))} to {_short(max(numbers))}"
    if len({len(shape) for shape in shapes}) > 1:
        return f"{dtypes} array, number of dimensions varies"
    sides = [
        f"{min(side)}-{max(side)}" if min(side) < max(side) else str(side[0])
        for side in zip(*shapes, strict=True)
    ]
    return f"{dtypes} array [{', '.join(sides)}]{', shape varies' * (len(shapes) > 1)}"


def _entries(documents: Sequence[Any]) -> dict[str, str]:
    """Return the type of each entry of the objects among JSON documents."""
    objects = [document for document in documents if isinstance(document, dict)]
    entries = {}
    for name, count in Counter(name for document in objects for name in document).items():
        kinds = _any_of(_json_kind(document[name]) for document in objects if name in document)
        share = f", in {count / len(documents):.0%}" * (count < len(documents))
        entries[printable(name)] = kinds + share
    return entries


def _json_text(entries: dict[str, str]) -> str:
    shown = [f"{name} ({kind})" for name, kind in entries.items()][:_MAX_ENTRIES]
    more = f", and {len(entries) - _MAX_ENTRIES} more" * (len(entries) > _MAX_ENTRIES)
    return ", ".join(shown) + more


def _any_of(kinds: Iterable[str]) -> str:
    names = list(dict.fromkeys(kinds))
    if "number" in names and "integer" in names:
        names.remove("integer")
    return " or ".join(sorted(names, key=lambda name: name == "null"))


def _json_kind(value: Any, depth: int = 0) -> str:
    if isinstance(value, list):
        shown = value[:100] if depth < _MAX_DEPTH else []
        inner = _any_of(_json_kind(item, depth + 1) for item in shown)
        return f"list of {inner}" if inner else "list"
    names = {bool: "flag", int: "integer", float: "number", str: "text", dict: "object"}
    return names.get(type(value), "null")


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.5g}"
