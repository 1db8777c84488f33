"""Heads: one class per kind of label, with its loss and its predictions in words; see `mask_head`.

A head reads its target from a batch, takes its columns of the model's output, and gives one loss
per sample. Its metrics are in `metrics`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from wdstrain.decode.fields import Field
from wdstrain.decode.labels import field_of
from wdstrain.errors import SampleError
from wdstrain.shards.kinds import ColumnInfo


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
    train_sum: ClassVar[str | None] = "accuracy"  # metric of the training epoch, if there is one

    @property
    def name(self) -> str:
        """Name of the label; in a batch "target " stands before it."""
        return self.target.name

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty for numbers."""
        return self.target.classes

    @property
    def outputs(self) -> int:
        """Number of columns in the model's output."""
        return len(self.classes)

    def output_shape(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the model's output for an image of this shape, without the batch."""
        return (self.outputs,)

    def field(self, image: Field | None = None) -> Field:
        """Return the field that reads the target: int64[b], class numbers.

        image: field of the images, which masks follow.
        """
        return replace(field_of(self.target), classes=self.classes)

    def checked_target(self, value: Any) -> Any:
        """Return a label that a transform returned, as `field` reads it.

        value: number or name of a class. Raises SampleError for a value that is none.
        """
        if isinstance(value, str):
            position = self._class_number(value)
            if value.isdecimal() and int(value) != position and int(value) < len(self.classes):
                raise SampleError(
                    f"{self.name} is the text {value!r}, the name of one class and the number of "
                    f"another: return the number as an integer"
                )
            return position
        number = as_float(value, self.name)
        if number != int(number) or not 0 <= number < len(self.classes):
            raise SampleError(
                f"{self.name} is {value}: must be a class number from 0 to {len(self.classes) - 1}"
            )
        return int(number)

    def _class_number(self, name: str) -> int:
        if name not in self.classes:
            raise SampleError(
                f"{self.name} is {name[:80]!r}: must be one of the {len(self.classes)} classes"
            )
        return self.classes.index(name)

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

    def class_weights(self, counts: Mapping[str, int], samples: int) -> Tensor | None:
        """Return weights with which rare classes count as much as frequent ones.

        float32[classes], whose mean over the samples is 1. None for numbers.
        """
        found = torch.tensor([float(counts.get(name, 0)) for name in self.classes])
        present = found > 0
        balanced = found.sum() / (present.sum() * found.clamp(min=1))
        return torch.where(present, balanced, torch.ones_like(found))

    @abstractmethod
    def train_values(self, outputs: Tensor, target: Tensor) -> Tensor | None:
        """Return values [b] whose mean over an epoch of training is shown as `train_sum`."""

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Return the probability of each class, [b, classes]."""
        return outputs.softmax(1)

    def predicted_classes(self, outputs: Tensor) -> list[str]:
        """Return the predicted classes of one row of outputs."""
        return [self.classes[int(self.probabilities(outputs[None])[0].argmax())]]

    def true_classes(self, target: Tensor) -> list[str]:
        """Return the true classes of one target."""
        return [self.classes[int(target)]]

    def prediction_text(self, outputs: Tensor) -> str:
        """Return the prediction of one row of outputs in words."""
        best = float(self.probabilities(outputs[None]).max())
        return f"{self.predicted_classes(outputs)[0]} {best:.0%}"

    def target_text(self, target: Tensor) -> str:
        """Return one target in words."""
        return "|".join(self.true_classes(target))

    def is_wrong(self, outputs: Tensor, target: Tensor) -> bool:
        """Return whether one prediction is another class than the target."""
        return self.predicted_classes(outputs) != self.true_classes(target)

    def compact(self, outputs: Tensor) -> Tensor:
        """Return what a prediction keeps of the outputs."""
        return outputs

    def columns(self, *, probabilities: bool) -> list[str]:
        """Return the names of a table's columns for predictions."""
        names = [self.name, f"{self.name} probability"]
        return names + ([f"{self.name}={name}" for name in self.classes] if probabilities else [])

    def cells(self, outputs: Tensor, *, probabilities: bool) -> list[str]:
        """Return the cells of one row of outputs, for `columns`."""
        shares = self.probabilities(outputs[None].double())[0].tolist()
        best = max(range(len(shares)), key=shares.__getitem__)
        cells = [self.classes[best], f"{shares[best]:.9g}"]
        return cells + ([f"{share:.9g}" for share in shares] if probabilities else [])

    def picture(
        self, pixels: npt.NDArray[np.uint8], outputs: Tensor, target: Tensor
    ) -> npt.NDArray[np.uint8]:
        """Return the picture of a sample in the report. uint8[h, w, 3] each."""
        return pixels

    @abstractmethod
    def describe(self) -> str:
        """Return the kind of the label in words, such as "one of 10 classes"."""


@dataclass(frozen=True)
class ClassHead(Head):
    """One of several classes: cross entropy over one logit per class."""

    kind: ClassVar[str] = "class"
    main_metric: ClassVar[str] = "accuracy"

    def losses(
        self,
        outputs: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        return functional.cross_entropy(
            outputs, target, weight=weights, label_smoothing=smoothing, reduction="none"
        )

    def train_values(self, outputs: Tensor, target: Tensor) -> Tensor:
        return outputs.argmax(1) == (target.argmax(1) if target.ndim == 2 else target)

    def describe(self) -> str:
        return f"one of {len(self.classes)} classes"


@dataclass(frozen=True)
class BinaryHead(Head):
    """One of two classes: one logit, for the second class."""

    kind: ClassVar[str] = "binary"
    main_metric: ClassVar[str] = "accuracy"

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

    def train_values(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs[:, 0] > 0).long() == (target.argmax(1) if target.ndim == 2 else target)

    def probabilities(self, outputs: Tensor) -> Tensor:
        second = outputs.sigmoid()
        return torch.cat([1 - second, second], 1)

    def describe(self) -> str:
        return "one of two classes"


@dataclass(frozen=True)
class MultiLabelHead(Head):
    """Any number of classes at once: one logit per class."""

    kind: ClassVar[str] = "multi"
    main_metric: ClassVar[str] = "mAP"
    train_sum: ClassVar[str | None] = None

    def field(self, image: Field | None = None) -> Field:
        """Return the field that reads the target: float32[b, classes], 0 or 1."""
        return replace(field_of(self.target), classes=self.classes)

    def checked_target(self, value: Any) -> Tensor:
        """Return flags, float32[classes]. value: names of classes, or a flag for each class."""
        if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
            numbers = [self._class_number(name) for name in value]
            flags = torch.zeros(len(self.classes))
            flags[numbers] = 1
            return flags
        flags = torch.as_tensor(value, dtype=torch.float32)
        if flags.shape != (len(self.classes),) or not ((flags == 0) | (flags == 1)).all():
            raise SampleError(
                f"{self.name} is {str(value)[:80]}: must be 0 or 1 for each of the "
                f"{len(self.classes)} classes, or a list of their names"
            )
        return flags

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
        found = torch.tensor([float(counts.get(name, 0)) for name in self.classes])
        both = torch.stack([samples - found, found], 1)
        balanced = samples / (2 * both.clamp(min=1))
        return torch.where((both > 0).all(1, keepdim=True), balanced, torch.ones_like(both))

    def train_values(self, outputs: Tensor, target: Tensor) -> None:
        return None

    def probabilities(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def predicted_classes(self, outputs: Tensor) -> list[str]:
        shares = self.probabilities(outputs[None])[0].tolist()
        return [name for name, share in zip(self.classes, shares, strict=True) if share > 0.5]

    def true_classes(self, target: Tensor) -> list[str]:
        return [n for n, share in zip(self.classes, target.tolist(), strict=True) if share > 0.5]

    def prediction_text(self, outputs: Tensor) -> str:
        return "|".join(self.predicted_classes(outputs))

    def columns(self, *, probabilities: bool) -> list[str]:
        return [self.name, *super().columns(probabilities=probabilities)[2:]]

    def cells(self, outputs: Tensor, *, probabilities: bool) -> list[str]:
        classes = "|".join(self.predicted_classes(outputs.double()))
        return [classes, *super().cells(outputs, probabilities=probabilities)[2:]]

    def describe(self) -> str:
        return f"any of {len(self.classes)} classes"


@dataclass(frozen=True)
class NumberHead(Head):
    """A number: squared error of the standardized number."""

    kind: ClassVar[str] = "number"
    main_metric: ClassVar[str] = "mse"
    train_sum: ClassVar[str | None] = "target_mean"

    @property
    def outputs(self) -> int:
        return 1

    def field(self, image: Field | None = None) -> Field:
        """Return the field that reads the target: float64[b], finite.

        float32 is too coarse for times and coordinates before the mean is subtracted.
        """
        target = replace(self.target, kind="number", classes=())
        return field_of(target, is_finite=True, dtype="float64")

    def checked_target(self, value: Any) -> float:
        return as_float(value, self.name)

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

    def class_weights(self, counts: Mapping[str, int], samples: int) -> None:
        return None

    def values(self, outputs: Tensor) -> Tensor:
        """Return predictions [b] on the scale of the labels."""
        return outputs[:, 0] * self.deviation + self.mean

    def train_values(self, outputs: Tensor, target: Tensor) -> Tensor:
        return target

    def prediction_text(self, outputs: Tensor) -> str:
        return f"{float(self.values(outputs[None])):.4g}"

    def target_text(self, target: Tensor) -> str:
        return f"{float(target):.4g}"

    def is_wrong(self, outputs: Tensor, target: Tensor) -> bool:
        """Return False: a number is off by more or less, never right or wrong."""
        return False

    def columns(self, *, probabilities: bool) -> list[str]:
        return [self.name]

    def cells(self, outputs: Tensor, *, probabilities: bool) -> list[str]:
        # float32 has about 9 digits, which count from the leading digit of the deviation
        extra = math.ceil(math.log10(max(abs(self.mean) / self.deviation, 1.0)))
        value = float(self.values(outputs[None].double()))
        return [number_text(float(f"{value:.{min(17, 9 + max(0, extra))}g}"))]

    def describe(self) -> str:
        return "a number"


def as_float(value: Any, name: str) -> float:
    """Return a label that a transform returned as a finite number. name: of the label."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise SampleError(f"{name} is {str(value)[:80]}: must be a finite number")
    return number


def number_text(value: float) -> str:
    """Return a number with all its digits."""
    return repr(value).removesuffix(".0")


def _binary_losses(
    outputs: Tensor, share: Tensor, smoothing: float, weights: Tensor | None
) -> Tensor:
    """Return the mean over the classes of each sample's binary cross entropies."""
    aim = share * (1 - smoothing) + smoothing / 2
    found = functional.binary_cross_entropy_with_logits(outputs, aim, reduction="none")
    if weights is not None:
        absent, present = weights if weights.ndim == 1 else weights.unbind(1)
        found = found * torch.lerp(absent, present, share)
    return found.mean(1)
