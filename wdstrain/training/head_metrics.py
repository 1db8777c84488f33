"""Metrics of each kind of head, from sums over the samples of a pass.

Every state is a sum (counts of a confusion matrix, squared errors). So memory does not grow with
the samples, a process without samples adds nothing, and processes add up to what a single one
counts. AUROC, average precision and calibration come from counts in narrow bins for that reason.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wdstrain.decode.masks import IGNORED
from wdstrain.training.heads import BinaryHead, ClassHead, Head, MultiLabelHead, NumberHead
from wdstrain.training.mask_head import MaskHead

_MOST_CURVES = 100  # classes with AUROC and average precision of each
_MOST_MATRIX = 2000  # classes with a confusion matrix
_MOST_BINS, _FEWEST_BINS, _BINS_OF_ALL = 1 << 14, 1 << 10, 1 << 21  # per class; of all classes
_FARTHEST = 1e4  # log-odds: samples of a model that is far too certain are ranked too
_LINEAR = 0.01  # log-odds up to which bins have equal widths; beyond it widths grow with them
_CALIBRATION_BINS = 15


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
        self.sums["calibration"] = self._zeros(3, _CALIBRATION_BINS)
        if count <= _MOST_MATRIX:
            self.sums["confusion"] = self._zeros(count, count)
        if count <= _MOST_CURVES:
            self.sums["ranks"] = self._zeros(head.outputs, 2, _bins_of(head.outputs))
        if count > 5:
            self.sums["top5"] = self._zeros(1)

    def update(self, outputs: Tensor, target: Tensor) -> None:
        head, sums = self.head, self.sums
        shares = head.probabilities(outputs.double())
        best, predicted = shares.max(1)
        sums["right"] += (predicted == target).double().sum()
        _add_calibration(sums["calibration"], best, predicted == target)
        if "confusion" in sums:
            _add_counts(sums["confusion"], target * len(head.classes) + predicted)
        if "top5" in sums:
            sums["top5"] += (shares.topk(5).indices == target[:, None]).double().sum()
        if "ranks" in sums:
            odds = outputs.double() if head.outputs == 1 else _log_odds(outputs.double())
            _add_ranks(sums["ranks"], odds, _one_hot(target, head.outputs))

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> dict[str, float]:
        metrics = {"accuracy": float(sums["right"]) / max(1, samples)}
        if "top5" in sums:
            metrics["top5"] = float(sums["top5"]) / max(1, samples)
        if "confusion" in sums:
            metrics |= _matrix_metrics(sums["confusion"], binary=len(self.head.classes) == 2)
        if "ranks" in sums:
            metrics |= _rank_metrics(sums["ranks"], ("auroc",))
        metrics["ece"] = _calibration_error(sums["calibration"])
        return metrics

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
        self.sums["ranks"] = self._zeros(count, 2, _bins_of(count))

    def update(self, outputs: Tensor, target: Tensor) -> None:
        predicted, true = outputs.double().sigmoid() > 0.5, target > 0
        kinds = (predicted & true, predicted & ~true, ~predicted & ~true, ~predicted & true)
        self.sums["exact"] += (predicted == true).all(1).double().sum()
        self.sums["counts"] += torch.stack([kind.double().sum(0) for kind in kinds], 1)
        _add_ranks(self.sums["ranks"], outputs.double(), true.long())

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> dict[str, float]:
        hits, false, rest, missed = sums["counts"].unbind(1)
        total = (hits + false + rest + missed).sum().clamp(min=1)
        metrics = {"accuracy": float((hits + rest).sum() / total)}
        metrics["exact"] = float(sums["exact"]) / max(1, samples)
        present = hits + missed > 0
        if present.any():
            f1 = 2 * hits / (2 * hits + false + missed).clamp(min=1)
            metrics["f1"] = float(f1[present].mean())
        metrics |= _rank_metrics(sums["ranks"], ("auroc", "mAP"))
        metrics["classes_without_positives"] = float((~present).sum())
        return metrics

    def details(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        hits, false, _, missed = sums["counts"].unbind(1)
        precision = _average_precision(sums["ranks"])
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
        metrics = {"mse": float(sums["squares"]) / count, "mae": float(sums["absolutes"]) / count}
        metrics["mean"] = self.head.mean + mean_offset
        metrics["variance"] = max(0.0, float(sums["offset_squares"]) / count - mean_offset**2)
        if metrics["variance"] > 0 and samples > 1:
            metrics["r2"] = 1 - metrics["mse"] / metrics["variance"]
        return metrics

    def text(self, metrics: Mapping[str, float]) -> str:
        baseline = ""
        if "mse_of_mean" in metrics:
            baseline = f" (predicting the mean gives {figure(metrics['mse_of_mean'])})"
        r2 = f", R2 {metrics['r2']:.3f}" if "r2" in metrics else ""
        return f"mse {figure(metrics['mse'])}{baseline}, mae {figure(metrics['mae'])}{r2}"


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
        _add_counts(self.sums["pixels"], cells.flatten())

    def compute(self, sums: Mapping[str, Tensor], samples: int) -> dict[str, float]:
        matrix = self._matrix(sums)
        union = _unions(matrix)
        present = union > 0
        if not present.any():
            return {}
        right = matrix.diagonal()
        metrics = {"mIoU": float((right[present] / union[present]).mean())}
        metrics["pixel_accuracy"] = float(right.sum() / matrix.sum().clamp(min=1))
        metrics |= _matrix_metrics(matrix, binary=False)
        metrics["classes_without_pixels"] = float((~present).sum())
        return metrics

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


def figure(value: float) -> str:
    """Return a number with four decimals, or four digits where these would say little."""
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e6 else f"{value:.4g}"


def _left_out(count: int, lacking: str) -> str:
    """Return how many classes are left out of means because they lack something."""
    if not count:
        return ""
    return f", {count} class{'' if count == 1 else 'es'} without {lacking} left out of means"


def _unions(matrix: Tensor) -> Tensor:
    """Return the pixels of each class that it has or is predicted for."""
    return matrix.sum(0) + matrix.sum(1) - matrix.diagonal()


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

    Whole numbers add up to the same in any order, so this is deterministic where torch's bincount
    is refused by deterministic algorithms.
    """
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        ones = torch.ones(len(positions), dtype=counts.dtype, device=counts.device)
        counts.view(-1).index_add_(0, positions, ones)
    finally:
        torch.set_deterministic_debug_mode(mode)


def _one_hot(target: Tensor, outputs: int) -> Tensor:
    """Return int64[b, outputs], 0 or 1; of one of two classes [b, 1]."""
    if outputs == 1:
        return target[:, None].long()
    return torch.nn.functional.one_hot(target, outputs)


def _bins_of(classes: int) -> int:
    """Return how many bins of log-odds each class gets."""
    return min(_MOST_BINS, max(_FEWEST_BINS, _BINS_OF_ALL // classes))


def _add_ranks(ranks: Tensor, odds: Tensor, present: Tensor) -> None:
    """Count samples by bin of their log-odds.

    ranks: [classes, 2, bins], without and with the class. odds, present: [b, classes].
    """
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


def _add_calibration(sums: Tensor, confidence: Tensor, right: Tensor) -> None:
    """Add a batch to [samples, confidences, right answers] by bin of the confidence."""
    bins = (confidence.nan_to_num() * _CALIBRATION_BINS).long().clamp(max=_CALIBRATION_BINS - 1)
    picked = torch.nn.functional.one_hot(bins, _CALIBRATION_BINS).double()
    sums += torch.stack([picked.sum(0), confidence @ picked, right.double() @ picked])


def _calibration_error(sums: Tensor) -> float:
    """Return the expected calibration error: mean difference of confidence and accuracy."""
    count, confidence, right = sums
    return float((confidence - right).abs().sum() / count.sum().clamp(min=1))


def _matrix_metrics(matrix: Tensor, *, binary: bool) -> dict[str, float]:
    """Return metrics of a confusion matrix: means over the classes that some sample has."""
    right, true, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    present = true > 0
    if not present.any():
        return {}
    recall = right / true.clamp(min=1)
    f1 = 2 * right / (true + predicted).clamp(min=1)
    metrics = {"balanced_accuracy": float(recall[present].mean())}
    if not present.all():
        metrics["classes_without_samples"] = float((~present).sum())
    if not binary:
        return metrics | {"f1": float(f1[present].mean())}
    precision = float(right[1] / predicted[1].clamp(min=1))
    return metrics | {"precision": precision, "recall": float(recall[1]), "f1": float(f1[1])}


def _rank_metrics(ranks: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Return means of AUROC and average precision over the classes for which they are defined."""
    curves = {"auroc": _auroc, "mAP": _average_precision}
    means = {name: curves[name](ranks).nanmean() for name in names}
    return {name: float(value) for name, value in means.items() if not value.isnan()}
