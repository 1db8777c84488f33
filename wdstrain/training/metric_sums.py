"""Sums for metrics: counts, ranks in bins of log-odds, calibration, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_MOST_BINS, _FEWEST_BINS, _BINS_OF_ALL = 1 << 14, 1 << 10, 1 << 21  # per class; of all classes
_FARTHEST = 1e4  # log-odds: samples of a model that is far too certain are ranked too
_LINEAR = 0.01  # log-odds up to which bins have equal widths; beyond it widths grow with them
CALIBRATION_BINS = 15


def add_counts(counts: Tensor, positions: Tensor) -> None:
    """Add 1 at each flat position of a tensor.

    Whole numbers add up to the same in any order, so this is deterministic where torch's bincount
    is refused by deterministic algorithms.
    """
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        ones = torch.ones(len(positions), dtype=counts.dtype, device=counts.device)
        counts.view(-1).index_add_(0, positions, ones)
    finally:
        torch.use_deterministic_algorithms(was)


def one_hot(target: Tensor, outputs: int) -> Tensor:
    """Return int64[b, outputs], 0 or 1; of one of two classes [b, 1]."""
    if outputs == 1:
        return target[:, None].long()
    return torch.nn.functional.one_hot(target, outputs)


def bins_of(classes: int) -> int:
    """Return how many bins of log-odds each class gets."""
    return min(_MOST_BINS, max(_FEWEST_BINS, _BINS_OF_ALL // classes))


def add_ranks(ranks: Tensor, odds: Tensor, present: Tensor) -> None:
    """Count samples by bin of their log-odds.

    ranks: [classes, 2, bins], without and with the class. odds, present: [b, classes].
    """
    bins = ranks.shape[2]
    near = odds.nan_to_num(-_FARTHEST).clamp(-_FARTHEST, _FARTHEST) / _LINEAR
    place = ((near.asinh() / math.asinh(_FARTHEST / _LINEAR) + 1) / 2 * (bins - 1)).round().long()
    row = 2 * torch.arange(odds.shape[1], device=odds.device) + present
    add_counts(ranks, (row * bins + place).flatten())


def log_odds(outputs: Tensor) -> Tensor:
    """Return log-odds of each class [b, classes], 0 where all classes are equally likely.

    They are exact also where a class is nearly certain.
    """
    best = outputs.argmax(1, keepdim=True)
    share = outputs.log_softmax(1)
    others = outputs.scatter(1, best, -torch.inf).logsumexp(1, keepdim=True)
    odds = (share - torch.log1p(-share.exp())).scatter(1, best, outputs.gather(1, best) - others)
    return odds + math.log(max(1, outputs.shape[1] - 1))


def auroc(ranks: Tensor) -> Tensor:
    """Return the area under the ROC curve of each class; NaN if all samples have it or none."""
    without, having = ranks.unbind(1)
    below = without.cumsum(1) - without / 2
    return (having * below).sum(1) / (having.sum(1) * without.sum(1))


def average_precision(ranks: Tensor) -> Tensor:
    """Return the average precision of each class; NaN if no sample has it."""
    without, having = ranks.flip(2).unbind(1)  # the most certain first
    found = having.cumsum(1)
    precision = found / (found + without.cumsum(1)).clamp(min=1)
    return (having * precision).sum(1) / having.sum(1)


def add_calibration(sums: Tensor, confidence: Tensor, right: Tensor) -> None:
    """Add a batch to [samples, confidences, right answers] by bin of the confidence."""
    bins = (confidence * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    picked = torch.nn.functional.one_hot(bins, CALIBRATION_BINS).double()
    sums += torch.stack([picked.sum(0), confidence @ picked, right.double() @ picked])


def calibration_error(sums: Tensor) -> float:
    """Return the expected calibration error: mean difference of confidence and accuracy."""
    count, confidence, right = sums
    return float((confidence - right).abs().sum() / count.sum().clamp(min=1))


def matrix_metrics(matrix: Tensor, *, binary: bool) -> dict[str, float]:
    """Return metrics of a confusion matrix: means over the classes that some sample has."""
    right, true, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    present = true > 0
    if not present.any():
        return {}
    recall = right / true.clamp(min=1)
    f1 = 2 * right / (true + predicted).clamp(min=1)
    found = {"balanced_accuracy": float(recall[present].mean())}
    if not present.all():
        found["classes_without_samples"] = float((~present).sum())
    if not binary:
        return found | {"f1": float(f1[present].mean())}
    precision = float(right[1] / predicted[1].clamp(min=1))
    return found | {"precision": precision, "recall": float(recall[1]), "f1": float(f1[1])}


def rank_metrics(ranks: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Return means of AUROC and average precision over the classes for which they are defined."""
    curves = {"auroc": auroc, "mAP": average_precision}
    means = {name: curves[name](ranks).nanmean() for name in names}
    return {name: float(value) for name, value in means.items() if not value.isnan()}
