"""Checks of samples that are appended to a finished set, and the index of both together.

The set keeps its keys, classes, fields and columns. Samples that do not fit them are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wdstrain.errors import UsageError
from wdstrain.order.rng import U64, bits, key
from wdstrain.shards.declare import class_counts, with_labels
from wdstrain.shards.index import Index, join
from wdstrain.shards.kinds import NOT_A_COLUMN, ColumnInfo
from wdstrain.shards.offsets import Ints

_NUMBERED = re.compile(r"\d{9,}", re.ASCII)  # a key that a conversion made from a number


def next_numbered_key(former: Index) -> int:
    """Return the number of the next sample without a key of its own."""
    keys = filter(_NUMBERED.fullmatch, former.keys(np.arange(len(former))))
    return max(map(int, keys), default=-1) + 1


def is_repeated(former: Index, new: Index) -> bool:
    """Return whether the last append to the set was of samples with the bytes of the new ones.

    Keys that were made from a number may differ: those of the new samples follow on the set's.
    """
    first = len(former) - len(new)
    if first < 0 or not former.info.get("appended"):
        return False
    pairs = ((former, np.arange(first, len(former))), (new, np.arange(len(new))))
    before, now = (_sample_hashes(index, ids) for index, ids in pairs)
    known, keys = (index.keys(ids) for index, ids in pairs)
    return np.array_equal(before, now) and all(map(_NUMBERED.fullmatch, {*keys} - {*known}))


def _sample_hashes(index: Index, ids: Ints) -> U64:
    """Return a hash of the fields and bytes of each sample, sorted.

    Members are not compared one by one: with other labels, the same images are other samples.
    """
    members = index.offsets.members_of(ids)
    names = np.array([key("field", name) for name in index.fields], np.uint64)[members.field]
    words = members.size.astype(np.uint64) << np.uint64(32) | members.crc.astype(np.uint64)
    return np.sort(np.add.reduceat(bits(names ^ words, "member"), members.first[:-1]))


def check_keys(former: Index, new: Iterable[str], out: str) -> None:
    """Raise UsageError if a new sample has a key of the set, upper or lower case."""
    known = {key.casefold(): key for key in former.keys(np.arange(len(former)))}
    keys = list(new)
    twice = [key for key in keys if key.casefold() in known]
    if twice:
        raise UsageError(
            f"{len(twice)} of {len(keys)} keys are in {out} already, such as '{twice[0]}'. A key "
            f"names one sample. Remove these samples from the source, or from the set with: "
            f"wdstrain remove"
        )


def check_labels(former: Index, labels: Sequence[ColumnInfo], out: str) -> None:
    """Raise UsageError unless the class numbers of the new samples mean the classes of the set.

    The new samples may have more classes, after those of the set.
    """
    known, new = ({label.name: label for label in part} for part in (former.labels, labels))
    for name in known | new:
        pair = known.get(name), new.get(name)
        if not _are_alike(*pair):
            raise UsageError(
                f"the label '{name}' is {_shown(pair[1])} in the new samples and {_shown(pair[0])} "
                f"in {out}. A set keeps its labels and the numbers of its classes. Number the new "
                f"samples alike with classes=..., new classes last, or convert them into another "
                f"folder."
            )


def _are_alike(old: ColumnInfo | None, new: ColumnInfo | None) -> bool:
    if old is None or new is None or replace(old, classes=()) != replace(new, classes=()):
        return False
    return all(before == now for before, now in zip(old.classes, new.classes, strict=False))


def appended(former: Index, new: Index, entry: dict[str, Any], out: str) -> Index:
    """Return the index of the set with the new shards. entry: the record of this append.

    Raises UsageError if the new samples have keys of the set, other fields, or other kinds of
    values in a column.
    """
    check_keys(former, new.keys(np.arange(len(new))), out)
    _check_fields(former, new, out)
    columns = {column.place: column for column in former.columns}
    # Without a column the set may still have values in its bytes, and nulls would hide them.
    known = [column for column in new.columns if column.place in columns]
    for column in known:
        old = columns[column.place]
        kinds = {old.kind, column.kind}
        if len(kinds) > 1 and kinds != {"integer", "number"} and not _all_null(old, column):
            raise UsageError(
                f"the column '{column.name}' holds values of the kind {column.kind} in the new "
                f"samples, and {old.kind} in {out}. Give them the same kind of values."
            )
    by_name = {label.name: label for label in new.labels}
    labels = [
        max(label, by_name.get(label.name, label), key=lambda label: len(label.classes))
        for label in former.labels
    ]
    joined = join([with_labels(part, labels) for part in (former, new.with_columns(known))])
    info = {**former.info, "appended": [*former.info.get("appended", []), entry]}
    info |= {"samples": class_counts(joined)} if "samples" in info else {}
    for name in ("listed", "skipped", "renamed"):
        if isinstance(info.get(name), int):
            info[name] += entry[name]
    return replace(joined, info=info)


def _check_fields(former: Index, new: Index, out: str) -> None:
    extra = [name for name in new.fields if name not in former.fields]
    if extra:
        raise UsageError(
            f"the new samples have the field '{extra[0]}', which {out} does not have. Its fields "
            f"are: {', '.join(former.fields)}. Drop the field, or convert into another folder."
        )
    missing = [name for name in _fields_of_all(former) if name not in _fields_of_all(new)]
    if missing:
        raise UsageError(
            f"every sample of {out} has the field '{missing[0]}', but not every new sample. Add "
            f"the field, or convert into another folder."
        )


def _fields_of_all(index: Index) -> list[str]:
    return [name for name in index.fields if not index.offsets.extents[name][0].null_count]


def _all_null(*columns: Any) -> bool:
    """Return whether one of the columns has no values."""
    return any(
        column.kind != NOT_A_COLUMN and column.values.null_count == len(column)
        for column in columns
    )


def _shown(label: ColumnInfo | None) -> str:
    if label is None:
        return "missing"
    names = ", ".join(label.classes[:8]) + (", ..." if len(label.classes) > 8 else "")
    return f"{label.kind}{f' ({names})' if names else ''}"
