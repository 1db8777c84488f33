"""Metrics from sums over samples: of confusion matrices, ranks and calibrations.

Every state is a sum (counts of a confusion matrix, squared errors). So memory does not grow with
the samples, a process without samples adds nothing, and processes add up to what a single one
counts. AUROC, average precision and calibration come from counts in narrow bins for that reason.
torchmetrics has bins of equal width for them, in which certain models are not ranked, and takes
seconds to import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Metrics = dict[str, Any]
Classes = dict[str, dict[str, float | None]]  # numbers of each class; None: undefined
Results = tuple[Metrics, dict[str, Any]]  # metrics; "classes", "confusion", "calibration"

# Bins per class, most and fewest, and of all classes. Fewer make mAP wrong by more than 0.003.
_MOST_BINS, _FEWEST_BINS, _BINS_OF_ALL = 1 << 14, 1 << 10, 1 << 21
_FARTHEST = 1e4  # log-odds: samples of a model that is far too certain are ranked too
_LINEAR = 0.01  # log-odds up to which bins have equal widths; beyond it widths grow with them


def add_counts(counts: Tensor, positions: Tensor) -> None:
    """Add 1 at each flat position of a tensor.

    Deterministic algorithms refuse torch's bincount.
    """
    positions = positions.flatten()
    counts.view(-1).index_add_(0, positions, torch.ones_like(positions, dtype=counts.dtype))


# --- ranks ----------------------------------------------------------------------------------------


def shape_of_ranks(classes: int) -> tuple[int, int, int]:
    """Return the shape of counts by bins of log-odds: [classes, without and with it, bins]."""
    return classes, 2, min(_MOST_BINS, max(_FEWEST_BINS, _BINS_OF_ALL // max(1, classes)))


def add_ranks(ranks: Tensor, odds: Tensor, present: Tensor) -> None:
    """Count samples by bin of their log-odds. odds, present: [b, classes]."""
    bins = ranks.shape[2]
    near = odds.nan_to_num(-_FARTHEST).clamp(-_FARTHEST, _FARTHEST) / _LINEAR
    place = ((near.asinh() / math.asinh(_FARTHEST / _LINEAR) + 1) / 2 * (bins - 1)).round().long()
    row = 2 * torch.arange(odds.shape[1], device=odds.device) + present.long()
    add_counts(ranks, row * bins + place)


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
    hits = having.cumsum(1)
    precision = hits / (hits + without.cumsum(1)).clamp(min=1)
    return (having * precision).sum(1) / having.sum(1)


# --- classes --------------------------------------------------------------------------------------


def matrix_metrics(names: Sequence[str], counted: str, matrix: Tensor, **more: Tensor) -> Results:
    """Return (means over the classes that some sample has, details) of a confusion matrix.

    Of two classes of samples: precision, recall and F1 of the second.
    """
    right, predicted, true = matrix.diagonal(), matrix.sum(0), matrix.sum(1)
    f1 = 2 * right / (predicted + true).clamp(min=1)
    metrics = {"balanced_accuracy": (right / true).nanmean(), "f1": f1[true > 0].mean()}
    metrics[f"classes_without_{counted}"] = (true == 0).sum()
    if len(matrix) == 2 and counted == "samples":
        metrics["precision"] = right[1] / predicted[1].clamp(min=1)
        metrics |= {"recall": right[1] / true[1].clamp(min=1), "f1": f1[1]}
    return metrics, {
        "confusion": matrix.tolist(),
        "classes": class_rows(names, counted, right, predicted, true, **more),
    }


def class_rows(
    names: Sequence[str],
    counted: str,
    right: Tensor,
    predicted: Tensor,
    true: Tensor,
    **more: Tensor,
) -> Classes:
    """Return count, precision, recall and more of each class. counted: name of the count."""
    columns = {"precision": right / predicted, "recall": right / true, **more}
    shares = torch.stack(list(columns.values()), 1).tolist()
    return {
        name: {counted: int(count)}
        | {n: None if math.isnan(x) else x for n, x in zip(columns, row, strict=True)}
        for name, count, row in zip(names, true.tolist(), shares, strict=True)
    }


def classes_of(details: Mapping[str, Any], most: float = math.inf) -> dict[str, Any]:
    """Return "classes": rows of classes by head. most: classes of a head; of more, none."""
    parts = ((name, own.get("classes", {})) for name, own in details["heads"].items())
    classes = {name: rows for name, rows in parts if 0 < len(rows) <= most}
    return {"classes": classes} if classes else {}
