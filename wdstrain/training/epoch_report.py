"""An epoch in figures and in words: its line of metrics.jsonl, and the sentences of the log."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wdstrain.loader.stats import EpochStats
from wdstrain.report.printing import printable
from wdstrain.shards.index import Index
from wdstrain.shards.label_values import recorded_counts
from wdstrain.training.heads import NumberHead
from wdstrain.training.metrics import class_shares
from wdstrain.training.run import Run
from wdstrain.training.state import Monitor
from wdstrain.training.tasks import Task

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
    state, task, sums = run.state, run.task, run.total_sums()
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
        if head.train_metric is not None:
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
            val[error] = val[variance] + (val[mean] - metrics[target]) ** 2
    if passes and (classes := class_shares(passes["val"][1]["heads"])):
        metrics["classes"] = classes
    return metrics


def progress_text(task: Task, sums: Mapping[str, float], seconds: Mapping[str, float]) -> str:
    """Return loss, accuracy and stall of the epoch so far."""
    heads = [head for head in task.heads if head.train_metric == "accuracy"]
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
