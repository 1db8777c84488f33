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
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from wdstrain.conversion.encode import encode
from wdstrain.conversion.labels import (
    MOST_CLASSES,
    check_classes,
    class_rule,
    counted_classes,
    given_classes,
    stated_classes,
)
from wdstrain.conversion.listing import BadSample, Sample, Source, check_there
from wdstrain.conversion.options import PackOptions, TorchvisionOptions
from wdstrain.errors import SampleError, SourceError, UsageError
from wdstrain.runtime.options import refuse
from wdstrain.shards.kinds import ColumnInfo

_KEY = re.compile(r"[^\0\ud800-\udfff]+")  # text that UTF-8 can hold


def stream_samples(options: PackOptions) -> Source:
    """Return the samples of an iterable or a data set as a source."""
    names = given_classes(options.classes, options.like)
    refuse(
        not all(isinstance(label, ColumnInfo) for label in options.labels),
        "{labels}: must be a list of ColumnInfo.",
        labels=options.labels,
    )
    return stream(
        "samples",
        {"": options.samples},
        partial(_named, fields=options.fields),
        {"kind": "samples", **stated_classes(names)},
        names=names or classes_of(options.samples),
        labels=options.labels,
        group=options.group,
        quality=options.pixel_quality,
    )


def stream(
    name: str,
    parts: Mapping[str, Any],
    fields_of: Callable[[Any], Mapping[str, Any]],
    about: dict[str, Any],
    *,
    names: Sequence[str] = (),
    labels: Sequence[ColumnInfo] = (),
    group: Callable[[Any], str] | None = None,
    strata: Sequence[str] | None = None,
    quality: int,
) -> Source:
    """Return samples as a source.

    parts: iterables or map-style data sets, by split; "": the split is drawn. fields_of: returns the
    values of a sample by field; raises SampleError for a bad one. names: of the classes of cls.
    group: returns the group of a sample. strata: of each sample; None: its cls decides, and is a
    label unless `labels` declare it. quality: of JPEGs that are made of pixels.
    """
    sizes = list(map(_length, parts.values()))
    places = {name: place for place, name in enumerate(names)}
    declared = {label.field for label in labels} | {label.name for label in labels}
    is_counted = strata is None and declared.isdisjoint(("cls", "label"))
    kinds, numbers = set[str](), set[int]()  # what each cls is; class numbers without names

    def stratum(cls: str) -> str:
        kind = "numbers" if cls.isdecimal() else "names"
        if cls and kinds - {kind}:
            raise SampleError(f"its cls is {cls!r}, but others are {min(kinds)}")
        number = int(cls) if kind == "numbers" else -1
        if is_counted and not names and number >= MOST_CLASSES:
            raise SampleError(f"its cls is {cls}, but a class must be {class_rule()}")
        kinds.update([kind] if cls else [])
        numbers.add(number)
        return names[number] if 0 <= number < len(names) else cls

    def read(split: str, number: int, sample: Any) -> Sample:
        if isinstance(sample, SampleError):
            raise sample
        key, packed = _packed(fields_of(sample), quality, places)
        cls = dict(packed).get("cls", b"").decode("utf-8", "replace").strip()
        kind = stratum(cls) if strata is None else strata[number]
        return Sample(key, packed, split, str(group(sample)) if group else "", kind, number + 1)

    def entries() -> Iterator[Sample | BadSample]:
        for split, part in parts.items():
            for number, sample in _numbered(part):
                try:
                    yield read(split, number, sample)
                except (SampleError, OSError) as error:
                    yield BadSample(name, number + 1, "", str(error))

    def all_labels() -> tuple[ColumnInfo, ...]:
        if "numbers" not in kinds or not is_counted:
            return tuple(labels)
        known = tuple(names) or counted_classes("cls", numbers - {-1})
        return (*labels, ColumnInfo("label", "class", "cls", classes=known))

    total = None if None in sizes else sum(filter(None, sizes))
    return Source(name, entries, all_labels, about, total, stratum="label")


def _packed(
    values: Mapping[str, Any], quality: int, places: Mapping[str, int]
) -> tuple[str | None, list[tuple[str, Any]]]:
    """Return (key, parts) of a sample. Raises SampleError if it cannot be packed."""
    packed = [
        encode(field, value, quality=quality, classes=places)
        for field, value in values.items()
        if not field.startswith("__")
    ]
    key = values.get("__key__")
    if key is not None and (not isinstance(key, str) or not _KEY.fullmatch(key)):
        raise SampleError(f"its __key__ is {key!r}, but a key must be text without NUL")
    if len(dict(packed)) < len(packed):
        raise SampleError(
            f"two of its fields have the same name: {', '.join(field for field, _ in packed)}"
        )
    return key, packed


def _length(part: Any) -> int | None:
    """Return the number of samples, None if unknown. Raises UsageError for no iterable of samples."""
    length = None
    with suppress(TypeError, NotImplementedError):  # an iterable has none
        length = len(part)
    refuse(
        (length is None and not hasattr(part, "__iter__"))
        or hasattr(part, "to_dict")
        or isinstance(part, (str, bytes, Mapping)),
        f"samples is {type(part).__name__}: must be a data set with a length, or an iterable of "
        "samples, each a dict of fields. For a DataFrame, use "
        "wt.convert_table(frame, out, image=..., label=...).",
    )
    return length


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
        named = {f: v for f, v in sample.items() if fields is None or f in (*fields, "__key__")}
        if all(name.startswith("__") for name in named):
            raise SampleError(f"it has no fields, only {', '.join(map(repr, sample)) or 'nothing'}")
        return named
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


def stream_torchvision(options: TorchvisionOptions) -> Source:
    """Return the samples of a data set.

    Raises UsageError for a name or split that torchvision does not know, SourceError for a split
    that is missing in `root` or damaged.
    """
    import torchvision.datasets  # takes half a second

    name, root, splits = options.name, os.fspath(options.root), options.splits
    refuse(
        name not in torchvision.datasets.__all__,
        f"torchvision.datasets has no data set '{name}'.",
        "Check its name.",
    )
    kind: Any = getattr(torchvision.datasets, name)
    check_there(root, kind="folder")
    parameters = inspect.signature(kind).parameters
    parameter = next((name for name in ("train", "split") if name in parameters), "")
    # For a split without a name, other data sets raise an error that lists their splits.
    known = {"train": ["train", "test"], "split": list(splits) or [""]}.get(parameter, [""])
    strange = set(splits) - set(known)
    refuse(
        strange,
        f"{name} has no split '{min(strange, default='')}'.",
        f"Use {' or '.join(known)}.",
    )
    wanted = list(splits) or known
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
                "Download it first, or name the splits to convert: {splits}",
                {"splits": ["train"]},
            ) from None
        data_sets["val" if split == "valid" else split] = data
    files = {split: getattr(data, "samples", None) for split, data in data_sets.items()}
    has_files = all(isinstance(rows, list) and rows for rows in files.values())
    source = stream(
        name,
        files if has_files else data_sets,
        _file_fields if has_files else partial(_named, fields=("png", "cls")),
        {"kind": "torchvision", "name": name, "splits": list(data_sets)},
        names=classes_of(next(iter(data_sets.values()))),
        quality=options.pixel_quality,
    )
    return replace(
        source,
        resplit=True,
        ignored={f"split {one}, which was not asked for": 1 for one in known if one not in wanted},
    )


def _file_fields(row: tuple[str, int]) -> dict[str, Any]:
    """Return the fields of a row of a data set that lists its files: their bytes are kept."""
    path, target = row
    with open(path, "rb") as file:
        return {str(path).rpartition(".")[2].lower(): file.read(), "cls": int(target)}
