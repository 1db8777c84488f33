"""What is to be learnt, told by the labels of an index: classes, one of two, several at once, numbers, or many of these together.

A task is a head for each label. The model gives one row of outputs per picture, and each head has its columns of it, so any
model with a number of outputs will do. Losses are per row, so they are exact whatever the sizes of the batches, and a
batch's loss is their plain mean, so that processes which share a batch come to the same gradient as one that has it whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from wdstrain.decode.fields import Example, Field, Image, NumpyArray, image
from wdstrain.decode.label_fields import Number, label
from wdstrain.decode.transforms import Augment
from wdstrain.errors import UsageError
from wdstrain.loader.gpu_augment import IMAGENET
from wdstrain.shards.index import Index, Label

Kind = Literal["class", "binary", "multi", "number"]

_FROM: dict[
    str, tuple[Kind, ...]
] = {  # what a label of an index can be learnt as; the first unless somebody says otherwise
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
        """What reads the target: int64[b] of classes, float32[b, classes] of several, float64[b] of numbers."""
        column = self.target.column
        if self.kind == "number":
            # a loss of NaN would end the run; a float32 holds times and coordinates too coarsely, before the mean is taken off
            return Number((self.target.field,), column, is_finite=True, dtype="float64")
        return label(
            self.target.field, column=column, classes=self.classes, multi=self.kind == "multi"
        )

    def losses(
        self,
        outputs: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        """float[b]: cross entropy, of yes and no for one of two and for several, or squared error in standard deviations.

        outputs: [b, self.outputs]; target: as `field` reads it, or shares of classes [b, classes]; weights: as `weights` has them.
        """
        if self.kind == "number":
            return (outputs[:, 0] - ((target - self.mean) / self.deviation).to(outputs.dtype)) ** 2
        if self.kind == "class":
            return functional.cross_entropy(
                outputs, target, weight=weights, label_smoothing=smoothing, reduction="none"
            )
        share = target
        if self.kind == "binary":
            share = target[:, 1:] if target.ndim == 2 else target[:, None].to(outputs.dtype)
        aimed = share * (1 - smoothing) + smoothing / 2
        found = functional.binary_cross_entropy_with_logits(outputs, aimed, reduction="none")
        if weights is not None:
            no, yes = weights if self.kind == "binary" else weights.unbind(1)
            found = found * torch.lerp(no, yes, share)
        return found.mean(1)

    def weights(self, counts: Mapping[str, int], samples: int | None = None) -> Tensor:
        """float32[classes] with which rare classes count as much as frequent ones; their mean over the samples is 1.

        Of several classes at once float32[classes, 2]: for samples without the class and with it, which count as much together.
        samples: how many the counts are of; default: their sum.
        """
        found = torch.tensor([float(counts.get(name, 0)) for name in self.classes])
        if self.kind == "multi":
            whole = float(found.sum()) if samples is None else float(samples)
            both = torch.stack([whole - found, found], 1)
            return torch.where(
                (both > 0).all(1, keepdim=True),
                whole / (2 * both.clamp(min=1)),
                torch.ones_like(both),
            )
        present = found > 0
        return torch.where(
            present, found.sum() / (present.sum() * found.clamp(min=1)), torch.ones_like(found)
        )

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
        apart = {
            one.name: one for shard in index.shard_labels for one in shard if one.name not in labels
        }
        for name, one in apart.items():
            if name == (asked or "").strip() or (not labels and asked is None):
                raise UsageError(
                    f"{index.disagreement(*one.place)}. Pack them together, or leave the others away."
                )
        if not labels:
            raise UsageError(
                "the index says nothing of labels. Name the field or the entry of JSON that holds them, such "
                "as --label cls or --label json.kind, or declare it once: wdstrain index URL --label cls"
            )
        if asked is None and len(labels) > 1:
            raise UsageError(
                f"the index has several labels: {', '.join(labels)}. Name one or more with --label a,b."
            )
        heads = []
        for word in (asked or next(iter(labels))).split(","):
            name, _, kind = (
                (part.strip() for part in word.partition(":"))
                if word.strip() not in labels
                else (word.strip(), "", "")
            )
            if name not in labels:
                raise UsageError(
                    f"there is no label {name!r} in the index; it has: {', '.join(labels)}."
                )
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
        """Raise UsageError for shards whose labels are not among those that the task learns, by the names of their classes.

        Classes that have other numbers there are no fault: `fields` reads them by their names.
        """
        theirs = {one.name: one for one in index.labels}
        for head in self.heads:
            other = theirs.get(head.name)
            if other is None and (why := index.disagreement(*head.target.place)):
                raise UsageError(
                    f"{why}. Learnt is: {head.target.numbering}. Pack the sets together, with one numbering."
                )
            if other is None:
                raise UsageError(
                    f"these shards have no label {head.name!r}, but {', '.join(theirs) or 'none'}. Learnt is: "
                    f"{head.target.numbering}. Convert them with this label, so that their index names its classes."
                )
            if other.kind != head.target.kind or not set(other.classes) <= set(head.classes):
                raise UsageError(
                    f"the classes of these shards are {other.numbering}; those that are learnt are {head.target.numbering}. "
                    f"Classes are joined by name, and each of these shards must be learnt. Convert them with the same names."
                )

    def is_as(self, other: Task) -> bool:
        """Whether the same is learnt, whatever the scale of numbers."""
        return [(one.target, one.kind) for one in self.heads] == [
            (one.target, one.kind) for one in other.heads
        ]

    def state(self) -> list[dict[str, Any]]:
        """The task as plain values, for a checkpoint."""
        return [
            {
                **vars(head.target),
                "classes": list(head.classes),
                "learnt_as": [head.kind, head.mean, head.deviation],
            }
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
        return ", ".join(
            f"{head.name} ({words[head.kind].format(len(head.classes))})" for head in self.heads
        )


def picture_of(size: int, augment: str | None = None) -> Field:
    """The pictures of a batch: uint8[b, 3, size, size]."""
    return image(size=size, augment=augment)


def shape_of(example: Example) -> tuple[int, ...]:
    """A picture as a batch has it: channels, height, width."""
    return (example.shape[-1], *example.shape[:-1]) if example.channels_last else example.shape


def check_picture(picture: Field, *, channels_last: bool, mixes: bool) -> Example:
    """What a model is given of a picture. Raises UsageError for what no model can be given, or not with these options."""
    example = picture.example
    if example is None:
        raise UsageError(
            "the pictures have no fixed size, so they make no batch. Give wt.image a size."
        )
    shown = f"image= gives {example.dtype}{list(shape_of(example))}"
    if np.dtype(example.dtype).kind not in "buif":
        raise UsageError(
            f"{shown}: a model takes real numbers. Give the real and the imaginary part as two channels."
        )
    if channels_last and len(example.shape) != 3:
        raise UsageError(
            f"{shown}, and channels_last is for pictures of channels, height and width. Leave it away."
        )
    if mixes and not is_rgb(shape_of(example), example.dtype):
        raise UsageError(
            f"{shown}, and mixup and cutmix mix pictures of uint8[3, height, width]. Leave them away."
        )
    return example


def picture_state(picture: Field, example: Example) -> dict[str, Any]:
    """What becomes of the pictures as plain values, for a checkpoint. A field of the user's has its class's name alone."""
    found: dict[str, Any] = {"shape": list(shape_of(example)), "dtype": example.dtype}
    if type(picture) is Image:
        return {
            **found,
            "field": "image",
            "names": list(picture.names),
            "augment": vars(picture.augment),
        }
    if type(picture) is NumpyArray:
        return {**found, "field": "array", "names": list(picture.names)}
    return {**found, "field": type(picture).__qualname__}


def picture_from(state: Mapping[str, Any]) -> Field | None:
    """The field that `picture_state` tells of; None for one of the user's."""
    names, shape = tuple(state.get("names", ())), tuple(state["shape"])
    if not names:
        return None
    if state["field"] == "image":
        return Image(names, shape[1:], Augment(**state["augment"]))
    return NumpyArray(names, Example(shape, state["dtype"]))


def is_rgb(shape: Sequence[int], dtype: str) -> bool:
    """Whether a picture is uint8[3, h, w], which ImageNet's mean and standard deviation are for."""
    return dtype == "uint8" and len(shape) == 3 and shape[0] == 3


def normalised(pixels: Tensor) -> Tensor:
    """float32: uint8 [b, 3, h, w] by ImageNet's mean and standard deviation, other uint8 in 0 to 1, other numbers as they are."""
    if pixels.dtype != torch.uint8:
        return pixels.float()
    if pixels.ndim != 4 or pixels.shape[1] != 3:
        return pixels.float() / 255
    mean, std = _planes(pixels.device)
    return (pixels.float() - mean) / std


@cache
def _planes(device: torch.device) -> list[Tensor]:
    """ImageNet's mean and deviation of 0 to 255, float32[3, 1, 1] each, on a device.

    Copied there once: a copy of pageable memory makes the host wait for the device.
    """
    with torch.inference_mode(False):  # the first call may come from a validation
        return [torch.tensor(one, device=device).view(3, 1, 1) * 255 for one in IMAGENET]


def _head(target: Label, kind: str) -> Head:
    can = (
        _FROM[target.kind]
        if target.column is not None or target.kind != "class"
        else ("class", "binary")
    )
    two = len(target.classes) == 2
    can = tuple(one for one in can if one != "binary" or two)
    if kind and kind not in can:
        what = (
            f"it is one of {len(target.classes)} classes"
            if target.kind == "class"
            else f"it is of the kind {target.kind}"
        )
        known = "" if kind in get_args(Kind) else f" (kinds are {', '.join(get_args(Kind))})"
        raise UsageError(
            f"the label {target.name!r} cannot be learnt as {kind!r}{known}: {what}. Use {' or '.join(can)}."
        )
    if (
        target.kind != "number"
        and len(target.classes) < (1 if target.kind == "multi" else 2)
        and kind != "number"
    ):
        raise UsageError(
            f"the label {target.name!r} has {len(target.classes)} class; there is nothing to tell apart."
        )
    return Head(target, kind or ("binary" if two and target.kind == "class" else can[0]))
