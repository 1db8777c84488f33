"""What is to be learnt, told by the labels of an index: classes, one of two, several at once, numbers, or many of these together.

A task is a head for each label. The model gives one row of outputs per picture, and each head has its columns of it, so any
model with a number of outputs will do. Losses are per row, so they are exact whatever the sizes of the batches, and a
batch's loss is their plain mean, so that processes which share a batch come to the same gradient as one that has it whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional

from wdstrain.augmentation import IMAGENET
from wdstrain.errors import UsageError
from wdstrain.fields import Example, Field, image, label, number
from wdstrain.indexing import Index, Label

Kind = Literal["class", "binary", "multi", "number"]

_FROM: dict[str, tuple[Kind, ...]] = {  # what a label of an index can be learnt as; the first unless somebody says otherwise
    "class": ("class", "binary", "number"),
    "multi": ("multi",),
    "number": ("number",),
}


@dataclass(frozen=True)
class Head:
    """Learning one label. `name`: of its target in a batch, before which stands "target ".

    mean, deviation: of a number in the data, by which it is brought to one scale, so that it is learnt at the pace of others.
    """

    target: Label
    kind: Kind
    mean: float = 0.0
    deviation: float = 1.0

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def classes(self) -> tuple[str, ...]:
        return self.target.classes

    @property
    def outputs(self) -> int:
        """Columns of the model's output: one logit for one of two, a logit per class, or a number."""
        return 1 if self.kind in ("binary", "number") else len(self.classes)

    def field(self) -> Field:
        """What reads the target: int64[b] of classes, float32[b, classes] of several, float32[b] of numbers."""
        column = self.target.column
        if self.kind == "number":
            return number(self.target.field, column=column)
        return label(self.target.field, column=column, classes=self.classes, multi=self.kind == "multi")

    def losses(self, outputs: Tensor, target: Tensor, *, smoothing: float = 0.0, weights: Tensor | None = None) -> Tensor:
        """float[b]: cross entropy, of yes and no for one of two and for several, or squared error in standard deviations.

        outputs: [b, self.outputs]; target: as `field` reads it, or shares of classes [b, classes]; weights: of classes.
        """
        if self.kind == "number":
            return (outputs[:, 0] - (target - self.mean) / self.deviation) ** 2
        if self.kind == "class":
            return functional.cross_entropy(outputs, target, weight=weights, label_smoothing=smoothing, reduction="none")
        share = target
        if self.kind == "binary":
            share = target[:, 1:] if target.ndim == 2 else target[:, None].to(outputs.dtype)
        aimed = share * (1 - smoothing) + smoothing / 2
        found = functional.binary_cross_entropy_with_logits(outputs, aimed, reduction="none")
        if weights is not None:
            found = found * (torch.lerp(weights[0], weights[1], share) if self.kind == "binary" else weights)
        return found.mean(1)

    def weights(self, counts: Mapping[str, int]) -> Tensor:
        """float32[classes] with which rare classes count as much as frequent ones; their mean over the samples is 1."""
        found = torch.tensor([float(counts.get(name, 0)) for name in self.classes])
        present = found > 0
        return torch.where(present, found.sum() / (present.sum() * found.clamp(min=1)), torch.ones_like(found))

    def values(self, outputs: Tensor) -> Tensor:
        """[b] of a head of numbers, as the labels have them."""
        return outputs[:, 0] * self.deviation + self.mean

    def probabilities(self, outputs: Tensor) -> Tensor:
        """[b, classes] of a head of classes; for one of two, both."""
        if self.kind == "class":
            return outputs.softmax(1)
        yes = outputs.sigmoid()
        return torch.cat([1 - yes, yes], 1) if self.kind == "binary" else yes


@dataclass(frozen=True)
class Task:
    """Learning some labels from pictures."""

    heads: tuple[Head, ...]

    @classmethod
    def of(cls, index: Index, asked: str | None = None) -> Task:
        """The task of an index: the labels that are asked for, as NAME or NAME:KIND with commas between, or its only one."""
        labels = {one.name: one for one in index.labels}
        if not labels:
            raise UsageError(
                "the index says nothing of labels. Convert with `wdstrain convert folder` or `convert table --label`."
            )
        if asked is None and len(labels) > 1:
            raise UsageError(f"the index has several labels: {', '.join(labels)}. Name one or more with --label a,b.")
        heads = []
        for word in (asked or next(iter(labels))).split(","):
            name, _, kind = (
                (part.strip() for part in word.partition(":")) if word.strip() not in labels else (word.strip(), "", "")
            )
            if name not in labels:
                raise UsageError(f"there is no label {name!r} in the index; it has: {', '.join(labels)}.")
            heads.append(_head(labels[name], kind))
        if len({head.name for head in heads}) < len(heads):
            raise UsageError(f"label={asked!r} names a label twice.")
        return cls(tuple(heads))

    @property
    def outputs(self) -> int:
        """Outputs of the model."""
        return sum(head.outputs for head in self.heads)

    def fields(self, picture: Field) -> dict[str, Field]:
        """The fields of a batch: "image", and "target <name>" for each head."""
        return {"image": picture, **{f"target {head.name}": head.field() for head in self.heads}}

    def targets(self, batch: Mapping[str, Any]) -> list[Tensor]:
        """The target of each head."""
        return [batch[f"target {head.name}"] for head in self.heads]

    def split(self, outputs: Tensor) -> Sequence[Tensor]:
        """The columns of each head."""
        return torch.split(outputs.float(), [head.outputs for head in self.heads], 1)

    def losses(self, outputs: Tensor, targets: Sequence[Tensor]) -> Tensor:
        """float[b]: the sum of the heads' losses."""
        parts = zip(self.heads, self.split(outputs), targets, strict=True)
        return cast(Tensor, sum(head.losses(own, target) for head, own, target in parts))

    def check(self, index: Index) -> None:
        """Raise UsageError if these shards label their samples otherwise than those the task comes from."""
        theirs = {one.name: one for one in index.labels}
        for head in self.heads:
            other = theirs.get(head.name)
            if theirs and other is None:
                raise UsageError(f"these shards have no label {head.name!r}, but {', '.join(theirs)}.")
            if other is not None and other.classes != head.classes:
                raise UsageError(
                    f"the classes of these shards are {_some(other.classes)}; those that are learnt are {_some(head.classes)}. "
                    f"Convert both together, so that classes have the same numbers."
                )

    def state(self) -> list[dict[str, Any]]:
        """The task as plain values, for a checkpoint."""
        return [
            {**vars(head.target), "classes": list(head.classes), "learnt_as": [head.kind, head.mean, head.deviation]}
            for head in self.heads
        ]

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> Task:
        heads = []
        for one in state:
            target = {**one, "classes": tuple(one["classes"])}
            kind, mean, deviation = target.pop("learnt_as")
            heads.append(Head(Label(**target), kind, mean, deviation))
        return cls(tuple(heads))

    def __str__(self) -> str:
        words = {
            "class": "one of {} classes",
            "binary": "one of two classes",
            "multi": "any of {} classes",
            "number": "a number",
        }
        return ", ".join(f"{head.name} ({words[head.kind].format(len(head.classes))})" for head in self.heads)


def picture_of(size: int, augment: str | None = None) -> Field:
    """The pictures of a batch: uint8[b, 3, size, size]."""
    return image(size=size, augment=augment)


def shape_of(example: Example) -> tuple[int, ...]:
    """A picture as a batch has it: channels, height, width."""
    return (example.shape[-1], *example.shape[:-1]) if example.channels_last else example.shape


def normalised(pixels: Tensor) -> Tensor:
    """uint8 [b, 3, h, w] to float32, by ImageNet's mean and standard deviation; numbers that are no uint8 stay as they are."""
    if pixels.dtype != torch.uint8:
        return pixels
    mean, std = (torch.tensor(one, device=pixels.device).view(3, 1, 1) * 255 for one in IMAGENET)
    return (pixels.float() - mean) / std


def _head(target: Label, kind: str) -> Head:
    can = _FROM[target.kind] if target.column is not None or target.kind != "class" else ("class", "binary")
    two = len(target.classes) == 2
    can = tuple(one for one in can if one != "binary" or two)
    if kind and kind not in can:
        what = f"it is one of {len(target.classes)} classes" if target.kind == "class" else f"it is of the kind {target.kind}"
        known = "" if kind in get_args(Kind) else f" (kinds are {', '.join(get_args(Kind))})"
        raise UsageError(f"the label {target.name!r} cannot be learnt as {kind!r}{known}: {what}. Use {' or '.join(can)}.")
    if target.kind != "number" and len(target.classes) < (1 if target.kind == "multi" else 2) and kind != "number":
        raise UsageError(f"the label {target.name!r} has {len(target.classes)} class; there is nothing to tell apart.")
    return Head(target, kind or ("binary" if two and target.kind == "class" else can[0]))


def _some(classes: tuple[str, ...]) -> str:
    return ", ".join(classes[:6]) + (f", ... ({len(classes)})" if len(classes) > 6 else "")
