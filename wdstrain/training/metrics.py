"""How good outputs are: torchmetrics for each head of a task, over one pass, of all processes together.

Every state is a sum (counts of a confusion matrix, squared errors), so memory does not grow with the samples, a process
for which no sample was left adds nothing, and processes add up to what one of them would have counted. AUROC is taken from
counts of log-odds in narrow bins for the same reason.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torchmetrics import classification, regression

from wdstrain.training.task import Head, Task

_BINS, _FEWEST_BINS, _ALL_BINS = (
    1 << 14,
    1 << 10,
    1 << 21,
)  # of AUROC: for a class, at least, for all classes together
_FURTHEST = 1e4  # log-odds; those of a model that is far too certain rank its samples too
_NEAR = 0.01  # log-odds up to which bins are equally wide, 0.00002; beyond that two thousandths of the log-odds
_CURVES = 100  # classes, of which AUROC is taken at most
_MATRIX = 2000  # classes, of which a confusion matrix is at most
_WORST = ("loss", "mse", "mae")  # less is better

FIRST = {
    "class": "accuracy",
    "binary": "accuracy",
    "multi": "accuracy",
    "number": "mse",
}  # the metric that counts


class Scores:
    """Metrics of one pass. Metrics of the only head have plain names, those of several `<head>/<metric>`."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device
        self._parts = [
            torchmetrics.MetricCollection(_metrics(head)).to(device).set_dtype(torch.float64)
            for head in task.heads
        ]
        self._areas = [
            one.to(device).set_dtype(torch.float64) if (one := _areas(head)) else None
            for head in task.heads
        ]
        self._sums = torch.zeros(
            1 + 2 * len(task.heads), dtype=torch.float64, device=device
        )  # losses; targets less their mean, its squares
        self.samples = 0

    @torch.no_grad()
    def update(self, outputs: Tensor, targets: Sequence[Tensor], losses: Tensor) -> None:
        """Count a batch. losses: [b], of the samples."""
        if not len(outputs):
            return
        self.samples += len(outputs)
        self._sums[0] += losses.double().sum()
        for i, (head, own, target, part, areas) in enumerate(
            zip(
                self._task.heads,
                self._task.split(outputs),
                targets,
                self._parts,
                self._areas,
                strict=True,
            )
        ):
            if head.kind == "number":
                apart = (
                    target.double() - head.mean
                )  # squares of times or coordinates would drown their variance
                self._sums[1 + 2 * i] += apart.sum()
                self._sums[2 + 2 * i] += (apart**2).sum()
            with _in_any_order():
                part.update(*_seen(head, own, target))
                if areas is not None:
                    areas.update(
                        _log_odds(own.double()) if head.kind == "class" else own.double(), target
                    )

    def compute(
        self, reduce: Callable[[Tensor], Tensor]
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """(metrics, details) of all processes. reduce: Tensor -> its sum over them. details: of a head, what is no one number."""
        sums = reduce(self._sums)
        samples = int(reduce(torch.tensor([self.samples], device=self._device)).item())
        found: dict[str, float] = {
            "samples": float(samples),
            "loss": float(sums[0]) / max(1, samples),
        }
        details: dict[str, Any] = {}
        for i, (head, part, areas) in enumerate(
            zip(self._task.heads, self._parts, self._areas, strict=True)
        ):
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message=".*before the.*update.*"
                )  # of a process that got no sample
                warnings.filterwarnings("ignore", message=".*No (positive|negative) samples.*")
                own = part.compute()
                area = None if areas is None else areas.compute()
            matrix, counts = (own.pop(name, None) for name in ("confusion", "counts"))
            numbers = {name: float(value) for name, value in own.items() if value.ndim == 0}
            if counts is not None:
                numbers |= _of_counts(counts[1:]) | {"exact": float(counts[0, 0]) / max(1, samples)}
                counts = counts[1:]
            if area is not None:
                numbers |= _mean_area(
                    area, matrix.sum(1) if matrix is not None else counts[:, 4], samples
                )
            if matrix is not None:
                numbers |= _of_matrix(head, matrix)
                details[head.name] = {
                    "confusion": matrix.tolist(),
                    "classes": _right_of_each(head, matrix),
                }
            if head.kind == "number":
                apart = float(sums[1 + 2 * i]) / max(1, samples)
                numbers["mean"] = head.mean + apart
                numbers["variance"] = max(0.0, float(sums[2 + 2 * i]) / max(1, samples) - apart**2)
                if numbers["variance"] > 0 and samples > 1:
                    numbers["r2"] = 1 - numbers["mse"] / numbers["variance"]
            if len(self._task.heads) > 1:
                numbers = {f"{head.name}/{name}": value for name, value in numbers.items()}
            found |= numbers
        return found, details


class _Areas(torchmetrics.Metric):
    """AUROC of each class against the others, from counts by bin of its log-odds. Samples of one bin count as equal."""

    full_state_update = False
    counts: Tensor  # [classes, 2, bins]: samples without the class, and with it

    def __init__(self, classes: int) -> None:
        super().__init__()
        self._bins = min(_BINS, max(_FEWEST_BINS, _ALL_BINS // classes))
        self.add_state("counts", torch.zeros(classes, 2, self._bins), dist_reduce_fx="sum")

    def update(self, odds: Tensor, target: Tensor) -> None:
        """odds: log-odds [b, classes]; target: 0 or 1 of each class [b, classes], or the class [b]; of one of two, 0 or 1."""
        if target.ndim == 1 and odds.shape[1] > 1:
            target = torch.nn.functional.one_hot(target, odds.shape[1])
        there = target.reshape(odds.shape).long()
        near = odds.nan_to_num(-_FURTHEST).clamp(-_FURTHEST, _FURTHEST) / _NEAR
        place = (
            ((near.asinh() / math.asinh(_FURTHEST / _NEAR) + 1) / 2 * (self._bins - 1))
            .round()
            .long()
        )
        row = 2 * torch.arange(odds.shape[1], device=odds.device) + there
        at = (row * self._bins + place).flatten()
        self.counts.view(-1).index_add_(0, at, torch.ones_like(at, dtype=self.counts.dtype))

    def compute(self) -> Tensor:
        """float64[classes]; NaN of a class that all samples have, or none."""
        without, having = self.counts.double().unbind(1)
        below = without.cumsum(1) - without / 2
        return (having * below).sum(1) / (having.sum(1) * without.sum(1))


class _Tags(torchmetrics.Metric):
    """Counts of several classes at once. torchmetrics' own know no label of one class."""

    full_state_update = False
    counts: Tensor  # [1 + classes, 5]: first the samples of which all is right; then as `_of_counts` takes them

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(1 + classes, 5), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """preds: probabilities [b, classes]; target: 0 or 1 of each."""
        said, true = preds > 0.5, target > 0
        kinds = [said & true, said & ~true, ~said & ~true, ~said & true, true]
        self.counts[0, 0] += (said == true).all(1).sum()
        self.counts[1:] += torch.stack([kind.sum(0) for kind in kinds], 1)

    def compute(self) -> Tensor:
        return self.counts


def _log_odds(outputs: Tensor) -> Tensor:
    """Of each class against the mean of the others, 0 where all are equal. [b, classes], also where a class is nearly certain."""
    best = outputs.argmax(1, keepdim=True)
    share = outputs.log_softmax(1)
    others = outputs.scatter(1, best, -torch.inf).logsumexp(1, keepdim=True)
    odds = (share - torch.log1p(-share.exp())).scatter(1, best, outputs.gather(1, best) - others)
    return odds + math.log(max(1, outputs.shape[1] - 1))


def _metrics(head: Head) -> dict[str, torchmetrics.Metric | torchmetrics.MetricCollection]:
    classes = len(head.classes)
    if head.kind == "number":
        return {"mse": regression.MeanSquaredError(), "mae": regression.MeanAbsoluteError()}
    if head.kind == "binary":
        return {
            "confusion": classification.BinaryConfusionMatrix(),
        }
    if head.kind == "multi":
        return {
            "counts": _Tags(classes),
        }
    found: dict[str, torchmetrics.Metric | torchmetrics.MetricCollection] = {}
    if classes <= _MATRIX:
        found["confusion"] = classification.MulticlassConfusionMatrix(classes)
    else:
        found["accuracy"] = classification.MulticlassAccuracy(classes, average="micro")
    if classes > 5:
        found["top5"] = classification.MulticlassAccuracy(classes, top_k=5, average="micro")
    return found


def _areas(head: Head) -> _Areas | None:
    if head.kind == "number" or (head.kind == "class" and len(head.classes) > _CURVES):
        return None
    return _Areas(head.outputs)


def _seen(head: Head, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """What torchmetrics is shown of a batch."""
    if head.kind == "number":
        return head.values(outputs.double()), target.double()
    if head.kind == "binary":
        return outputs[:, 0].double().sigmoid(), target
    if head.kind == "multi":
        return outputs.double().sigmoid(), target.long()
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


def _of_counts(counts: Tensor) -> dict[str, float]:
    """Accuracy of all yes and no, and F1 as a mean over the classes that some sample has.

    counts: [classes, 5], true and false positives, true and false negatives, and samples that have the class.
    """
    hits, false, rest, missed, true = counts.double().unbind(1)
    found = {
        "accuracy": float((hits + rest).sum() / (hits + false + rest + missed).sum().clamp(min=1))
    }
    if (there := true > 0).any():
        found["f1"] = float((2 * hits / (2 * hits + false + missed).clamp(min=1))[there].mean())
    return found


def _mean_area(areas: Tensor, true: Tensor, samples: int) -> dict[str, float]:
    """AUROC as a mean over the classes that some samples have and others have not; nothing where there is none.

    areas: of each class, or one for two classes; true: int[classes], the samples of each.
    """
    defined = (true > 0) & (true < samples)
    return {"auroc": float(areas.expand(len(true))[defined].mean())} if defined.any() else {}


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
        return ", ".join(
            f"{head.name}: {_of_head(head, metrics, f'{head.name}/')}" for head in task.heads
        )
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
        baseline = (
            f" (predicting the mean gives {one('mse_of_mean'):.4f})"
            if f"{prefix}mse_of_mean" in metrics
            else ""
        )
        explained = f", R2 {one('r2'):.3f}" if f"{prefix}r2" in metrics else ""
        return f"mse {one('mse'):.4f}{baseline}, mae {one('mae'):.4f}{explained}"
    area = (
        f", AUROC {one('auroc'):.4f}" if f"{prefix}auroc" in metrics else ""
    )  # not where only one class was there
    if head.kind == "binary":
        return f"accuracy {one('accuracy'):.2%}{area}, F1 {one('f1'):.4f}"
    if head.kind == "multi":
        f1 = f", F1 {one('f1'):.4f}" if f"{prefix}f1" in metrics else ""
        return f"accuracy {one('accuracy'):.2%}{f1}{area}"
    top5 = f", top-5 {one('top5'):.2%}" if f"{prefix}top5" in metrics else ""
    return f"accuracy {one('accuracy'):.2%}{top5}"
