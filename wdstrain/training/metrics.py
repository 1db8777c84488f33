"""Metrics of one pass over samples, per head, for all processes together.

Every state is a sum (counts of a confusion matrix, squared errors). So memory does not grow with
the samples, a process without samples adds nothing, and processes add up to what a single one
counts. AUROC, average precision and calibration come from counts in narrow bins for that reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wdstrain.decode.masks import IGNORED
from wdstrain.training.heads import BinaryHead, ClassHead, Head, MultiLabelHead, NumberHead
from wdstrain.training.mask_head import MaskHead
from wdstrain.training.metric_sums import (
    CALIBRATION_BINS,
    add_calibration,
    add_counts,
    add_ranks,
    average_precision,
    bins_of,
    calibration_error,
    log_odds,
    matrix_metrics,
    one_hot,
    rank_metrics,
)
from wdstrain.training.tasks import Task

_MOST_CURVES = 100  # classes with AUROC and average precision of each
_MOST_MATRIX = 2000  # classes with a confusion matrix

MINIMIZED = ("loss", "mse", "mae", "ece")  # metrics of which less is better

Reduce = Callable[[Tensor], Tensor]  # a tensor -> its sum over all processes


class HeadMetrics(ABC):
    """Sums for the metrics of one head. float64 on the device; `sums` lists them."""

    def __init__(self, head: Head, device: torch.device) -> None:
        self.head, self._device = head, device
        self.sums: dict[str, Tensor] = {}

    @abstractmethod
    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add a batch. outputs: [b, columns of the head]."""

    @abstractmethod
    def compute(self, sums: Mapping[str, Tensor], samples: int) -> dict[str, float]:
        """Return metrics by name. sums: of all processes. Undefined metrics are left out."""

    def details(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what the report shows beside single numbers."""
        return {}

    @abstractmethod
    def text(self, metrics: Mapping[str, float]) -> str:
        """Return metrics in a few words. metrics: of this head, with plain names."""

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self._device)


class _Classes(HeadMetrics):
    """Metrics of one class per sample, of two classes or more."""

    def __init__(self, head: Head, device: torch.device) -> None:
        super().__init__(head, device)
        count = len(head.classes)
        self.sums["right"] = self._zeros(1)
        self.sums["calibration"] = self._zeros(3, CALIBRATION_BINS)
        if count <= _MOST_MATRIX:
            self.sums["confusion"] = self._zeros(count, count)
        if count <= _MOST_CURVES:
            self.sums["ranks"] = self._zeros(head.outputs, 2, bins_of(head.outputs))
        if count > 5:
            self.sums["top5"] = self._zeros(1)

    def update(self, outputs: Tensor, target: Tensor) -> None:
        head, sums = self.head, self.sums
        shares = head.probabilities(outputs.double())
        best, predicted = shares.max(1)
        sums["right"] += (predicted == target).double().sum()
        add_calibration(sums["calibration"], best, predicted == target)
        if "confusion" in sums:
            add_counts(sums["confusion"], target * len(head.classes) + predicted)
        if "top5" in sums:
            sums["top5"] += (shares.topk(5).indices == target[:, None]).double().sum()
        if "ranks" in sums:
            odds = outputs.double() if head.outputs == 1 else log_odds(outputs.double())
            add_ranks(sums["ranks"], odds, one_hot(target, head.outputs))

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> dict[str, float]:
        found = {"accuracy": float(sums["right"]) / max(1, samples)}
        if "top5" in sums:
            found["top5"] = float(sums["top5"]) / max(1, samples)
        if "confusion" in sums:
            found |= matrix_metrics(sums["confusion"], binary=len(self.head.classes) == 2)
        if "ranks" in sums:
            found |= rank_metrics(sums["ranks"], ("auroc",))
        found["ece"] = calibration_error(sums["calibration"])
        return found

    def details(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        if "confusion" not in sums:
            return {}
        matrix = sums["confusion"]
        rows = zip(self.head.classes, matrix.diagonal().tolist(), matrix.sum(1), strict=True)
        recalls = {name: right / float(count) for name, right, count in rows if count}
        return {"confusion": matrix.tolist(), "classes": recalls}

    def text(self, metrics: Mapping[str, float]) -> str:
        if isinstance(self.head, BinaryHead):
            area = f", AUROC {metrics['auroc']:.4f}" if "auroc" in metrics else ""
            return f"accuracy {metrics['accuracy']:.2%}{area}, F1 {metrics['f1']:.4f}"
        top5 = f", top-5 {metrics['top5']:.2%}" if "top5" in metrics else ""
        without = int(metrics.get("classes_without_samples", 0))
        note = _left_out(without, "samples")
        return f"accuracy {metrics['accuracy']:.2%}{top5}{note}"


class _MultiLabel(HeadMetrics):
    """Metrics of several classes per sample."""

    def __init__(self, head: Head, device: torch.device) -> None:
        super().__init__(head, device)
        count = len(head.classes)
        self.sums["exact"] = self._zeros(1)
        self.sums["counts"] = self._zeros(count, 4)  # true and false positives, negatives
        self.sums["ranks"] = self._zeros(count, 2, bins_of(count))

    def update(self, outputs: Tensor, target: Tensor) -> None:
        predicted, true = outputs.double().sigmoid() > 0.5, target > 0
        kinds = (predicted & true, predicted & ~true, ~predicted & ~true, ~predicted & true)
        self.sums["exact"] += (predicted == true).all(1).double().sum()
        self.sums["counts"] += torch.stack([kind.double().sum(0) for kind in kinds], 1)
        add_ranks(self.sums["ranks"], outputs.double(), true.long())

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> dict[str, float]:
        hits, false, rest, missed = sums["counts"].unbind(1)
        total = (hits + false + rest + missed).sum().clamp(min=1)
        found = {"accuracy": float((hits + rest).sum() / total)}
        found["exact"] = float(sums["exact"]) / max(1, samples)
        present = hits + missed > 0
        if present.any():
            f1 = 2 * hits / (2 * hits + false + missed).clamp(min=1)
            found["f1"] = float(f1[present].mean())
        found |= rank_metrics(sums["ranks"], ("auroc", "mAP"))
        found["classes_without_positives"] = float((~present).sum())
        return found

    def details(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        hits, false, _, missed = sums["counts"].unbind(1)
        precision = average_precision(sums["ranks"])
        table = {}
        for i, name in enumerate(self.head.classes):
            positives = float(hits[i] + missed[i])
            predicted = float(hits[i] + false[i])
            table[name] = {
                "positives": positives,
                "precision": float(hits[i]) / predicted if predicted else None,
                "recall": float(hits[i]) / positives if positives else None,
                "average precision": float(precision[i]) if positives else None,
            }
        return {"per_class": table}

    def text(self, metrics: Mapping[str, float]) -> str:
        parts = [f"mAP {metrics['mAP']:.4f}"] if "mAP" in metrics else []
        parts += [f"F1 {metrics['f1']:.4f}"] if "f1" in metrics else []
        parts += [f"AUROC {metrics['auroc']:.4f}"] if "auroc" in metrics else []
        note = _left_out(int(metrics["classes_without_positives"]), "positives")
        return ", ".join([*parts, f"accuracy {metrics['accuracy']:.2%}"]) + note


class _Number(HeadMetrics):
    """Metrics of numbers: squared and absolute error, and the variance of the labels."""

    def __init__(self, head: Head, device: torch.device) -> None:
        super().__init__(head, device)
        for name in ("squares", "absolutes", "offsets", "offset_squares"):
            self.sums[name] = self._zeros(1)

    def update(self, outputs: Tensor, target: Tensor) -> None:
        assert isinstance(self.head, NumberHead)
        target = target.double()
        error = self.head.values(outputs.double()) - target
        # squares of times or coordinates themselves would drown their variance
        offset = target - self.head.mean
        self.sums["squares"] += (error**2).sum()
        self.sums["absolutes"] += error.abs().sum()
        self.sums["offsets"] += offset.sum()
        self.sums["offset_squares"] += (offset**2).sum()

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> dict[str, float]:
        count = max(1, samples)
        mean_offset = float(sums["offsets"]) / count
        found = {"mse": float(sums["squares"]) / count, "mae": float(sums["absolutes"]) / count}
        found["mean"] = self.head.mean + mean_offset
        found["variance"] = max(0.0, float(sums["offset_squares"]) / count - mean_offset**2)
        if found["variance"] > 0 and samples > 1:
            found["r2"] = 1 - found["mse"] / found["variance"]
        return found

    def text(self, metrics: Mapping[str, float]) -> str:
        baseline = ""
        if "mse_of_mean" in metrics:
            baseline = f" (predicting the mean gives {metrics['mse_of_mean']:.4f})"
        r2 = f", R2 {metrics['r2']:.3f}" if "r2" in metrics else ""
        return f"mse {metrics['mse']:.4f}{baseline}, mae {metrics['mae']:.4f}{r2}"


class _Masks(HeadMetrics):
    """Metrics of the class of each pixel, from a confusion matrix of pixels."""

    def __init__(self, head: Head, device: torch.device) -> None:
        super().__init__(head, device)
        count = len(head.classes)
        self.sums["pixels"] = self._zeros(count * count + 1)  # the last: pixels without a class

    def update(self, outputs: Tensor, target: Tensor) -> None:
        count = len(self.head.classes)
        cells = target * count + outputs.argmax(1)
        # no boolean index: it waits for the device
        cells = torch.where(target == IGNORED, count * count, cells)
        add_counts(self.sums["pixels"], cells.flatten())

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> dict[str, float]:
        matrix = self._matrix(sums)
        union = _unions(matrix)
        present = union > 0
        if not present.any():
            return {}
        right = matrix.diagonal()
        found = {"mIoU": float((right[present] / union[present]).mean())}
        found["pixel_accuracy"] = float(right.sum() / matrix.sum().clamp(min=1))
        found |= matrix_metrics(matrix, binary=False)
        found["classes_without_pixels"] = float((~present).sum())
        return found

    def details(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        matrix = self._matrix(sums)
        right, true, predicted, union = (
            values.tolist()
            for values in (matrix.diagonal(), matrix.sum(1), matrix.sum(0), _unions(matrix))
        )
        table = {
            name: {
                "pixels": true[i],
                "IoU": right[i] / union[i] if union[i] else None,
                "precision": right[i] / predicted[i] if predicted[i] else None,
                "recall": right[i] / true[i] if true[i] else None,
            }
            for i, name in enumerate(self.head.classes)
        }
        shares = {name: row["IoU"] for name, row in table.items() if row["IoU"] is not None}
        return {"confusion": matrix.tolist(), "classes": shares, "per_class": table}

    def text(self, metrics: Mapping[str, float]) -> str:
        if "mIoU" not in metrics:
            return "no pixel has a class"
        note = _left_out(int(metrics["classes_without_pixels"]), "pixels")
        accuracy = metrics["pixel_accuracy"]
        return f"mIoU {metrics['mIoU']:.4f}, pixel accuracy {accuracy:.2%}{note}"

    def _matrix(self, sums: Mapping[str, Tensor]) -> Tensor:
        count = len(self.head.classes)
        return sums["pixels"][:-1].view(count, count)


def _left_out(count: int, lacking: str) -> str:
    """Return how many classes are left out of means because they lack something."""
    if not count:
        return ""
    return f", {count} class{'' if count == 1 else 'es'} without {lacking} left out of means"


def _unions(matrix: Tensor) -> Tensor:
    """Return the pixels of each class that it has or is predicted for."""
    return matrix.sum(0) + matrix.sum(1) - matrix.diagonal()


_BY_HEAD: dict[type[Head], type[HeadMetrics]] = {
    ClassHead: _Classes,
    BinaryHead: _Classes,
    MultiLabelHead: _MultiLabel,
    NumberHead: _Number,
    MaskHead: _Masks,
}


class EvalMetrics:
    """Metrics of one pass over samples.

    user_metrics: torchmetrics by name, updated with (predictions, target): probabilities of classes
    or numbers. With several heads, by HEAD/NAME.
    """

    def __init__(
        self, task: Task, device: torch.device, user_metrics: Mapping[str, Any] | None = None
    ) -> None:
        self._task, self._device = task, device
        self._parts = [_BY_HEAD[type(head)](head, device) for head in task.heads]
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
        self._loss[1] += len(outputs)
        columns = self._task.split(outputs)
        for part, own, target in zip(self._parts, columns, targets, strict=True):
            part.update(own, target)
        for name, metric in self._user.items():
            position = self._head_of(name)
            metric.update(
                *_user_values(self._task.heads[position], columns[position], targets[position])
            )

    def compute(self, reduce: Reduce) -> tuple[dict[str, float], dict[str, Any]]:
        """Return (metrics, details of each head) of all processes."""
        loss, samples = reduce(self._loss).tolist()
        found: dict[str, float] = {"samples": samples, "loss": loss / max(1.0, samples)}
        details: dict[str, Any] = {}
        for part in self._parts:
            sums = {name: reduce(value) for name, value in part.sums.items()}
            metrics = part.compute(sums, int(samples))
            found |= {self._task.metric_name(part.head, name): v for name, v in metrics.items()}
            if more := part.details(sums):
                details[part.head.name] = more
        for name, metric in self._user.items():
            found[name] = float(metric.compute())
        return found, details

    def _head_of(self, metric_name: str) -> int:
        """Return the position of the head that a metric of the user's is for."""
        names = [head.name for head in self._task.heads]
        head = metric_name.partition("/")[0]
        return names.index(head) if self._task.has_several and head in names else 0


def _user_values(head: Head, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return predictions and targets as torchmetrics expects them."""
    if isinstance(head, NumberHead):
        return head.values(outputs.double()), target.double()
    if isinstance(head, BinaryHead):
        return outputs[:, 0].sigmoid(), target
    return head.probabilities(outputs), target.long()


# --- choosing the best ----------------------------------------------------------------------------


def default_monitor(task: Task) -> str:
    """Return the metric that chooses the best checkpoint: of the only head, else the loss."""
    return "loss" if task.has_several else task.heads[0].main_metric


def is_maximized(name: str) -> bool:
    """Return whether more of a metric is better."""
    return name.rpartition("/")[2] not in MINIMIZED


def is_better(value: float, best: float | None, *, maximize: bool, min_delta: float = 0.0) -> bool:
    """Return whether a value improves on the best by more than min_delta. NaN never does."""
    if value != value:
        return False
    if best is None or best != best:
        return True
    return value > best + min_delta if maximize else value < best - min_delta


def head_texts(task: Task, metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics of each head in a few words, by its name."""
    cpu, texts = torch.device("cpu"), {}
    for head in task.heads:
        prefix = f"{head.name}/" if task.has_several else ""
        own = {n.removeprefix(prefix): v for n, v in metrics.items() if n.startswith(prefix)}
        texts[head.name] = _BY_HEAD[type(head)](head, cpu).text(own)
    if not task.has_several and not isinstance(task.heads[0], NumberHead):
        texts[task.heads[0].name] += f", loss {metrics['loss']:.4f}"
    return texts


def metrics_text(task: Task, metrics: Mapping[str, float]) -> str:
    """Return the metrics of a pass in a few words."""
    texts = head_texts(task, metrics)
    if not task.has_several:
        return texts[task.heads[0].name]
    return ", ".join(f"{name}: {text}" for name, text in texts.items())


def metric_text(name: str, value: float) -> str:
    """Return one metric in words: shares in percent, errors as numbers."""
    plain = name.rpartition("/")[2]
    is_share = plain in ("accuracy", "balanced_accuracy", "pixel_accuracy", "top5", "exact")
    return f"{name} {value:.2%}" if is_share else f"{name} {value:.4f}"
