"""Progress of an epoch of training, and the lines of steps.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from wdstrain.errors import StorageError, WdstrainError
from wdstrain.training.epoch_report import mean_loss, progress_text
from wdstrain.training.run_state import RunState
from wdstrain.training.timing import STAGES, StageTimer

_LOOK_SECONDS = 0.5  # between looks at the loss, for which a GPU is waited for


class StepLog:
    """Looks at the sums of an epoch now and then: progress, lines of steps.jsonl, checks.

    seconds: by stage since the epoch was started here, as the loader's report has them.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self.timer = StageTimer(run.setup.device)
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._shown_at = self._recorded_at = time.monotonic()
        self._recorded = run.sums.read()
        self._window = dict.fromkeys(STAGES, 0.0)  # seconds since the last record
        self._text = ""

    def update(self) -> None:
        """Show progress; look at the sums where enough time passed."""
        run, state, now = self._run, self._run.position, time.monotonic()
        is_last = state.step >= run.steps
        if now - self._shown_at >= _LOOK_SECONDS or is_last:
            self._shown_at = now
            self._look(now, is_last)
        done, total = (
            state.epoch * run.steps + state.step,
            run.config.epochs * run.steps,
        )
        run.setup.reporter.step(
            "training", done, total, ", ".join(filter(None, (run.title, self._text))), ""
        )

    def _look(self, now: float, is_last: bool) -> None:
        run, state = self._run, self._run.position
        window = self.timer.window(run.loader.report()["copy_seconds"])
        for seconds in (state.seconds, self.seconds, self._window):
            for name in STAGES:
                seconds[name] += window[name]
        sums = run.sums.read()
        self._check(sums)
        new = sums["samples"] - self._recorded["samples"]
        rate = new * run.setup.distributed.size / max(1e-9, sum(self._window.values()))
        self._text = f"{progress_text(run.task, sums, state.seconds)}, {rate:.0f}/s"
        seconds_between = 1.0 + (now - run.started_at) / 300
        if now - self._recorded_at >= seconds_between or is_last:
            self._record(sums, rate)
            self._recorded_at, self._recorded = now, sums
            self._window = dict.fromkeys(STAGES, 0.0)

    def _check(self, sums: Mapping[str, float]) -> None:
        """Raise WdstrainError if the loss is not finite, or no scale fits into 16 bits."""
        run = self._run
        if not math.isfinite(sums["loss"]):
            run.check_loss(sums["loss"])
        if sums["skipped"] and run.scaler.get_scale() < 1:
            raise WdstrainError(
                f"16 bits overflow at any scale of the loss, at step {run.position.step} of "
                f"{run.title}. Use amp=bf16 or amp=none, or set clip_norm. Earlier "
                f"checkpoints are intact."
            )

    def _record(self, sums: Mapping[str, float], rate: float) -> None:
        run, state = self._run, self._run.position
        line = {
            "epoch": state.epoch,
            "step": state.step,
            "loss": mean_loss({name: sums[name] - self._recorded[name] for name in sums}),
            "lr": run.optimizer.param_groups[0]["lr"],
            "samples_per_second": rate,
            **{f"{name}_seconds": round(value, 6) for name, value in self._window.items()},
        }
        try:
            run.logger.record(line)
        except StorageError as error:
            run.setup.reporter.line(f"{error} Training goes on.")
