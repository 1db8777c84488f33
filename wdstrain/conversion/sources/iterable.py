"""Samples of any Python iterable or torch data set, also of torchvision by the name of its class.

A sample is a dict of fields, a tuple or a single value. In a dict, "__key__" is the key, and other
names that begin with two underscores are ignored. The values of a tuple are named by `fields`, by
default ("png", "cls"). A map-style data set is read by number, so an item that raises can be
skipped. An iterable that raises ends the conversion.

A data set of torchvision that lists its files (`samples`) is packed with their bytes. Of others,
items are read and their images stored as PNG, which is lossless. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from wdstrain.conversion.classes import (
    MOST_CLASSES,
    check_classes,
    class_rule,
    counted_classes,
    stated_classes,
)
from wdstrain.conversion.encode import encode
from wdstrain.conversion.listing import BadSample, Sample, Source, check_there
from wdstrain.errors import SampleError, SourceError, UsageError
from wdstrain.shards.kinds import ColumnInfo

_KEY = re.compile(r"[^\0\ud800-\udfff]+")  # text that UTF-8 can hold


def stream_samples(
    parts: Mapping[str, Any],
    *,
    fields: Sequence[str] | None = None,
    classes: Sequence[str] = (),
    labels: Sequence[ColumnInfo] = (),
    group: Callable[[Any], str] | None = None,
    quality: int = 95,
    name: str = "samples",
    source: dict[str, Any] | None = None,
) -> Source:
    """Return samples as a source.

    parts: iterables or map-style data sets, by split; "": the split is drawn. group: returns the
    group of a sample. quality: of JPEGs that are made of pixels.
    """
    sizes = list(map(_length, parts.values()))
    names = check_classes(classes) or classes_of(next(iter(parts.values()), None))
    places = {name: place for place, name in enumerate(names)}
    is_declared = any(label.field == "cls" or label.name == "label" for label in labels)
    kinds, numbers = set[str](), set[int]()  # what each cls is; class numbers without names

    def read(split: str, number: int, sample: Any) -> Sample:
        key, packed = _packed(sample, fields, quality, places)
        cls = next((data for field, data in packed if field == "cls"), b"")
        stratum = cls.decode("utf-8", "replace").strip()
        kind = "numbers" if stratum.isdecimal() else "names"
        if stratum and kinds - {kind}:
            raise SampleError(f"its cls is {stratum!r}, but others are {min(kinds)}")
        if kind == "numbers" and int(stratum) < len(names):
            stratum = names[int(stratum)]
        elif kind == "numbers" and not (names or is_declared):
            if int(stratum) >= MOST_CLASSES:
                raise SampleError(f"its cls is {stratum}, but a class must be {class_rule()}")
            numbers.add(int(stratum))
        kinds.update([kind] if stratum else [])
        grouped = str(group(sample)) if group else ""
        return Sample(key, packed, split, grouped, stratum, number + 1)

    def entries() -> Iterator[Sample | BadSample]:
        for split, part in parts.items():
            for number, sample in _numbered(part):
                try:
                    yield read(split, number, sample)
                except SampleError as error:
                    yield BadSample(name, number + 1, "", str(error))

    def all_labels() -> tuple[ColumnInfo, ...]:
        if "numbers" not in kinds or is_declared:
            return tuple(labels)
        known = names or counted_classes("cls", numbers)
        return (*labels, ColumnInfo("label", "class", "cls", classes=known))

    about = source or {"kind": "samples", **stated_classes(classes)}
    total = None if None in sizes else sum(filter(None, sizes))
    return Source(name, entries, all_labels, about, total, stratum="label")


def _packed(
    sample: Any, fields: Sequence[str] | None, quality: int, places: Mapping[str, int]
) -> tuple[str | None, list[tuple[str, Any]]]:
    """Return (key, parts) of a sample. Raises SampleError if it cannot be packed."""
    if isinstance(sample, SampleError):
        raise sample
    named = _named(sample, fields)
    packed = [
        encode(field, value, quality=quality, classes=places)
        for field, value in named.items()
        if not field.startswith("__")
    ]
    if not packed:
        raise SampleError(f"it has no fields, only {', '.join(map(repr, sample)) or 'nothing'}")
    key = named.get("__key__")
    if key is not None and (not isinstance(key, str) or not _KEY.fullmatch(key)):
        raise SampleError(f"its __key__ is {key!r}, but a key must be text without NUL")
    if len(dict(packed)) < len(packed):
        names = ", ".join(field for field, _ in packed)
        raise SampleError(f"two of its fields have the same name: {names}")
    return key, packed


def _length(part: Any) -> int | None:
    """Return the number of samples, None if unknown. Raises UsageError for no iterable of samples."""
    is_table = hasattr(part, "to_dict") and hasattr(part, "columns")
    if not is_table and not isinstance(part, (str, bytes, Mapping)):
        try:
            return len(part)
        except (TypeError, NotImplementedError):
            if hasattr(part, "__iter__"):
                return None
    raise UsageError(
        f"samples is {type(part).__name__}: must be a data set with a length, or an iterable of "
        "samples, each a dict of fields. For a DataFrame, use "
        "wt.convert_table(frame, out, image=..., label=...)."
    )


def _numbered(part: Any) -> Iterator[tuple[int, Any]]:
    """Yield (number, sample); the sample that a data set cannot give is an error."""
    if hasattr(part, "__iter__"):
        yield from enumerate(part)
        return
    for number in range(len(part)):
        try:
            sample = part[number]
        except Exception as error:  # the user's data set may raise anything
            sample = SampleError(f"the data set raised {type(error).__name__}: {error}")
        yield number, sample


def _named(sample: Any, fields: Sequence[str] | None) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        if odd := [name for name in sample if not isinstance(name, str)]:
            raise SampleError(f"the name of a field is {odd[0]!r}, but it must be text")
        return {f: v for f, v in sample.items() if fields is None or f in (*fields, "__key__")}
    values = list(sample) if isinstance(sample, (tuple, list)) else [sample]
    names = list(fields) if fields is not None else ["png", "cls"][: len(values)]
    if len(names) != len(values):
        raise UsageError(
            f"a sample has {len(values)} values, but {len(names)} are named ({', '.join(names)}).",
            "Name each value: fields=(...)",
        )
    return dict(zip(names, values, strict=True))


def classes_of(part: Any) -> tuple[str, ...]:
    """Return the class names of a torchvision data set; () if it has none."""
    names: Any = getattr(part, "classes", None)
    is_names = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    return check_classes(names) if is_names else ()


# --- data sets of torchvision ---------------------------------------------------------------------


def stream_torchvision(name: str, root: str, *, splits: Sequence[str] = ()) -> Source:
    """Return the samples of a data set. splits: names of its splits (default: all).

    Raises UsageError for a name or split that torchvision does not know, SourceError for a split
    that is missing in `root` or damaged.
    """
    import torchvision.datasets  # takes half a second

    if name not in torchvision.datasets.__all__:
        raise UsageError(
            f"torchvision.datasets has no data set '{name}'.",
            "Check its name.",
        )
    kind: Any = getattr(torchvision.datasets, name)
    check_there(root, kind="folder")
    parameter, known = _splits_of(kind, root)
    if strange := sorted(set(splits) - set(known)):
        raise UsageError(
            f"{name} has no split '{strange[0]}'.",
            f"Use {' or '.join(known)}.",
        )
    has_parts = {"train", "val"} & set(known)  # of trainval
    wanted = list(splits) or [one for one in known if one != "trainval" or not has_parts]
    data_sets: dict[str, Any] = {}
    for split in wanted:
        value = split == "train" if parameter == "train" else split
        try:
            data = kind(root, **({parameter: value} if parameter else {}))
        except Exception as error:  # data sets raise any type for missing files
            raise SourceError(
                f"{name} in {root}: the split '{split}' is missing or cannot be read as "
                "torchvision expects it "
                f"({str(error).partition(chr(10))[0] or type(error).__name__}).",
                "Download it first, or name the splits to convert: splits=[...]",
            ) from None
        data_sets["val" if split == "valid" else split] = data
    files = {split: _Files(data.samples) for split, data in data_sets.items() if _has_files(data)}
    has_files = len(files) == len(data_sets)
    stream = stream_samples(
        files if has_files else data_sets,
        fields=None if has_files else ("png", "cls"),
        classes=classes_of(next(iter(data_sets.values()))),
        name=name,
        source={"kind": "torchvision", "name": name, "splits": list(data_sets)},
    )
    left_out = {f"split {one}, which was not asked for": 1 for one in known if one not in wanted}
    return replace(stream, resplit=True, ignored=left_out)


def _splits_of(kind: Any, root: str) -> tuple[str, list[str]]:
    """Return (parameter of the class that chooses a split, its splits)."""
    parameters = inspect.signature(kind).parameters
    if "train" in parameters or "split" not in parameters:
        return ("train", ["train", "test"]) if "train" in parameters else ("", [""])
    known = list[str]()
    try:
        kind(root, split=" ")
    except Exception as error:  # of any type; it names the splits
        known += re.findall(r"'([^']*)'", str(error).partition("Valid values are ")[2])
    return "split", known or ["train", "test"]


class _Files:
    """The files of a data set that lists them, as samples with their bytes."""

    def __init__(self, rows: list[tuple[str, int]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        path, target = self._rows[number]
        with open(path, "rb") as file:
            return {str(path).rpartition(".")[2].lower(): file.read(), "cls": int(target)}


def _has_files(data: Any) -> bool:
    rows = getattr(data, "samples", None)
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], tuple)
