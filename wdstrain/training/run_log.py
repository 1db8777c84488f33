"""Writes what a run tells about itself: lines, TensorBoard events and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from wdstrain.errors import StorageError
from wdstrain.training.checkpoint import Checkpoints
from wdstrain.training.data import addresses, count_pixels
from wdstrain.training.heads import MaskHead
from wdstrain.training.report import pixels_sentence, write_report
from wdstrain.training.run import Run
from wdstrain.training.run_dir import BOARD, CHECKPOINTS, METRICS, REPORT, STEPS, RunDir

_STEP_VALUES = ("loss", "lr", "samples_per_second")


def open_log(run: Run, stack: ExitStack) -> RunLog:
    """Open the folder of a run, and return its log. stack: closes both."""
    arguments, head = run.arguments, run.task.heads[0]
    if isinstance(head, MaskHead):
        is_strict = run.config.on_error == "raise"
        counts = count_pixels(run.train_set, head, is_strict=is_strict)
        run.setup.reporter.line(pixels_sentence(counts))
        if run.val_set is not None and is_strict:
            count_pixels(run.val_set, head, is_strict=True)
    val = addresses(arguments.val) if arguments.val is not None else None
    text = run.config.toml({"train": addresses(arguments.urls), "val": val})
    run_dir = RunDir(run.folder, text, overwrite=arguments.overwrite, resume=arguments.resume)
    stack.callback(run_dir.close)
    run.checkpoints = Checkpoints(run_dir.path(CHECKPOINTS), run.config.keep)
    log = RunLog(run_dir, run)
    stack.callback(log.close)
    return log


class RunLog:
    """Writes to the folder of a run. What cannot be written is reported, and the run goes on.

    Steps of events count from the start of the run.
    """

    def __init__(self, run_dir: RunDir, run: Run) -> None:
        """Remove lines and events after the position of the run."""
        state = run.state
        run_dir.rewind(state.history, (state.epoch, state.step))
        self._dir, self._run = run_dir, run
        self._board: Any = None  # opened with the first event, and again after a failure
        self._next = state.epoch * run.steps + state.step + 1  # step of the next event

    def step(self, line: Mapping[str, Any]) -> None:
        """Write the figures of the last second or so: position, loss, rates."""
        with self._going_on():
            self._dir.log(STEPS, line)
        seconds = {name: line[name] for name in line if name.endswith("_seconds")}
        whole = max(1e-9, sum(seconds.values()))
        values = {f"step/{name}": line[name] for name in _STEP_VALUES}
        values |= {f"time/{n.removesuffix('_seconds')}": s / whole for n, s in seconds.items()}
        self._add_events(values, line["epoch"] * self._run.steps + line["step"])

    def epoch(self, details: Mapping[str, Any], best: str) -> None:
        """Write the metrics of the last epoch and the report.

        details: of its validation. best: sentence on the best epoch.
        """
        metrics = self._run.state.history[-1]
        with self._going_on():
            self._dir.log(METRICS, metrics)
        parts = {"train": metrics, **{n: metrics.get(n, {}) for n in ("val", "val_raw")}}
        values = {
            f"{part}/{name}": value
            for part, figures in parts.items()
            for name, value in figures.items()
            if isinstance(value, (int, float)) and name not in ("epoch", "lr")
        }
        self._add_events(values, (metrics["epoch"] + 1) * self._run.steps, flush=True)
        with self._going_on():
            path, steps = self._dir.path(REPORT), self._dir.lines(STEPS)
            write_report(path, self._run, best, steps, details)

    def close(self) -> None:
        """Write the last events."""
        if self._board is not None:
            with suppress(OSError):
                self._board.close()

    def _add_events(self, values: Mapping[str, float], step: int, *, flush: bool = False) -> None:
        board, self._board = self._board, None  # a failed one writes no more
        with self._going_on():
            if board is None:
                from torch.utils.tensorboard import SummaryWriter  # takes a second to import

                board = SummaryWriter(self._dir.path(BOARD), purge_step=self._next)
            for name, value in values.items():
                board.add_scalar(name, value, step)
            if flush:
                board.flush()
            self._board, self._next = board, step + 1

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Report errors of writing."""
        try:
            yield
        except (OSError, StorageError) as error:
            cause = getattr(error, "strerror", None) or str(error).rstrip(".")
            self._run.setup.reporter.line(
                f"{self._dir.folder} cannot be written: {cause}. Training goes on."
            )
