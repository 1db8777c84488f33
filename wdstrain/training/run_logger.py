"""Writes the files of a run: lines, checkpoints, TensorBoard events and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from wdstrain.errors import StorageError
from wdstrain.shards.index import Index
from wdstrain.training.checkpoint import Checkpoints
from wdstrain.training.config import Config
from wdstrain.training.epoch_sums import TrainerState
from wdstrain.training.report import Data, write_report
from wdstrain.training.run_dir import BOARD, CHECKPOINTS, METRICS, REPORT, STEPS, RunDir
from wdstrain.training.tasks import Task


class RunLogger:
    """Writes to the folder of a run. Before `start`, and on other ranks than 0, it writes nothing."""

    def __init__(self, task: Task, monitor: str) -> None:
        """monitor: name of the metric that chooses the best epoch."""
        self._task, self._monitor = task, monitor
        self._run: RunDir | None = None

    def start(
        self,
        run: RunDir,
        config: Config,
        state: TrainerState,
        indexes: Mapping[str, Index],
        steps: int,
    ) -> None:
        """Write to this folder from now on, without the lines after this position.

        steps: of an epoch.
        """
        run.rewind(state.history, (state.epoch, state.step))
        self._checkpoints = Checkpoints(run.path(CHECKPOINTS), config.keep)
        self._board = TensorBoardLogger(run.path(BOARD), state.epoch * steps + state.step)
        self._run, self._config, self._steps = run, config, steps
        self._data = {name: Data.of(index, self._task) for name, index in indexes.items()}

    def record(self, line: dict[str, Any]) -> None:
        """Write the figures of the last second or so: position, loss, rates."""
        if self._run is None:
            return
        with _storage_errors(self._run.folder):
            self._run.log(STEPS, line)
            self._board.step(line, line["epoch"] * self._steps + line["step"])

    def epoch(self, history: Sequence[dict[str, Any]], details: dict[str, Any], best: str) -> None:
        """Write the metrics of the last epoch and the report. best: sentence on the best epoch."""
        if self._run is None:
            return
        metrics = history[-1]
        with _storage_errors(self._run.folder):
            self._run.log(METRICS, metrics)
            self._board.epoch(metrics, (metrics["epoch"] + 1) * self._steps)
            path, steps = self._run.path(REPORT), self._run.lines(STEPS)
            write_report(
                path,
                self._task,
                self._config,
                self._monitor,
                f"These figures are of the last epoch. {best}." if len(history) > 1 else "",
                history,
                steps,
                details,
                self._data,
            )

    def save(self, state: dict[str, Any], step: int, *, best: bool) -> str | None:
        """Write a checkpoint, and return its path; None where nothing is written."""
        if self._run is None:
            return None
        return self._checkpoints.save(state, step, best=best)

    def close(self) -> None:
        """Close the folder, so that another process may use it."""
        if self._run is not None:
            with suppress(OSError):  # the last events, on a full disk
                self._board.close()
            self._run.close()
            self._run = None


_STEP_VALUES = ("loss", "lr", "samples_per_second")


class TensorBoardLogger:
    """Writes TensorBoard events. Steps count from the start of the run.

    Events after the position of a resumed run are purged.
    """

    def __init__(self, folder: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._writer = SummaryWriter(folder, purge_step=step + 1)

    def step(self, line: Mapping[str, Any], step: int) -> None:
        for name in _STEP_VALUES:
            self._writer.add_scalar(f"step/{name}", line[name], step)
        seconds = {name: line[name] for name in line if name.endswith("_seconds")}
        whole = max(1e-9, sum(seconds.values()))
        for name, value in seconds.items():
            self._writer.add_scalar(f"time/{name.removesuffix('_seconds')}", value / whole, step)

    def epoch(self, metrics: Mapping[str, Any], step: int) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and name not in ("epoch", "lr"):
                self._writer.add_scalar(f"train/{name}", value, step)
        for part in ("val", "val_raw"):
            for name, value in metrics.get(part, {}).items():
                self._writer.add_scalar(f"{part}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@contextmanager
def _storage_errors(folder: str) -> Iterator[None]:
    """Raise errors of writing as StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}.") from error
