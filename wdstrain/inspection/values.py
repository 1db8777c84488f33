"""Values of fields: parsed, and described by image formats, shapes, entries of JSON, and numbers.

For a description, the type of a value follows from its first bytes, then from the name of its
field. Image headers are read without decoding pixels. Nothing is unpickled.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from wdstrain.decode.codecs import decode_image
from wdstrain.report.printing import printable
from wdstrain.shards.columns import typed
from wdstrain.shards.declare import even_part, read_columns
from wdstrain.shards.formats import format_of, is_image, open_picture
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo, npy_array, parsed_json

_BINARY = "binary data of unknown type"
_PICKLE = "pickle (never loaded)"
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
    **{(0, b"\x80" + bytes([version])): _PICKLE for version in range(2, 6)},
}
_MAX_KINDS = 3  # types of the values of a field that are named
_MAX_ENTRIES = 12  # JSON entries that are named
_ORIENTATION = 274  # EXIF tag

Header = tuple[str, str, int, int, bool]  # format, mode, width, height, rotated by EXIF


@dataclass(frozen=True)
class ImageSummary:
    """Formats, modes and sizes in the headers of some images.

    width, height: smallest, median and largest, in pixels, as stored. rotated: share of the images
    that EXIF rotates or mirrors. unreadable: images without a readable header; reason: why, for the
    first of them.
    """

    looked_at: int
    unreadable: int
    reason: str
    formats: dict[str, int]
    modes: dict[str, int]
    width: tuple[int, ...]
    height: tuple[int, ...]
    rotated: float

    def __str__(self) -> str:
        if not self.formats:
            return f"image; none can be read: {self.reason}"
        least, median, most = (f"{w} x {h}" for w, h in zip(self.width, self.height, strict=True))
        parts = [
            f"{' or '.join(self.formats)} image",
            median if least == most else f"{least} to {most}, median {median}",
            " or ".join(self.modes),
            f"{self.rotated:.0%} rotated by EXIF" if self.rotated else "",
            f"{self.unreadable} unreadable ({self.reason})" if self.unreadable else "",
            f"by {self.looked_at} headers",
        ]
        return "; ".join(filter(None, parts))


@dataclass(frozen=True)
class Content:
    """Contents of a field, in words (`what`) and by type (`kinds`). entries: of JSON objects."""

    what: str
    looked_at: int
    kinds: dict[str, int]
    entries: dict[str, int]
    images: ImageSummary | None


def described(name: str, values: Iterable[bytes]) -> Content:
    """Return the contents of the field `name`, from some of its values."""
    groups: dict[str, list[Any]] = {}
    for value in values:
        kind, detail = _kind(name, value)
        groups.setdefault(kind, []).append(detail)
    images = _image_summary(groups["image"]) if "image" in groups else None
    kinds = Counter({kind: len(details) for kind, details in groups.items()})
    entries = Counter(name for names in groups.get("JSON", ()) for name in names)
    shown = []
    for kind, count in kinds.most_common(_MAX_KINDS):
        text = str(images) if kind == "image" else _words(kind, groups[kind], list(entries))
        shown.append(text if len(kinds) == 1 else f"{text} ({count} of {kinds.total()})")
    more = f"; and {len(kinds) - _MAX_KINDS} more" * (len(kinds) > _MAX_KINDS)
    what = "; ".join(shown) + more or "not looked at"
    return Content(what, kinds.total(), dict(kinds), dict(entries), images)


def quantiles(values: Any, shares: Sequence[float]) -> tuple[Any, ...]:
    """Return quantiles of numbers; each is one of them."""
    return tuple(np.quantile(values, shares, method="inverted_cdf").tolist())


def _words(kind: str, details: Sequence[Any], entries: Sequence[str]) -> str:
    """Return a type with the range of its numbers, or with the names of JSON entries."""
    numbers = [detail for detail in details if isinstance(detail, (int, float))]
    if numbers:
        title = "text, characters:" if kind == "text" else kind
        return f"{title} {min(numbers):.5g} to {max(numbers):.5g}"
    named = ", ".join(entries[:_MAX_ENTRIES]) + ", ..." * (len(entries) > _MAX_ENTRIES)
    return f"{kind}: {named}" if kind == "JSON" and named else kind


def parsed(name: str, data: bytes) -> Any:
    """Return a field as its name says: an image uint8[h, w, 3], an array, a document, else a text.

    Parsers raise whatever they meet. Nothing is unpickled.
    """
    extension = name.rpartition(".")[2]
    if is_image(name):
        return decode_image(data)
    if extension == "npy":
        return npy_array(memoryview(data))
    return parsed_json(data) if extension == "json" else data.decode("utf-8-sig")


def _kind(name: str, data: bytes) -> tuple[str, Any]:
    """Return (type of a value, a number that varies, names of JSON entries, or a header)."""
    matches = (kind for (at, magic), kind in _MAGIC.items() if data.startswith(magic, at))
    magic = next(matches, "" if data else "empty")
    if format_of(data) is not None or (not magic and is_image(name)):
        return "image", _image_header(data)
    try:
        if magic == "array":
            array = npy_array(memoryview(data))
            number = float(array) if array.shape == () and array.dtype.kind in "biuf" else None
            return printable(f"{array.dtype} array {list(array.shape)}"), number
        if magic:
            return magic, None
        if name.rpartition(".")[2] == "json":
            document = parsed(name, data)
            return "JSON", [*map(printable, document)] if isinstance(document, dict) else ()
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return _BINARY, None
    except ValueError as error:
        return printable(f"invalid {magic or 'JSON'} ({error})"), None
    with suppress(ValueError):
        return "number", float(text)
    return (_BINARY, None) if "\0" in text else ("text", len(text))


def _image_header(data: bytes) -> Header | str:
    """Return the header of an image, or the reason that it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images and odd tags
            with open_picture(data) as image:
                tags = Image.Image.getexif(image)  # that of PNG would decode the pixels
                rotated = tags.get(_ORIENTATION, 1) in range(2, 9)
                return str(image.format), image.mode, image.width, image.height, rotated
    except Exception as error:  # Pillow's plugins raise whatever their parsers meet
        return printable(str(error) or type(error).__name__)


def _image_summary(headers: Sequence[Header | str]) -> ImageSummary:
    good = [header for header in headers if not isinstance(header, str)]
    bad = [reason for reason in headers if isinstance(reason, str)]
    formats, modes, widths, heights, rotated = zip(*good, strict=True) if good else ((),) * 5
    return ImageSummary(
        looked_at=len(headers),
        unreadable=len(bad),
        reason=bad[0] if bad else "",
        formats=dict(Counter(formats).most_common()),
        modes=dict(Counter(modes).most_common()),
        width=quantiles(widths, (0, 0.5, 1)) if good else (),
        height=quantiles(heights, (0, 0.5, 1)) if good else (),
        rotated=sum(rotated) / max(1, len(good)),
    )


# --- labels ---------------------------------------------------------------------------------------


def known_labels(index: Index) -> list[ColumnInfo]:
    """Return the labels of an index, else its field `cls`."""
    if index.labels or index.differing:  # that number their classes differently
        return list(index.labels)
    return [ColumnInfo(name, "class", name) for name in ("cls", "cls2") if name in index.fields]


def with_values(index: Index, labels: Sequence[ColumnInfo], most: int | None) -> Index:
    """Return an index with columns of these labels: itself, if it has them.

    Else labels are read from the shards, of `most` samples spread over the set (None: of all); the
    index has only these samples and columns.
    """
    if {label.place for label in labels} <= {column.place for column in index.columns}:
        return index
    part = index if most is None else index.take(even_part(index, most))
    read = read_columns(part, [label.place for label in labels])
    # Class numbers count in the classes of each shard, which may differ.
    named = [label for label in labels if label.classes and not index.differing]
    return read.with_columns(typed(read.columns, named))
