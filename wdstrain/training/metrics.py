"""Metrics of one pass over samples, of all processes together, and the one that is monitored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wdstrain.errors import UsageError
from wdstrain.training.config import Config
from wdstrain.training.head_metrics import METRICS_OF_HEAD, figure
from wdstrain.training.heads import BinaryHead, Head, NumberHead
from wdstrain.training.optim import count_plateaus
from wdstrain.training.tasks import Task

_MINIMIZED = ("loss", "mse", "mae", "ece")  # metrics of which less is better

Reduce = Callable[[Tensor], Tensor]  # a tensor -> its sum over all processes


class EvalMetrics:
    """Metrics of one pass over samples.

    user_metrics: torchmetrics by name, updated with (predictions, target): probabilities of classes
    or numbers. With several heads, by HEAD/NAME.
    """

    def __init__(
        self, task: Task, device: torch.device, user_metrics: Mapping[str, Any] | None = None
    ) -> None:
        self._task, self._device = task, device
        self._parts = [METRICS_OF_HEAD[type(head)](head, device) for head in task.heads]
        self._loss = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, samples
        self._user = {name: metric.to(device) for name, metric in (user_metrics or {}).items()}
        for metric in self._user.values():
            metric.reset()

    @torch.no_grad()
    def update(self, outputs: Tensor, targets: Sequence[Tensor], losses: Tensor) -> None:
        """Add a batch. losses: [b]."""
        if not len(outputs):
            return
        self._loss[0] += losses.double().sum()
        self._loss[1] += len(outputs)
        columns = self._task.split(outputs)
        for part, own, target in zip(self._parts, columns, targets, strict=True):
            part.update(own, target)
        for name, metric in self._user.items():
            position = self._head_of(name)
            metric.update(
                *_user_values(self._task.heads[position], columns[position], targets[position])
            )

    def compute(self, reduce: Reduce) -> tuple[dict[str, float], dict[str, Any]]:
        """Return (metrics, details of each head) of all processes."""
        loss, samples = reduce(self._loss).tolist()
        metrics: dict[str, float] = {"samples": samples, "loss": loss / max(1.0, samples)}
        details: dict[str, Any] = {}
        for part in self._parts:
            sums = {name: reduce(value) for name, value in part.sums.items()}
            for name, value in part.compute(sums, int(samples)).items():
                metrics[self._task.metric_name(part.head, name)] = value
            if more := part.details(sums):
                details[part.head.name] = more
        for name, metric in self._user.items():
            metrics[name] = float(metric.compute())
        return metrics, details

    def _head_of(self, metric_name: str) -> int:
        """Return the position of the head that a metric of the user's is for."""
        names = [head.name for head in self._task.heads]
        head = metric_name.partition("/")[0]
        return names.index(head) if self._task.has_several and head in names else 0


def _user_values(head: Head, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return predictions and targets as torchmetrics expects them."""
    if isinstance(head, NumberHead):
        return head.values(outputs.double()), target.double()
    if isinstance(head, BinaryHead):
        return outputs[:, 0].sigmoid(), target
    return head.probabilities(outputs), target.long()


# --- choosing the best ----------------------------------------------------------------------------


def default_monitor(task: Task) -> str:
    """Return the metric that chooses the best checkpoint: of the only head, else the loss."""
    return "loss" if task.has_several else task.heads[0].main_metric


def is_maximized(name: str) -> bool:
    """Return whether more of a metric is better."""
    return name.rpartition("/")[2] not in _MINIMIZED


def is_better(value: float, best: float | None, *, maximize: bool, min_delta: float = 0.0) -> bool:
    """Return whether a value improves on the best by more than min_delta. NaN never does."""
    if value != value:
        return False
    if best is None or best != best:
        return True
    return value > best + min_delta if maximize else value < best - min_delta


class Monitor:
    """Metric of validation that chooses the best epoch, and ends a run that improves no longer."""

    def __init__(self, config: Config, task: Task, metrics: Mapping[str, Any]) -> None:
        """metrics: of the user's. Raises UsageError for one without a direction."""
        self._config = config
        self.name = config.monitor or default_monitor(task)
        name, _, direction = self.name.rpartition(":")
        if direction in ("min", "max"):
            self.name, self.maximizes = name, direction == "max"
        elif self.name in metrics:
            more_is_better: bool | None = getattr(metrics[self.name], "higher_is_better", None)
            if more_is_better is None:
                raise UsageError(
                    f"monitor={self.name!r}: the metric has no higher_is_better. Say whether less or "
                    f"more is better: {self.name}:min or {self.name}:max."
                )
            self.maximizes = more_is_better
        else:
            self.maximizes = is_maximized(self.name)

    def is_best(self, val: Mapping[str, float] | None, best: Mapping[str, float] | None) -> bool:
        """Return whether an epoch is the best so far. Without validation every epoch is."""
        if val is None or best is None:
            return True
        value = val.get(self.name, math.nan)
        return is_better(value, best.get(self.name), maximize=self.maximizes)

    def since_best(self, history: Sequence[Mapping[str, Any]]) -> int:
        """Return how many epochs did not improve on those before by more than min_delta."""
        reference, waited = None, 0
        for line in history:
            value, min_delta = line.get("val", {}).get(self.name, math.nan), self._config.min_delta
            if is_better(value, reference, maximize=self.maximizes, min_delta=min_delta):
                reference, waited = value, 0
            else:
                waited += 1
        return waited

    def plateaus(self, history: Sequence[Mapping[str, Any]]) -> int:
        """Return how often the schedule "plateau" dropped the learning rate."""
        if self._config.schedule != "plateau":
            return 0
        values = [line["val"].get(self.name, math.nan) for line in history]
        return count_plateaus(values, self._config.plateau_epochs, maximize=self.maximizes)

    def stop_reason(self, since_best: int) -> str | None:
        """Return why training ends early; None if it goes on. since_best: epochs."""
        if not 0 < self._config.patience <= since_best:
            return None
        return (
            f"{self.name} did not improve for {since_best} epochs "
            f"(patience={self._config.patience}). Raise patience, or set it to 0, to go on."
        )

    def check(self, val: Mapping[str, float]) -> str | None:
        """Return a warning if validation lacks the metric. Raises UsageError if it was asked for."""
        if self.name in val:
            return None
        if self._config.monitor is not None:
            raise UsageError(
                f"monitor={self.name!r} is not among the metrics of validation. Use one of: "
                f"{', '.join(sorted(val))}."
            )
        return f"{self.name} is undefined on this validation data."


# --- metrics in words -----------------------------------------------------------------------------


def head_texts(task: Task, metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics of each head in a few words, by its name."""
    cpu, texts = torch.device("cpu"), {}
    for head in task.heads:
        prefix = f"{head.name}/" if task.has_several else ""
        own = {n.removeprefix(prefix): v for n, v in metrics.items() if n.startswith(prefix)}
        texts[head.name] = METRICS_OF_HEAD[type(head)](head, cpu).text(own)
    if not task.has_several and not isinstance(task.heads[0], NumberHead):
        texts[task.heads[0].name] += f", loss {figure(metrics['loss'])}"
    return texts


def metrics_text(task: Task, metrics: Mapping[str, float]) -> str:
    """Return the metrics of a pass in a few words."""
    texts = head_texts(task, metrics)
    if not task.has_several:
        return texts[task.heads[0].name]
    return ", ".join(f"{name}: {text}" for name, text in texts.items())


def metric_text(name: str, value: float) -> str:
    """Return one metric in words: shares in percent, errors as numbers."""
    plain = name.rpartition("/")[2]
    is_share = plain in ("accuracy", "balanced_accuracy", "pixel_accuracy", "top5", "exact")
    return f"{name} {value:.2%}" if is_share else f"{name} {figure(value)}"
