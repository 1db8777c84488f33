"""Position of a run, and sums over an epoch: losses, samples, values of heads, seconds by stage.

The stages of a step: data, copy to the device, forward and backward, optimizer, other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wdstrain.training.distributed import DistributedContext
from wdstrain.training.tasks import Task

STAGES = ("data", "copy", "compute", "optimizer", "other")

_ON_DEVICE = ("compute", "optimizer")


@dataclass
class TrainerState:
    """Position and history of a run.

    step: in the epoch, of batches. best: validation of the best epoch. since_best: epochs
    that did not improve on it by more than min_delta.
    lr_scale: factor on the learning rate, set by callbacks. seconds: of the epoch so far, by stage.
    """

    epoch: int = 0
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, float] | None = None
    since_best: int = 0
    lr_scale: float = 1.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    verdict: str = ""

    def finish_epoch(self, metrics: dict[str, Any]) -> None:
        """Add an epoch to the history, and go to the start of the next."""
        self.history.append(metrics)
        self.epoch, self.step = self.epoch + 1, 0
        self.seconds = dict.fromkeys(STAGES, 0.0)


class EpochSums:
    """Sums of the epoch so far on this process. values: of `names`, in float64.

    They stay on the device, so that a step does not wait for it. Names: loss, samples, overflowed
    (losses that 16 bits could not hold), skipped (steps whose gradient 16 bits could not hold), bad
    (samples that cannot be read), "head NAME".
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = task
        heads = [f"head {head.name}" for head in task.heads if head.train_metric is not None]
        self.names = ["loss", "samples", "overflowed", "skipped", "bad", *heads]
        self.values = torch.zeros(len(self.names), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self, outputs: Tensor, targets: Sequence[Tensor], losses: Tensor, *, may_overflow: bool
    ) -> None:
        """Add a batch. may_overflow: losses that are not finite are counted, and not added up."""
        device = losses.device
        losses, overflowed = losses.double(), torch.zeros((), dtype=torch.float64, device=device)
        if may_overflow:
            is_finite = losses.isfinite()
            losses = losses.masked_fill(~is_finite, 0.0)
            overflowed = (~is_finite).double().sum()
        # torch.tensor would copy the count from the host, which waits for the device
        count = torch.full((), len(losses), dtype=torch.float64, device=device)
        none = torch.zeros_like(count)
        sums = [losses.sum(), count, overflowed, none, none]
        columns = self._task.split(outputs)
        for head, own, target in zip(self._task.heads, columns, targets, strict=True):
            if head.train_metric is not None:
                sums.append(head.train_values(own, target).double().sum())
        self.values += torch.stack(sums)

    def add_bad(self, count: int) -> None:
        """Count bad samples of a batch."""
        if count:
            self.values[self.names.index("bad")] += count

    def add_skipped(self, is_skipped: Tensor) -> None:
        """Count a step that was skipped. is_skipped: bool scalar on the device."""
        self.values[self.names.index("skipped")] += is_skipped

    def read(self) -> dict[str, float]:
        """Return the sums of this process by name. Waits for the device."""
        return dict(zip(self.names, self.values.tolist(), strict=True))

    def reduced(self, distributed: DistributedContext) -> dict[str, float]:
        """Return the sums of all processes by name."""
        return dict(zip(self.names, distributed.reduce(self.values).tolist(), strict=True))

    def load(self, sums: Mapping[str, float]) -> None:
        """Set the sums, of all processes together, on one of them."""
        values = [sums.get(name, 0.0) for name in self.names]
        self.values.copy_(torch.tensor(values, dtype=torch.float64))

    def clear(self) -> None:
        """Start an epoch."""
        self.values.zero_()


class StageTimer:
    """Adds up seconds by stage: `lap` adds the time since the lap before to a stage.

    On a CPU the clock times each stage. A CUDA device works asynchronously, so events in its stream
    time the stages that run there. Its idle time, up to the wait of the loop, is waiting for data,
    and as much of it as batches were being copied is waiting for copies. Events are read once per
    window, so steps do not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._events: list[tuple[str, Any, Any]] = []
        self._event: Any = None
        self._copied = 0.0
        self._begun = self._at = time.perf_counter()
        self._mark()

    def lap(self, stage: str) -> None:
        """Add the time since the lap before to a stage."""
        now = time.perf_counter()
        self._seconds[stage] += now - self._at
        self._at = now
        before = self._event
        self._mark()
        if self._cuda and stage in _ON_DEVICE:
            self._events.append((stage, before, self._event))

    def window(self, copied: float) -> dict[str, float]:
        """Return seconds by stage since the last window. Waits for a CUDA device.

        copied: seconds for which batches were being copied to the device, since the start.
        """
        if self._cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        whole, seconds = now - self._begun, self._seconds
        if self._cuda:
            device = dict.fromkeys(_ON_DEVICE, 0.0)
            for stage, begin, end in self._events:
                device[stage] += begin.elapsed_time(end) / 1e3
            idle = max(0.0, whole - sum(device.values()))
            waited = min(seconds["data"], idle)
            copy = min(waited, copied - self._copied)
            seconds = {**seconds, **device, "data": waited - copy, "copy": copy}
        self._copied = copied
        seconds["other"] = max(0.0, whole - sum(seconds.values()))
        self._seconds, self._events = dict.fromkeys(STAGES, 0.0), []
        self._begun = self._at = now
        self._mark()
        return seconds

    def _mark(self) -> None:
        if self._cuda:
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
