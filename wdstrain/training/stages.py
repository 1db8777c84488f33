"""Where the seconds of a step go: waiting for data, for its copy to the device, forward and backward, the optimiser, the rest.

On a processor a stage is what the clock says. A CUDA device works on its own: there the stages that it does are timed by events
in its stream, and the wait for data is what is left of the time in which it had nothing to do; as much of it as batches were on
their way in the meantime is waiting for copies. Events are read once per window, so nothing waits for the device in between.
"""

from __future__ import annotations

import time
from typing import Any

import torch

STAGES = ("data", "copy", "compute", "optimiser", "other")

_ON_DEVICE = ("compute", "optimiser")


class Stages:
    """A stopwatch with a hand for each stage: `lap` gives the time since the lap before to a stage."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._events: list[tuple[str, Any, Any]] = []
        self._event: Any = None
        self._copied = 0.0
        self._begun = self._at = time.perf_counter()
        self._mark()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self._seconds[stage] += now - self._at
        self._at = now
        before = self._event
        self._mark()
        if self._cuda and stage in _ON_DEVICE:
            self._events.append((stage, before, self._event))

    def window(self, copied: float) -> dict[str, float]:
        """Seconds by stage since the last window, which add up to what the clock says. A CUDA device is waited for.

        copied: seconds for which batches were on their way to the device, since the start.
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
