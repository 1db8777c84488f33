"""Seconds of each stage of a step: data, copy to the device, forward and backward, optimizer, other.

On a CPU the clock times each stage. A CUDA device works asynchronously, so events in its stream
time the stages that run there. Time in which it had nothing to do, up to the wait of the loop, is
waiting for data, and as much of it as batches were being copied is waiting for copies. Events are
read once per window, so steps do not wait for the device.
"""

from __future__ import annotations

import time
from typing import Any

import torch

STAGES = ("data", "copy", "compute", "optimizer", "other")

_ON_DEVICE = ("compute", "optimizer")


class StageTimer:
    """Adds up seconds by stage: `lap` adds the time since the lap before to a stage."""

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
