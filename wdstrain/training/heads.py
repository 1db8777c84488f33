"""Heads: one class per kind of label. It says all that differs between kinds.

A head reads its target from a batch and turns its columns of the model's output into scores. From
these come a loss for each sample, predictions, and sums of which metrics are made. To learn another
kind of label, add a class here and its kind in `tasks`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from wdstrain.decode.codecs import IGNORED
from wdstrain.decode.fields import Field, Image, mask_like
from wdstrain.decode.labels import field_of
from wdstrain.errors import UsageError
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.training import metrics

_MOST_CURVES = 100  # classes with AUROC and average precision of each
_MOST_MATRIX = 2000  # classes with a confusion matrix
_CALIBRATION_BINS = 15

Sums = dict[str, Tensor]  # float64 on the device, by name

# (scores, target) -> loss, a scalar or [b]. By the name of the head if there are
# several.
Criterion = Callable[[Tensor, Any], Tensor]

# (batch, model) -> loss, a scalar or [b]
TrainingStep = Callable[[dict[str, Any], Any], Tensor]


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

    # --- learning ---------------------------------------------------------------------------------

    def scores(self, columns: Tensor) -> Tensor:
        """Return the scores that columns [b, self.outputs] of the model's output mean.

        Logits [b, classes], or standardized numbers [b]. All other methods take scores.
        """
        return columns

    def aim(self, target: Tensor) -> Tensor:
        """Return a target as a loss compares it with scores."""
        return target

    @abstractmethod
    def losses(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of each sample, float[b].

        target: as `field` reads it, or shares of classes [b, classes]. smoothing: share of a label
        that is spread over all classes. weights: see `class_weights`.
        """

    def class_weights(self, counts: Mapping[str, int], samples: int) -> Tensor:
        """Return weights with which rare classes count as much as frequent ones.

        float32[classes], whose mean over the samples is 1.
        """
        counted = torch.tensor([float(counts.get(name, 0)) for name in self.classes])
        balanced = counted.sum() / ((counted > 0).sum() * counted.clamp(min=1))
        return torch.where(counted > 0, balanced, torch.ones_like(counted))

    # --- predictions ------------------------------------------------------------------------------

    @abstractmethod
    def decided(self, scores: Tensor) -> Tensor:
        """Return predictions in the form of targets."""

    def right(self, scores: Tensor, target: Tensor) -> Tensor:
        """Return whether each prediction is right, bool[b]. target: also shares of classes."""
        return self.decided(scores) == (target.argmax(1) if target.ndim == 2 else target)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return the probability of each class, [b, classes]."""
        return scores.softmax(1)

    def for_metric(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (predictions, target) as torchmetrics expects them."""
        return self.probabilities(scores), target.long()

    def predicted(self, scores: Tensor) -> list[Any]:
        """Return what is predicted for each row: a class, a list of them, a number or a mask."""
        return self.true(self.decided(scores))

    @abstractmethod
    def true(self, target: Tensor) -> list[Any]:
        """Return the targets of a batch in the form of `predicted`."""

    def text(self, value: Any) -> str:
        """Return a prediction or a target in words."""
        return str(value)

    # --- metrics ----------------------------------------------------------------------------------

    @abstractmethod
    def sums(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the sums by name; without elements for sums that are not kept."""

    @abstractmethod
    def add(self, sums: Sums, scores: Tensor, target: Tensor) -> None:
        """Add a batch to the sums. scores: float64."""

    @abstractmethod
    def results(self, sums: Sums, samples: int) -> metrics.Results:
        """Return (metrics by name, details for the report). Undefined metrics are NaN."""


@dataclass(frozen=True)
class ClassHead(Head):
    """One of several classes: cross entropy over one logit per class.

    ignored: number of targets without a class.
    """

    kind: ClassVar[str] = "class"
    main_metric: ClassVar[str] = "accuracy"
    ignored: ClassVar[int] = -1

    def losses(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        return functional.cross_entropy(
            scores,
            target,
            weight=weights,
            label_smoothing=smoothing,
            ignore_index=self.ignored,
            reduction="none",
        )

    def decided(self, scores: Tensor) -> Tensor:
        return scores.argmax(1)

    def true(self, target: Tensor) -> list[Any]:
        return [self.classes[number] for number in target.tolist()]

    def sums(self) -> dict[str, tuple[int, ...]]:
        count = len(self.classes)
        return {
            "top5": (1,),
            "calibration": (3, _CALIBRATION_BINS),  # samples, confidences, right answers
            "confusion": (count * (count <= _MOST_MATRIX), count),
            "ranks": metrics.shape_of_ranks(count * (count <= _MOST_CURVES)),
        }

    def add(self, sums: Sums, scores: Tensor, target: Tensor) -> None:
        count, shares = len(self.classes), scores.softmax(1)
        confidence, right = shares.amax(1), self.right(scores, target).double()
        bins = (confidence.nan_to_num() * _CALIBRATION_BINS).long().clamp(max=_CALIBRATION_BINS - 1)
        picked = functional.one_hot(bins, _CALIBRATION_BINS).double()
        sums["calibration"] += torch.stack([picked.sum(0), confidence @ picked, right @ picked])
        sums["top5"] += (shares.topk(min(5, count)).indices == target[:, None]).sum()
        if len(sums["confusion"]):
            metrics.add_counts(sums["confusion"], target * count + self.decided(scores))
        if len(sums["ranks"]):
            present = functional.one_hot(target, count)
            metrics.add_ranks(sums["ranks"], metrics.log_odds(scores), present)

    def results(self, sums: Sums, samples: int) -> metrics.Results:
        _, confidence, hits = sums["calibration"]
        values = {
            "accuracy": hits.sum() / samples,
            "ece": (confidence - hits).abs().sum() / samples,
            "auroc": metrics.auroc(sums["ranks"]).nanmean(),
        }
        if len(self.classes) > 5:
            values["top5"] = sums["top5"].sum() / samples
        details = {"calibration": sums["calibration"].tolist()}
        if not len(sums["confusion"]):
            return values, details
        more, rows = metrics.matrix_metrics(self.classes, "samples", sums["confusion"])
        return values | more, details | rows


@dataclass(frozen=True)
class BinaryHead(ClassHead):
    """One of two classes: one logit, for the second class; the other's is 0."""

    kind: ClassVar[str] = "binary"

    @property
    def outputs(self) -> int:
        return 1

    def scores(self, columns: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(columns), columns], 1)

    def losses(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        # The weight of a sample is that of its own class, also if smoothing gives the other a share.
        share = target[:, 1:] if target.ndim == 2 else target[:, None].to(scores.dtype)
        return _binary_losses(scores[:, 1:], share, smoothing, weights)

    def for_metric(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.probabilities(scores)[:, 1], target


@dataclass(frozen=True)
class MaskHead(ClassHead):
    """The class of each pixel: cross entropy over one logit per class and pixel.

    Pixels of the number 255 count neither in the loss nor in metrics. Scores are
    [b, classes, h, w], targets int64[b, h, w].
    """

    kind: ClassVar[str] = "mask"
    main_metric: ClassVar[str] = "mIoU"
    ignored: ClassVar[int] = IGNORED

    def field(self, image: Field | None = None) -> Field:
        """Return the field that reads the target, as large as the images."""
        if not isinstance(image, Image) or image.size is None:
            raise UsageError(
                "masks need an image field of wt.image with a size: they get the same crop and flip."
            )
        target = self.target
        return mask_like(image, (target.field,), len(target.classes), target.ignored)

    def losses(self, scores: Tensor, target: Tensor, **options: Any) -> Tensor:
        """Return the mean loss of each sample's pixels that have a class; 0 if none has."""
        losses = super().losses(scores, target, **options)
        pixels = (target != IGNORED).flatten(1).sum(1)
        return losses.flatten(1).sum(1) / pixels.clamp(min=1)

    def true(self, target: Tensor) -> list[Any]:
        return list(target.byte().cpu())

    def sums(self) -> dict[str, tuple[int, ...]]:
        return {"pixels": (len(self.classes) ** 2 + 1,)}  # the last: pixels without a class

    def add(self, sums: Sums, scores: Tensor, target: Tensor) -> None:
        count = len(self.classes)
        cells = target * count + self.decided(scores)
        # no boolean index: it waits for the device
        cells = torch.where(target == IGNORED, count * count, cells)
        metrics.add_counts(sums["pixels"], cells)

    def results(self, sums: Sums, samples: int) -> metrics.Results:
        matrix = sums["pixels"][:-1].view(len(self.classes), -1)
        right = matrix.diagonal()
        shares = right / (matrix.sum(0) + matrix.sum(1) - right)
        values = {"mIoU": shares.nanmean(), "pixel_accuracy": right.sum() / matrix.sum()}
        more, details = metrics.matrix_metrics(self.classes, "pixels", matrix, IoU=shares)
        return values | more | {"classes_without_pixels": shares.isnan().sum()}, details


@dataclass(frozen=True)
class MultiLabelHead(Head):
    """Any number of classes at once: one logit per class. Targets are float32[b, classes], 0 or 1."""

    kind: ClassVar[str] = "multi"
    main_metric: ClassVar[str] = "mAP"

    def losses(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        return _binary_losses(scores, target, smoothing, weights)

    def class_weights(self, counts: Mapping[str, int], samples: int) -> Tensor:
        """Return float32[classes, 2]: for samples without the class and with it."""
        counted = torch.tensor([float(counts.get(name, 0)) for name in self.classes])
        both = torch.stack([samples - counted, counted], 1)
        balanced = samples / (2 * both.clamp(min=1))
        return torch.where((both > 0).all(1, keepdim=True), balanced, torch.ones_like(both))

    def decided(self, scores: Tensor) -> Tensor:
        return scores > 0

    def probabilities(self, scores: Tensor) -> Tensor:
        return scores.sigmoid()

    def true(self, target: Tensor) -> list[Any]:
        rows = (target > 0).tolist()
        return [[n for n, has in zip(self.classes, row, strict=True) if has] for row in rows]

    def text(self, value: Any) -> str:
        return "|".join(value)

    def sums(self) -> dict[str, tuple[int, ...]]:
        count = len(self.classes)
        # counts: of hits, of predictions and of samples with each class
        return {"exact": (1,), "counts": (3, count), "ranks": metrics.shape_of_ranks(count)}

    def add(self, sums: Sums, scores: Tensor, target: Tensor) -> None:
        predicted, true = self.decided(scores), target > 0
        sums["exact"] += (predicted == true).all(1).sum()
        sums["counts"] += torch.stack([predicted & true, predicted, true]).sum(1)
        metrics.add_ranks(sums["ranks"], scores, true)

    def results(self, sums: Sums, samples: int) -> metrics.Results:
        hits, predicted, true = sums["counts"]
        precision = metrics.average_precision(sums["ranks"])
        values = {
            "mAP": precision.nanmean(),
            "auroc": metrics.auroc(sums["ranks"]).nanmean(),
            "accuracy": 1 - (predicted + true - 2 * hits).sum() / (samples * len(hits)),
            "exact": sums["exact"].sum() / samples,
            "f1": (2 * hits / (predicted + true))[true > 0].mean(),
            "classes_without_positives": (true == 0).sum(),
        }
        rows = metrics.class_rows(
            self.classes, "positives", hits, predicted, true, **{"average precision": precision}
        )
        return values, {"classes": rows}


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

    def scores(self, columns: Tensor) -> Tensor:
        return columns[:, 0]

    def aim(self, target: Tensor) -> Tensor:
        return ((target - self.mean) / self.deviation).float()

    def losses(self, scores: Tensor, target: Tensor, **options: Any) -> Tensor:
        return (scores - self.aim(target)) ** 2

    def decided(self, scores: Tensor) -> Tensor:
        """Return predictions float64[b] on the scale of the labels."""
        return scores.double() * self.deviation + self.mean

    def for_metric(self, scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.decided(scores), target.double()

    def predicted(self, scores: Tensor) -> list[Any]:
        # float32 has about 9 digits, which count from the leading digit of the deviation
        extra = math.ceil(math.log10(max(abs(self.mean) / self.deviation, 1.0)))
        return [float(f"{x:.{min(17, 9 + extra)}g}") for x in self.decided(scores).tolist()]

    def true(self, target: Tensor) -> list[Any]:
        return target.tolist()

    def text(self, value: Any) -> str:
        return f"{value:.4g}"

    def sums(self) -> dict[str, tuple[int, ...]]:
        # squared and absolute errors, distances from the mean, their squares
        return {"totals": (4,)}

    def add(self, sums: Sums, scores: Tensor, target: Tensor) -> None:
        # squares of times or coordinates themselves would lose their variance
        error, offset = self.decided(scores) - target, target.double() - self.mean
        sums["totals"] += torch.stack([error**2, error.abs(), offset, offset**2]).sum(1)

    def results(self, sums: Sums, samples: int) -> metrics.Results:
        mse, mae, offset, square = sums["totals"] / samples
        values = {"mse": mse, "mae": mae, "mse_of_mean": square}  # of the mean in training
        variance = square - offset**2
        if variance > 0 and samples > 1:
            values["r2"] = 1 - mse / variance
        return values, {}


HEADS: dict[str, type[Head]] = {
    head.kind: head for head in (ClassHead, BinaryHead, MultiLabelHead, NumberHead, MaskHead)
}


def _binary_losses(
    scores: Tensor, share: Tensor, smoothing: float, weights: Tensor | None
) -> Tensor:
    """Return the mean over the classes of each sample's binary cross entropies."""
    aim = share * (1 - smoothing) + smoothing / 2
    losses = functional.binary_cross_entropy_with_logits(scores, aim, reduction="none")
    if weights is not None:
        absent, present = weights if weights.ndim == 1 else weights.unbind(1)
        losses = losses * torch.lerp(absent, present, share)
    return losses.mean(1)
