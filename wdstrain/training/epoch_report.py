"""Metrics, sentences and the verdict of an epoch of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wdstrain.loader.stats import EpochStats
from wdstrain.report.printing import printable
from wdstrain.shards.index import Index
from wdstrain.shards.label_values import recorded_counts
from wdstrain.training.heads import NumberHead
from wdstrain.training.metrics import is_maximized, metric_text
from wdstrain.training.tasks import Task

# Shorter epochs are dominated by their start: threads begin, the first batches are read.
_FEWEST_STEPS, _FEWEST_SECONDS = 100, 60.0

_MOST_CLASSES = 8  # classes whose samples are counted in the first lines of a run


def mean_loss(sums: Mapping[str, float]) -> float:
    """Return the mean loss of the samples whose loss is finite."""
    return sums["loss"] / max(1.0, sums["samples"] - sums["overflowed"])


def stall_share(seconds: Mapping[str, float]) -> float:
    """Return the share of the time in which a step waited for data. seconds: by stage."""
    return (seconds["data"] + seconds["copy"]) / max(1e-9, sum(seconds.values()))


def epoch_metrics(
    task: Task, sums: Mapping[str, float], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of an epoch. sums: of all processes. seconds: by stage."""
    samples, total = sums["samples"], sum(seconds.values())
    metrics: dict[str, Any] = {
        "loss": mean_loss(sums),
        "samples": int(samples),
        "bad": int(sums["bad"]),
        "seconds": total,
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "samples_per_second": samples / max(1e-9, total),
        "stall": stall_share(seconds),
    }
    for head in task.heads:
        if head.train_sum is not None:
            value = sums[f"head {head.name}"] / max(1.0, samples)
            metrics[task.metric_name(head, head.train_sum)] = value
    return metrics


def add_baselines(task: Task, metrics: dict[str, Any]) -> None:
    """Add to metrics["val"] the squared error of predicting the training data's mean."""
    val = metrics["val"]
    for head in task.heads:
        if isinstance(head, NumberHead):
            names = (task.metric_name(head, name) for name in ("mean", "variance"))
            mean, variance = (val[name] for name in names)
            offset = mean - metrics[task.metric_name(head, "target_mean")]
            val[task.metric_name(head, "mse_of_mean")] = variance + offset**2


def progress_text(task: Task, sums: Mapping[str, float], seconds: Mapping[str, float]) -> str:
    """Return loss, accuracy and stall of the epoch so far."""
    heads = [head for head in task.heads if head.train_sum == "accuracy"]
    accuracy = ""
    if len(heads) == 1:
        accuracy = f", acc {sums[f'head {heads[0].name}'] / max(1.0, sums['samples']):.1%}"
    return f"loss {mean_loss(sums):.3f}{accuracy}, stall {stall_share(seconds):.0%}"


def epoch_sentence(metrics: Mapping[str, Any], monitor: str) -> str:
    """Return an epoch in one line."""
    val = metrics.get("val", {})
    validation = f"val {metric_text(monitor, val[monitor])}, " if monitor in val else ""
    rate, stall = metrics["samples_per_second"], metrics["stall"]
    return f"loss {metrics['loss']:.3f}, {validation}{rate:.0f} samples/s, stall {stall:.1%}"


def best_sentence(
    history: Sequence[Mapping[str, Any]], best: Mapping[str, float] | None, monitor: str
) -> str:
    """Return the epoch of best.pt and how it was chosen."""
    same = (i for i, line in enumerate(history, 1) if best and line.get("val") == best)
    title = f"best.pt is of epoch {next(same, len(history))}"
    if best is None:
        return f"{title}, the last: there was no validation"
    if monitor not in best:
        return f"{title}: {monitor} was undefined"
    rank = "highest" if is_maximized(monitor) else "lowest"
    value = metric_text(monitor, best[monitor])
    if len(history) == 1:
        return f"{title}, the only epoch: {value}"
    return f"{title}: {value}, the {rank} of {len(history)} epochs"


def samples_sentence(index: Index, task: Task) -> str:
    """Return the number of samples, and of those of each class where the index says it."""
    text = f"{len(index)} samples"
    for head in task.heads:
        counts = recorded_counts(index, head.target) if head.classes else {}
        if counts:
            some = sorted(counts.items(), key=lambda item: -item[1])[:_MOST_CLASSES]
            rest = len(counts) - len(some)
            named = ", ".join(f"{printable(name)} {count}" for name, count in some)
            more = f", and {rest} classes more" if rest else ""
            text += f"; {printable(head.name)}: {named}{more}"
    return text


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
