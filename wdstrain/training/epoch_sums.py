"""Sums over one epoch of training: losses, samples, one value per head, and seconds of each stage.

The stages of a step: data, copy to the device, forward and backward, optimizer, other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wdstrain.training.distributed import DistributedContext
from wdstrain.training.tasks import Task

STAGES = ("data", "copy", "compute", "optimizer", "other")

_ON_DEVICE = ("compute", "optimizer")


class EpochSums:
    """Sums of the epoch so far on this process, in float64.

    They stay on the device, so that a step does not wait for it. Names: loss, samples, overflowed
    (losses that 16 bits could not hold), skipped (steps whose gradient 16 bits could not hold), bad
    (samples, counted by the loader), "head NAME".
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = task
        heads = [f"head {head.name}" for head in task.heads if head.train_sum is not None]
        self.names = ["loss", "samples", "overflowed", "skipped", "bad", *heads]
        self._values = torch.zeros(len(self.names), dtype=torch.float64, device=device)

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
            values = head.train_values(own, target)
            if values is not None:
                sums.append(values.double().sum())
        self._values += torch.stack(sums)

    def add_skipped(self, is_skipped: Tensor) -> None:
        """Count a step that was skipped. is_skipped: bool scalar on the device."""
        self._values[self.names.index("skipped")] += is_skipped

    def read(self) -> dict[str, float]:
        """Return the sums of this process by name. Waits for the device."""
        return dict(zip(self.names, self._values.tolist(), strict=True))

    def reduced(self, distributed: DistributedContext, bad: int) -> dict[str, float]:
        """Return the sums of all processes by name. bad: bad samples of this process's loader."""
        values = self._values.clone()
        values[self.names.index("bad")] += bad
        return dict(zip(self.names, distributed.reduce(values).tolist(), strict=True))

    def load(self, sums: Mapping[str, float]) -> None:
        """Set the sums, of all processes together, on one of them."""
        values = [sums.get(name, 0.0) for name in self.names]
        self._values.copy_(torch.tensor(values, dtype=torch.float64))

    def clone(self) -> Tensor:
        """Return the sums, for `restore`."""
        return self._values.clone()

    def restore(self, values: Tensor) -> None:
        """Set the sums to an earlier state."""
        self._values.copy_(values)

    def clear(self) -> None:
        """Start an epoch."""
        self._values.zero_()


class StepSnapshot:
    """Sums and buffers (batch norms) before a step of several batches, which may be cut short."""

    def __init__(self, sums: EpochSums, model: nn.Module) -> None:
        self._sums, self._buffers = sums.clone(), [buffer.clone() for buffer in model.buffers()]

    def restore(self, sums: EpochSums, model: nn.Module) -> None:
        sums.restore(self._sums)
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), self._buffers, strict=True):
                buffer.copy_(before)


class StageTimer:
    """Adds up seconds by stage: `lap` adds the time since the lap before to a stage.

    On a CPU the clock times each stage. A CUDA device works asynchronously, so events in its stream
    time the stages that run there. Time in which it had nothing to do, up to the wait of the loop,
    is waiting for data, and as much of it as batches were being copied is waiting for copies. Events
    are read once per window, so steps do not wait for the device.
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
        whole, found = now - self._begun, self._seconds
        if self._cuda:
            device = dict.fromkeys(_ON_DEVICE, 0.0)
            for stage, begin, end in self._events:
                device[stage] += begin.elapsed_time(end) / 1e3
            idle = max(0.0, whole - sum(device.values()))
            waited = min(found["data"], idle)
            copy = min(waited, copied - self._copied)
            found = {**found, **device, "data": waited - copy, "copy": copy}
        self._copied = copied
        found["other"] = max(0.0, whole - sum(found[stage] for stage in STAGES if stage != "other"))
        self._seconds, self._events = dict.fromkeys(STAGES, 0.0), []
        self._begun = self._at = now
        self._mark()
        return found

    def _mark(self) -> None:
        if self._cuda:
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
