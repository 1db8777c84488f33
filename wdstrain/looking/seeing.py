"""A sample as a person looks at it: its pictures, its labels in words, its texts; of everything else what it is and how large.

Only the members that can be shown are read, at their own places, so that looking into a set of terabytes on a server takes a
request per sample. What is wrong with a sample is part of what there is to see: it stands in `error`, in the sample's own place.
Pictures are made small at once, because a thousand photographs are gigabytes.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from wdstrain.decode.bad_samples import MISMATCH
from wdstrain.decode.codecs import decode_image
from wdstrain.decode.fields import Field, array
from wdstrain.decode.image_formats import EXTENSIONS
from wdstrain.decode.transforms import DRAWS
from wdstrain.looking.picturing import Array, Pixels, picture_in, small
from wdstrain.looking.wording import LETTERS, array_said, cut, number_said, shares_said
from wdstrain.native.checksum import crc32
from wdstrain.order.rng import uniform
from wdstrain.report.printing import printable
from wdstrain.runtime.byte_sizes import format_size
from wdstrain.shards.index import Index, Label
from wdstrain.shards.labels import classes_in
from wdstrain.shards.offsets import Ints
from wdstrain.shards.values import parsed_json, scalar
from wdstrain.storage.local import Source, open_source

_TEXTS = ("txt", "text", "caption", "transcript")
_NUMBERS = (
    "cls",
    "cls2",
    "class",
    "count",
    "index",
    "inx",
    "id",
)  # what webdataset takes for numbers
_LARGEST = 64 << 20  # bytes of a member that is read to be shown
_SMALL = 1 << 10  # bytes of a member of an unknown kind that is read, because it may be text
_GAP = (
    1 << 20
)  # bytes between two members that are read over, rather than asked for the second anew


@dataclass(frozen=True, eq=False)
class Seen:
    """A sample to be looked at.

    shard: its address as it may be shown; offset: where the sample begins in it; both empty (-1) where nobody knows. labels: values in
    words, by the name of the label. pictures: uint8[h, w, 3] by field, at most 256 pixels wide and high. fields: what each field
    is, in words. error: what is wrong with it, empty if nothing is.
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
        """The first of its pictures, uint8[h, w, 3]; None if there is none, or it cannot be decoded."""
        return next(iter(self.pictures.values()), None)

    @property
    def facts(self) -> dict[str, Any]:
        """All of it but the pixels, JSON-able; what is no text in a key is a mark there."""
        text = json.dumps({**vars(self), "pictures": list(self.pictures)}, ensure_ascii=False)
        found: dict[str, Any] = json.loads(text.encode("utf-8", "replace"))
        return found

    @property
    def said(self) -> str:
        """The labels as a line."""
        if len(self.labels) == 1:
            return printable(next(iter(self.labels.values())))
        return printable(", ".join(f"{name} {value}" for name, value in self.labels.items()))

    @property
    def rest(self) -> str:
        """The other fields as a line."""
        return printable(", ".join(f"{name}: {value}" for name, value in self.fields.items()))


class Variants(NamedTuple):
    """A field of pictures as a loader would read it, in some epochs."""

    field: Field
    epochs: Sequence[int]
    seed: int


def seen_at(
    index: Index, ids: Ints, labels: Sequence[Label], variants: Variants | None = None
) -> list[Seen]:
    """Samples of an index, in the order of `ids`; they are read in the order in which they lie.

    labels: those to be told of. variants: pictures are those that a loader with this field and seed delivers, one for each epoch.
    Raises what reading a shard raises.
    """
    found: dict[int, Seen] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Pillow finds odd, and shows all the same
        for i, seen in _seen(index, ids, labels, variants):
            found[i] = seen
    return [found[i] for i in ids.tolist()]


def _seen(
    index: Index, ids: Ints, labels: Sequence[Label], variants: Variants | None
) -> Iterator[tuple[int, Seen]]:
    shards = index.shard_of(ids)
    for number in np.unique(shards).tolist():
        shard = index.shards[number]
        with open_source(shard.path, shard.bytes) as source:
            for i in np.unique(ids[shards == number]).tolist():
                view, varied = (
                    View(index.key(i), [index.label_in_sample(one, i) for one in labels]),
                    _varied(index, i, variants),
                )
                for name, size, data, crc in _members(index, source, i):
                    if data is None or (
                        variants is not None and _kind(name) in EXTENSIONS and name != varied
                    ):
                        view.leave(name, size)
                    elif crc is not None and crc32(data) != crc:
                        view.wrong(name, MISMATCH)
                    elif variants is not None and name == varied:
                        view.vary(name, data, variants, i)
                    else:
                        view.add_bytes(name, data)
                if variants is not None and varied is None:
                    view.wrong("", f"it has none of {', '.join(variants.field.names)}")
                start = int(index.offsets.start[i])
                yield i, view.seen(shard=shard.shown, offset=start, split=shard.split)


def _varied(index: Index, number: int, variants: Variants | None) -> str | None:
    """The field of a sample that is varied: the first of those that the loader's field looks for, as a loader takes it."""
    has = {name for name, _, _ in index.members(number)}
    return (
        next((name for name in variants.field.names if name in has), None)
        if variants is not None
        else None
    )


class View:
    """Collects what there is to see of one sample. labels: those that its fields hold."""

    def __init__(self, key: str, labels: Sequence[Label] = ()) -> None:
        self._key, self._of = key, labels
        self.labels: dict[str, str] = {}
        self.fields: dict[str, str] = {}
        self._pictures: dict[str, Pixels] = {}
        self._text, self._errors = "", list[str]()

    def seen(self, **where: Any) -> Seen:
        """What was collected."""
        return Seen(
            self._key,
            labels=self.labels,
            text=self._text,
            pictures=self._pictures,
            fields=self.fields,
            error="; ".join(self._errors),
            **where,
        )

    def wrong(self, name: str, reason: str) -> None:
        """Something is wrong with a field."""
        self._errors.append(f"{name}: {reason}" if name else reason)

    def leave(self, name: str, size: int) -> None:
        """A field that is not looked into."""
        self.fields[name] = format_size(size)
        if size > _LARGEST and _kind(name) in EXTENSIONS:
            self.wrong(
                name,
                f"its {format_size(size)} are more than the {format_size(_LARGEST)} that are read to look at a picture",
            )

    def add_bytes(self, name: str, data: bytes | memoryview) -> None:
        """A field as it lies in a shard."""
        mine = [label for label in self._of if label.field == name]
        for label in mine:
            self._add_label(label, memoryview(data))
        kind = _kind(name)
        try:
            if kind in EXTENSIONS:
                pixels = decode_image(data)
                self.fields[name] = (
                    f"{pixels.shape[1]} x {pixels.shape[0]}, {format_size(len(data))}"
                )
                self._pictures[name] = small(pixels)
            elif kind == "npy":
                self._add_npy(name, data, any(label.column is None for label in mine))
            elif kind == "json":
                self._add_json(
                    name, data, {label.column for label in mine if label.column is not None}
                )
            elif not mine:
                self._add_text(name, data, kind)
        except (
            Exception
        ) as error:  # whatever a parser meets is to be seen, in the sample's own place
            self.fields[name] = format_size(len(data))
            self.wrong(name, str(error) or type(error).__name__)

    def add_value(self, name: str, value: Any, classes: Sequence[str] = ()) -> None:
        """A field as a batch has it. classes: names for a class, or for shares of classes."""
        if isinstance(value, (bytes, memoryview)):
            self.add_bytes(name, value)
        elif isinstance(value, str):
            self._text = self._text or cut(value)
        elif isinstance(value, np.ndarray) and value.ndim:
            shares = shares_said(value, classes)
            if shares:
                self.labels[name] = shares
            else:
                self._add_array(name, value)
        elif isinstance(value, (np.ndarray, np.generic, int, float)):
            number = value.item() if isinstance(value, (np.ndarray, np.generic)) else value
            is_class = (
                isinstance(number, int)
                and not isinstance(number, bool)
                and 0 <= number < len(classes)
            )
            self.labels[name] = classes[int(number)] if is_class else number_said(number)
        elif value is not None:
            self.fields[name] = cut(_as_json(value))

    def vary(self, name: str, data: memoryview, variants: Variants, number: int) -> None:
        """The picture of a sample as a loader delivers it, once for each epoch."""
        self.fields[name] = format_size(len(data))
        example = variants.field.example
        for epoch in variants.epochs:
            draws = uniform(np.array([number]), DRAWS, "sample", variants.seed, epoch)[0]
            try:
                out = np.empty(example.shape, example.dtype) if example is not None else None
                value = variants.field.read(name, data, out, draws)
            except Exception as error:  # whatever the field raises is the reason
                self.wrong(name, str(error) or type(error).__name__)
                return
            pixels = out if out is not None else np.moveaxis(value, 0, -1)
            self._pictures[f"epoch {epoch}"] = small(pixels)

    def _add_label(self, label: Label, data: memoryview) -> None:
        try:
            if label.kind == "number":
                self.labels[label.name] = number_said(scalar(data, label.column))
            else:
                scalar(data, label.column)  # its error is to be told
                self.labels[label.name] = "|".join(classes_in(data, label.column, label.classes))
        except Exception as error:  # as above
            self.wrong(f"label {label.name}", str(error))

    def _add_npy(self, name: str, data: bytes | memoryview, is_label: bool) -> None:
        value = array().read(name, memoryview(data), None, np.zeros(0))
        if value is not None and value.ndim:
            self._add_array(name, value)
        elif value is not None and not is_label:
            self.fields[name] = number_said(value.item())

    def _add_array(self, name: str, value: Array) -> None:
        self.fields[name] = array_said(value)
        pixels = picture_in(value)
        if pixels is not None:
            self._pictures[name] = small(pixels)

    def _add_json(self, name: str, data: bytes | memoryview, told: set[str]) -> None:
        document = parsed_json(bytes(data))
        if isinstance(document, dict):
            document = {entry: value for entry, value in document.items() if entry not in told}
        if document or not told:
            self.fields[name] = cut(re.sub(r'"(\w+)":', r"\1:", _as_json(document)))

    def _add_text(self, name: str, data: bytes | memoryview, kind: str) -> None:
        try:
            said = bytes(data[: 4 * LETTERS + 4]).decode(
                "utf-8-sig", "ignore" if len(data) > 4 * LETTERS else "strict"
            )
        except UnicodeDecodeError:
            if kind in _TEXTS:
                self.wrong(name, "it is no UTF-8 text")
            self.fields[name] = format_size(len(data))
            return
        if kind not in (*_TEXTS, *_NUMBERS) and not "".join(said.split()).isprintable():
            self.fields[name] = format_size(len(data))
        elif kind in _NUMBERS:
            self.labels[name] = cut(said.strip())
        elif kind in _TEXTS and not self._text:
            self._text = cut(said)
        else:
            self.fields[name] = cut(said)


# --- reading ---------------------------------------------------------------------------------------------------------


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=lambda one: type(one).__name__)
    except RecursionError:
        return "nested too deeply to be shown"


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _is_shown(name: str, size: int) -> bool:
    known = _kind(name) in (*EXTENSIONS, *_TEXTS, *_NUMBERS, "npy", "json")
    return size <= (_LARGEST if known else _SMALL)


def _members(
    index: Index, source: Source, number: int
) -> Iterator[tuple[str, int, memoryview | None, int | None]]:
    """(field, size, bytes, crc32) of each field of a sample; bytes None: not read, crc None: not known. Fields side by side are read at once."""
    members, first = index.members(number), int(index.offsets.member_first[number])
    crcs = index.offsets.member_crc
    read: Mapping[int, memoryview] = _read_together(
        source, [one if _is_shown(one[0], one[2]) else None for one in members]
    )
    for place, (name, _, size) in enumerate(members):
        yield name, size, read.get(place), (int(crcs[first + place]) or None) if len(crcs) else None


def _read_together(
    source: Source, members: Sequence[tuple[str, int, int] | None]
) -> dict[int, memoryview]:
    """The bytes of members, by place; None is not wanted."""
    wanted = sorted(
        (one[1], one[1] + one[2], place) for place, one in enumerate(members) if one is not None
    )
    found: dict[int, memoryview] = {}
    while wanted:
        count, stop = 1, wanted[0][1]
        while count < len(wanted) and wanted[count][0] - stop <= _GAP:
            stop, count = max(stop, wanted[count][1]), count + 1
        start, data = wanted[0][0], memoryview(bytearray(stop - wanted[0][0]))
        source.read_into([data], start)
        for begin, end, place in wanted[:count]:
            found[place] = data[begin - start : end - start]
        wanted = wanted[count:]
    return found
