"""report.html of a run or of an evaluation, and the same in words for terminal and log.

The page is one file and loads nothing from elsewhere. A run rewrites it after every epoch.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from html import escape
from typing import Any

from wdstrain.loader.stats import EpochStats
from wdstrain.report import charts, pages
from wdstrain.report.charts import Line
from wdstrain.report.printing import printable
from wdstrain.shards.declare import recorded_counts
from wdstrain.shards.index import Index
from wdstrain.storage.files import write_whole
from wdstrain.training.config import Config
from wdstrain.training.heads import Head
from wdstrain.training.metrics import Classes, classes_of
from wdstrain.training.results import (
    History,
    curves,
    heading,
    metric_rows,
    metric_text,
    metric_title,
    metric_value,
)
from wdstrain.training.run import STAGES, Run
from wdstrain.training.tasks import Monitor, Task
from wdstrain.training.validation import PALETTE, Preview
from wdstrain.training.weights import LoadedCheckpoint

_MATRIX_CLASSES = 50  # classes of a matrix that can be read; of more, the worst pairs are listed
_NAMED_COLORS = 30  # classes in a legend
_CLASSES = 200  # rows of a table of classes
_LOGGED = 100  # classes whose numbers are in the line of an epoch
_PAIRS = 20  # mistaken pairs of classes in a list
_NAMED = 8  # classes in a sentence
# Shorter epochs are dominated by their start: threads begin, the first batches are read.
_FEWEST_STEPS, _FEWEST_SECONDS = 100, 60.0

# (metrics, details) of each pass of validation: "val" and, of weights without averaging, "val_raw"
Passes = dict[str, tuple[dict[str, float], dict[str, Any]]]


def write_report(
    path: str, run: Run, best: str, steps: History, details: Mapping[str, Any]
) -> None:
    """Write the page of a run.

    best: sentence on the best epoch. steps: lines of steps.jsonl. details: of the last validation.
    """
    history, config = run.state.history, run.config
    last, title = history[-1], os.path.basename(os.path.dirname(os.path.abspath(path)))
    seconds = sum(line["seconds"] + line.get("val_seconds", 0.0) for line in history)
    facts = _shown_first(run.state.best or {}, run.monitor.name) | {
        "epochs": f"{len(history)} of {config.epochs}",
        "total time": str(timedelta(seconds=round(seconds))),
        "samples/s": f"{last['samples_per_second']:.0f}",
        "stall": f"{last['stall']:.1%}",
        "bad samples": str(last["bad"]),
    }
    texts = [
        f"{best}. The other figures are of the last epoch.",
        f"{last['verdict'][:1].upper()}{last['verdict'][1:]}.",
    ]
    cards = [*_curves(run.task, run.monitor.name, history, steps)]
    if details:
        cards += _results(run.task, last["val"], details)
    _write(path, title, config, run.task, facts, texts, cards)


def write_evaluation(
    path: str,
    loaded: LoadedCheckpoint,
    metrics: Mapping[str, Any],
    details: Mapping[str, Any],
) -> None:
    """Write the page of an evaluation. metrics, details: of its pass."""
    task, head = loaded.task, loaded.task.heads[0]
    facts = _shown_first(metrics, task.metric_name(head, head.main_metric))
    facts |= {name: str(int(metrics[name])) for name in ("samples", "bad")}
    title, cards = f"Evaluation of {loaded.path}", _results(task, metrics, details)
    _write(path, title, loaded.config, task, facts, (), cards)


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
        pages.cards([*cards, pages.card("Options", pages.table(options))]),
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

    main = [task.metric_name(head, head.main_metric) for head in task.heads]
    there = {name for line in history for name in (*line, *line.get("val", ()))} - {"loss"}
    for name in dict.fromkeys(name for name in (*main, monitor) if name in there):
        yield curves(name, _by_epoch(history, name))
    yield curves("loss", [by_step("loss"), *_by_epoch(history, "loss")[1:]])
    yield curves("learning_rate", [by_step("lr")])
    yield curves("samples_per_second", [by_step("samples_per_second")])
    yield curves(
        "seconds_by_stage", [by_step(f"{s}_seconds", title) for s, title in STAGES.items()]
    )


def _by_epoch(history: History, name: str) -> list[Line]:
    """Return the curves of a metric: of training, and of validation with averaging and without."""
    epochs = [line["epoch"] + 1.0 for line in history]
    parts = {
        "training": history,
        "validation": [line.get("val", {}) for line in history],
        "validation without averaging": [line.get("val_raw", {}) for line in history],
    }
    return [
        Line(title, epochs, [line.get(name, math.nan) for line in figures], dots=True)
        for title, figures in parts.items()
    ]


def _largest(counts: Mapping[str, int], most: int | None = None) -> dict[str, int]:
    """Return the classes by count, the most frequent first."""
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:most])


# --- results --------------------------------------------------------------------------------------


def _results(task: Task, metrics: Mapping[str, Any], details: Mapping[str, Any]) -> Iterator[str]:
    """Yield a card for each result of a pass: metrics, mistakes of each head, worst samples."""
    yield pages.card("Metrics", pages.table(dict(metric_rows(metrics))))
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
    words = "Share of right predictions by the probability that they had."
    return "calibration", f"<p class=soft>{words}</p>{chart}"


def _confusion(head: Head, counts: Sequence[Sequence[float]]) -> tuple[str, str]:
    """Return the confusion matrix; of many classes the pairs that are mistaken most often."""
    names = head.classes
    if len(names) <= _MATRIX_CLASSES:
        unit = "pixels" if head.kind == "mask" else "samples"
        words = f"Percent of the {unit} of each true class (rows) by prediction (columns)."
        return "confusion matrix", f"<p class=soft>{words}</p>{pages.matrix(names, counts)}"
    cells = ((value, i, j) for i, row in enumerate(counts) for j, value in enumerate(row))
    pairs = sorted(((v, i, j) for v, i, j in cells if i != j and v), reverse=True)[:_PAIRS]
    rows = [(names[i], names[j], f"{v:g} of {sum(counts[i]):g}") for v, i, j in pairs]
    return "most frequent mistakes", pages.grid(("class", "predicted as", "samples"), rows)


def _class_table(head: Head, classes: Classes) -> tuple[str, str]:
    """Return a table of classes, the rarest last; of many the most frequent. The first column counts."""
    counted, *names = next(iter(classes.values()))
    order = _largest({name: int(row[counted] or 0) for name, row in classes.items()})
    rows = [
        [
            name,
            count,
            *("-" if classes[name][n] is None else f"{classes[name][n]:.3f}" for n in names),
        ]
        for name, count in order.items()
    ]
    name, most = next(iter(order.items()))
    share = most / max(1, sum(order.values()))
    baseline = f"Predicting always {name!r} would be right for {share:.2%} of {counted}."
    table = pages.grid(("class", counted, *names), rows[:_CLASSES])
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
            prefix = f"{name}: " if task.has_several else ""
            caption += escape(prefix + (prediction or "none"))
            if is_wrong or target not in (prediction, prediction.rpartition(" ")[0]):
                style = "wrong" if is_wrong else "soft"
                caption += f" <span class={style}>({escape(target or 'none')})</span>"
            caption += "<br>"
        caption += f'<div class="key">{escape(sample.key)}</div>'
        figures.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    style, words, names = "shown", "prediction (true label if different)", ""
    if task.is_dense:
        style, words = "shown wide", "image, prediction, true mask"
        colors = (f"#{color.tobytes().hex()}" for color in PALETTE)
        names = pages.legend(dict(zip(task.heads[0].classes[:_NAMED_COLORS], colors, strict=False)))
    return f'<p class="soft">{words}</p>{names}<div class="{style}">{"".join(figures)}</div>'


# --- an epoch in figures and in words -------------------------------------------------------------


def mean_loss(sums: Mapping[str, float]) -> float:
    """Return the mean loss of the samples whose loss is finite."""
    return sums["loss"] / max(1.0, sums["samples"] - sums["overflowed"])


def stall_share(seconds: Mapping[str, float]) -> float:
    """Return the share of the time in which a step waited for data. seconds: by stage."""
    return (seconds["data"] + seconds["copy"]) / max(1e-9, sum(seconds.values()))


def epoch_metrics(run: Run, passes: Passes) -> dict[str, Any]:
    """Return the line of the epoch in metrics.jsonl. Collective.

    Seconds and verdict are those of the first process.
    """
    state, sums = run.state, run.sums.read(run.setup.distributed)
    samples, seconds = sums["samples"], sum(state.seconds.values())
    metrics: dict[str, Any] = {
        "epoch": state.epoch,
        "loss": mean_loss(sums),
        "samples": int(samples),
        "bad": int(sums["bad"]),
        "seconds": seconds,
        **{f"{name}_seconds": value for name, value in state.seconds.items()},
        "samples_per_second": samples / max(1e-9, seconds),
        "stall": stall_share(state.seconds),
        "left_out": run.loader.plan(state.epoch).left_out,
        "lr": run.lr,
        "verdict": state.verdict,
        **{
            run.task.metric_name(head, "accuracy"): sums[f"head {head.name}"] / max(1.0, samples)
            for head in run.task.heads
            if f"head {head.name}" in sums
        },
    }
    if run.scaler.is_enabled():
        metrics["skipped_steps"] = int(sums["skipped"])
    metrics |= {name: dict(values) for name, (values, _) in passes.items()}
    return metrics | (classes_of(passes["val"][1], _LOGGED) if passes else {})


def progress_text(task: Task, sums: Mapping[str, float], seconds: Mapping[str, float]) -> str:
    """Return loss, accuracy and stall of the epoch so far."""
    hits = [sums[f"head {head.name}"] for head in task.heads if f"head {head.name}" in sums][:1]
    shares = [f"acc {count / max(1.0, sums['samples']):.1%}" for count in hits]
    return ", ".join([f"loss {mean_loss(sums):.3f}", *shares, f"stall {stall_share(seconds):.0%}"])


def epoch_lines(title: str, history: History, monitor: str) -> Iterator[str]:
    """Yield the lines on the last epoch: its figures, and a verdict that differs from the last."""
    metrics = history[-1]
    val = metrics.get("val", {})
    validation = f"val {metric_text(monitor, val[monitor])}, " if monitor in val else ""
    rate = f"{metrics['samples_per_second']:.0f} samples/s, stall {metrics['stall']:.1%}"
    yield f"{title}: loss {metrics['loss']:.3f}, {validation}{rate}"
    if metrics.get("skipped_steps"):
        yield f"  {metrics['skipped_steps']} steps overflowed 16 bits and were skipped"
    if metrics["verdict"] not in [epoch["verdict"] for epoch in history[-2:-1]]:
        yield textwrap.indent(textwrap.fill(metrics["verdict"], 76), "  ")


def best_sentence(history: History, best: Mapping[str, float] | None, monitor: Monitor) -> str:
    """Return the epoch of best.pt and how it was chosen."""
    same = (i for i, line in enumerate(history, 1) if best and line.get("val") == best)
    title = f"best.pt is of epoch {next(same, len(history))}"
    if best is None:
        return f"{title}, the last: there was no validation"
    if monitor.name not in best:
        return f"{title}: {monitor.name} was undefined"
    rank = "highest" if monitor.maximizes else "lowest"
    return f"{title}: {metric_text(monitor.name, best[monitor.name])}, the {rank} of all epochs"


def samples_sentence(index: Index, task: Task) -> str:
    """Return the number of samples, and of those of each class where the index says it."""
    parts = [f"{len(index)} samples"]
    for head in task.heads:
        if counts := recorded_counts(index, head.target):
            parts.append(f"{printable(head.name)}: {counts_text(counts)}")
    return "; ".join(parts)


def counts_text(counts: Mapping[str, int]) -> str:
    """Return the counts of the most frequent classes, and the classes without any."""
    named = [f"{printable(name)} {n}" for name, n in _largest(counts, _NAMED).items() if n]
    if len(counts) > _NAMED:
        named.append(f"and {len(counts) - _NAMED} classes more")
    missing = [printable(name) for name, n in counts.items() if not n][:_NAMED]
    return ", ".join(named) + (f"; none of: {', '.join(missing)}" if missing else "")


def verdict(report: Mapping[str, Any], seconds: Mapping[str, float], consumer: str) -> str:
    """Return what limited the epoch. report: of the loader. seconds: by stage, as in the report.

    A short epoch has a bottleneck only if the model waited most of the time for one slow stage.
    """
    stats = EpochStats(**{name: report[name] for name in EpochStats.__dataclass_fields__})
    stats.wait_seconds = seconds["data"] + seconds["copy"]
    stats.loop_seconds = sum(seconds.values()) - stats.wait_seconds
    is_short = stats.batches < _FEWEST_STEPS and sum(seconds.values()) < _FEWEST_SECONDS
    if is_short and (stats.stall < 0.5 or not stats.is_input_bound):
        return f"no bottleneck is named: epochs of fewer than {_FEWEST_STEPS} steps are too short"
    return stats.verdict_of(consumer, seconds["compute"] + seconds["optimizer"])
