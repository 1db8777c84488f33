"""Contents of a field: image formats and sizes, array shapes, entries of JSON, texts and numbers.

The type of a value follows from its first bytes, then from the name of its field. Image headers are
read without decoding pixels. Nothing is unpickled.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from PIL import Image

from wdstrain.decode.codecs import open_picture
from wdstrain.decode.formats import format_of, is_image
from wdstrain.report.printing import printable
from wdstrain.shards.values import npy_array, parsed_json

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

    def __str__(self) -> str:
        if self.width is None or self.height is None:
            return f"image; none can be read: {self.reason}"
        sides = (self.width, self.height)
        least, median, most = (f"{w:g} x {h:g}" for w, h in zip(*sides, strict=True))
        rotated = f"{self.rotated:.0%} rotated by EXIF" if self.rotated else ""
        bad = f"{self.unreadable} unreadable ({self.reason})" if self.unreadable else ""
        parts = [
            f"{' or '.join(self.formats)} image",
            median if least == most else f"{least} to {most}, median {median}",
            " or ".join(self.modes),
            rotated,
            bad,
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
    kinds = Counter({kind: len(details) for kind, details in groups.items()})
    images = _image_summary(groups["image"]) if "image" in groups else None
    entries = Counter(entry for names in groups.get("JSON", ()) for entry in names)
    named = ", ".join([*entries][:_MAX_ENTRIES]) + ", ..." * (len(entries) > _MAX_ENTRIES)
    texts = {
        "image": str(images),
        "JSON": f"JSON: {named}" if named else "JSON",
        "text": "text, characters:",
    }
    shown = []
    for kind, count in kinds.most_common(_MAX_KINDS):
        numbers = [detail for detail in groups[kind] if isinstance(detail, (int, float))]
        range_text = f" {min(numbers):.5g} to {max(numbers):.5g}" if numbers else ""
        text = texts.get(kind, kind) + range_text
        shown.append(text if len(kinds) == 1 else f"{text} ({count} of {kinds.total()})")
    more = f"; and {len(kinds) - _MAX_KINDS} more" * (len(kinds) > _MAX_KINDS)
    what = "; ".join(shown) + more if shown else "not looked at"
    return Content(what, kinds.total(), dict(kinds), dict(entries), images)


def range_of(values: Iterable[float]) -> Range | None:
    """Return the range of some numbers; None if there are none. The median is one of them."""
    ordered = sorted(values)
    return Range(ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1]) if ordered else None


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
            document = parsed_json(data.decode("utf-8-sig"))
            return "JSON", [*map(printable, document)] if isinstance(document, dict) else ()
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return "binary data of unknown type", None
    except ValueError as error:
        return printable(f"invalid {magic or 'JSON'} ({error})"), None
    if "\0" in text:
        return "binary data of unknown type", None
    try:
        return "number", float(text)
    except ValueError:
        return "text", len(text)


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
