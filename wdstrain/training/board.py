"""TensorBoard's events of a run. Of a run that goes on, what is after its checkpoint is purged from what it shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_STEPS = ("loss", "lr", "samples_per_second")


class Board:
    """Writes to a folder that `tensorboard --logdir` shows. Steps are counted from the start of the run."""

    def __init__(self, folder: str, step: int) -> None:
        from torch.utils.tensorboard import (
            SummaryWriter,
        )  # a second to import, which other uses should not wait for

        self._writer = SummaryWriter(folder, purge_step=step + 1)

    def step(self, line: Mapping[str, Any], step: int) -> None:
        for name in _OF_STEPS:
            self._add(f"step/{name}", line[name], step)
        seconds = {name: line[name] for name in line if name.endswith("_seconds")}
        whole = max(1e-9, sum(seconds.values()))
        for name, value in seconds.items():
            self._add(f"time/{name.removesuffix('_seconds')}", value / whole, step)

    def epoch(self, metrics: Mapping[str, Any], step: int) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and name not in ("epoch", "lr"):
                self._add(f"train/{name}", value, step)
        for name, value in metrics.get("val", {}).items():
            self._add(f"val/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
