"""Checks of samples that are appended to a finished set, and the index of both together.

The set keeps its keys, classes, fields and columns. Samples that do not fit them are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wdstrain.conversion.catalog import Catalog
from wdstrain.conversion.result import ConversionResult, merged_counts
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index, join
from wdstrain.shards.kinds import NOT_A_COLUMN, ColumnInfo
from wdstrain.shards.offsets import Ints

_NUMBERED = re.compile(r"\d{9,}", re.ASCII)  # a key that a conversion made from a number


def next_numbered_key(former: Index) -> int:
    """Return the number of the next sample without a key of its own."""
    keys = filter(_NUMBERED.fullmatch, former.keys(np.arange(len(former))))
    return max(map(int, keys), default=-1) + 1


def was_appended(former: Index, catalog: Catalog, numbers: Ints, entry: dict[str, Any]) -> bool:
    """Return whether the last append to the set was of these samples.

    entry: what its record says about source, options and number of samples.
    """
    records = former.info.get("appended", [])
    if not records or any(records[-1].get(name) != value for name, value in entry.items()):
        return False
    known = set(former.keys(np.arange(len(former))))
    keys = [catalog.key(number) for number in numbers.tolist()]
    return all(key in known or _NUMBERED.fullmatch(key) for key in keys)


def check_keys(former: Index, catalog: Catalog, numbers: Ints, out: str) -> None:
    """Raise UsageError if a new sample has a key of the set, upper or lower case."""
    known = {key.casefold(): key for key in former.keys(np.arange(len(former)))}
    keys = [catalog.key(number) for number in numbers.tolist()]
    twice = [key for key in keys if key.casefold() in known]
    if twice:
        raise UsageError(
            f"{len(twice)} of {len(keys)} keys are in {out} already, such as '{twice[0]}'. A key "
            f"names one sample. Remove these samples from the source, or from the set with: "
            f"wdstrain remove"
        )


def check_labels(former: Index, labels: Sequence[ColumnInfo], out: str) -> None:
    """Raise UsageError unless the class numbers of the new samples mean the classes of the set."""
    for name in dict.fromkeys(label.name for label in [*former.labels, *labels]):
        old, new = _named(former.labels, name), _named(labels, name)
        if old is not None and new is not None:
            same_numbers = old.classes[: len(new.classes)] == new.classes
            if replace(old, classes=()) == replace(new, classes=()) and same_numbers:
                continue
        raise UsageError(
            f"the label '{name}' is {_shown(new)} in the new samples and {_shown(old)} in {out}. "
            f"A set keeps its labels and the numbers of its classes. Number the new samples alike "
            f"with classes=..., or convert them into another folder."
        )


def joined(former: Index, new: Index, out: str) -> Index:
    """Return the index of the set with the new shards.

    Raises UsageError if the new samples have other fields, or other kinds of values in a column.
    """
    _check_fields(former, new, out)
    columns = {column.place: column for column in former.columns}
    for column in new.columns:
        old = columns.get(column.place)
        kinds = {column.kind, old.kind if old is not None else column.kind}
        if len(kinds) > 1 and kinds != {"integer", "number"} and not _all_null(old, column):
            assert old is not None
            raise UsageError(
                f"the column '{column.name}' holds values of the kind {column.kind} in the new "
                f"samples, and {old.kind} in {out}. Give them the same kind of values."
            )
    # Without a column the set may still have values in its bytes, and nulls would hide them.
    known = tuple(column for column in new.columns if column.place in columns)
    new = replace(new.with_columns(known), labels=former.labels)
    return replace(join([former, new]), info=former.info)


def appended_info(former: Index, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the provenance of a set after an append. entry: the record of this append."""
    info = dict(former.info)
    info["appended"] = [*info.get("appended", []), entry]
    if "samples" in info:
        info["samples"] = merged_counts([info["samples"], entry["samples"]], former.labels)
    for name in ("listed", "skipped", "renamed"):
        if isinstance(info.get(name), int):
            info[name] += entry[name]
    return info


def appended_result(index: Index) -> ConversionResult:
    """Return the result of the last append to a set, from what its index records."""
    entry = index.info["appended"][-1]
    return ConversionResult(
        index,
        entry["listed"],
        [],
        entry["renamed"],
        entry["samples"],
        entry["ignored"],
        limited=entry["limited"],
        divided=entry["divided"],
    )


def _check_fields(former: Index, new: Index, out: str) -> None:
    extra = [name for name in new.fields if name not in former.fields]
    if extra:
        raise UsageError(
            f"the new samples have the field '{extra[0]}', which {out} does not have. Its fields "
            f"are: {', '.join(former.fields)}. Drop the field, or convert into another folder."
        )
    for name in _fields_of_all(former):
        if name not in _fields_of_all(new):
            raise UsageError(
                f"every sample of {out} has the field '{name}', but not every new sample. Add the "
                f"field, or convert into another folder."
            )


def _fields_of_all(index: Index) -> Iterable[str]:
    extents = {name: index.offsets.extents[name][0] for name in index.fields}
    return [name for name, offset in extents.items() if not offset.null_count]


def _all_null(*columns: Any) -> bool:
    """Return whether one of the columns has no values."""
    return any(
        column is not None
        and column.kind != NOT_A_COLUMN
        and column.values.null_count == len(column)
        for column in columns
    )


def _named(labels: Sequence[ColumnInfo], name: str) -> ColumnInfo | None:
    return next((label for label in labels if label.name == name), None)


def _shown(label: ColumnInfo | None) -> str:
    if label is None:
        return "missing"
    names = ", ".join(label.classes[:8]) + (", ..." if len(label.classes) > 8 else "")
    return f"{label.kind}{f' ({names})' if names else ''}"
