"""`SampleView`: a sample as a person looks at it, with small images, labels and texts.

Only members that can be shown are read, at their offsets: one request per sample from a server.
What is wrong with a sample is in its `error`.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.decode.codecs import decode_image
from wdstrain.decode.fields import Field, array
from wdstrain.decode.formats import is_image
from wdstrain.decode.transforms import DRAWS
from wdstrain.inspection.show.values import (
    MAX_TEXT,
    Array,
    Pixels,
    array_text,
    class_shares_text,
    number_text,
    shortened,
    thumbnail,
    to_image,
)
from wdstrain.order.rng import uniform
from wdstrain.report.printing import printable
from wdstrain.runtime.options import format_size
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.label_values import classes_in
from wdstrain.shards.offsets import Ints
from wdstrain.shards.values import parsed_json, scalar
from wdstrain.storage.local import Source, open_source

_TEXTS = ("txt", "text", "caption", "transcript")
_NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")  # as webdataset decodes them
_MAX_BYTES = 64 << 20  # of a member that is read
_MAX_UNKNOWN_BYTES = 1 << 10  # of a member of an unknown type, which may be text
_GAP = 1 << 20  # bytes between members of a sample that are read through


@dataclass(frozen=True, eq=False)
class SampleView:
    """Visible parts of a sample: images, labels, texts.

    shard, offset: where it is stored; "" and -1 if unknown. labels: values as text, by name.
    pictures: thumbnails uint8[h, w, 3], by field. fields: what each field is, as text.
    error: what is wrong with it; "" if nothing is.
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
        """The other fields as one line."""
        return printable(", ".join(f"{name}: {value}" for name, value in self.fields.items()))

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the pixels as JSON-able values."""
        text = json.dumps({**vars(self), "pictures": list(self.pictures)}, ensure_ascii=False)
        values: dict[str, Any] = json.loads(text.encode("utf-8", "replace"))
        return values


class Variants(NamedTuple):
    """An image field of a loader, and the epochs and the seed with which it augments."""

    field: Field
    epochs: Sequence[int]
    seed: int


def read_views(
    index: Index, ids: Ints, labels: Sequence[ColumnInfo], variants: Variants | None = None
) -> list[SampleView]:
    """Return the samples with these ids, in their order. Each shard is read forward.

    labels: the labels to show. variants: show the image as a loader delivers it, once per epoch.
    """
    views: dict[int, SampleView] = {}
    shards = index.shard_of(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about odd images that it can show
        for number in np.unique(shards).tolist():
            shard = index.shards[number]
            with open_source(shard.path, shard.bytes) as source:
                for i in np.unique(ids[shards == number]).tolist():
                    mine = [index.label_in_sample(label, i) for label in labels]
                    builder = ViewBuilder(index.key(i), mine)
                    _add_members(builder, index, source, i, variants)
                    start = int(index.offsets.start[i])
                    views[i] = builder.view(shard=shard.shown, offset=start, split=shard.split)
    return [views[i] for i in ids.tolist()]


class ViewBuilder:
    """Builder of the view of one sample. labels: that its fields hold."""

    def __init__(self, key: str, labels: Sequence[ColumnInfo] = ()) -> None:
        self._key, self._labels = key, labels
        self.labels: dict[str, str] = {}
        self.fields: dict[str, str] = {}
        self._pictures: dict[str, Pixels] = {}
        self._text, self._errors = "", list[str]()

    def view(self, **where: Any) -> SampleView:
        return SampleView(
            self._key,
            labels=self.labels,
            text=self._text,
            pictures=self._pictures,
            fields=self.fields,
            error="; ".join(self._errors),
            **where,
        )

    def add_error(self, name: str, reason: object) -> None:
        """Add an error of a field; of the sample if `name` is empty."""
        text = str(reason) or type(reason).__name__
        self._errors.append(f"{name}: {text}" if name else text)

    def add_size(self, name: str, size: int) -> None:
        """Add a field that is not read."""
        self.fields[name] = format_size(size)
        if size > _MAX_BYTES and is_image(name):
            limit = format_size(_MAX_BYTES)
            self.add_error(name, f"{format_size(size)} are too many to show (limit {limit})")

    def add_bytes(self, name: str, data: bytes | memoryview) -> None:
        """Add a field as it is stored in a shard."""
        mine = [label for label in self._labels if label.field == name]
        for label in mine:
            self._add_label(label, memoryview(data))
        extension = _extension(name)
        try:
            if is_image(name):
                pixels = decode_image(data)
                height, width = pixels.shape[:2]
                self.fields[name] = f"{width} x {height}, {format_size(len(data))}"
                self._pictures[name] = thumbnail(pixels)
            elif extension == "npy":
                self._add_npy(name, data, is_label=any(label.entry is None for label in mine))
            elif extension == "json":
                self._add_json(name, data, {label.entry for label in mine if label.entry})
            elif not mine:
                self._add_text(name, data, extension)
        except Exception as error:  # parsers raise anything; it is shown in the sample's place
            self.fields[name] = format_size(len(data))
            self.add_error(name, error)

    def add_value(self, name: str, value: Any, classes: Sequence[str] = ()) -> None:
        """Add a field as a batch has it. classes: names of class numbers or class shares."""
        if isinstance(value, (bytes, memoryview)):
            self.add_bytes(name, value)
        elif isinstance(value, str):
            self._text = self._text or shortened(value)
        elif isinstance(value, np.ndarray) and value.ndim:
            if shares := class_shares_text(value, classes):
                self.labels[name] = shares
            else:
                self._add_array(name, value)
        elif isinstance(value, (np.ndarray, np.generic, int, float)):
            number = value.item() if isinstance(value, (np.ndarray, np.generic)) else value
            is_class = type(number) is int and 0 <= number < len(classes)
            self.labels[name] = classes[int(number)] if is_class else number_text(number)
        elif value is not None:
            self.fields[name] = shortened(_json_text(value))

    def add_variants(self, name: str, data: memoryview, variants: Variants, number: int) -> None:
        """Add the image of sample `number` as a loader delivers it in each epoch."""
        self.fields[name] = format_size(len(data))
        example = variants.field.example
        for epoch in variants.epochs:
            draws = uniform(np.array([number]), DRAWS, "sample", variants.seed, epoch)[0]
            out = np.empty(example.shape, example.dtype) if example is not None else None
            try:
                value = variants.field.read(name, data, out, draws)
            except Exception as error:  # whatever the field raises is the reason
                self.add_error(name, error)
                return
            pixels = out if out is not None else np.moveaxis(value, 0, -1)
            self._pictures[f"epoch {epoch}"] = thumbnail(pixels)

    def _add_label(self, label: ColumnInfo, data: memoryview) -> None:
        try:
            value = scalar(data, label.entry)
            text = number_text(value)
            if label.kind != "number":
                text = "|".join(classes_in(data, label.entry, label.classes))
            self.labels[label.name] = text
        except Exception as error:  # parsers raise anything
            self.add_error(f"label {label.name}", error)

    def _add_npy(self, name: str, data: bytes | memoryview, *, is_label: bool) -> None:
        value = array().read(name, memoryview(data), None, np.zeros(0))
        if value is not None and value.ndim:
            self._add_array(name, value)
        elif value is not None and not is_label:
            self.fields[name] = number_text(value.item())

    def _add_array(self, name: str, value: Array) -> None:
        self.fields[name] = array_text(value)
        pixels = to_image(value)
        if pixels is not None:
            self._pictures[name] = thumbnail(pixels)

    def _add_json(self, name: str, data: bytes | memoryview, shown: set[str]) -> None:
        """Add a JSON document without the entries that are shown as labels."""
        document = parsed_json(bytes(data))
        if isinstance(document, dict):
            document = {entry: value for entry, value in document.items() if entry not in shown}
        if document or not shown:
            self.fields[name] = shortened(re.sub(r'"(\w+)":', r"\1:", _json_text(document)))

    def _add_text(self, name: str, data: bytes | memoryview, extension: str) -> None:
        limit = 4 * MAX_TEXT  # bytes of the characters that are kept
        try:
            errors = "ignore" if len(data) > limit else "strict"
            text = bytes(data[: limit + 4]).decode("utf-8-sig", errors)
        except UnicodeDecodeError:
            if extension in _TEXTS:
                self.add_error(name, "it is not UTF-8 text")
            self.fields[name] = format_size(len(data))
            return
        is_known = extension in (*_TEXTS, *_NUMBERS)
        if not is_known and not "".join(text.split()).isprintable():
            self.fields[name] = format_size(len(data))
        elif extension in _NUMBERS:
            self.labels[name] = shortened(text)
        elif extension in _TEXTS and not self._text:
            self._text = shortened(text)
        else:
            self.fields[name] = shortened(text)


def _add_members(
    builder: ViewBuilder, index: Index, source: Source, number: int, variants: Variants | None
) -> None:
    """Add the members of sample `number` to its view."""
    members = index.members(number)
    names = [name for name, _, _ in members]
    augmented = None
    if variants is not None:  # a loader takes the first of its names that the sample has
        augmented = next((name for name in variants.field.names if name in names), None)
        if augmented is None:
            builder.add_error("", f"it has none of {', '.join(variants.field.names)}")
    crcs = index.offsets.members_of(np.array([number])).crc.tolist()
    data_of = _read_members(source, members)
    for place, (name, _, size) in enumerate(members):
        data, crc = data_of.get(place), crcs[place]
        is_other_image = variants is not None and is_image(name)
        if data is None or (is_other_image and name != augmented):
            builder.add_size(name, size)
        elif crc and crc32(data) != crc:
            builder.add_error(name, "its bytes are not those that were packed (crc32)")
        elif variants is not None and name == augmented:
            builder.add_variants(name, data, variants, number)
        else:
            builder.add_bytes(name, data)


def _read_members(source: Source, members: list[tuple[str, int, int]]) -> dict[int, memoryview]:
    """Return the bytes of members that can be shown, by position, read at once unless far apart."""
    wanted = [
        (place, offset, offset + size)
        for place, (name, offset, size) in enumerate(members)
        if size <= (_MAX_BYTES if _is_known(name) else _MAX_UNKNOWN_BYTES)
    ]
    start = min((begin for _, begin, _ in wanted), default=0)
    stop = max((end for _, _, end in wanted), default=0)
    if stop - start > sum(end - begin for _, begin, end in wanted) + _GAP:
        return {place: _read(source, begin, end) for place, begin, end in wanted}
    data = _read(source, start, stop)
    return {place: data[begin - start : end - start] for place, begin, end in wanted}


def _read(source: Source, start: int, stop: int) -> memoryview:
    data = memoryview(bytearray(stop - start))
    source.read_into(data, start)
    return data


def _is_known(name: str) -> bool:
    return is_image(name) or _extension(name) in (*_TEXTS, *_NUMBERS, "npy", "json")


def _extension(name: str) -> str:
    return name.rpartition(".")[2]


def _json_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=lambda item: type(item).__name__)
    except RecursionError:
        return "nested too deeply to be shown"
