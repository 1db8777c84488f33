"""Results in words, tables and pages: of a run, of an evaluation, and of runs side by side.

A page is one file and loads nothing from elsewhere. A run rewrites its own after every epoch. This
module does not import torch, which takes seconds.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from wdstrain.errors import WdstrainError
from wdstrain.report import charts, pages
from wdstrain.report.charts import Line
from wdstrain.report.printing import counted
from wdstrain.storage.files import write_whole
from wdstrain.training.config import (
    CONFIG,
    METRICS,
    STAGES,
    Config,
    read_config,
    read_lines,
    refuse,
)

if TYPE_CHECKING:
    from wdstrain.training.checkpoint import Setup
    from wdstrain.training.heads import Head
    from wdstrain.training.metrics import Classes
    from wdstrain.training.predict import Preview
    from wdstrain.training.run import Run
    from wdstrain.training.tasks import Task

_MATRIX_CLASSES = 50  # classes of a matrix that can be read; of more, the worst pairs are listed
_NAMED_COLORS = 30  # classes in a legend
_CLASSES = 200  # rows of a table of classes
_HARDEST = 24  # training samples with the largest losses
_PAIRS = 20  # mistaken pairs of classes in a list
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


def curves(name: str, lines: Sequence[Line]) -> str:
    """Return a card with curves of a metric over the epochs."""
    is_share = name.rpartition("/")[2] in _SHARES
    return pages.card(heading(name), charts.lines(lines, across="epoch", share=is_share))


# --- pages -----------------------------------------------------------------------------------------


def write_report(
    path: str,
    run: Run,
    best: str,
    steps: History,
    details: Mapping[str, Any],
    recorded: Any,
) -> None:
    """Write the page of a run.

    best: sentence on the best epoch. steps: lines of steps.jsonl. details: of the last validation.
    recorded: table of losses of the training samples, or None.
    """
    history, config = run.state.history, run.config
    last, title = history[-1], os.path.basename(os.path.dirname(os.path.abspath(path)))
    verdict = last["verdict"][:1].upper() + last["verdict"][1:]
    seconds = sum(line["seconds"] + line.get("val_seconds", 0.0) for line in history)
    facts = _shown_first(run.state.best or {}, run.monitor.name) | {
        "epochs": f"{len(history)} of {config.epochs}",
        "total time": str(timedelta(seconds=round(seconds))),
        "samples/s": f"{last['samples_per_second']:.0f}",
        "stall": f"{last['stall']:.1%}",
        "bad samples": str(last["bad"]),
    }
    results = _results(run.task, last["val"], details) if details else ()
    cards = [
        *_curves(run.task, run.monitor.name, history, steps),
        *results,
        *([] if recorded is None else [_hardest(run, recorded)]),
    ]
    texts = (f"{best}. The other figures are of the last epoch.", f"{verdict}.")
    _write(path, title, config, run.task, facts, texts, cards)


def write_evaluation(
    path: str, setup: Setup, metrics: Mapping[str, Any], details: Mapping[str, Any]
) -> None:
    """Write the page of an evaluation. metrics, details: of its pass."""
    task, head = setup.task, setup.task.heads[0]
    counts = {name: str(int(metrics[name])) for name in ("samples", "bad")}
    facts = _shown_first(metrics, task.metric_name(head, head.main_metric)) | counts
    title, cards = f"Evaluation of {setup.path}", _results(task, metrics, details)
    _write(path, title, setup.config, task, facts, (), cards)


def _write(
    path: str,
    title: str,
    config: Config,
    task: Task,
    facts: Mapping[str, str],
    texts: Iterable[str],
    cards: Iterable[str],
) -> None:
    """Write a page: title, facts, sentences, cards and options."""
    cells = "".join(f"<div><b>{escape(v)}</b>{escape(n)}</div>" for n, v in facts.items())
    options = {name: value for name, value in vars(config).items() if value not in (None, "")}
    parts = [
        f"<p class=soft>{escape(f'model {config.model}, task {task}')}</p>",
        f'<div class="facts">{cells}</div>',
        *(f"<p>{escape(text)}</p>" for text in texts),
        pages.cards([*cards, pages.card("Options", pages.table(options.items()))]),
    ]
    write_whole(path, pages.page(title, parts))


def _shown_first(metrics: Mapping[str, float], name: str) -> dict[str, str]:
    """Return the metric that chooses the best, if there is one, by its name in words."""
    return {metric_title(name): metric_value(name, metrics[name])} if name in metrics else {}


# --- curves and data ------------------------------------------------------------------------------


def _curves(task: Task, monitor: str, history: History, steps: History) -> Iterator[str]:
    """Yield a card for each curve over the epochs: metrics, losses, learning rate and speed."""
    longest = max((line["step"] for line in steps), default=1)
    at = [line["epoch"] + line["step"] / longest for line in steps]

    def by_step(value: str, name: str = "training") -> Line:
        return Line(name, at, [line[value] for line in steps])

    parts: dict[str, History] = {
        "training": history,
        "validation": [line.get("val", {}) for line in history],
        "validation without averaging": [line.get("val_raw", {}) for line in history],
    }
    main = [task.metric_name(head, head.main_metric) for head in task.heads]
    there = {name for line in history for name in (*line, *line.get("val", ()))} - {"loss"}
    for name in dict.fromkeys(name for name in (*main, monitor) if name in there):
        yield curves(name, _by_epoch(parts, name))
    yield curves("loss", [by_step("loss"), *_by_epoch(parts, "loss")[1:]])
    yield curves("learning_rate", [by_step("lr")])
    yield curves("samples_per_second", [by_step("samples_per_second")])
    yield curves(
        "seconds_by_stage", [by_step(f"{s}_seconds", title) for s, title in STAGES.items()]
    )


def _by_epoch(figures: Mapping[str, History], name: str) -> list[Line]:
    """Return a curve of a metric for each of these lists of figures, which have one for each epoch."""
    return [
        Line(
            title,
            range(1, len(epochs) + 1),
            [epoch.get(name, math.nan) for epoch in epochs],
            dots=True,
        )
        for title, epochs in figures.items()
    ]


def largest(counts: Mapping[str, int], most: int | None = None) -> dict[str, int]:
    """Return the classes by count, the most frequent first."""
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:most])


# --- results --------------------------------------------------------------------------------------


def _results(task: Task, metrics: Mapping[str, Any], details: Mapping[str, Any]) -> Iterator[str]:
    """Yield a card for each result of a pass: metrics, mistakes of each head, worst samples."""
    yield pages.card("Metrics", pages.table(metric_rows(metrics)))
    for head in task.heads:
        own = details["heads"][head.name]
        for title, body in (draw(head, own[part]) for part, draw in _PANELS if part in own):
            yield pages.card(heading(task.metric_name(head, title)), body)
    yield pages.card("Worst predictions", _gallery(details["worst"], task))


def _calibration(head: Head, bins: Sequence[Sequence[float]]) -> tuple[str, str]:
    """Return the share of right predictions by their probability. bins: sums of each."""
    filled = [values for values in zip(*bins, strict=True) if values[0]]
    sure, right = ([values[n] / values[0] for values in filled] for n in (1, 2))
    lines = [Line("model", sure, right, dots=True), Line("right as often as sure", (0, 1), (0, 1))]
    chart = charts.lines(lines, across="probability of the predicted class", share=True)
    return (
        "calibration",
        f"<p class=soft>Share of right predictions by the probability that they had.</p>{chart}",
    )


def _confusion(head: Head, counts: Sequence[Sequence[float]]) -> tuple[str, str]:
    """Return the confusion matrix; of many classes the pairs that are mistaken most often."""
    names = head.classes
    if len(names) <= _MATRIX_CLASSES:
        unit = "pixels" if head.kind == "mask" else "samples"
        return (
            "confusion matrix",
            f"<p class=soft>Percent of the {unit} of each true class (rows) by prediction (columns)."
            f"</p>{pages.matrix(names, counts)}",
        )
    cells = ((value, i, j) for i, row in enumerate(counts) for j, value in enumerate(row))
    pairs = sorted(((v, i, j) for v, i, j in cells if i != j and v), reverse=True)[:_PAIRS]
    rows = [(names[i], names[j], f"{v:g} of {sum(counts[i]):g}") for v, i, j in pairs]
    return "most frequent mistakes", pages.table(rows, ("class", "predicted as", "samples"))


def _class_table(head: Head, classes: Classes) -> tuple[str, str]:
    """Return a table of classes, the rarest last; of many the most frequent. The first column counts."""
    counted, *names = next(iter(classes.values()))
    order = largest({name: int(row[counted] or 0) for name, row in classes.items()})
    rows = [
        [
            name,
            count,
            *("-" if classes[name][n] is None else f"{classes[name][n]:.3f}" for n in names),
        ]
        for name, count in order.items()
    ]
    name, most = next(iter(order.items()))
    share = f"{most / max(1, sum(order.values())):.2%}"
    baseline = f"Predicting always {name!r} would be right for {share} of {counted}."
    table = pages.table(rows[:_CLASSES], ("class", counted, *names))
    return "classes", f"<p>{escape(baseline)}</p>{table}"


# Panels of a head: the detail of a pass, and the function of it that returns (title, body).
_PANELS: tuple[tuple[str, Callable[[Head, Any], tuple[str, str]]], ...] = (
    ("calibration", _calibration),
    ("confusion", _confusion),
    ("classes", _class_table),
)


def _gallery(samples: Sequence[Preview], task: Task) -> str:
    """Return pictures of samples with their predictions. A different true label is in brackets."""
    figures = []
    for sample in samples:
        image, caption = "" if sample.pixels is None else pages.picture(sample.pixels), ""
        for name, (prediction, target, is_wrong) in sample.said.items():
            caption += escape(f"{name}: " if task.has_several else "")
            caption += escape(prediction or "none")
            if is_wrong or target not in (prediction, prediction.rpartition(" ")[0]):
                style = "wrong" if is_wrong else "soft"
                caption += f" <span class={style}>({escape(target or 'none')})</span>"
            caption += "<br>"
        caption += f'<div class="key">{escape(sample.key)}</div>'
        figures.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    style, words, names = "shown", "prediction (true label if different)", ""
    if task.is_dense:
        style, words = "shown wide", "image, prediction, true mask"
        label = task.heads[0].target
        colors = (f"#{color.tobytes().hex()}" for color in label.colors)
        names = pages.legend(dict(zip(label.classes[:_NAMED_COLORS], colors, strict=False)))
    return f'<p class="soft">{words}</p>{names}<div class="{style}">{"".join(figures)}</div>'


def _hardest(run: Run, recorded: Any) -> str:
    """Return a card with the training samples that had the largest losses in their last epoch."""
    from wdstrain.training.data import few_samples

    hard = recorded.sort_by([("loss", "descending")]).slice(0, _HARDEST)
    name, pictures = run.setup.inputs.picture, {}
    if name is not None:
        keys, wanted = run.train_set.offsets.rows.column(0), hard["key"].cast("large_binary")
        few = run.train_set.take(np.flatnonzero(pc.is_in(keys, value_set=wanted)))
        with suppress(WdstrainError):  # of pictures that cannot be read
            batch = few_samples(few, {name: run.val_fields[name]}, run.config, _HARDEST)
            pictures = {
                key: pages.picture(image.permute(1, 2, 0).numpy())
                for key, image in zip(batch["__key__"], batch[name], strict=True)
            }
    figures = (
        f"<figure>{pictures.get(row['key'], '')}<figcaption>loss {row['loss']:.4g}, "
        f'shown {counted(row["times"], "time")}<div class="key">{escape(str(row["key"]))}</div>'
        "</figcaption></figure>"
        for row in hard.to_pylist()
    )
    return pages.card("Hardest training samples", f'<div class="shown">{"".join(figures)}</div>')


# --- runs side by side ----------------------------------------------------------------------------


def compare(runs: Sequence[str], report: str | None = None) -> list[dict[str, Any]]:
    """Return a row for each run: run, epochs, best_epoch, seconds, metrics, options.

    metrics: of validation after the best epoch, without validation those of training. options:
    those that differ between the runs. report: page to write, with curves. Raises UsageError for a
    folder that holds no run.
    """
    histories = [read_lines(os.path.join(run, METRICS)) for run in runs]
    options = [_options(run) for run in runs]
    differing = [
        name
        for name in dict.fromkeys(name for own in options for name in own)
        if len({str(own.get(name)) for own in options}) > 1
    ]
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
    refuse(not os.path.exists(path), f"{run} holds no run.", "Name folders that train wrote.")
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
    runs = dict(zip(_short_names(rows)[:_MOST], histories, strict=False))
    figures = {run: [line.get("val", line) for line in history] for run, history in runs.items()}
    cards = [curves(name, _by_epoch(figures, name)) for name in _main_metrics(rows)]
    more = f"<p>Curves of the first {_MOST} runs.</p>" if len(rows) > _MOST else ""
    tables = [pages.table(body, head), more, pages.cards(cards)]
    write_whole(path, pages.page(f"{len(rows)} runs", tables))
