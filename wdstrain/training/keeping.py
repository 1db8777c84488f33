"""What a run leaves behind, in one place: lines, checkpoints, TensorBoard events and the report, by the first process alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from wdstrain.errors import StorageError
from wdstrain.shards.index import Index
from wdstrain.training.board import Board
from wdstrain.training.checkpoints import Checkpoints
from wdstrain.training.configuration import Config
from wdstrain.training.loop import Progress
from wdstrain.training.report import Data, write_report
from wdstrain.training.run import BOARD, CHECKPOINTS, METRICS, REPORT, STEPS, Run
from wdstrain.training.task import Task


class Keeper:
    """Keeps a run in its folder. Before `begin`, and in other processes than the first, it keeps nothing."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._run: Run | None = None

    def begin(
        self, run: Run, config: Config, at: Progress, indexes: Mapping[str, Index], steps: int
    ) -> None:
        """Keep from here on in this folder; what it holds from after this position is taken out of it. steps: of an epoch."""
        run.rewind(at.history, lambda line: (line["epoch"], line["step"]) <= (at.epoch, at.step))
        self._checkpoints = Checkpoints(run.path(CHECKPOINTS), config.keep)
        self._board = Board(run.path(BOARD), at.epoch * steps + at.step)
        self._run, self._config, self._steps, self._history = run, config, steps, list(at.history)
        self._data = {name: Data.of(index, self._task) for name, index in indexes.items()}

    def record(self, line: dict[str, Any]) -> None:
        if self._run is None:
            return
        with _written(self._run.folder):
            self._run.log(STEPS, line)
            self._board.step(line, line["epoch"] * self._steps + line["step"])

    def epoch(self, metrics: dict[str, Any], details: dict[str, Any]) -> None:
        if self._run is None:
            return
        self._history.append(metrics)
        with _written(self._run.folder):
            self._run.log(METRICS, metrics)
            self._board.epoch(metrics, (metrics["epoch"] + 1) * self._steps)
            steps = self._run.lines(STEPS)
            write_report(
                self._run.path(REPORT),
                self._task,
                self._config,
                self._history,
                steps,
                details,
                self._data,
            )

    def save(self, state: dict[str, Any], step: int, *, best: bool) -> None:
        if self._run is not None:
            self._checkpoints.save(state, step, best=best)

    def close(self) -> None:
        if self._run is not None:
            with suppress(OSError):  # the last events, on a disk that is full
                self._board.close()
            self._run.close()
            self._run = None


@contextmanager
def _written(folder: str) -> Iterator[None]:
    """What the system says against writing is a StorageError, whoever writes."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}.") from error
