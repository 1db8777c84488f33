"""Metrics in words and curves, for the terminal, the log and pages. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wdstrain.report import charts, pages

_TITLES = {
    "top5": "top-5",
    "auroc": "AUROC",
    "f1": "F1",
    "r2": "R2",
    "ece": "calibration error",
    "mse": "MSE",
    "mae": "MAE",
    "mse_of_mean": "MSE of predicting the mean",
    "bad": "bad samples",
}
_SHARES = ("accuracy", "balanced_accuracy", "pixel_accuracy", "top5", "exact")


def figure(value: float) -> str:
    """Return a number with four decimals, or four digits where these would say little."""
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e6 else f"{value:.4g}"


def metric_title(name: str) -> str:
    """Return the name of a metric in words."""
    label, separator, own = name.rpartition("/")
    return label + separator + _TITLES.get(own, own.replace("_", " "))


def metric_value(name: str, value: float) -> str:
    """Return the value of a metric: shares in percent, errors as numbers, counts as they are."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.2%}" if name.rpartition("/")[2] in _SHARES else figure(value)


def metric_text(name: str, value: float) -> str:
    """Return one metric in words."""
    return f"{metric_title(name)} {metric_value(name, value)}"


def heading(name: str) -> str:
    """Return the title of a chart of a metric, such as "Accuracy" or "kind: Accuracy"."""
    label, _, own = name.rpartition("/")
    words = metric_title(own)
    if words[1:].islower():  # no abbreviation such as mAP
        words = f"{words[0].upper()}{words[1:]}"
    return f"{label}: {words}" if label else words


def metric_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and value of each metric of a pass in words."""
    numbers = ((name, value) for name, value in metrics.items() if name != "classes")
    return [(metric_title(name), metric_value(name, value)) for name, value in numbers]


def curves(name: str, lines: Sequence[charts.Line]) -> str:
    """Return a card with curves of a metric over the epochs."""
    is_share = name.rpartition("/")[2] in _SHARES
    return pages.card(heading(name), charts.lines(lines, across="epoch", share=is_share))
