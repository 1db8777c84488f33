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

from wdstrain.training.heads import Head
from wdstrain.training.tasks import Task

Reduce = Callable[[Tensor], Tensor]  # a tensor -> its sum over all processes
Metrics = dict[str, Any]
Classes = dict[str, dict[str, float | None]]  # numbers of each class; None: undefined

_MOST_CURVES = 100  # classes with AUROC and average precision of each
_MOST_MATRIX = 2000  # classes with a confusion matrix
_MOST_BINS, _FEWEST_BINS, _BINS_OF_ALL = 1 << 14, 1 << 10, 1 << 21  # per class; of all classes
_FARTHEST = 1e4  # log-odds: samples of a model that is far too certain are ranked too
_LINEAR = 0.01  # log-odds up to which bins have equal widths; beyond it widths grow with them
_CALIBRATION_BINS = 15


class HeadMetrics(ABC):
    """Sums for the metrics of one head: float64 on the device, by name."""

    def __init__(self, head: Any, device: torch.device) -> None:
        self.head = head
        shapes = self.shapes(len(head.classes)).items()
        self.sums = {n: torch.zeros(s, dtype=torch.float64, device=device) for n, s in shapes}

    @abstractmethod
    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the sums by name; without elements for sums that are not kept."""

    @abstractmethod
    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add a batch. outputs: [b, columns of the head], float64."""

    @abstractmethod
    def compute(self, sums: Mapping[str, Tensor], samples: int) -> tuple[Metrics, dict[str, Any]]:
        """Return (metrics by name, details for the report). sums: of all processes.

        Undefined metrics are NaN. details: "classes" with a row for each class, "confusion",
        "calibration".
        """


class _Classes(HeadMetrics):
    """Metrics of one class per sample, of two classes or more."""

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        return {
            "top5": (1,),
            "calibration": (3, _CALIBRATION_BINS),  # samples, confidences, right answers
            "confusion": (classes * (classes <= _MOST_MATRIX), classes),
            "ranks": _shape_of_ranks(self.head.outputs * (classes <= _MOST_CURVES)),
        }

    def update(self, outputs: Tensor, target: Tensor) -> None:
        head, sums, count = self.head, self.sums, len(self.head.classes)
        predicted, shares = head.numbers(outputs), head.probabilities(outputs)
        confidence, right = shares.amax(1), (predicted == target).double()
        bins = (confidence.nan_to_num() * _CALIBRATION_BINS).long().clamp(max=_CALIBRATION_BINS - 1)
        picked = torch.nn.functional.one_hot(bins, _CALIBRATION_BINS).double()
        sums["calibration"] += torch.stack([picked.sum(0), confidence @ picked, right @ picked])
        if count > 5:
            sums["top5"] += (shares.topk(5).indices == target[:, None]).sum()
        if len(sums["confusion"]):
            _add_counts(sums["confusion"], target * count + predicted)
        if len(sums["ranks"]):
            odds = outputs if head.outputs == 1 else _log_odds(outputs)
            numbers = torch.arange(count, device=target.device)[-head.outputs :]
            _add_ranks(sums["ranks"], odds, (target[:, None] == numbers).long())

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> tuple[Metrics, dict[str, Any]]:
        _, confidence, hits = sums["calibration"]
        metrics = {"accuracy": hits.sum() / samples}
        metrics["ece"] = (confidence - hits).abs().sum() / samples
        metrics["auroc"] = _auroc(sums["ranks"]).nanmean()
        details: dict[str, Any] = {"calibration": sums["calibration"].tolist()}
        if len(self.head.classes) > 5:
            metrics["top5"] = sums["top5"].sum() / samples
        if len(matrix := sums["confusion"]):
            more, table = _matrix_metrics(self.head, "samples", matrix)
            metrics, details = metrics | more, details | table
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
        matrix = sums["pixels"][:-1].view(len(self.head.classes), -1)
        right = matrix.diagonal()
        shares = right / (matrix.sum(0) + matrix.sum(1) - right)
        metrics = {"mIoU": shares.nanmean(), "pixel_accuracy": right.sum() / matrix.sum()}
        more, details = _matrix_metrics(self.head, "pixels", matrix, IoU=shares)
        return metrics | more | {"classes_without_pixels": shares.isnan().sum()}, details


class _MultiLabel(HeadMetrics):
    """Metrics of several classes per sample."""

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        # counts: of hits, of predictions and of samples with each class
        return {"exact": (1,), "counts": (3, classes), "ranks": _shape_of_ranks(classes)}

    def update(self, outputs: Tensor, target: Tensor) -> None:
        predicted, true = self.head.probabilities(outputs) > 0.5, target > 0
        self.sums["exact"] += (predicted == true).all(1).sum()
        self.sums["counts"] += torch.stack([predicted & true, predicted, true]).sum(1)
        _add_ranks(self.sums["ranks"], outputs, true.long())

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> tuple[Metrics, dict[str, Any]]:
        hits, predicted, true = sums["counts"]
        precision = _average_precision(sums["ranks"])
        metrics = {"mAP": precision.nanmean(), "auroc": _auroc(sums["ranks"]).nanmean()}
        metrics["accuracy"] = 1 - (predicted + true - 2 * hits).sum() / (samples * len(hits))
        metrics["exact"] = sums["exact"].sum() / samples
        metrics["f1"] = (2 * hits / (predicted + true))[true > 0].mean()
        metrics["classes_without_positives"] = (true == 0).sum()
        more = {"average precision": precision}
        return metrics, {"classes": _rows(self.head, "positives", hits, predicted, true, **more)}


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
        mse, mae, offset, square = sums["totals"] / samples
        metrics = {"mse": mse, "mae": mae, "mse_of_mean": square}  # of the mean in training
        variance = square - offset**2
        if variance > 0 and samples > 1:
            metrics["r2"] = 1 - mse / variance
        return metrics, {}


METRICS_OF_KIND: dict[str, type[HeadMetrics]] = {
    "class": _Classes,
    "binary": _Classes,
    "multi": _MultiLabel,
    "number": _Number,
    "mask": _Masks,
}


# --- sums -----------------------------------------------------------------------------------------


def _add_counts(counts: Tensor, positions: Tensor) -> None:
    """Add 1 at each flat position of a tensor.

    Deterministic algorithms refuse torch's bincount.
    """
    counts.view(-1).index_add_(0, positions, torch.ones_like(positions, dtype=counts.dtype))


def _shape_of_ranks(classes: int) -> tuple[int, int, int]:
    """Return the shape of counts by bins of log-odds: [classes, without and with it, bins]."""
    return classes, 2, min(_MOST_BINS, max(_FEWEST_BINS, _BINS_OF_ALL // max(1, classes)))


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


def _matrix_metrics(
    head: Head, counted: str, matrix: Tensor, **more: Tensor
) -> tuple[Metrics, dict[str, Any]]:
    """Return (means over the classes that some sample has, details) of a confusion matrix."""
    right, predicted, true = matrix.diagonal(), matrix.sum(0), matrix.sum(1)
    f1 = 2 * right / (predicted + true).clamp(min=1)
    metrics = {"balanced_accuracy": (right / true).nanmean(), "f1": f1[true > 0].mean()}
    metrics[f"classes_without_{counted}"] = (true == 0).sum()
    if len(matrix) == 2 and counted == "samples":
        metrics["precision"] = right[1] / predicted[1].clamp(min=1)
        metrics |= {"recall": right[1] / true[1].clamp(min=1), "f1": f1[1]}
    rows = _rows(head, counted, right, predicted, true, **more)
    return metrics, {"confusion": matrix.tolist(), "classes": rows}


def _rows(
    head: Head, counted: str, right: Tensor, predicted: Tensor, true: Tensor, **more: Tensor
) -> Classes:
    """Return count, precision, recall and more of each class. counted: name of the count."""
    columns = {"precision": right / predicted, "recall": right / true, **more}
    shares = torch.stack(list(columns.values()), 1).tolist()
    return {
        name: {counted: int(count)}
        | {n: None if math.isnan(x) else x for n, x in zip(columns, row, strict=True)}
        for name, count, row in zip(head.classes, true.tolist(), shares, strict=True)
    }


def classes_of(details: Mapping[str, Any], most: float = math.inf) -> dict[str, Any]:
    """Return "classes": rows of classes by head. most: classes of a head; of more, none."""
    parts = ((name, own.get("classes", {})) for name, own in details["heads"].items())
    classes = {name: rows for name, rows in parts if 0 < len(rows) <= most}
    return {"classes": classes} if classes else {}


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
        self._parts = [METRICS_OF_KIND[head.kind](head, device) for head in task.heads]
        self._loss = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, samples
        self._user = {name: metric.to(device) for name, metric in (user_metrics or {}).items()}
        for metric in self._user.values():
            metric.reset()

    @torch.no_grad()
    def update(self, outputs: Tensor, targets: Sequence[Tensor], losses: Tensor) -> None:
        """Add a batch of one sample or more. losses: [b]."""
        self._loss += torch.stack([losses.double().sum(), torch.ones_like(losses).sum()])
        columns = self._task.split(outputs)
        for part, own, target in zip(self._parts, columns, targets, strict=True):
            part.update(own.double(), target)
        for name, metric in self._user.items():
            head = self._task.head_of(name)
            number = self._task.heads.index(head)
            metric.update(*head.for_metric(columns[number], targets[number]))

    def compute(self, reduce: Reduce) -> tuple[Metrics, dict[str, Any]]:
        """Return (metrics, details of each head) of all processes. Undefined metrics are left out."""
        loss, samples = reduce(self._loss).tolist()
        metrics: Metrics = {"samples": int(samples), "loss": loss / max(1.0, samples)}
        details: dict[str, Any] = {}
        for part in self._parts:
            sums = {name: reduce(value) for name, value in part.sums.items()}
            values, details[part.head.name] = part.compute(sums, max(1, int(samples)))
            for name, value in values.items():
                if not (part.head.classes and value.isnan()):
                    metrics[self._task.metric_name(part.head, name)] = value.item()
        return metrics | {
            name: float(metric.compute()) for name, metric in self._user.items()
        }, details
