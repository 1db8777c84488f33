"""Labels of a set, and the labels of several sets together.

Sets may number their classes differently. Class numbers are joined by the names of the classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from wdstrain.shards.columns import Place


@dataclass(frozen=True)
class Label:
    """A label: a training target that is stored in `field`, in the entry `column` if it is JSON.

    kind: "class": the value is a class number or one of `classes`; "number": a float; "multi": a
    list of `classes`; "mask": an image of class numbers. An index that is stored has no masks.
    """

    name: str
    kind: str
    field: str
    column: str | None = None
    classes: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
        """(field, column) of its value."""
        return self.field, self.column

    @property
    def has_names(self) -> bool:
        """Whether the classes have names other than their numbers."""
        return self.classes != tuple(map(str, range(len(self.classes))))

    @property
    def summary(self) -> str:
        """The kind of its values and the first classes, for people."""
        if self.kind == "number":
            return "a number"
        names = ", ".join(self.classes[:10]) + (", ..." if len(self.classes) > 10 else "")
        some_of = "any of " if self.kind == "multi" else ""
        return f"{some_of}{len(self.classes)} class{'es' * (len(self.classes) != 1)}: {names}"

    @property
    def numbering(self) -> str:
        """The first classes with their numbers, for error messages."""
        if self.kind == "number":
            return "numbers, no classes"
        if not self.has_names:
            return f"{len(self.classes)} classes without names"
        shown = ", ".join(f"{number} {name}" for number, name in enumerate(self.classes[:6]))
        return shown + (f", ... ({len(self.classes)} classes)" if len(self.classes) > 6 else "")


def joined_labels(
    shard_labels: tuple[tuple[Label, ...], ...],
) -> tuple[tuple[Label, ...], tuple[tuple[Label, ...], ...]]:
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
    shard_labels: Sequence[tuple[Label, ...]], shards: Iterable[str], place: Place
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


def place_named(shard_labels: Sequence[tuple[Label, ...]], name: str) -> Place | None:
    """Return the place of the first label with a name, or stored there (`cls`, `json.kind`)."""
    for label in dict.fromkeys(label for labels in shard_labels for label in labels):
        stored = label.field if label.column is None else f"{label.field}.{label.column}"
        if name in (label.name, stored):
            return label.place
    return None
