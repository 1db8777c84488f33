"""What a run writes about itself while it runs: progress, steps.jsonl, TensorBoard events, the report.

What cannot be written is reported, and the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from wdstrain.errors import StorageError
from wdstrain.training.config import METRICS, read_lines
from wdstrain.training.data import addresses, count_pixels
from wdstrain.training.heads import MaskHead
from wdstrain.training.report import counts_text, mean_loss, progress_text, write_report
from wdstrain.training.run import STAGES, Diverged, Run
from wdstrain.training.run_dir import (
    BOARD,
    CHECKPOINTS,
    REPORT,
    STEPS,
    Checkpoints,
    RunDir,
)

_ON_DEVICE = ("compute", "optimizer")
_SHORTEST, _LONGEST = 0.5, 10.0  # seconds between looks at the loss, for which a GPU is waited for


def open_folder(run: Run, stack: ExitStack) -> RunDir:
    """Return the folder of a run, opened for this process. stack: closes it."""
    arguments, head = run.arguments, run.task.heads[0]
    if isinstance(head, MaskHead):
        is_strict = run.config.on_error == "raise"
        counts = count_pixels(run.train_set, head, is_strict=is_strict)
        run.setup.reporter.line(f"pixels: {counts_text(counts)}")
        if run.val_set is not None and is_strict:
            count_pixels(run.val_set, head, is_strict=True)
    val = addresses(arguments.val) if arguments.val is not None else None
    text = run.config.toml({"train": addresses(arguments.urls), "val": val})
    folder = RunDir(run.folder, text, overwrite=arguments.overwrite, resume=arguments.resume)
    stack.callback(folder.close)
    folder.rewind(run.state.history, (run.state.epoch, run.state.step))
    run.checkpoints = Checkpoints(folder.path(CHECKPOINTS), run.config.keep)
    return folder


class RunLog:
    """Shows the progress of a run, checks its losses, and writes to its folder.

    It looks at the sums of an epoch now and then, not at every step. seconds: by stage since the
    epoch was started here, as the loader's report has them. Steps of events count from the start of
    the run.
    """

    def __init__(self, run: Run, stack: ExitStack) -> None:
        """Only the first process writes. It removes lines and events after the position of the run.

        stack: closes the folder.
        """
        self._run, state = run, run.state
        self._dir: Any = open_folder(run, stack) if run.is_leader else None
        self._board: Any = None  # opened with the first event, and again after a failure
        self._next = state.epoch * run.steps + state.step + 1  # step of the next event
        stack.callback(self._close_board)

    def start_epoch(self) -> None:
        """Begin to measure."""
        self.timer = StageTimer(self._run.setup.device)
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._at, self._sums, self._text = time.monotonic(), self._run.sums.read(), ""

    def update(self) -> None:
        """Show progress; look at the sums if enough time passed."""
        run, state, now = self._run, self._run.state, time.monotonic()
        pause = min(_LONGEST, _SHORTEST + (now - run.started_at) / 300)
        if now - self._at >= pause or state.step >= run.steps:
            self._look(now)
        done, total = state.epoch * run.steps + state.step, run.config.epochs * run.steps
        text = ", ".join(filter(None, (run.title, self._text)))
        run.setup.reporter.step("training", done, total, text, "")

    def _look(self, now: float) -> None:
        """Check the sums, and write the figures of the last second or so."""
        run, state = self._run, self._run.state
        window = self.timer.window(run.loader.report()["copy_seconds"])
        for seconds in (state.seconds, self.seconds):
            for name in STAGES:
                seconds[name] += window[name]
        sums, whole = run.sums.read(), max(1e-9, sum(window.values()))
        self._check(sums)
        new = {name: sums[name] - self._sums[name] for name in sums}
        rate = new["samples"] * run.setup.distributed.size / whole
        self._at, self._sums = now, sums
        self._text = f"{progress_text(run.task, sums, state.seconds)}, {rate:.0f}/s"
        if self._dir is None:
            return
        values = {"loss": mean_loss(new), "lr": run.lr, "samples_per_second": rate}
        spent = {f"{name}_seconds": round(seconds, 6) for name, seconds in window.items()}
        with self._going_on():
            self._dir.log(STEPS, {"epoch": state.epoch, "step": state.step} | values | spent)
        events = {f"step/{name}": value for name, value in values.items()}
        events |= {f"time/{name}": window[name] / whole for name in STAGES}
        self._add_events(events, state.epoch * run.steps + state.step)

    def _check(self, sums: Mapping[str, float]) -> None:
        """Raise Diverged if the loss is not finite, or no scale fits into 16 bits."""
        run = self._run
        if sums["overflowed"]:
            run.check_finite(sums)
        if sums["skipped"] and run.scaler.get_scale() < 1:
            raise Diverged(
                f"16 bits overflow at any scale of the loss, at step {run.state.step} of "
                f"{run.title}.",
                "Use {amp} or none, or set {clip_norm}. Earlier checkpoints are intact.",
                {"amp": "bf16", "clip_norm": ...},
            )

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
            if isinstance(value, (int, float)) and name not in ("epoch", "lr", "is_best")
        }
        self._add_events(values, (metrics["epoch"] + 1) * self._run.steps)
        with self._going_on():
            steps = read_lines(self._dir.path(STEPS))
            write_report(self._dir.path(REPORT), self._run, best, steps, details)

    def _add_events(self, values: Mapping[str, float], step: int) -> None:
        board, self._board = self._board, None  # a failed one writes no more
        with self._going_on():
            if board is None:
                from torch.utils.tensorboard import SummaryWriter  # takes a second to import

                board = SummaryWriter(self._dir.path(BOARD), purge_step=self._next)
            for name, value in values.items():
                board.add_scalar(name, value, step)
            board.flush()
            self._board, self._next = board, step + 1

    def _close_board(self) -> None:
        if self._board is not None:
            with suppress(OSError):
                self._board.close()

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


class StageTimer:
    """Adds up seconds by stage: `lap` adds the time since the lap before to a stage.

    On a CPU the clock times each stage. A CUDA device works asynchronously, so events in its stream
    time the stages that run there. Its idle time, up to the wait of the loop, is waiting for data,
    and as much of it as batches were being copied is waiting for copies. Events are read once per
    window, so steps do not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._copied = device.type == "cuda", 0.0
        self._laps: list[tuple[str, Any, Any]] = []
        self._begin = self._last = self._mark()

    def lap(self, stage: str) -> None:
        """Add the time since the lap before to a stage."""
        before, self._last = self._last, self._mark()
        self._laps.append((stage, before, self._last))

    def window(self, copied: float) -> dict[str, float]:
        """Return seconds by stage since the last window. Waits for a CUDA device.

        copied: seconds for which batches were being copied to the device, since the start.
        """
        if self._cuda:
            torch.cuda.synchronize()
        seconds, end = dict.fromkeys(STAGES, 0.0), self._mark()
        whole = end[0] - self._begin[0]
        for stage, (at, event), (after, next_event) in self._laps:
            is_on_device = self._cuda and stage in _ON_DEVICE
            seconds[stage] += event.elapsed_time(next_event) / 1e3 if is_on_device else after - at
        if self._cuda:
            idle = max(0.0, whole - sum(seconds[stage] for stage in _ON_DEVICE))
            waited = min(seconds["data"], idle)
            seconds["copy"] = min(waited, copied - self._copied)
            seconds["data"] = waited - seconds["copy"]
        seconds["other"] = max(0.0, whole - sum(seconds.values()))
        self._copied, self._laps = copied, []
        self._begin = self._last = end
        return seconds

    def _mark(self) -> tuple[float, Any]:
        """Return the time, and on a CUDA device an event in its stream."""
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        return time.perf_counter(), event
