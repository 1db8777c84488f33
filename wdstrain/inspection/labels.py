"""Labels of an index that people look at, chosen by name, with their values."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from wdstrain.errors import UsageError
from wdstrain.shards.columns import typed
from wdstrain.shards.declare import read_columns
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo


def known_labels(index: Index, name: str | None = None) -> list[ColumnInfo]:
    """Return the labels of an index, else its field `cls`; or the one label or field of this name.

    Raises UsageError for a label that does not exist.
    """
    labels = list(index.labels)
    # A class number has no meaning if the sets number their classes differently.
    if not labels and not index.differing:
        labels = [ColumnInfo(n, "class", n) for n in ("cls", "cls2") if n in index.fields]
    if name is None:
        return labels
    known = [*labels, *(ColumnInfo(field, "class", field) for field in index.fields)]
    for label in known:
        if label.name == name:
            return [label]
    names = list(dict.fromkeys(label.name for label in known))
    raise UsageError(f"there is no label {name!r}.", choices(name, names))


def with_values(index: Index, labels: Sequence[ColumnInfo]) -> Index:
    """Return an index with columns of these labels only, whose values are read from its shards."""
    read = read_columns(index, [label.place for label in labels])
    # Class numbers count in the classes of each shard, which may differ.
    named = [label for label in labels if label.classes and not index.differing]
    return read.with_columns(typed(read.columns, named))


def choices(name: str, names: Sequence[str]) -> str:
    """Return a sentence with a name that resembles `name`, and the names there are."""
    near = get_close_matches(name, names, 1, 0.5)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    return f"{guess}Use one of: {listed(names) or 'none'}."


def listed(names: Sequence[str]) -> str:
    """Return the first ten names."""
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
