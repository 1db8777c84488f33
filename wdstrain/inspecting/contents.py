"""What the values of a field are, told from some of them: pictures and how large, arrays of which kind, JSON of which entries, text.

A value tells it by its own bytes, and by the name of its field only where those do not. Nothing is unpickled, ever: what looks like
a pickle is named as one.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wdstrain.decode.image_formats import EXTENSIONS
from wdstrain.inspecting.dimensions import Images, Value, header, images_of
from wdstrain.report.printing import printable
from wdstrain.shards.values import npy_head, parsed_json

_PICKLES = ("pyd", "pkl", "pickle", "pth", "pt")
_MAGIC = {
    (0, b"\xff\xd8\xff"): "image",
    (0, b"\x89PNG\r\n"): "image",
    (0, b"GIF8"): "image",
    (0, b"II*\0"): "image",
    (0, b"MM\0*"): "image",
    (8, b"WEBP"): "image",
    (4, b"ftypavif"): "image",
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
_DEEPEST = 4  # lists in lists that are named
_NAMED = 12  # entries of JSON and shapes that are named


@dataclass(frozen=True)
class Content:
    """What the values of a field are. entries: of JSON objects, what each is. what: in words."""

    what: str
    looked_at: int
    kinds: dict[str, int] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)
    images: Images | None = None


class Looker:
    """Looks at values of the field of this name, one after another, and tells what they are."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._groups: dict[str, list[Any]] = {}

    def add(self, value: Value) -> None:
        kind, found = _kind(self._name, value)
        self._groups.setdefault(kind, []).append(found)

    def content(self) -> Content:
        """What they were."""
        if "number" in self._groups:
            self._groups["number"] += self._groups.pop("whole number", [])
        kinds = Counter({kind: len(found) for kind, found in self._groups.items()})
        words, entries, images = [], dict[str, str](), None
        for kind, count in kinds.most_common():
            found = self._groups[kind]
            if kind == "image":
                images = images_of(found)
                said = " or ".join(images.formats) + " image" if images.formats else "image"
            elif kind == "array":
                said = _arrays(found)
            elif kind == "JSON":
                entries, said = _entries(found)
            elif kind in ("whole number", "number"):
                said = f"{kind}, {_short(min(found))} to {_short(max(found))}"
            elif kind == "text":
                said = f"text (UTF-8), {min(found)} to {max(found)} characters"
            else:
                said = kind
            words.append(said if len(kinds) == 1 else f"{said} ({count} of {kinds.total()})")
        return Content(
            "; ".join(words) or "nothing was looked at", kinds.total(), dict(kinds), entries, images
        )


# --- one value -------------------------------------------------------------------------------------------------------


def _kind(name: str, value: Value) -> tuple[str, Any]:
    """(what a value is, what is to be known of it)"""
    size, data, last = value.size, value.data, name.rpartition(".")[2]
    if not size:
        return "empty", None
    magic = next(
        (kind for (at, start), kind in _MAGIC.items() if data[at : at + len(start)] == start), None
    )
    if magic == "image" or (magic is None and last in EXTENSIONS):
        return "image", header(value)
    if magic == "array":
        return _array(value)
    if magic is not None:
        return magic, None
    if last in _PICKLES or (
        data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05" and last not in ("json", "txt")
    ):
        return "pickle (never loaded)", None
    if last == "json" or data[:1] in (b"{", b"["):
        try:
            return "JSON", parsed_json(
                (data if len(data) == size else value.whole()).decode("utf-8-sig")
            )
        except ValueError:
            if last == "json":
                return "no JSON that can be read", None
    return _text(size, data)


def _text(size: int, data: bytes) -> tuple[str, Any]:
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, len(data) == size)
    except UnicodeDecodeError:
        return "bytes of no known kind", None
    if not all(one.isprintable() or one in "\t\r\n" for one in text):
        return "bytes of no known kind", None
    word = text.strip()
    if len(data) == size and word.isdecimal() and len(word) < 16:
        return "whole number", int(word)
    try:
        if len(word) < 32 and len(data) == size:
            return "number", float(word)
    except ValueError:
        pass
    return "text", len(text)


def _array(value: Value) -> tuple[str, Any]:
    """(dtype, shape, the number if it is one alone)"""
    data = value.data
    wide = 2 if data[6:7] == b"\x01" else 4  # bytes in which the length of the head is
    length = int.from_bytes(data[8 : 8 + wide], "little") + 8 + wide
    try:
        dtype, _, shape = npy_head(bytes(data[:length]))
        if dtype.hasobject:
            return "array of Python objects (never loaded)", None
        number = (
            np.frombuffer(data, dtype, 1, length)[0]
            if shape == () and dtype.kind in "biuf"
            else None
        )
    except ValueError:
        return "array that cannot be read", None
    return "array", (str(dtype), tuple(shape), None if number is None else float(number))


# --- many values -----------------------------------------------------------------------------------------------------


def _arrays(found: list[tuple[str, tuple[int, ...], float | None]]) -> str:
    dtypes = " or ".join(dict.fromkeys(one[0] for one in found))
    shapes = list(dict.fromkeys(one[1] for one in found))
    numbers = [one[2] for one in found if one[2] is not None]
    if len(shapes) == 1:
        if numbers:
            return f"number in .npy ({dtypes}), {_short(min(numbers))} to {_short(max(numbers))}"
        return f"array of {dtypes} [{', '.join(map(str, shapes[0]))}]"
    if len({len(shape) for shape in shapes}) > 1:
        return f"array of {dtypes}, shapes differ, also in how many sides they have"
    sides = [
        f"{min(side)}-{max(side)}" if min(side) < max(side) else str(side[0])
        for side in zip(*shapes, strict=True)
    ]
    return f"array of {dtypes}, shapes differ: [{', '.join(sides)}]"


def _entries(found: list[Any]) -> tuple[dict[str, str], str]:
    """The entries of JSON objects with what they are, and what the whole is in words."""
    objects = [one for one in found if isinstance(one, dict)]
    if not objects:
        return {}, f"JSON: {_or(map(_json_kind, found))}"
    counts: Counter[str] = Counter(name for one in objects for name in one)
    entries = {}
    for name, count in counts.items():
        some = f", in {count / len(found):.0%}" if count < len(found) else ""
        entries[printable(name)] = (
            _or(_json_kind(one[name]) for one in objects if name in one) + some
        )
    said = [f"{name} ({kind})" for name, kind in list(entries.items())[:_NAMED]]
    more = f", and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return entries, f"JSON: {', '.join(said)}{more}"


def _or(kinds: Iterable[str]) -> str:
    found = list(dict.fromkeys(kinds))
    if "number" in found and "whole number" in found:
        found.remove("whole number")
    return " or ".join(sorted(found, key=lambda one: one == "null"))


def _json_kind(value: Any, depth: int = 0) -> str:
    if isinstance(value, list):
        inside = _or(_json_kind(one, depth + 1) for one in value[:100]) if depth < _DEEPEST else ""
        return f"list of {inside}" if inside else "list"
    kinds = {
        bool: "true or false",
        int: "whole number",
        float: "number",
        str: "text",
        dict: "object",
    }
    return kinds.get(type(value), "null")


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.5g}"
