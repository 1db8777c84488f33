"""report.html: what people look at after a run, and while it goes on. One file; nothing is fetched.

Curves, what was taken for what, the worst predictions and some at random as pictures, where the time went, what the data are, and
how it was done. It is rewritten after every epoch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from wdstrain.report import charts
from wdstrain.report.charts import Line
from wdstrain.shards.index import Index
from wdstrain.storage.files import write_whole
from wdstrain.storage.remote import is_remote
from wdstrain.training.configuration import Config
from wdstrain.training.counting import class_counts, counts_said
from wdstrain.training.gallery import Shown
from wdstrain.training.metrics import FIRST, text
from wdstrain.training.stages import STAGES
from wdstrain.training.task import Head, Task

_CLASSES = 30  # of a matrix that can be taken in; of more, the pairs that are mistaken most often are listed
_PAIRS = 20
_NAMES = {
    "data": "waiting for data",
    "copy": "copy to the device",
    "compute": "forward and backward",
    "optimiser": "optimiser",
    "other": "other",
}


@dataclass(frozen=True)
class Data:
    """Shards that were trained on or validated on, and by head how many samples there are of each class, where that is known."""

    index: Index
    counts: dict[str, dict[str, int]]

    @classmethod
    def of(cls, index: Index, task: Task) -> Data:
        """Labels of shards on a server are not read for a picture of them."""
        far = any(is_remote(shard.path) for shard in index.shards)
        count = counts_said if far else class_counts
        return cls(
            index, {head.name: count(index, head) for head in task.heads if head.kind != "number"}
        )


def write_report(
    path: str,
    task: Task,
    config: Config,
    history: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    details: Mapping[str, Any],
    data: Mapping[str, Data],
) -> None:
    """Write the page. history: metrics of each epoch; steps: the lines of steps.jsonl; details: of the last validation."""
    title = os.path.basename(os.path.dirname(os.path.abspath(path)))
    parts = [
        _head(title, task, config, history),
        '<div class="cards">',
        *_curves(task, history, steps),
        "</div>",
    ]
    if details:
        parts += [
            '<div class="cards">',
            *(_mistakes(head, details["heads"].get(head.name)) for head in task.heads),
            "</div>",
        ]
        parts += [
            _gallery("Worst predictions", details["gallery"]["worst"]),
            _gallery("Predictions at random", details["gallery"]["random"]),
        ]
    parts += [
        '<div class="cards">',
        *(_data(name, one, task) for name, one in data.items()),
        "</div>",
    ]
    parts.append(
        _card(
            "How",
            charts.table(
                {name: value for name, value in vars(config).items() if value not in (None, "")}
            ),
        )
    )
    write_whole(path, charts.page(f"{title} - wdstrain", "".join(parts)).encode("utf-8", "replace"))


def _head(title: str, task: Task, config: Config, history: Sequence[Mapping[str, Any]]) -> str:
    last = history[-1]
    facts = {
        "epochs": f"{len(history)} of {config.epochs}",
        "samples/s": f"{last['samples_per_second']:.0f}",
        "stall": f"{last['stall']:.1%}",
    }
    if "val" in last:
        several = len(task.heads) > 1
        for head in task.heads:
            name = FIRST[head.kind]
            value = last["val"][f"{head.name}/{name}" if several else name]
            facts[f"{head.name} {name}"] = (
                f"{value:.4f}" if head.kind == "number" else f"{value:.2%}"
            )
    if last["bad"]:
        facts["bad samples"] = str(last["bad"])
    shown = "".join(
        f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in facts.items()
    )
    said = f"<p>{escape(text(task, last['val']))}</p>" if "val" in last else ""
    return (
        f"<h1>{escape(title)}</h1><p class=soft>{escape(config.model)} learns {escape(str(task))}</p>"
        f'<div class="facts">{shown}</div>{said}<p>{escape(last["verdict"][:1].upper() + last["verdict"][1:])}.</p>'
    )


def _curves(
    task: Task, history: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[str]:
    longest = max((line["step"] for line in steps), default=1)
    at = [line["epoch"] + line["step"] / longest for line in steps]
    epochs = [line["epoch"] + 1.0 for line in history]
    val = [line.get("val", {}) for line in history]

    def of_val(name: str) -> Line:
        return Line("validation", epochs, [one.get(name, float("nan")) for one in val], dots=True)

    loss = [Line("training", at, [line["loss"] for line in steps])]
    found = [
        _card(
            "Loss",
            charts.lines(
                [*loss, *([of_val("loss")] if any(val) else [])], across="epoch", log=True
            ),
        )
    ]
    several = len(task.heads) > 1
    for head in task.heads:
        name = FIRST[head.kind]
        full = f"{head.name}/{name}" if several else name
        own = (
            [Line("training", epochs, [line[full] for line in history], dots=True)]
            if full in history[-1]
            else []
        )
        own += [of_val(full)] if any(val) else []
        if head.kind == "number" and any(val):
            own.append(
                of_val(full.replace("mse", "mse_of_mean"))._replace(
                    name="predicting the mean", dots=False
                )
            )
        if own:
            found.append(
                _card(
                    f"{head.name}: {name}",
                    charts.lines(own, across="epoch", share=head.kind != "number"),
                )
            )
    spent = {_NAMES[stage]: [line[f"{stage}_seconds"] for line in steps] for stage in STAGES}
    found.append(_card("Where the time of training went", charts.shares(at, spent, across="epoch")))
    found.append(
        _card(
            "Samples per second",
            charts.lines(
                [Line("training", at, [line["samples_per_second"] for line in steps])],
                across="epoch",
            ),
        )
    )
    found.append(
        _card(
            "Learning rate",
            charts.lines(
                [Line("learning rate", at, [line["lr"] for line in steps])], across="epoch"
            ),
        )
    )
    return found


def _mistakes(head: Head, details: Mapping[str, Any] | None) -> str:
    """What was taken for what, on the validation data."""
    if details is None or "confusion" not in details:
        return ""
    counts = details["confusion"]
    if len(head.classes) <= _CLASSES:
        return _card(
            f"{head.name}: confusion matrix (rows: true class, columns: prediction)",
            charts.matrix(head.classes, counts),
        )
    worst = dict(sorted(details["classes"].items(), key=lambda one: one[1])[:_CLASSES])
    weakest = _card(
        f"{head.name}: classes that are known least",
        charts.bars({name: round(part, 3) for name, part in worst.items()}),
    )
    pairs = [
        (value, i, j)
        for i, row in enumerate(counts)
        for j, value in enumerate(row)
        if i != j and value
    ]
    rows = {
        f"{head.classes[i]} taken for {head.classes[j]}": f"{value:g} of {sum(counts[i]):g}"
        for value, i, j in sorted(pairs, reverse=True)[:_PAIRS]
    }
    return weakest + _card(
        f"{head.name}: most frequent mistakes", charts.table(rows) if rows else "<p>none</p>"
    )


def _gallery(title: str, samples: Sequence[Shown]) -> str:
    figures = []
    for one in samples:
        picture = charts.picture(one.pixels) if one.pixels is not None else ""
        words = []
        for name, said in one.said.items():
            prefix, kind = (
                f"{name}: " if len(one.said) > 1 else "",
                "wrong" if name in one.wrong else "soft",
            )
            differs = name in one.wrong or one.true[name] not in (said, said.rpartition(" ")[0])
            true = f" <span class={kind}>({escape(one.true[name])})</span>" if differs else ""
            words.append(f"{escape(prefix + said)}{true}")
        figures.append(
            f'<figure>{picture}<figcaption>{"<br>".join(words)}<div class="key">{escape(one.key)}</div></figcaption></figure>'
        )
    note = '<p class="soft">said, and (what is true) where that is something else</p>'
    return _card(title, f'{note}<div class="shown">{"".join(figures)}</div>') if figures else ""


def _data(name: str, data: Data, task: Task) -> str:
    index = data.index
    size = sum(shard.bytes for shard in index.shards)
    rows = {
        "samples": len(index),
        "shards": len(index.shards),
        "MB": f"{size / 1e6:.1f}",
        "fields": ", ".join(index.fields),
    }
    shown = charts.table(rows)
    for head in task.heads:
        if head.kind != "number":
            counts = data.counts.get(head.name, {})
            most = (
                dict(sorted(counts.items(), key=lambda one: -one[1])[:_CLASSES])
                if len(counts) > _CLASSES
                else counts
            )
            shown += f"<p class=soft>{escape(head.name)}</p>" + charts.bars(most) if most else ""
    return _card(f"Data: {name}", shown)


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>'
