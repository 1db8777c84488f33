"""How good outputs are: torchmetrics for each head of a task, over one pass, of all processes together.

Every state is a sum (counts of a confusion matrix, squared errors), so memory does not grow with the samples, a process
for which no sample was left adds nothing, and processes add up to what one of them would have counted. AUROC is taken from
counts at fixed thresholds for the same reason, 1 001 of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torchmetrics import classification, regression

from wdstrain.training.task import Head, Task

_THRESHOLDS = 1001  # of AUROC, for one of two classes
_FEWER = 201  # the same for each of several classes
_CURVES = 100  # classes, of which AUROC is taken at most
_MATRIX = 2000  # classes, of which a confusion matrix is at most
_WORST = ("loss", "mse", "mae")  # less is better

FIRST = {"class": "accuracy", "binary": "accuracy", "multi": "accuracy", "number": "mse"}  # the metric that counts


class Scores:
    """Metrics of one pass. Metrics of the only head have plain names, those of several `<head>/<metric>`."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device
        self._parts = [torchmetrics.MetricCollection(_metrics(head)).to(device).set_dtype(torch.float64) for head in task.heads]
        self._sums = torch.zeros(1 + 2 * len(task.heads), dtype=torch.float64, device=device)  # losses; targets, their squares
        self.samples = 0

    @torch.no_grad()
    def update(self, outputs: Tensor, targets: Sequence[Tensor], losses: Tensor) -> None:
        """Count a batch. losses: [b], of the samples."""
        if not len(outputs):
            return
        self.samples += len(outputs)
        self._sums[0] += losses.double().sum()
        for i, (head, own, target, part) in enumerate(
            zip(self._task.heads, self._task.split(outputs), targets, self._parts, strict=True)
        ):
            if head.kind == "number":
                self._sums[1 + 2 * i] += target.double().sum()
                self._sums[2 + 2 * i] += (target.double() ** 2).sum()
            with _in_any_order():
                part.update(*_seen(head, own, target))

    def compute(self, reduce: Callable[[Tensor], Tensor]) -> tuple[dict[str, float], dict[str, Any]]:
        """(metrics, details) of all processes. reduce: Tensor -> its sum over them. details: of a head, what is no one number."""
        sums = reduce(self._sums)
        samples = int(reduce(torch.tensor([self.samples], device=self._device)).item())
        found: dict[str, float] = {"samples": float(samples), "loss": float(sums[0]) / max(1, samples)}
        details: dict[str, Any] = {}
        for i, (head, part) in enumerate(zip(self._task.heads, self._parts, strict=True)):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*before the.*update.*")  # of a process that got no sample
                warnings.filterwarnings("ignore", message=".*No (positive|negative) samples.*")
                own = part.compute()
            matrix = own.pop("confusion", None)
            numbers = {name: float(value) for name, value in own.items() if value.ndim == 0}
            if matrix is not None:
                numbers |= _of_matrix(head, matrix)
                details[head.name] = {"confusion": matrix.tolist(), "classes": _right_of_each(head, matrix)}
            if head.kind == "number":
                numbers["mean"] = float(sums[1 + 2 * i]) / max(1, samples)
                numbers["square"] = float(sums[2 + 2 * i]) / max(1, samples)
                if (spread := numbers["square"] - numbers["mean"] ** 2) > 0 and samples > 1:
                    numbers["r2"] = 1 - numbers["mse"] / spread
            if len(self._task.heads) > 1:
                numbers = {f"{head.name}/{name}": value for name, value in numbers.items()}
            found |= numbers
        return found, details


def _metrics(head: Head) -> dict[str, torchmetrics.Metric | torchmetrics.MetricCollection]:
    classes = len(head.classes)
    if head.kind == "number":
        return {"mse": regression.MeanSquaredError(), "mae": regression.MeanAbsoluteError()}
    if head.kind == "binary":
        return {
            "confusion": classification.BinaryConfusionMatrix(),
            "auroc": classification.BinaryAUROC(thresholds=_THRESHOLDS),
        }
    if head.kind == "multi":
        return {
            "accuracy": classification.MultilabelAccuracy(classes, average="micro"),
            "exact": classification.MultilabelExactMatch(classes),
            "f1": classification.MultilabelF1Score(classes, average="macro"),
            "auroc": classification.MultilabelAUROC(classes, thresholds=_FEWER),
        }
    found: dict[str, torchmetrics.Metric | torchmetrics.MetricCollection] = {}
    if classes <= _MATRIX:
        found["confusion"] = classification.MulticlassConfusionMatrix(classes)
    else:
        found["accuracy"] = classification.MulticlassAccuracy(classes, average="micro")
    if classes <= _CURVES:
        found["auroc"] = classification.MulticlassAUROC(classes, thresholds=_FEWER)
    if classes > 5:
        found["top5"] = classification.MulticlassAccuracy(classes, top_k=5, average="micro")
    return found


def _seen(head: Head, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """What torchmetrics is shown of a batch."""
    if head.kind == "number":
        return head.values(outputs.double()), target.double()
    if head.kind == "binary":
        return outputs[:, 0].sigmoid(), target
    if head.kind == "multi":
        return outputs.sigmoid(), target.long()
    return outputs, target


def _of_matrix(head: Head, matrix: Tensor) -> dict[str, float]:
    """Accuracy, of all samples and as a mean over the classes there are; for one of two also precision and recall of the second."""
    counts = matrix.double()
    right, true, said = counts.diagonal(), counts.sum(1), counts.sum(0)
    there = true > 0
    found = {"accuracy": float(right.sum() / counts.sum().clamp(min=1))}
    found["per_class"] = float((right[there] / true[there]).mean()) if there.any() else 0.0
    if head.kind == "binary":
        precision, recall = right[1] / said[1].clamp(min=1), right[1] / true[1].clamp(min=1)
        found |= {"precision": float(precision), "recall": float(recall)}
        found["f1"] = float(2 * precision * recall / (precision + recall).clamp(min=1e-12))
    return found


def _right_of_each(head: Head, matrix: Tensor) -> dict[str, float]:
    """The share of each class's samples that is said to be of it; of classes without samples nothing."""
    rows = zip(head.classes, matrix.diagonal().tolist(), matrix.sum(1).tolist(), strict=True)
    return {name: right / whole for name, right, whole in rows if whole}


@contextmanager
def _in_any_order() -> Iterator[None]:
    """Counts are whole numbers and come to the same in any order; torchmetrics counts with a table of all pairs, gigabytes of it,
    where torch is asked to be deterministic."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def better(task: Task, metrics: Mapping[str, float], best: Mapping[str, float] | None) -> bool:
    """Whether these metrics are better than the best so far: by the metric that counts, by the loss where there are several heads."""
    if best is None:
        return True
    name = "loss" if len(task.heads) > 1 else FIRST[task.heads[0].kind]
    if metrics[name] != metrics[name] or best[name] != best[name]:
        return metrics[name] == metrics[name]
    return metrics[name] < best[name] if name in _WORST else metrics[name] > best[name]


def text(task: Task, metrics: Mapping[str, float]) -> str:
    """The metrics in a few words."""
    if len(task.heads) > 1:
        return ", ".join(f"{head.name}: {_of_head(head, metrics, f'{head.name}/')}" for head in task.heads)
    head = task.heads[0]
    loss = "" if head.kind == "number" else f", loss {metrics['loss']:.4f}"
    return _of_head(head, metrics, "") + loss


def short(task: Task, metrics: Mapping[str, float]) -> str:
    """The metric that counts, in a word."""
    if len(task.heads) > 1:
        return f"loss {metrics['loss']:.4f}"
    name = FIRST[task.heads[0].kind]
    return f"{name} {metrics[name]:.4f}" if name in _WORST else f"{name} {metrics[name]:.2%}"


def _of_head(head: Head, metrics: Mapping[str, float], prefix: str) -> str:
    def one(name: str) -> float:
        return metrics[prefix + name]

    if head.kind == "number":
        baseline = f" (predicting the mean gives {one('mse_of_mean'):.4f})" if f"{prefix}mse_of_mean" in metrics else ""
        explained = f", R2 {one('r2'):.3f}" if f"{prefix}r2" in metrics else ""
        return f"mse {one('mse'):.4f}{baseline}, mae {one('mae'):.4f}{explained}"
    if head.kind == "binary":
        return f"accuracy {one('accuracy'):.2%}, AUROC {one('auroc'):.4f}, F1 {one('f1'):.4f}"
    if head.kind == "multi":
        return f"accuracy {one('accuracy'):.2%}, F1 {one('f1'):.4f}, AUROC {one('auroc'):.4f}"
    top5 = f", top-5 {one('top5'):.2%}" if f"{prefix}top5" in metrics else ""
    return f"accuracy {one('accuracy'):.2%}{top5}"
