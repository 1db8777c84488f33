"""Samples of any Python iterable or torch data set.

A sample is a dict of fields, a tuple or a single value. In a dict, "__key__" is the key, and other
names that begin with two underscores are ignored. The values of a tuple are named by `fields`, by
default ("png", "cls"). A map-style data set is read by number, so an item that raises can be
skipped. An iterable that raises ends the conversion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from wdstrain.conversion.classes import (
    MOST_CLASSES,
    check_classes,
    class_rule,
    counted_classes,
    stated_classes,
)
from wdstrain.conversion.encode import encode
from wdstrain.conversion.listing import BadSample, Sample, Source
from wdstrain.errors import SampleError, UsageError
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
    for samples in parts.values():
        _check_iterable(samples)
    names = check_classes(classes) or check_classes(classes_of(next(iter(parts.values()), None)))
    places = {name: place for place, name in enumerate(names)}
    is_declared = any(label.field == "cls" or label.name == "label" for label in labels)
    kinds, numbers = set[str](), set[int]()  # what each cls is; class numbers without names

    def read(split: str, number: int, sample: Any) -> Sample:
        key, packed = _packed(sample, fields, quality, places)
        stratum = _stratum(packed)
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

    sizes = [_length(part) for part in parts.values()]
    return Source(
        name,
        entries,
        all_labels,
        source or {"kind": "samples", **stated_classes(classes)},
        None if None in sizes else sum(filter(None, sizes)),
        stratum="label",
    )


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
        of_those = " of those in fields=" if fields is not None else ""
        has = ", ".join(map(repr, sample)) or "nothing"
        raise SampleError(f"it has no fields{of_those}, only {has}")
    key = named.get("__key__")
    if key is not None and (not isinstance(key, str) or not _KEY.fullmatch(key)):
        raise SampleError(f"its __key__ is {key!r}, but a key must be text without NUL")
    if len({field for field, _ in packed}) < len(packed):
        names = ", ".join(field for field, _ in packed)
        raise SampleError(f"two of its fields have the same name: {names}")
    return key, packed


def _check_iterable(samples: Any) -> None:
    """Raise UsageError for tables and single values, which are iterable too."""
    if hasattr(samples, "to_dict") and hasattr(samples, "columns"):
        raise UsageError(
            "a DataFrame is a table: use wt.convert_table(frame, out, image=..., label=...)."
        )
    if isinstance(samples, (str, bytes, Mapping)):
        raise UsageError(
            f"samples is {type(samples).__name__}: must be an iterable of samples, each a dict of "
            f"fields."
        )


def _length(part: Any) -> int | None:
    try:
        return len(part)
    except (TypeError, NotImplementedError):
        return None


def _numbered(part: Any) -> Iterator[tuple[int, Any]]:
    """Yield (number, sample); the sample that a data set cannot give is an error."""
    if hasattr(part, "__iter__"):
        yield from enumerate(part)
        return
    length = _length(part)
    if not hasattr(part, "__getitem__") or length is None:
        raise UsageError(
            f"{type(part).__name__} is neither an iterable nor a data set with a length. Give an "
            f"iterable of samples, each a dict of fields."
        )
    for number in range(length):
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
            f"a sample has {len(values)} values, but {len(names)} are named ({', '.join(names)}). "
            f"Name each value: fields=(...)"
        )
    return dict(zip(names, values, strict=True))


def _stratum(packed: list[tuple[str, Any]]) -> str:
    return next(
        (data.decode("utf-8", "replace").strip() for field, data in packed if field == "cls"), ""
    )


def classes_of(part: Any) -> tuple[str, ...]:
    """Return the class names of a torchvision data set; () if it has none."""
    names = getattr(part, "classes", None)
    if isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names):
        return tuple(names)
    return ()
