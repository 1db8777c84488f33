"""Names and numbers of classes: given by the user, taken from an earlier set, or counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from hashlib import blake2b

from wdstrain.errors import UsageError
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.label_kinds import RANGE
from wdstrain.shards.resolve import open_index
from wdstrain.storage.addresses import Urls

MOST_CLASSES = 1_000_000  # classes without names
_GAP = 100  # class numbers per number that occurs; numbers with wider gaps are ids


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes. Raises UsageError for a text, or for a name that comes twice."""
    if isinstance(classes, str):
        raise UsageError(
            "must be a list of names, such as ['cat', 'dog'].",
            option="classes",
            value=classes,
        )
    names = tuple(classes)
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UsageError(
            f"classes has {twice!r} at {names.index(twice)} and again later: each name must be "
            "one class.",
            "Rename one.",
        )
    return names


def fixed_classes(
    classes: Sequence[str], like: Urls | None, asked: Sequence[tuple[str, str | None]]
) -> dict[str, ColumnInfo]:
    """Return the labels whose classes are given, by name.

    classes: names of the only label that is asked for; like: shards that have all labels. asked:
    (name, kind or None). Raises UsageError if they do not fit together.
    """
    names = check_classes(classes)
    if names:
        able = [name for name, kind in asked if kind != "number"]
        if len(able) != 1:
            raise UsageError(
                f"classes needs one label of classes, but there are {len(able)}: "
                f"{', '.join(able) or 'none'}.",
                "Use {like} for several labels, or write LABEL:number for numbers.",
                {"like": ...},
            )
        return {able[0]: ColumnInfo(able[0], dict(asked)[able[0]] or "class", "", classes=names)}
    if like is None:
        return {}
    labels = {label.name: label for label in open_index(like).labels}
    for name, _ in asked:
        if name not in labels:
            raise UsageError(
                f"these shards have no label {name!r}.",
                f"Use one of their labels: {', '.join(labels) or 'none'}.",
                option="like",
                value=like,
            )
    return {name: labels[name] for name, _ in asked}


def class_names(classes: Sequence[str], like: Urls | None) -> tuple[str, ...]:
    """Return the given classes of the field `cls`, whose label is called "label"; () if none."""
    fixed = fixed_classes(classes, like, [("label", None)])
    return fixed["label"].classes if fixed else ()


def stated_classes(names: Sequence[str]) -> dict[str, str]:
    """Return an entry for `Source.source` that identifies the given names of classes.

    It makes a resumed call with other names another call, also if no sample has a label.
    """
    names = check_classes(names)
    if not names:
        return {}
    some = ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
    digest = blake2b(json.dumps(list(map(str, names))).encode(), digest_size=4).hexdigest()
    return {"class_names": f"{len(names)}: {some} ({digest})"}


def class_rule(count: int = 0) -> str:
    """Return what a class number must be, for messages. count: of the classes; 0: no names."""
    if count:
        return f"a whole number from 0 to {count - 1}: there are {count} classes"
    return f"a whole number from 0 to {MOST_CLASSES - 1}; store an id or a time under another name"


def counted_classes(
    name: str, numbers: Collection[int], *, stated: bool = False
) -> tuple[str, ...]:
    """Return all class numbers up to the highest one, of a label without names of classes.

    stated: the user declared them as classes. Otherwise numbers with wide gaps are ids. Raises
    UsageError for these.
    """
    count = max(numbers, default=-1) + 1
    if not stated and count > max(RANGE, _GAP * len(numbers)):
        raise UsageError(
            f"{name} holds {len(numbers)} different whole numbers up to {count - 1}: as classes "
            f"counted from 0 they would make {count}, nearly all of them empty.",
            "Number them anew, name the classes with {classes}, or store them under another name. "
            f"For arrays, state the kind: {name}:class or {name}:number.",
            {"classes": ...},
        )
    return tuple(map(str, range(count)))
