"""report.html: curves, mistakes, predictions, time and data of a run, in one file.

It is rewritten after every epoch, and loads nothing from elsewhere.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from wdstrain.loader.stats import EpochStats
from wdstrain.report import charts, pages
from wdstrain.report.charts import Line
from wdstrain.report.printing import printable
from wdstrain.shards.declare import recorded_counts
from wdstrain.shards.index import Index
from wdstrain.storage.files import write_whole
from wdstrain.training.evaluate import PreviewSample, color_of
from wdstrain.training.heads import Head, MaskHead, NumberHead
from wdstrain.training.metrics import ByClass, class_shares
from wdstrain.training.run import Run
from wdstrain.training.state import STAGES, Monitor
from wdstrain.training.tasks import Task

_MATRIX_CLASSES = 50  # classes of a matrix that can be read; of more, the worst pairs are listed
_BARS = 30  # classes with bars
_CLASSES = 200  # rows of a table of classes
_PAIRS = 20  # mistaken pairs of classes in a list
_STAGE_NAMES = {
    "data": "waiting for data",
    "copy": "copy to the device",
    "compute": "forward and backward",
    "optimizer": "optimizer",
    "other": "other",
}

History = Sequence[Mapping[str, Any]]


def write_report(
    path: str, run: Run, best: str, steps: History, details: Mapping[str, Any]
) -> None:
    """Write the page.

    best: sentence on the best epoch. steps: lines of steps.jsonl. details: of the last validation.
    """
    title = os.path.basename(os.path.dirname(os.path.abspath(path)))
    task, history = run.task, run.state.history
    options = {name: value for name, value in vars(run.config).items() if value not in (None, "")}
    sections = [
        _header(title, run, best),
        _cards(_curves(task, run.monitor.name, history, steps)),
    ]
    if details:
        heads = details["heads"]
        sections.append(
            _cards(card for head in task.heads for card in _head_cards(head, heads[head.name]))
        )
        sections.append(_gallery("Worst predictions", details["worst"], task))
    sets = {"train": run.train_set, "val": run.val_set}
    sections.append(
        _cards(_data_card(n, index, task) for n, index in sets.items() if index is not None)
    )
    sections.append(_cards([_card("Options", pages.table(options))]))
    page = pages.page(f"{title} - wdstrain", "".join(sections))
    write_whole(path, page.encode("utf-8", "replace"))


# --- header and curves ----------------------------------------------------------------------------


def _header(title: str, run: Run, best: str) -> str:
    task, history = run.task, run.state.history
    last = history[-1]
    seconds = sum(line["seconds"] + line.get("val_seconds", 0.0) for line in history)
    facts = {
        "epochs": f"{len(history)} of {run.config.epochs}",
        "total time": f"{seconds // 3600:.0f} h {seconds // 60 % 60:.0f} min {seconds % 60:.0f} s",
        "samples/s": f"{last['samples_per_second']:.0f}",
        "stall": f"{last['stall']:.1%}",
        "bad samples": str(last["bad"]),
    }
    cells = "".join(f"<div><b>{escape(v)}</b>{escape(n)}</div>" for n, v in facts.items())
    metrics = pages.table(head_texts(task, last["val"])) if "val" in last else ""
    verdict = last["verdict"][:1].upper() + last["verdict"][1:]
    return (
        f"<h1>{escape(title)}</h1>"
        f"<p class=soft>model {escape(run.config.model)}, task {escape(str(task))}</p>"
        f'<div class="facts">{cells}</div>{metrics}'
        f"<p>These figures are of the last epoch. {escape(best)}.</p><p>{escape(verdict)}.</p>"
    )


def _curves(task: Task, monitor: str, history: History, steps: History) -> list[str]:
    """Return the cards of curves over the epochs."""
    longest = max((line["step"] for line in steps), default=1)
    at = [line["epoch"] + line["step"] / longest for line in steps]
    epochs = [line["epoch"] + 1.0 for line in history]

    def over_steps(name: str) -> Line:
        return Line("training", at, [line[name] for line in steps])

    loss = [over_steps("loss"), *_val_lines(history, epochs, "loss")]
    cards = [_card("Loss", charts.lines(loss, across="epoch", log=True))]
    names = {task.metric_name(head, head.main_metric): head for head in task.heads}
    if monitor != "loss":
        names.setdefault(monitor, task.heads[0])
    for name, head in names.items():
        lines = _val_lines(history, epochs, name)
        if name in history[-1]:
            lines.insert(0, Line("training", epochs, [line[name] for line in history], dots=True))
        is_share = not isinstance(head, NumberHead)
        if not is_share:
            mean = _val_lines(history, epochs, name.replace("mse", "mse_of_mean"))
            lines += [line._replace(name="predicting the mean", dots=False) for line in mean[:1]]
        if lines:
            cards.append(_card(name, charts.lines(lines, across="epoch", share=is_share)))
    spent = {_STAGE_NAMES[s]: [line[f"{s}_seconds"] for line in steps] for s in STAGES}
    cards.append(_card("Training time by stage", charts.shares(at, spent, across="epoch")))
    for title, name in (("Samples per second", "samples_per_second"), ("Learning rate", "lr")):
        cards.append(_card(title, charts.lines([over_steps(name)], across="epoch")))
    return cards


def _val_lines(history: History, epochs: list[float], name: str) -> list[Line]:
    """Return the curves of a metric of validation: with averaged weights, and without."""
    lines = []
    for key, title in (("val", "validation"), ("val_raw", "validation without averaging")):
        values = [line.get(key, {}).get(name, float("nan")) for line in history]
        if any(value == value for value in values):
            lines.append(Line(title, epochs, values, dots=True))
    return lines


# --- predictions ----------------------------------------------------------------------------------


def _head_cards(head: Head, details: Mapping[str, Any]) -> list[str]:
    """Return the cards of one head's mistakes on the validation data."""
    cards = []
    if "points" in details:
        shown = charts.scatter(details["points"], across="true value", up="prediction")
        cards.append(_card(f"{head.name}: Prediction by true value", shown))
    if "confusion" in details:
        cards.append(_confusion_card(head, details["confusion"]))
    if "by_class" in details:
        cards.append(_card(f"{head.name}: classes", _class_table(details["by_class"])))
    return cards


def _confusion_card(head: Head, counts: Sequence[Sequence[float]]) -> str:
    """Return the confusion matrix; of many classes the pairs that are mistaken most often."""
    if len(head.classes) <= _MATRIX_CLASSES:
        unit = " Pixels are counted." if isinstance(head, MaskHead) else ""
        legend = f"<p class=soft>Rows are true classes, columns are predictions.{unit}</p>"
        return _card(f"{head.name}: Confusion matrix", legend + pages.matrix(head.classes, counts))
    pairs = [
        (value, i, j)
        for i, row in enumerate(counts)
        for j, value in enumerate(row)
        if i != j and value
    ]
    table = {
        f"{head.classes[i]} predicted as {head.classes[j]}": f"{value:g} of {sum(counts[i]):g}"
        for value, i, j in sorted(pairs, reverse=True)[:_PAIRS]
    }
    return _card(f"{head.name}: most frequent mistakes", pages.table(table))


def _class_table(by_class: ByClass) -> str:
    """Return a table of classes, the rarest last; of many the most frequent. The first column counts."""
    names = list(next(iter(by_class.values())))
    rows = []
    for name, row in sorted(by_class.items(), key=lambda item: -(item[1][names[0]] or 0)):
        count, *shares = row.values()
        rows.append([name, f"{count:.0f}", *("-" if x is None else f"{x:.3f}" for x in shares)])
    share = float(rows[0][1]) / max(1, sum(row[names[0]] or 0 for row in by_class.values()))
    baseline = f"Predicting always {rows[0][0]!r} would be right for {share:.2%} of {names[0]}."
    return f"<p>{escape(baseline)}</p>{pages.grid(('class', *names), rows[:_CLASSES])}"


def _gallery(title: str, samples: Sequence[PreviewSample], task: Task) -> str:
    figures = []
    for sample in samples:
        image = pages.picture(sample.pixels) if sample.pixels is not None else ""
        lines = []
        for name, (prediction, target, is_wrong) in sample.said.items():
            prefix = f"{name}: " if task.has_several else ""
            differs = is_wrong or target not in (prediction, prediction.rpartition(" ")[0])
            style = "wrong" if is_wrong else "soft"
            true = f" <span class={style}>({escape(target or 'none')})</span>" if differs else ""
            lines.append(f"{escape(prefix + (prediction or 'none'))}{true}")
        caption = f'{"<br>".join(lines)}<div class="key">{escape(sample.key)}</div>'
        figures.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    head, style = task.heads[0], "shown"
    legend = '<p class="soft">prediction (true label if different)</p>'
    if isinstance(head, MaskHead):
        style = "shown wide"
        colors = enumerate(head.classes[:_BARS])
        names = pages.legend({name: color_of(number) for number, name in colors})
        legend = f'<p class="soft">image, prediction, true mask</p>{names}'
    return _card(title, f'{legend}<div class="{style}">{"".join(figures)}</div>')


# --- data -----------------------------------------------------------------------------------------


def _data_card(name: str, index: Index, task: Task) -> str:
    rows = {
        "samples": len(index),
        "shards": len(index.shards),
        "MB": f"{sum(shard.bytes for shard in index.shards) / 1e6:.1f}",
        "fields": ", ".join(index.fields),
    }
    body = pages.table(rows)
    for head in task.heads:
        counts = recorded_counts(index, head.target)
        if counts:
            some = sorted(counts.items(), key=lambda item: -item[1])[:_BARS]
            body += f"<p class=soft>{escape(head.name)}</p>" + pages.bars(dict(some))
    return _card(f"Data: {name}", body)


def _cards(cards: Iterable[str]) -> str:
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>'


# --- an epoch in figures and in words -------------------------------------------------------------

# Shorter epochs are dominated by their start: threads begin, the first batches are read.
_FEWEST_STEPS, _FEWEST_SECONDS = 100, 60.0
_NAMED = 8  # classes in a sentence
_TITLES = {"top5": "top-5", "auroc": "AUROC", "f1": "F1", "r2": "R2"}
_SHARES = ("accuracy", "balanced_accuracy", "pixel_accuracy", "top5", "exact")

# (metrics, details) of each pass of validation: "val" and, of weights without averaging, "val_raw"
Passes = dict[str, tuple[dict[str, float], dict[str, Any]]]


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
    state, task, sums = run.state, run.task, run.sums.read(run.setup.distributed)
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
    }
    for head in task.heads:
        if f"head {head.name}" in sums and head.train_metric is not None:
            value = sums[f"head {head.name}"] / max(1.0, samples)
            metrics[task.metric_name(head, head.train_metric)] = value
    if run.scaler.is_enabled():
        metrics["skipped_steps"] = int(sums["skipped"])
    metrics |= {name: dict(values) for name, (values, _) in passes.items()}
    for head in task.heads if passes else ():
        if isinstance(head, NumberHead):  # the squared error of predicting the mean of training
            names = ("mean", "variance", "mse_of_mean", "target_mean")
            mean, variance, error, target = (task.metric_name(head, name) for name in names)
            val = metrics["val"]
            if target in metrics:
                val[error] = val[variance] + (val[mean] - metrics[target]) ** 2
    if passes and (classes := class_shares(passes["val"][1]["heads"])):
        metrics["classes"] = classes
    return metrics


def progress_text(task: Task, sums: Mapping[str, float], seconds: Mapping[str, float]) -> str:
    """Return loss, accuracy and stall of the epoch so far."""
    shown = [head for head in task.heads if f"head {head.name}" in sums]
    heads = [head for head in shown if head.train_metric == "accuracy"]
    accuracy = ""
    if len(heads) == 1:
        accuracy = f", acc {sums[f'head {heads[0].name}'] / max(1.0, sums['samples']):.1%}"
    return f"loss {mean_loss(sums):.3f}{accuracy}, stall {stall_share(seconds):.0%}"


def epoch_lines(title: str, history: Sequence[Mapping[str, Any]], monitor: str) -> Iterator[str]:
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


def best_sentence(
    history: Sequence[Mapping[str, Any]], best: Mapping[str, float] | None, monitor: Monitor
) -> str:
    """Return the epoch of best.pt and how it was chosen."""
    same = (i for i, line in enumerate(history, 1) if best and line.get("val") == best)
    title = f"best.pt is of epoch {next(same, len(history))}"
    if best is None:
        return f"{title}, the last: there was no validation"
    if monitor.name not in best:
        return f"{title}: {monitor.name} was undefined"
    rank = "highest" if monitor.maximizes else "lowest"
    value = metric_text(monitor.name, best[monitor.name])
    if len(history) == 1:
        return f"{title}, the only epoch: {value}"
    return f"{title}: {value}, the {rank} of {len(history)} epochs"


def samples_sentence(index: Index, task: Task) -> str:
    """Return the number of samples, and of those of each class where the index says it."""
    text = f"{len(index)} samples"
    for head in task.heads:
        counts = recorded_counts(index, head.target) if head.classes else {}
        if counts:
            some = sorted(counts.items(), key=lambda item: -item[1])[:_NAMED]
            rest = len(counts) - len(some)
            named = ", ".join(f"{printable(name)} {count}" for name, count in some)
            more = f", and {rest} classes more" if rest else ""
            text += f"; {printable(head.name)}: {named}{more}"
    return text


def pixels_sentence(counts: Mapping[str, int]) -> str:
    """Return the shares of the most frequent classes of masks, and the classes without pixels."""
    whole = max(1, sum(counts.values()))
    some = sorted(counts.items(), key=lambda item: -item[1])[:_NAMED]
    shares = ", ".join(f"{printable(name)} {n / whole:.1%}" for name, n in some if n)
    missing = ", ".join([printable(name) for name, n in counts.items() if not n][:_NAMED])
    text = f"pixels: {shares or 'none has a class'}"
    return f"{text}. No pixel was found of: {missing}" if missing else text


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


# --- metrics in words -----------------------------------------------------------------------------


def figure(value: float) -> str:
    """Return a number with four decimals, or four digits where these would say little."""
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e6 else f"{value:.4g}"


def metric_text(name: str, value: float) -> str:
    """Return one metric in words: shares in percent, errors as numbers."""
    is_share = name.rpartition("/")[2] in _SHARES
    title = _TITLES.get(name, name.replace("_", " "))
    return f"{title} {f'{value:.2%}' if is_share else figure(value)}"


def head_texts(task: Task, metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics of each head in a few words, by its name."""
    texts = {}
    for head in task.heads:
        prefix = task.metric_name(head, "")
        own = {n.removeprefix(prefix): v for n, v in metrics.items() if n.startswith(prefix)}
        parts = [metric_text(name, own[name]) for name in head.shown_metrics if name in own]
        if "mse_of_mean" in own:
            parts[0] += f" (predicting the mean gives {figure(own['mse_of_mean'])})"
        for name, count in own.items():
            if name.startswith("classes_without_") and count:
                lacking = name.removeprefix("classes_without_")
                plural = "class" if count == 1 else "classes"
                parts.append(f"{count:.0f} {plural} without {lacking} left out of means")
        texts[head.name] = ", ".join(parts) or "no pixel has a class"
    if not task.has_several and not isinstance(task.heads[0], NumberHead):
        texts[task.heads[0].name] += f", loss {figure(metrics['loss'])}"
    return texts


def metrics_text(task: Task, metrics: Mapping[str, float]) -> str:
    """Return the metrics of a pass in a few words."""
    texts = head_texts(task, metrics).items()
    return ", ".join(f"{name}: {text}" if task.has_several else text for name, text in texts)
