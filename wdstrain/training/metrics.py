"""Metrics of one pass over samples, of all processes together.

Every state is a sum (counts of a confusion matrix, squared errors). So memory does not grow with
the samples, a process without samples adds nothing, and processes add up to what a single one
counts. AUROC, average precision and calibration come from counts in narrow bins for that reason.
torchmetrics has bins of equal width for them, in which certain models are not ranked, and takes
seconds to import.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wdstrain.training.heads import (
    BinaryHead,
    ClassHead,
    Head,
    MaskHead,
    MultiLabelHead,
    NumberHead,
)
from wdstrain.training.tasks import Task

Reduce = Callable[[Tensor], Tensor]  # a tensor -> its sum over all processes
Metrics = dict[str, float]
ByClass = dict[str, dict[str, float | None]]  # figures of each class; None: undefined

_MOST_CURVES = 100  # classes with AUROC and average precision of each
_MOST_SHARES = 100  # classes whose recalls are in the line of an epoch
_MOST_MATRIX = 2000  # classes with a confusion matrix
_MOST_BINS, _FEWEST_BINS, _BINS_OF_ALL = 1 << 14, 1 << 10, 1 << 21  # per class; of all classes
_FARTHEST = 1e4  # log-odds: samples of a model that is far too certain are ranked too
_LINEAR = 0.01  # log-odds up to which bins have equal widths; beyond it widths grow with them
_CALIBRATION_BINS = 15


class HeadMetrics(ABC):
    """Sums for the metrics of one head: float64 on the device, by name."""

    def __init__(self, head: Any, device: torch.device) -> None:
        self.head = head
        self.sums = {
            name: torch.zeros(shape, dtype=torch.float64, device=device)
            for name, shape in self.shapes(len(head.classes)).items()
        }

    @abstractmethod
    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the sums by name."""

    @abstractmethod
    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add a batch. outputs: [b, columns of the head]."""

    @abstractmethod
    def compute(self, sums: Mapping[str, Tensor], samples: int) -> tuple[Metrics, dict[str, Any]]:
        """Return (metrics by name, details for the report). sums: of all processes.

        Undefined metrics are left out. details: "by_class", and where there is one "confusion".
        """


class _Classes(HeadMetrics):
    """Metrics of one class per sample, of two classes or more."""

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "right": (1,),
            "top5": (1,),
            "calibration": (3, _CALIBRATION_BINS),
        }
        if classes <= _MOST_MATRIX:
            shapes["confusion"] = (classes * classes,)
        if classes <= _MOST_CURVES:
            shapes["ranks"] = _shape_of_ranks(self.head.outputs)
        return shapes

    def update(self, outputs: Tensor, target: Tensor) -> None:
        head, sums, outputs = self.head, self.sums, outputs.double()
        predicted = head.numbers(outputs)
        shares = head.probabilities(outputs)
        sums["right"] += (predicted == target).sum()
        _add_calibration(sums["calibration"], shares.amax(1), predicted == target)
        if len(head.classes) > 5:
            sums["top5"] += (shares.topk(5).indices == target[:, None]).sum()
        if "confusion" in sums:
            _add_counts(sums["confusion"], target * len(head.classes) + predicted)
        if "ranks" in sums:
            odds = outputs if head.outputs == 1 else _log_odds(outputs)
            numbers = torch.arange(len(head.classes), device=target.device)[-head.outputs :]
            _add_ranks(sums["ranks"], odds, (target[:, None] == numbers).long())

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> tuple[Metrics, dict[str, Any]]:
        metrics: Metrics = {"accuracy": float(sums["right"]) / max(1, samples)}
        details: dict[str, Any] = {}
        if len(self.head.classes) > 5:
            metrics["top5"] = float(sums["top5"]) / max(1, samples)
        if "confusion" in sums:
            more, details = _matrix_metrics(self.head, sums["confusion"], "samples")
            metrics |= more
        if "ranks" in sums:
            metrics |= _mean("auroc", _auroc(sums["ranks"]))
        count, confidence, right = sums["calibration"]
        metrics["ece"] = float((confidence - right).abs().sum() / count.sum().clamp(min=1))
        return metrics, details


class _Masks(HeadMetrics):
    """Metrics of the class of each pixel, from a confusion matrix of pixels."""

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        return {"pixels": (classes * classes + 1,)}  # the last: pixels without a class

    def update(self, outputs: Tensor, target: Tensor) -> None:
        count = len(self.head.classes)
        cells = target * count + self.head.numbers(outputs)
        # no boolean index: it waits for the device
        cells = torch.where(target == self.head.ignored, count * count, cells)
        _add_counts(self.sums["pixels"], cells.flatten())

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> tuple[Metrics, dict[str, Any]]:
        more, details = _matrix_metrics(self.head, sums["pixels"][:-1], "pixels")
        shares = [row["IoU"] for row in details["by_class"].values() if row["IoU"] is not None]
        if not shares:
            return {}, details
        right = sum(row[i] for i, row in enumerate(details["confusion"]))
        metrics = {"mIoU": sum(shares) / len(shares)}
        metrics["pixel_accuracy"] = right / max(1.0, float(sums["pixels"][:-1].sum()))
        metrics["classes_without_pixels"] = len(self.head.classes) - len(shares)
        return metrics | more, details


class _MultiLabel(HeadMetrics):
    """Metrics of several classes per sample."""

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        # counts: of hits, of predictions and of samples with each class
        return {"exact": (1,), "counts": (3, classes), "ranks": _shape_of_ranks(classes)}

    def update(self, outputs: Tensor, target: Tensor) -> None:
        outputs = outputs.double()
        predicted, true = self.head.probabilities(outputs) > 0.5, target > 0
        self.sums["exact"] += (predicted == true).all(1).sum()
        self.sums["counts"] += torch.stack([predicted & true, predicted, true]).sum(1)
        _add_ranks(self.sums["ranks"], outputs, true.long())

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> tuple[Metrics, dict[str, Any]]:
        hits, predicted, true = sums["counts"]
        decisions = max(1, samples * len(hits))
        wrong = float((predicted + true - 2 * hits).sum())
        metrics: Metrics = {"accuracy": (decisions - wrong) / decisions}
        metrics["exact"] = float(sums["exact"]) / max(1, samples)
        if (true > 0).any():
            metrics["f1"] = float((2 * hits / (predicted + true))[true > 0].mean())
        precision = _average_precision(sums["ranks"])
        metrics |= _mean("auroc", _auroc(sums["ranks"])) | _mean("mAP", precision)
        metrics["classes_without_positives"] = int((true == 0).sum())
        more = {"average precision": precision}
        return metrics, {"by_class": _by_class(self.head, "positives", hits, predicted, true, more)}


class _Number(HeadMetrics):
    """Metrics of numbers: squared and absolute error, and the variance of the labels."""

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        return {"totals": (4,)}

    def update(self, outputs: Tensor, target: Tensor) -> None:
        predicted, true = self.head.for_metric(outputs, target)
        # squares of times or coordinates themselves would lose their variance
        error, offset = predicted - true, true - self.head.mean
        self.sums["totals"] += torch.stack([error**2, error.abs(), offset, offset**2]).sum(1)

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> tuple[Metrics, dict[str, Any]]:
        mse, mae, mean_offset, square = (sums["totals"] / max(1, samples)).tolist()
        metrics = {"mse": mse, "mae": mae, "mean": self.head.mean + mean_offset}
        metrics["variance"] = max(0.0, square - mean_offset**2)
        if metrics["variance"] > 0 and samples > 1:
            metrics["r2"] = 1 - mse / metrics["variance"]
        return metrics, {}


METRICS_OF_HEAD: dict[type[Head], type[HeadMetrics]] = {
    ClassHead: _Classes,
    BinaryHead: _Classes,
    MultiLabelHead: _MultiLabel,
    NumberHead: _Number,
    MaskHead: _Masks,
}


# --- sums -----------------------------------------------------------------------------------------


def _add_counts(counts: Tensor, positions: Tensor) -> None:
    """Add 1 at each flat position of a tensor.

    Deterministic algorithms refuse torch's bincount.
    """
    counts.view(-1).index_add_(0, positions, torch.ones_like(positions, dtype=counts.dtype))


def _shape_of_ranks(classes: int) -> tuple[int, int, int]:
    """Return the shape of counts by bins of log-odds: [classes, without and with it, bins]."""
    return classes, 2, min(_MOST_BINS, max(_FEWEST_BINS, _BINS_OF_ALL // classes))


def _add_ranks(ranks: Tensor, odds: Tensor, present: Tensor) -> None:
    """Count samples by bin of their log-odds. odds, present: [b, classes]."""
    bins = ranks.shape[2]
    near = odds.nan_to_num(-_FARTHEST).clamp(-_FARTHEST, _FARTHEST) / _LINEAR
    place = ((near.asinh() / math.asinh(_FARTHEST / _LINEAR) + 1) / 2 * (bins - 1)).round().long()
    row = 2 * torch.arange(odds.shape[1], device=odds.device) + present
    _add_counts(ranks, (row * bins + place).flatten())


def _log_odds(outputs: Tensor) -> Tensor:
    """Return log-odds of each class [b, classes], 0 where all classes are equally likely.

    They are exact also where a class is nearly certain.
    """
    best = outputs.argmax(1, keepdim=True)
    share = outputs.log_softmax(1)
    others = outputs.scatter(1, best, -torch.inf).logsumexp(1, keepdim=True)
    odds = (share - torch.log1p(-share.exp())).scatter(1, best, outputs.gather(1, best) - others)
    return odds + math.log(max(1, outputs.shape[1] - 1))


def _auroc(ranks: Tensor) -> Tensor:
    """Return the area under the ROC curve of each class; NaN if all samples have it or none."""
    without, having = ranks.unbind(1)
    below = without.cumsum(1) - without / 2
    return (having * below).sum(1) / (having.sum(1) * without.sum(1))


def _average_precision(ranks: Tensor) -> Tensor:
    """Return the average precision of each class; NaN if no sample has it."""
    without, having = ranks.flip(2).unbind(1)  # the most certain first
    hits = having.cumsum(1)
    precision = hits / (hits + without.cumsum(1)).clamp(min=1)
    return (having * precision).sum(1) / having.sum(1)


def _mean(name: str, values: Tensor) -> Metrics:
    """Return the mean over the classes for which a metric is defined; nothing if none is."""
    mean = float(values.nanmean())
    return {} if math.isnan(mean) else {name: mean}


def _add_calibration(sums: Tensor, confidence: Tensor, right: Tensor) -> None:
    """Add a batch to [samples, confidences, right answers] by bin of the confidence."""
    bins = (confidence.nan_to_num() * _CALIBRATION_BINS).long().clamp(max=_CALIBRATION_BINS - 1)
    picked = torch.nn.functional.one_hot(bins, _CALIBRATION_BINS).double()
    sums += torch.stack([picked.sum(0), confidence @ picked, right.double() @ picked])


def _matrix_metrics(head: Head, counts: Tensor, counted: str) -> tuple[Metrics, dict[str, Any]]:
    """Return (means over the classes that some sample has, details) of a confusion matrix.

    counts: flat. counted: what it counts, "samples" or "pixels".
    """
    matrix = counts.view(len(head.classes), -1)
    right, predicted, true = matrix.diagonal(), matrix.sum(0), matrix.sum(1)
    more = {"IoU": right / (predicted + true - right)} if counted == "pixels" else {}
    by_class = _by_class(head, counted, right, predicted, true, more)
    details = {"confusion": matrix.tolist(), "by_class": by_class}
    present = true > 0
    if not present.any():
        return {}, details
    recall, f1 = right / true.clamp(min=1), 2 * right / (predicted + true).clamp(min=1)
    metrics: Metrics = {"balanced_accuracy": float(recall[present].mean())}
    if not present.all():
        metrics["classes_without_samples"] = int((~present).sum())
    if counted == "samples" and len(head.classes) == 2:
        metrics["precision"] = float(right[1] / predicted[1].clamp(min=1))
        metrics |= {"recall": float(recall[1]), "f1": float(f1[1])}
    else:
        metrics["f1"] = float(f1[present].mean())
    return metrics, details


def _by_class(
    head: Head,
    counted: str,
    right: Tensor,
    predicted: Tensor,
    true: Tensor,
    more: Mapping[str, Tensor],
) -> ByClass:
    """Return count, precision and recall of each class. counted: name of the count."""
    columns = {"precision": right / predicted, "recall": right / true, **more}
    shares = [[None if x != x else x for x in column.tolist()] for column in columns.values()]
    rows = zip(true.long().tolist(), *shares, strict=True)
    return {
        name: dict(zip((counted, *columns), row, strict=True))
        for name, row in zip(head.classes, rows, strict=True)
    }


def class_shares(details: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the recall of each class, of masks the IoU, by head; not of more than 100 classes.

    details: of heads, as `EvalMetrics.compute` returns them.
    """
    shares = {}
    for name, of_head in details.items():
        rows = {n: row.get("IoU", row["recall"]) for n, row in of_head.get("by_class", {}).items()}
        defined = {n: share for n, share in rows.items() if share is not None}
        if 0 < len(defined) <= _MOST_SHARES:
            shares[name] = defined
    return shares


# --- a pass ---------------------------------------------------------------------------------------


class EvalMetrics:
    """Metrics of one pass over samples.

    user_metrics: torchmetrics by name, updated with (predictions, target): probabilities of classes
    or numbers. With several heads, by HEAD/NAME.
    """

    def __init__(
        self, task: Task, device: torch.device, user_metrics: Mapping[str, Any] | None = None
    ) -> None:
        self._task = task
        self._parts = [METRICS_OF_HEAD[type(head)](head, device) for head in task.heads]
        self._loss = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, samples
        self._user = {name: metric.to(device) for name, metric in (user_metrics or {}).items()}
        for metric in self._user.values():
            metric.reset()

    @torch.no_grad()
    def update(self, outputs: Tensor, targets: Sequence[Tensor], losses: Tensor) -> None:
        """Add a batch. losses: [b]."""
        if not len(outputs):
            return
        self._loss[0] += losses.double().sum()
        self._loss[1] += len(losses)
        pairs = zip(self._task.split(outputs), targets, strict=True)
        batches = dict(zip(self._task.heads, pairs, strict=True))
        for part in self._parts:
            part.update(*batches[part.head])
        for name, metric in self._user.items():
            head = self._task.head_of(name)
            metric.update(*head.for_metric(*batches[head]))

    def compute(self, reduce: Reduce) -> tuple[Metrics, dict[str, Any]]:
        """Return (metrics, details of each head) of all processes."""
        loss, samples = reduce(self._loss).tolist()
        metrics: Metrics = {"samples": int(samples), "loss": loss / max(1.0, samples)}
        details: dict[str, Any] = {}
        for part in self._parts:
            sums = {name: reduce(value) for name, value in part.sums.items()}
            values, details[part.head.name] = part.compute(sums, int(samples))
            metrics |= {self._task.metric_name(part.head, n): v for n, v in values.items()}
        metrics |= {name: float(metric.compute()) for name, metric in self._user.items()}
        return metrics, details
