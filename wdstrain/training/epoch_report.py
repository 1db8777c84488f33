"""Reports of an epoch of training: progress, lines of steps.jsonl, metrics, the verdict."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wdstrain.errors import WdstrainError
from wdstrain.loader.stats import EpochStats
from wdstrain.report.printing import printable
from wdstrain.shards.index import Index
from wdstrain.shards.label_values import recorded_counts
from wdstrain.training.epoch_sums import STAGES, StageTimer
from wdstrain.training.heads import NumberHead
from wdstrain.training.metrics import Monitor, class_shares, metric_text
from wdstrain.training.run import Run
from wdstrain.training.run_log import RunLog
from wdstrain.training.tasks import Task

# Shorter epochs are dominated by their start: threads begin, the first batches are read.
_FEWEST_STEPS, _FEWEST_SECONDS = 100, 60.0

_LOOK_SECONDS = 0.5  # between looks at the loss, for which a GPU is waited for
_MOST_CLASSES = 8  # classes whose samples are counted in the first lines of a run

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
    state, sums = run.state, run.total_sums()
    metrics = {"epoch": state.epoch, **_training_figures(run.task, sums, state.seconds)}
    metrics["left_out"] = run.loader.plan(state.epoch).left_out
    metrics["lr"] = run.lr
    metrics["verdict"] = state.verdict
    if run.scaler.is_enabled():
        metrics["skipped_steps"] = int(sums["skipped"])
    if not passes:
        return metrics
    metrics |= {name: dict(values) for name, (values, _) in passes.items()}
    _add_baselines(run.task, metrics)
    classes = class_shares(passes["val"][1]["heads"])
    return metrics | ({"classes": classes} if classes else {})


def _training_figures(
    task: Task, sums: Mapping[str, float], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Return loss, rates and times of an epoch. sums: of all processes. seconds: by stage."""
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
        if head.train_metric is not None:
            value = sums[f"head {head.name}"] / max(1.0, samples)
            metrics[task.metric_name(head, head.train_metric)] = value
    return metrics


def _add_baselines(task: Task, metrics: dict[str, Any]) -> None:
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
    heads = [head for head in task.heads if head.train_metric == "accuracy"]
    accuracy = ""
    if len(heads) == 1:
        accuracy = f", acc {sums[f'head {heads[0].name}'] / max(1.0, sums['samples']):.1%}"
    return f"loss {mean_loss(sums):.3f}{accuracy}, stall {stall_share(seconds):.0%}"


def epoch_lines(title: str, history: Sequence[Mapping[str, Any]], monitor: str) -> Iterator[str]:
    """Yield the lines on the last epoch: its figures, and a verdict that differs from the last."""
    metrics = history[-1]
    yield f"{title}: {_epoch_sentence(metrics, monitor)}"
    if metrics.get("skipped_steps"):
        yield f"  {metrics['skipped_steps']} steps overflowed 16 bits and were skipped"
    if metrics["verdict"] not in [epoch["verdict"] for epoch in history[-2:-1]]:
        yield textwrap.indent(textwrap.fill(metrics["verdict"], 76), "  ")


def _epoch_sentence(metrics: Mapping[str, Any], monitor: str) -> str:
    """Return an epoch in one line."""
    val = metrics.get("val", {})
    validation = f"val {metric_text(monitor, val[monitor])}, " if monitor in val else ""
    rate, stall = metrics["samples_per_second"], metrics["stall"]
    return f"loss {metrics['loss']:.3f}, {validation}{rate:.0f} samples/s, stall {stall:.1%}"


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


# --- while it runs --------------------------------------------------------------------------------


class StepLog:
    """Looks at the sums of an epoch now and then: progress, lines of steps.jsonl, checks.

    seconds: by stage since the epoch was started here, as the loader's report has them.
    """

    def __init__(self, run: Run, log: RunLog | None) -> None:
        self._run, self._log = run, log
        self.timer = StageTimer(run.setup.device)
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._shown_at = self._recorded_at = time.monotonic()
        self._recorded = run.sums.read()
        self._window = dict.fromkeys(STAGES, 0.0)  # seconds since the last record
        self._text = ""

    def update(self) -> None:
        """Show progress; look at the sums where enough time passed."""
        run, state, now = self._run, self._run.state, time.monotonic()
        is_last = state.step >= run.steps
        if now - self._shown_at >= _LOOK_SECONDS or is_last:
            self._shown_at = now
            self._look(now, is_last)
        done, total = (
            state.epoch * run.steps + state.step,
            run.config.epochs * run.steps,
        )
        run.setup.reporter.step(
            "training", done, total, ", ".join(filter(None, (run.title, self._text))), ""
        )

    def _look(self, now: float, is_last: bool) -> None:
        run, state = self._run, self._run.state
        window = self.timer.window(run.loader.report()["copy_seconds"])
        for seconds in (state.seconds, self.seconds, self._window):
            for name in STAGES:
                seconds[name] += window[name]
        sums = run.sums.read()
        self._check(sums)
        new = sums["samples"] - self._recorded["samples"]
        rate = new * run.setup.distributed.size / max(1e-9, sum(self._window.values()))
        self._text = f"{progress_text(run.task, sums, state.seconds)}, {rate:.0f}/s"
        seconds_between = 1.0 + (now - run.started_at) / 300
        if now - self._recorded_at >= seconds_between or is_last:
            self._record(sums, rate)
            self._recorded_at, self._recorded = now, sums
            self._window = dict.fromkeys(STAGES, 0.0)

    def _check(self, sums: Mapping[str, float]) -> None:
        """Raise WdstrainError if the loss is not finite, or no scale fits into 16 bits."""
        run = self._run
        if not math.isfinite(sums["loss"]):
            run.check_loss(sums["loss"])
        if sums["skipped"] and run.scaler.get_scale() < 1:
            raise WdstrainError(
                f"16 bits overflow at any scale of the loss, at step {run.state.step} of "
                f"{run.title}. Use amp=bf16 or amp=none, or set clip_norm. Earlier "
                f"checkpoints are intact."
            )

    def _record(self, sums: Mapping[str, float], rate: float) -> None:
        run, state = self._run, self._run.state
        line = {
            "epoch": state.epoch,
            "step": state.step,
            "loss": mean_loss({name: sums[name] - self._recorded[name] for name in sums}),
            "lr": run.lr,
            "samples_per_second": rate,
            **{f"{name}_seconds": round(value, 6) for name, value in self._window.items()},
        }
        if self._log is not None:
            self._log.step(line)
