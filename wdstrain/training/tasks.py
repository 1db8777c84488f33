"""The task: which labels of an index are learned, with one head for each.

The model returns one row of outputs per image, and each head has its columns of it, so any model
with a number of outputs fits. For masks it returns a row of outputs per pixel. Losses are per
sample. The loss of a batch is their mean, so processes that share a batch get the same gradient as
one process that has it whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wdstrain.decode.fields import Field
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.training.config import refuse
from wdstrain.training.heads import HEADS, Criterion, Head


@dataclass(frozen=True)
class Task:
    """Learning of some labels from images."""

    heads: tuple[Head, ...]

    @classmethod
    def of(cls, index: Index, labels: str | None = None) -> Task:
        """Return the task of an index.

        labels: NAME or NAME:KIND with a comma between; None: the only label of the index. Raises
        UsageError if the index has no such label, or several and none is named.
        """
        known = {label.name: label for label in index.labels}
        differing = {own.name: why for own, why in index.differing.items() if own.name not in known}
        asked = (labels or "").strip()
        if not known and labels is None:
            asked = next(iter(differing), "")
        refuse(
            (
                asked in differing,
                f"{differing.get(asked)}.",
                "Pack them together, or leave some out.",
            ),
            (
                not known,
                "the index declares no labels.",
                "Name the field or the JSON entry that holds them, such as {label} or json.kind, or "
                "declare it once: wdstrain index URL --label cls",
                {"label": "cls"},
            ),
            (
                labels is None and len(known) > 1,
                f"the index has several labels: {', '.join(known)}.",
                "Name those to learn, such as {label}.",
                {"label": ",".join(known)},
            ),
        )
        words = (labels or next(iter(known))).split(",")
        heads = tuple(_make_head(known, word.strip()) for word in words)
        refuse(
            (
                len({head.name for head in heads}) < len(heads),
                "{label} names a label twice.",
                "",
                {"label": labels},
            ),
            (
                len(heads) > 1 and any(head.kind == "mask" for head in heads),
                "{label}: masks must be the only label that is learned.",
                "",
                {"label": labels},
            ),
        )
        return cls(heads)

    @property
    def outputs(self) -> int:
        """Number of outputs of the model."""
        return sum(head.outputs for head in self.heads)

    def output_shape(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the model's output for an image of this shape, without the batch."""
        return (self.outputs, *image[1:]) if self.is_dense else (self.outputs,)

    @property
    def is_dense(self) -> bool:
        """Whether the model has outputs for each pixel."""
        return self.heads[0].kind == "mask"

    @property
    def has_several(self) -> bool:
        """Whether there are several heads; then metrics are named HEAD/METRIC."""
        return len(self.heads) > 1

    def metric_name(self, head: Head, name: str) -> str:
        """Return the name of a head's metric."""
        return f"{head.name}/{name}" if self.has_several else name

    def head_of(self, metric: str) -> int:
        """Return the number of the head that a metric of the user's is for: HEAD/NAME, or 0."""
        names = [head.name for head in self.heads]
        name = metric.partition("/")[0]
        return names.index(name) if name in names else 0

    @property
    def label_names(self) -> dict[str, Head]:
        """The heads by the names that a user may give labels; a single one is also "label"."""
        stored = {h.target.stored_as: h for h in self.heads if h.kind == "mask"}
        heads = stored | {head.name: head for head in self.heads}
        return heads if self.has_several else {"label": self.heads[0]} | heads

    def target_fields(self, image: Field | None) -> dict[str, Field]:
        """Return the field "target NAME" of each head. image: that masks follow."""
        return {f"target {head.name}": head.field(image) for head in self.heads}

    def targets(self, batch: Mapping[str, Any]) -> list[Tensor]:
        """Return the target of each head."""
        return [batch[f"target {head.name}"] for head in self.heads]

    def split(self, outputs: Tensor) -> list[Tensor]:
        """Return the scores of each head."""
        columns = torch.split(outputs.float(), [head.outputs for head in self.heads], 1)
        return [head.scores(own) for head, own in zip(self.heads, columns, strict=True)]

    def losses(
        self,
        outputs: Tensor,
        targets: Sequence[Tensor],
        *,
        smoothing: float = 0.0,
        weights: Sequence[Tensor | None] = (),
        criterion: Criterion | Mapping[str, Criterion] | None = None,
    ) -> Tensor:
        """Return the sum of the heads' losses for each sample, float[b].

        weights: of classes, by head. criterion: of the user's, in place of the heads' own losses.
        """
        total = torch.zeros(len(outputs), device=outputs.device)
        weights = weights or [None] * len(self.heads)
        parts = zip(self.heads, self.split(outputs), targets, weights, strict=True)
        for head, scores, target, weight in parts:
            own = criterion.get(head.name) if isinstance(criterion, Mapping) else criterion
            if own is None:
                losses = head.losses(scores, target, smoothing=smoothing, weights=weight)
            else:
                losses = own(scores, head.aim(target))
            total = total + (losses.flatten(1).mean(1) if losses.ndim > 1 else losses)
        return total

    def check(self, index: Index) -> None:
        """Raise UsageError for shards whose labels are not among the learned ones.

        Classes are compared by name. Other numbers for the same names are no error.
        """
        given = {label.name: label for label in index.labels}
        for head in self.heads:
            other, learned = given.get(head.name), head.target.numbering
            if other is None and (reason := index.disagreement(*head.target.place)):
                raise UsageError(
                    f"{reason}. The model learns: {learned}.",
                    "Pack the sets with one numbering.",
                )
            if other is None:
                raise UsageError(
                    f"these shards have no label {head.name!r}, but "
                    f"{', '.join(given) or 'none'}. The model learns: {learned}.",
                    "Convert them with this label.",
                )
            if other.task != head.target.task or not set(other.classes) <= set(head.classes):
                raise UsageError(
                    f"the classes of these shards are {other.numbering}, the model learns "
                    f"{learned}: every class must be learned.",
                    "Convert the shards with the same class names.",
                )

    def equals(self, other: Task) -> bool:
        """Return whether the same is learned; the scale of numbers may differ."""
        return [(head.target, head.kind) for head in self.heads] == [
            (head.target, head.kind) for head in other.heads
        ]

    def state(self) -> list[dict[str, Any]]:
        """Return plain values, for a checkpoint."""
        return [
            {
                "target": {**head.target.row, "classes": list(head.classes)},
                "kind": head.kind,
                "mean": head.mean,
                "deviation": head.deviation,
            }
            for head in self.heads
        ]

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> Task:
        """Return the task that `state` describes."""
        heads = (
            HEADS[row["kind"]](ColumnInfo.of_row(row["target"]), row["mean"], row["deviation"])
            for row in state
        )
        return cls(tuple(heads))

    def __str__(self) -> str:
        texts = ((head.name, _ABOUT[head.kind].format(len(head.classes))) for head in self.heads)
        return ", ".join(f"{name} ({about})" for name, about in texts)


def _make_head(known: Mapping[str, ColumnInfo], word: str) -> Head:
    """Return the head that NAME or NAME:KIND describes; without KIND the one that fits best.

    Raises UsageError for an unknown name, and for a kind that cannot learn the label.
    """
    name, kind = (word, "") if word in known else map(str.strip, word.partition(":")[::2])
    if name not in known:
        raise UsageError(f"the index has no label {name!r}.", f"Use one of: {', '.join(known)}.")
    target, count = known[name], len(known[name].classes)
    has_two = target.is_class and count == 2
    excluded = set() if has_two else {"binary"}
    if target.kind != "number" and target.entry is None:
        excluded.add("number")
    possible = [own for own in _KINDS[target.task] if own not in excluded]
    needed = 1 if target.kind == "multi" else 2
    reason = f"one of {count} classes" if target.is_class else f"of kind {target.kind}"
    refuse(
        (
            kind and kind not in possible,
            f"label {name!r} cannot be learned as {kind!r}: it is {reason}.",
            f"Use {' or '.join(possible)}. Kinds are {', '.join(HEADS)}.",
        ),
        (
            "number" not in (target.kind, kind) and count < needed,
            f"label {name!r} has {count} class: must have {needed} or more.",
        ),
    )
    return HEADS[kind or ("binary" if has_two else possible[0])](target)


_ABOUT = {
    "class": "one of {} classes",
    "binary": "one of two classes",
    "multi": "any of {} classes",
    "number": "a number",
    "mask": "one of {} classes per pixel",
}

# Kinds of heads that can learn a kind of label; the first is the default.
_KINDS = {
    "class": ("class", "binary", "number"),
    "multi": ("multi",),
    "number": ("number",),
    "mask": ("mask",),
}
