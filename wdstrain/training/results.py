"""Results of runs in words, tables and curves, for the terminal, the log and pages.

A run by itself, and runs side by side: the results of each, and the options in which they differ.
This module does not import torch.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from wdstrain.report import charts, pages
from wdstrain.report.charts import Line
from wdstrain.storage.files import write_whole
from wdstrain.training.config import CONFIG, METRICS, read_config, read_lines, refuse

_MAIN = ("accuracy", "mAP", "mIoU", "mse", "loss")  # metrics with a column and a chart
_MOST = len(charts.COLORS)  # runs with curves

History = Sequence[Mapping[str, Any]]

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


def metric_title(name: str) -> str:
    """Return the name of a metric in words."""
    label, separator, own = name.rpartition("/")
    return label + separator + _TITLES.get(own, own.replace("_", " "))


def metric_value(name: str, value: float) -> str:
    """Return the value of a metric: shares in percent, counts as they are.

    Errors have four decimals, or four digits where these would say little.
    """
    if isinstance(value, int):
        return str(value)
    if name.rpartition("/")[2] in _SHARES:
        return f"{value:.2%}"
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e6 else f"{value:.4g}"


def metric_text(name: str, value: float) -> str:
    """Return one metric in words."""
    return f"{metric_title(name)} {metric_value(name, value)}"


def heading(name: str) -> str:
    """Return the title of a chart of a metric, such as "Accuracy" or "kind: Accuracy"."""
    label, _, own = name.rpartition("/")
    words = metric_title(own)
    # not of an abbreviation such as mAP
    title = words[:1].upper() + words[1:] if words[1:].islower() else words
    return f"{label}: {title}" if label else title


def metric_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and value of each metric of a pass in words."""
    return [
        (metric_title(name), metric_value(name, value))
        for name, value in metrics.items()
        if name != "classes"
    ]


def curves(name: str, lines: Sequence[charts.Line]) -> str:
    """Return a card with curves of a metric over the epochs."""
    is_share = name.rpartition("/")[2] in _SHARES
    return pages.card(heading(name), charts.lines(lines, across="epoch", share=is_share))


# --- runs side by side ----------------------------------------------------------------------------


def compare(runs: Sequence[str], report: str | None = None) -> list[dict[str, Any]]:
    """Return a row for each run: run, epochs, best_epoch, seconds, metrics, options.

    metrics: of validation after the best epoch, without validation those of training. options:
    those that differ between the runs. report: page to write, with curves. Raises UsageError for a
    folder that holds no run.
    """
    histories = [read_lines(os.path.join(run, METRICS)) for run in runs]
    options = [_options(run) for run in runs]
    names = dict.fromkeys(name for own in options for name in own)
    differing = [name for name in names if len({str(own.get(name)) for own in options}) > 1]
    rows = [
        _row(run, lines) | {"options": {name: own.get(name) for name in differing}}
        for run, lines, own in zip(runs, histories, options, strict=True)
    ]
    if report is not None:
        _write_page(report, rows, histories)
    return rows


def _options(run: str) -> dict[str, Any]:
    """Return the options and the data of a run."""
    path = os.path.join(run, CONFIG)
    refuse((not os.path.exists(path), f"{run} holds no run.", "Name folders that train wrote."))
    options, data = read_config(path)
    return options | data


def _row(run: str, lines: History) -> dict[str, Any]:
    """Return the results of a run. lines: of metrics.jsonl."""
    best = max((i for i, line in enumerate(lines, 1) if line.get("is_best", True)), default=None)
    line = lines[best - 1] if best else {}
    return {
        "run": run,
        "epochs": len(lines),
        "best_epoch": best,
        "seconds": sum(line["seconds"] + line.get("val_seconds", 0.0) for line in lines),
        "metrics": line.get("val", {name: line[name] for name in _MAIN if name in line}),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of `compare` as texts, below a line of titles."""
    names = _main_metrics(rows)
    head = ["run", *map(metric_title, names), "best epoch", "time", "options that differ"]
    return [head] + [
        [
            run,
            *(metric_value(n, row["metrics"][n]) if n in row["metrics"] else "-" for n in names),
            f"{row['best_epoch'] or '-'} of {row['epochs']}",
            str(timedelta(seconds=round(row["seconds"]))),
            ", ".join(f"{name}={value}" for name, value in row["options"].items()),
        ]
        for run, row in zip(_short_names(rows), rows, strict=True)
    ]


def spread(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return "mean" and "deviation" of each metric that all of these runs have."""
    columns = {name: [row["metrics"].get(name) for row in rows] for name in rows[0]["metrics"]}
    shares = {n: values for n, values in columns.items() if all(type(x) is float for x in values)}
    return {
        "mean": {name: statistics.fmean(values) for name, values in shares.items()},
        "deviation": {name: statistics.stdev(values) for name, values in shares.items()},
    }


def spread_lines(mean: Mapping[str, float], deviation: Mapping[str, float]) -> list[str]:
    """Return mean and deviation of each metric in words."""
    return [
        f"{metric_text(name, value)} ± {metric_value(name, deviation[name])}"
        for name, value in mean.items()
    ]


def _short_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the paths of the runs from the folder that holds all of them."""
    paths = [os.path.abspath(row["run"]) for row in rows]
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(path, folder) for path in paths]


def _main_metrics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metrics that are shown: of each label the one that chooses the best, and the loss."""
    there = dict.fromkeys(name for row in rows for name in row["metrics"])
    return [name for main in _MAIN for name in there if name.rpartition("/")[2] == main]


def _write_page(path: str, rows: Sequence[Mapping[str, Any]], histories: Sequence[History]) -> None:
    """Write a page with the table and the curves of each metric by epoch."""
    head, *body = table(rows)
    cards = []
    for name in _main_metrics(rows):
        lines = []
        for run, history in zip(_short_names(rows)[:_MOST], histories, strict=False):
            values = [line.get("val", line).get(name, math.nan) for line in history]
            lines.append(Line(run, range(1, len(values) + 1), values, dots=True))
        cards.append(curves(name, lines))
    more = f"<p>Curves of the first {_MOST} runs.</p>" if len(rows) > _MOST else ""
    parts = [pages.grid(head, body), more, pages.cards(cards)]
    write_whole(path, pages.page(f"{len(rows)} runs", parts))
