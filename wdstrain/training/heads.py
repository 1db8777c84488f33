"""Heads: one class per kind of label, with its target, its loss and what its outputs say.

A head reads its target from a batch, takes its columns of the model's output, and gives one loss
per sample. Its metrics are in `metrics`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from wdstrain.decode.fields import IGNORED, Field, Image, mask_like
from wdstrain.decode.labels import field_of
from wdstrain.errors import UsageError
from wdstrain.shards.kinds import ColumnInfo

_SHOWN = 3  # classes of a mask in words


@dataclass(frozen=True)
class Head(ABC):
    """Learning of one label.

    mean, deviation: of the numbers in the training data, which standardize them, so that they are
    learned at the pace of other heads.
    """

    target: ColumnInfo
    mean: float = 0.0
    deviation: float = 1.0

    kind: ClassVar[str]
    main_metric: ClassVar[str]  # chooses the best checkpoint
    has_accuracy: ClassVar[bool] = False  # whether an epoch of training has one

    @property
    def name(self) -> str:
        """Name of the label; in a batch "target " stands before it."""
        return self.target.name

    @property
    def label(self) -> ColumnInfo:
        """The label as it is learned."""
        return self.target

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty for numbers."""
        return self.target.classes

    @property
    def outputs(self) -> int:
        """Number of columns in the model's output."""
        return len(self.classes)

    def field(self, image: Field | None = None) -> Field:
        """Return the field that reads the target. image: field of the images, which masks follow."""
        return field_of(self.target)

    @abstractmethod
    def losses(
        self,
        outputs: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each sample, float[b].

        outputs: [b, self.outputs]. target: as `field` reads it, or shares of classes [b, classes].
        smoothing: share of a label that is spread over all classes. weights: see `class_weights`.
        """

    def for_criterion(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (outputs, target) as a criterion of the user's gets them."""
        return outputs, target

    def for_metric(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (predictions, target) as torchmetrics expects them."""
        return self.probabilities(outputs), target.long()

    def class_weights(self, counts: Mapping[str, int], samples: int) -> Tensor:
        """Return weights with which rare classes count as much as frequent ones.

        float32[classes], whose mean over the samples is 1.
        """
        counted = torch.tensor([float(counts.get(name, 0)) for name in self.classes])
        present = counted > 0
        balanced = counted.sum() / (present.sum() * counted.clamp(min=1))
        return torch.where(present, balanced, torch.ones_like(counted))

    def right(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return whether each prediction is right, bool[b]. For heads that have an accuracy."""
        raise NotImplementedError

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the probability of each class, [b, classes]."""
        return outputs.softmax(1)

    @abstractmethod
    def predicted(self, outputs: Tensor) -> list[Any]:
        """Return what is predicted for each row: a class, a list of them, a number or a mask."""

    @abstractmethod
    def true(self, target: Tensor) -> list[Any]:
        """Return the targets of a batch in the form of `predicted`."""

    def text(self, value: Any) -> str:
        """Return a prediction or a target in words."""
        return str(value)


@dataclass(frozen=True)
class ClassHead(Head):
    """One of several classes: cross entropy over one logit per class.

    ignored: number of targets without a class.
    """

    kind: ClassVar[str] = "class"
    main_metric: ClassVar[str] = "accuracy"
    has_accuracy: ClassVar[bool] = True
    ignored: ClassVar[int] = -1

    def losses(
        self,
        outputs: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        return functional.cross_entropy(
            outputs,
            target,
            weight=weights,
            label_smoothing=smoothing,
            ignore_index=self.ignored,
            reduction="none",
        )

    def numbers(self, outputs: Tensor) -> Tensor:
        """Return the number of the most likely class of each row."""
        return outputs.argmax(1)

    def right(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return whether each prediction is right, bool[b]. target: also shares of classes."""
        return self.numbers(outputs) == (target.argmax(1) if target.ndim == 2 else target)

    def predicted(self, outputs: Tensor) -> list[Any]:
        return self.true(self.numbers(outputs))

    def true(self, target: Tensor) -> list[Any]:
        return [self.classes[number] for number in target.tolist()]


@dataclass(frozen=True)
class BinaryHead(ClassHead):
    """One of two classes: one logit, for the second class."""

    kind: ClassVar[str] = "binary"

    @property
    def outputs(self) -> int:
        return 1

    def losses(
        self,
        outputs: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        share = target[:, 1:] if target.ndim == 2 else target[:, None].to(outputs.dtype)
        return _binary_losses(outputs, share, smoothing, weights)

    def for_criterion(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [b, 2], whose softmax is the probability of each class, and the target."""
        return torch.cat([torch.zeros_like(outputs), outputs], 1), target

    def for_metric(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return outputs[:, 0].sigmoid(), target

    def numbers(self, outputs: Tensor) -> Tensor:
        return (outputs[:, 0] > 0).long()

    def probabilities(self, outputs: Tensor) -> Tensor:
        second = outputs.sigmoid()
        return torch.cat([1 - second, second], 1)


@dataclass(frozen=True)
class MultiLabelHead(Head):
    """Any number of classes at once: one logit per class. Targets are float32[b, classes], 0 or 1."""

    kind: ClassVar[str] = "multi"
    main_metric: ClassVar[str] = "mAP"

    def losses(
        self,
        outputs: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        return _binary_losses(outputs, target, smoothing, weights)

    def class_weights(self, counts: Mapping[str, int], samples: int) -> Tensor:
        """Return float32[classes, 2]: for samples without the class and with it."""
        counted = torch.tensor([float(counts.get(name, 0)) for name in self.classes])
        both = torch.stack([samples - counted, counted], 1)
        balanced = samples / (2 * both.clamp(min=1))
        return torch.where((both > 0).all(1, keepdim=True), balanced, torch.ones_like(both))

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def predicted(self, outputs: Tensor) -> list[Any]:
        return self.true(self.probabilities(outputs.double()))

    def true(self, target: Tensor) -> list[Any]:
        rows = (target > 0.5).tolist()
        return [[n for n, has in zip(self.classes, row, strict=True) if has] for row in rows]

    def text(self, value: Any) -> str:
        return "|".join(value)


@dataclass(frozen=True)
class NumberHead(Head):
    """A number: squared error of the standardized number."""

    kind: ClassVar[str] = "number"
    main_metric: ClassVar[str] = "mse"

    @property
    def label(self) -> ColumnInfo:
        return replace(self.target, kind="number", classes=())

    @property
    def outputs(self) -> int:
        return 1

    def field(self, image: Field | None = None) -> Field:
        """Return the field that reads the target: float64[b], finite.

        float32 is too coarse for times and coordinates before the mean is subtracted.
        """
        return field_of(self.label, is_finite=True, dtype="float64")

    def losses(
        self,
        outputs: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        predicted, standardized = self.for_criterion(outputs, target)
        return (predicted - standardized) ** 2

    def for_criterion(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and standardized target, float[b] each."""
        standardized = (target - self.mean) / self.deviation
        return outputs[:, 0], standardized.to(outputs.dtype)

    def for_metric(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.values(outputs.double()), target.double()

    def values(self, outputs: Tensor) -> Tensor:
        """Return predictions [b] on the scale of the labels."""
        return outputs[:, 0] * self.deviation + self.mean

    def predicted(self, outputs: Tensor) -> list[Any]:
        # float32 has about 9 digits, which count from the leading digit of the deviation
        extra = math.ceil(math.log10(max(abs(self.mean) / self.deviation, 1.0)))
        numbers = self.values(outputs.double()).tolist()
        return [float(f"{number:.{min(17, 9 + extra)}g}") for number in numbers]

    def true(self, target: Tensor) -> list[Any]:
        return target.tolist()

    def text(self, value: Any) -> str:
        return f"{value:.4g}"


@dataclass(frozen=True)
class MaskHead(ClassHead):
    """The class of each pixel: cross entropy over one logit per class and pixel.

    Pixels of the number 255 count neither in the loss nor in metrics. Outputs are
    [b, classes, h, w], targets int64[b, h, w].
    """

    kind: ClassVar[str] = "mask"
    main_metric: ClassVar[str] = "mIoU"
    has_accuracy: ClassVar[bool] = False
    ignored: ClassVar[int] = IGNORED

    def field(self, image: Field | None = None) -> Field:
        """Return the field that reads the target, as large as the images."""
        if not isinstance(image, Image) or image.size is None:
            raise UsageError(
                "masks need an image field of wt.image with a size: they get the same crop and flip."
            )
        return mask_like(image, (self.target.field,), len(self.classes))

    def losses(
        self,
        outputs: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss of each sample's pixels that have a class; 0 if none has."""
        losses = super().losses(outputs, target, smoothing=smoothing, weights=weights)
        pixels = (target != IGNORED).flatten(1).sum(1)
        return losses.flatten(1).sum(1) / pixels.clamp(min=1)

    def true(self, target: Tensor) -> list[Any]:
        return list(target.byte().cpu())

    def text(self, value: Any) -> str:
        """Return the largest classes of a mask, with their shares of the pixels."""
        counts = torch.bincount(value[value != IGNORED].long(), minlength=len(self.classes))
        shares = (counts / counts.sum().clamp(min=1)).tolist()
        order = sorted(range(len(shares)), key=lambda number: -shares[number])[:_SHOWN]
        return ", ".join(f"{self.classes[i]} {shares[i]:.0%}" for i in order if shares[i])


def _binary_losses(
    outputs: Tensor, share: Tensor, smoothing: float, weights: Tensor | None
) -> Tensor:
    """Return the mean over the classes of each sample's binary cross entropies."""
    aim = share * (1 - smoothing) + smoothing / 2
    losses = functional.binary_cross_entropy_with_logits(outputs, aim, reduction="none")
    if weights is not None:
        absent, present = weights if weights.ndim == 1 else weights.unbind(1)
        losses = losses * torch.lerp(absent, present, share)
    return losses.mean(1)
