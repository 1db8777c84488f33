"""Values of fields: parsed, and described by image formats, shapes, entries of JSON, and numbers.

For a description, the type of a value follows from its first bytes, then from the name of its
field. Image headers are read without decoding pixels. Nothing is unpickled.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
from PIL import Image

from wdstrain.decode.codecs import decode_image
from wdstrain.inspection.result import text_of
from wdstrain.report.printing import printable
from wdstrain.shards.columns import typed
from wdstrain.shards.declare import even_part, read_columns
from wdstrain.shards.formats import format_of, is_image, open_picture
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo, npy_array, parsed_json

_BINARY = "binary data of unknown type"
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
    **{(0, b"\x80" + bytes([version])): "pickle (never loaded)" for version in range(2, 6)},
}
_MAX_KINDS = 3  # types of the values of a field that are named
_ORIENTATION = 274  # EXIF tag


def described(name: str, values: Iterable[bytes]) -> tuple[str, dict[str, int]]:
    """Return what some values of the field `name` are: as text, and the number of each type."""
    groups: dict[str, list[tuple[Any, ...]]] = {}
    for value in values:
        kind, details = _kind(name, value)
        groups.setdefault(kind, []).append(details)
    kinds = Counter({kind: len(details) for kind, details in groups.items()})
    words = [
        _words(kind, groups[kind]) + f" ({count} of {kinds.total()})" * (len(kinds) > 1)
        for kind, count in kinds.most_common(_MAX_KINDS)
    ]
    if len(kinds) > _MAX_KINDS:
        words.append(f"and {len(kinds) - _MAX_KINDS} more")
    return "; ".join(words) or "not looked at", dict(kinds)


def quantiles(values: Any, shares: Sequence[float]) -> tuple[Any, ...]:
    """Return quantiles of numbers, or of each of their columns; each is one of them."""
    return tuple(np.quantile(values, shares, axis=0, method="inverted_cdf").tolist())


def _words(kind: str, details: Sequence[tuple[Any, ...]]) -> str:
    """Return a type with the names of entries, or with the range and the median of numbers."""
    if not any(details):
        return kind
    if kind == "JSON":
        return f"JSON: {text_of(list(dict.fromkeys(chain(*details))))}"
    low, median, high = (
        " x ".join(f"{number:.5g}" for number in row) for row in quantiles(details, (0, 0.5, 1))
    )
    return f"{kind}: {low}" if low == high else f"{kind}: {low} to {high}, median {median}"


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


def _kind(name: str, data: bytes) -> tuple[str, tuple[Any, ...]]:
    """Return (type of a value, the numbers that vary, or the names of JSON entries)."""
    matches = (kind for (at, magic), kind in _MAGIC.items() if data.startswith(magic, at))
    magic = next(matches, "" if data else "empty")
    if format_of(data) is not None or (not magic and is_image(name)):
        return _image_kind(data)
    try:
        if magic == "array":
            array = npy_array(memoryview(data))
            return printable(f"{array.dtype} array {list(array.shape)}"), ()
        if magic:
            return magic, ()
        if name.rpartition(".")[2] == "json":
            document = parsed(name, data)
            return "JSON", tuple(map(printable, document)) if isinstance(document, dict) else ()
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return _BINARY, ()
    except ValueError as error:
        return printable(f"invalid {magic or 'JSON'} ({error})"), ()
    with suppress(ValueError):
        return "number", (float(text),)
    return (_BINARY, ()) if "\0" in text else ("text, characters", (len(text),))


def _image_kind(data: bytes) -> tuple[str, tuple[int, ...]]:
    """Return (format, mode and rotation of an image, its width and height as stored)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images and odd tags
            with open_picture(data) as image:
                tags = Image.Image.getexif(image)  # that of PNG would decode the pixels
                turned = ", rotated by EXIF" * (tags.get(_ORIENTATION, 1) in range(2, 9))
                return f"{image.format} image, {image.mode}{turned}", image.size
    except Exception:  # Pillow's plugins raise whatever their parsers meet
        return "unreadable image", ()


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
