"""Labels of a set, and the labels of several sets together.

Sets may number their classes differently. Class numbers are joined by the names of the classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from wdstrain.shards.kinds import ColumnInfo, Place


def joined_labels(
    shard_labels: tuple[tuple[ColumnInfo, ...], ...],
) -> tuple[tuple[ColumnInfo, ...], tuple[tuple[ColumnInfo, ...], ...]]:
    """Return (labels of all shards together, labels of each shard or () if they are all equal).

    shard_labels: labels of each shard; at least one shard.
    """
    different = list(dict.fromkeys(shard_labels))
    if len(different) == 1:
        return different[0], ()
    joined = []
    for place in dict.fromkeys(label.place for labels in different for label in labels):
        by_set = [
            next((label for label in labels if label.place == place), None) for labels in different
        ]
        present = [label for label in by_set if label is not None]
        # Class numbers without names must not be joined: 0 may be another class in another set.
        # Multi-labels store names, so they can always be joined.
        is_ambiguous = (
            present[0].kind == "class" and len({label.has_names for label in present}) > 1
        )
        same_kind = len({label.kind for label in present}) == 1
        if len(present) == len(by_set) and same_kind and not is_ambiguous:
            classes = dict.fromkeys(name for label in present for name in label.classes)
            joined.append(replace(present[0], classes=tuple(classes)))
    return tuple(joined), shard_labels


def disagreement(
    shard_labels: Sequence[tuple[ColumnInfo, ...]], shards: Iterable[str], place: Place
) -> str:
    """Return the class numbering of each set at a place, and the first shard that has it.

    shards: the names of the shards, for the text. "" if no set has a label there.
    """
    first_shards: dict[str, str] = {}  # by numbering
    for shard, labels in zip(shards, shard_labels, strict=True):
        numberings = (label.numbering for label in labels if label.place == place)
        first_shards.setdefault(next(numberings, "no label"), shard)
    if set(first_shards) == {"no label"}:
        return ""
    parts = "; ".join(f"{numbering} ({shard})" for numbering, shard in first_shards.items())
    field, column = place
    shown = field if column is None else f"{field}, column {column!r},"
    return f"the label in {shown} differs between these sets: {parts}"


def place_named(shard_labels: Sequence[tuple[ColumnInfo, ...]], name: str) -> Place | None:
    """Return the place of the first label with a name, or stored there (`cls`, `json.kind`)."""
    for label in dict.fromkeys(label for labels in shard_labels for label in labels):
        if name in (label.name, label.stored_as):
            return label.place
    return None
