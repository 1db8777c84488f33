"""report.html: curves, mistakes, predictions, time and data of a run, in one file.

It is rewritten after every epoch, and loads nothing from elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from wdstrain.report import charts, pages
from wdstrain.report.charts import Line
from wdstrain.shards.index import Index
from wdstrain.shards.label_values import recorded_counts
from wdstrain.storage.files import write_whole
from wdstrain.training.epoch_report import head_texts
from wdstrain.training.heads import Head, MaskHead, NumberHead
from wdstrain.training.metrics import ByClass
from wdstrain.training.previews import PreviewSample, color_of
from wdstrain.training.run import Run
from wdstrain.training.state import STAGES
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
