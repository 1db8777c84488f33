"""Python samples to a stream: any iterable, or a torch data set, of dicts, tuples or single values.

A dict names its fields itself ("__key__" is its key; other names with two underscores are passed over, as webdataset's own);
a tuple is named by `fields`, or taken for (picture, class). A map-style data set is read by number from 0, so one item that
raises can be skipped; an iterable that raises has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from wdstrain.conversion.classes import Numbered, check_classes, stated_classes
from wdstrain.conversion.encode import encode
from wdstrain.conversion.listing import BadSample, BadSamples, Part, Stream, StreamSample
from wdstrain.errors import SampleError, UsageError
from wdstrain.shards.label import Label


def stream_samples(
    samples: Any,
    *,
    fields: Sequence[str] | None = None,
    classes: Sequence[str] = (),
    labels: Sequence[Label] = (),
    group: Callable[[Any], str] | None = None,
    splits: Mapping[str, Any] | None = None,
    quality: int = 95,
    name: str = "samples",
    source: dict[str, Any] | None = None,
) -> Stream:
    """The samples of an iterable or map-style data set, or of several that are splits by name (`splits`, then `samples` is None)."""
    if hasattr(samples, "to_dict") and hasattr(samples, "columns"):
        raise UsageError(
            "a DataFrame is a table: use wt.convert_table(frame, out, image=..., label=...)."
        )
    if isinstance(samples, (str, bytes, Mapping)):
        raise UsageError(
            f"samples is {type(samples).__name__}; give an iterable of samples, each a dict of fields."
        )
    parts = dict(splits) if splits is not None else {"": samples}
    numbers = Numbered("cls")
    numbered = False  # whether a cls is a number
    named_so = False  # whether a cls is a text that is no number, which only readers with names of classes understand
    names = check_classes(classes) or check_classes(_classes(next(iter(parts.values()), None)))
    places = {name: place for place, name in enumerate(names)}
    counted = not names and not any(
        label.field == "cls" or label.name == "label" for label in labels
    )

    def entries(quarantine: BadSamples) -> Iterator[StreamSample]:
        nonlocal numbered, named_so
        for split, part in parts.items():
            for number, sample in _numbered(part, name, quarantine):
                try:
                    named = _named(sample, fields)
                    packed = [
                        encode(field, value, quality=quality, classes=places)
                        for field, value in named.items()
                        if not field.startswith("__")
                    ]
                    if not packed:
                        raise SampleError(
                            f"it has no fields, but {', '.join(map(repr, named)) or 'nothing'}"
                        )
                    key, stratum = named.get("__key__"), _stratum(packed)
                    if key is not None and (not isinstance(key, str) or not key or "\0" in key):
                        raise SampleError(
                            f"its __key__ is {key!r}, and a key is a text without NUL"
                        )
                    if len({field for field, _ in packed}) < len(packed):
                        raise SampleError(
                            f"two of its fields have one name: {', '.join(field for field, _ in packed)}"
                        )
                    if stratum and (named_so if stratum.isdecimal() else numbered):
                        raise SampleError(
                            f"its cls is {stratum!r}, and others are {'names' if named_so else 'numbers'}"
                        )
                    if counted and stratum.isdecimal():
                        numbers.see(int(stratum))
                except SampleError as error:
                    quarantine.put(BadSample(name, number + 1, "", str(error)))
                    continue
                named_so = named_so or bool(stratum and not stratum.isdecimal())
                numbered = numbered or stratum.isdecimal()
                if stratum.isdecimal() and int(stratum) < len(names):
                    stratum = names[int(stratum)]
                yield StreamSample(key, packed, split, str(group(sample)) if group else "", stratum)

    def found() -> tuple[Label, ...]:
        if not numbered or any(label.field == "cls" or label.name == "label" for label in labels):
            return tuple(labels)
        return (*labels, Label("label", "class", "cls", classes=names or numbers.classes()))

    sizes = [_length(part) for part in parts.values()]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    return Stream(
        name,
        entries,
        found,
        source or {"kind": "samples", **stated_classes(check_classes(classes))},
        total,
        stratum="label",
    )


def _length(part: Any) -> int | None:
    try:
        return len(part)
    except (TypeError, NotImplementedError):
        return None


def _numbered(part: Any, name: str, quarantine: BadSamples) -> Iterator[tuple[int, Any]]:
    if hasattr(part, "__iter__"):
        yield from enumerate(part)
        return
    length = _length(part)
    if not hasattr(part, "__getitem__") or length is None:
        raise UsageError(
            f"{type(part).__name__} is neither an iterable nor a data set with a length. Give one of them."
        )
    for number in range(length):
        try:
            sample = part[number]
        except Exception as error:  # whatever a data set of the user raises is the sample's fault
            quarantine.put(
                BadSample(
                    name, number + 1, "", f"the data set raised {type(error).__name__}: {error}"
                )
            )
            continue
        yield number, sample


def _named(sample: Any, fields: Sequence[str] | None) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        return {
            str(field): value
            for field, value in sample.items()
            if fields is None or field in (*fields, "__key__")
        }
    values = list(sample) if isinstance(sample, (tuple, list)) else [sample]
    names = list(fields) if fields is not None else ["png", "cls"][: len(values)]
    if len(names) != len(values):
        raise UsageError(
            f"a sample has {len(values)} values and {len(names)} names ({', '.join(names)}). Name each: fields=(...)"
        )
    return dict(zip(names, values, strict=True))


def _stratum(packed: list[Part]) -> str:
    return next(
        (data.decode("utf-8", "replace").strip() for field, data in packed if field == "cls"), ""
    )


def _classes(part: Any) -> tuple[str, ...]:
    """The class names of a torchvision data set, or nothing."""
    found = getattr(part, "classes", None)
    if isinstance(found, (list, tuple)) and all(isinstance(one, str) for one in found):
        return tuple(found)
    return ()
