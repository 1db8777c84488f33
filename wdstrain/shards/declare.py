"""Columns and labels for shards that were made elsewhere, read from their fields in one forward pass.

A column is named by where it is stored: `cls` for a field, `json.kind` for an entry of a JSON field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import UsageError
from wdstrain.report.printing import printable
from wdstrain.shards.columns import (
    PLAIN_FIELDS,
    Column,
    as_label,
    column_name,
    is_json,
    typed,
)
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import FLAG_CLASSES, KINDS, NOT_A_COLUMN, ColumnInfo, Place, json_place
from wdstrain.shards.label_values import read_columns
from wdstrain.shards.where import column_named, names_in

_LABELS = [name for name, kind in KINDS.items() if kind.can_be_label]
_MOST_CLASSES = 1 << 20  # of a label without names


def with_columns(index: Index, names: Sequence[str]) -> Index:
    """Return the index with columns of these fields and entries. Columns that it has are read again.

    Raises UsageError for a name that is no field, for a column without a value, and for values that
    no column can hold.
    """
    places = list(dict.fromkeys(_place(index, name) for name in names))
    kept = [column for column in index.columns if column.place not in places]
    return index.with_columns((*kept, *typed(_raw(index, places), index.labels)))


def with_columns_of(index: Index, condition: str) -> Index:
    """Return the index with columns of the fields that a condition names and that have none."""
    names = [
        name
        for name in names_in(condition)
        if column_named(index, name) is None
        and (place := _place_in(index, name)) is not None
        and not index.disagreement(*place)
    ]
    return with_columns(index, names) if names else index


def with_labels(index: Index, labels: Sequence[ColumnInfo]) -> Index:
    """Return `index` with these labels, and with its columns typed by them.

    A column that no Arrow type can hold is left out. A label without a column stays without one.
    """
    columns = [c for c in typed(index.columns, labels) if c.kind != NOT_A_COLUMN]
    return replace(index.with_columns(columns), labels=tuple(labels))


def with_label(index: Index, name: str, classes: Sequence[str] | None = None) -> Index:
    """Return the index with a label that is stored in a field or in an entry of a JSON field.

    name: of the column, with `:KIND` if the values do not say which kind is meant. classes: names
    in the order of their numbers; default: sorted. Raises UsageError for values that do not fit.
    """
    head, _, kind = name.rpartition(":")
    head, kind = (head, kind) if head and kind in _LABELS else (name, "")
    place = _place(index, head)
    column = _raw(index, [place])[0]
    is_named = column.kind == "flag" and classes is not None
    kind = kind or ("class" if column.kind not in _LABELS or is_named else column.kind)
    if kind == "number" and classes is not None:
        raise UsageError(f"{name} is a number, and numbers have no classes. Leave classes away.")
    plain = place[1] is None and place[0] in PLAIN_FIELDS
    title = "label" if plain else column_name(place)
    label = ColumnInfo(title, kind, *place, _classes(column, kind, classes))
    declared = as_label(column, label)
    _check_values(index, column, declared, label)
    labels = [other for other in index.labels if other.place != place and other.name != title]
    columns = [other for other in index.columns if other.place != place]
    return replace(index.with_columns((*columns, declared)), labels=(*labels, label))


def with_mask(index: Index, field: str, classes: Sequence[str]) -> Index:
    """Return the index with a label whose values are masks: images of class numbers.

    classes: names in the order of their numbers, or only the number of classes. The label has no
    column. It is named like the field without the extension. Raises UsageError for fewer than 2
    classes and for more than 255, the number of ignored pixels.
    """
    if len(classes) == 1 and classes[0].isdecimal():
        classes = tuple(map(str, range(int(classes[0]))))
    if not 2 <= len(classes) <= 255 or len(set(classes)) < len(classes):
        raise UsageError(
            f"{field} holds masks, and {len(classes)} classes are named: must be 2 to 255 different "
            f"ones. Name them in the order of their numbers: background,cat,dog, or give their "
            f"number: 21"
        )
    label = ColumnInfo(field.rpartition(".")[0] or "mask", "mask", field, None, tuple(classes))
    others = (other for other in index.labels if other.name != label.name)
    return replace(index, labels=(label, *others))


def column_rows(index: Index) -> list[tuple[str, str]]:
    """Return (name, description) of each column, with the number of samples that lack a value."""
    rows = []
    for column in index.columns:
        missing = column.values.null_count
        shown = f"{len(column.classes)} classes" if column.kind == "class" else column.kind
        note = f", {missing} samples have none" if missing else ""
        rows.append((printable(f"column {column.name}"), shown + note))
    return rows


# --- parts ----------------------------------------------------------------------------------------


def _place(index: Index, name: str) -> Place:
    """Return (field, entry) of a column's name. Raises UsageError for a name that is no field."""
    if (place := _place_in(index, name)) is not None:
        return place
    shown = ", ".join(f"{field}.ENTRY" if is_json(field) else field for field in index.fields)
    raise UsageError(f"there is no field {name!r} in these shards. Use one of: {shown}.")


def _place_in(index: Index, name: str) -> Place | None:
    field, entry = place = json_place(name)
    return place if field in index.fields and is_json(field) == (entry is not None) else None


def _raw(index: Index, places: Sequence[Place]) -> tuple[Column, ...]:
    """Return the columns of these places as their bytes say. Raises UsageError."""
    columns = read_columns(index, places).columns
    for column in columns:
        name = column.stored_as
        if column.kind == NOT_A_COLUMN:
            raise UsageError(
                f"{name} holds values that no column can hold: long texts, documents, or values of "
                f"different types. A column holds numbers, texts of at most 256 characters, "
                f"true and false, or lists of names."
            )
        if column.values.null_count == len(column):
            raise UsageError(
                f"no sample has a value in {name} that a column can hold: a number, a short text, true "
                f"or false, or a list of names. Look at one: wdstrain show"
            )
    return columns


def _classes(column: Column, kind: str, given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the class names of a label; () for numbers."""
    if kind == "number":
        return ()
    if kind == "flag" or (column.kind == "flag" and given is None):
        return FLAG_CLASSES
    if given is not None:
        twice = next((name for name, count in Counter(given).items() if count > 1), None)
        if twice is not None or not given:
            problem = f"{twice!r} occurs twice" if given else "the list is empty"
            raise UsageError(
                f"classes: {problem}. Give each class once, in the order of their numbers: cat,dog, "
                f"or a file with a name on each line."
            )
        return tuple(given)
    if column.kind == "integer":
        low, high = pc.min_max(column.values).as_py().values()
        if low < 0 or high >= _MOST_CLASSES:
            raise UsageError(
                f"{column.name} has values from {low} to {high}, and class numbers count from 0. "
                f"If they are numbers, add :number to the name."
            )
        return tuple(map(str, range(high + 1)))
    values = column.values.flatten() if column.kind == "multi" else column.values
    names = sorted(filter(None, pc.unique(pc.cast(values, pa.string())).to_pylist()))
    number = next((name for name in names if name.isdecimal()), None)
    if number is not None and column.entry is None:
        raise UsageError(
            f"{column.name} holds names and numbers, such as {names[-1]!r} and {number!r}, and a number "
            f"counts as the number of a class. Name the classes in the order of their numbers."
        )
    return tuple(names)


def _check_values(index: Index, raw: Column, declared: Column, label: ColumnInfo) -> None:
    """Raise UsageError for the first sample whose value is none that the label can have."""
    wrong = np.asarray(declared.values.is_null()) & ~np.asarray(raw.values.is_null())
    if label.kind == "multi" and raw.kind == "multi":
        known = pa.array(label.classes, pa.string())
        rows = pc.list_parent_indices(raw.values)
        unknown = pc.invert(pc.is_in(raw.values.flatten(), value_set=known))
        wrong[rows.filter(unknown).to_numpy()] = True
    if not wrong.any():
        return
    number = int(np.flatnonzero(wrong)[0])
    shard = index.shard_with(number)
    value = str(raw.values[number].as_py())[:80]
    classes = f"of the {len(label.classes)} classes"
    rule = {"number": "a number", "multi": f"a list {classes}"}.get(label.kind, f"one {classes}")
    raise UsageError(
        f"{shard.shown}: {printable(raw.name)} of sample {printable(index.key(number))!r} is "
        f"{printable(value)!r}, which is not {rule} ({int(wrong.sum())} such samples). Name all "
        f"classes, or another kind."
    )
