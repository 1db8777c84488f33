"""Epochs of training and validation: forward, loss, backward, step, as in every PyTorch script.

The state of a run is its weights, the optimizer's state and a position: epoch and step. Order,
images, learning rate and the random numbers of the model (dropout) are functions of the position:
torch is seeded at every step. So a resumed run computes what the first run would have, bit
for bit where the arithmetic is deterministic. Checkpoints are written between two optimizer steps.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wdstrain.errors import StorageError, UsageError, WdstrainError
from wdstrain.loader.device import to_device
from wdstrain.training.callbacks import Callbacks
from wdstrain.training.distributed import GO_ON, SAVE, STOP
from wdstrain.training.epoch_report import (
    StepLog,
    add_baselines,
    epoch_metrics,
    epoch_sentence,
    verdict,
)
from wdstrain.training.epoch_sums import STAGES
from wdstrain.training.evaluation import evaluate_pass
from wdstrain.training.inputs import batch_augmentation
from wdstrain.training.metrics import default_monitor, is_better, is_maximized
from wdstrain.training.run_logger import TrainerState
from wdstrain.training.run_state import RunState
from wdstrain.training.stop_signals import SignalHandler, Stopped
from wdstrain.training.train_step import TrainStep
from wdstrain.training.weights import train_mode

_MOST_CLASSES = 100  # classes whose recalls are in the line of an epoch


class Trainer:
    """A run from its position to its end.

    run: its weights, optimizer and position. monitor: the metric that chooses the best checkpoint.
    stop_reason: why `fit` ended.
    """

    def __init__(self, run: RunState, *, weights: list[Tensor | None], frozen: list[str]) -> None:
        """weights: of the classes of each head. frozen: names of parameters that are not trained."""
        config = run.config
        self.run, self.setup, self.config, self.task = run, run.setup, config, run.task
        self.monitor = config.monitor or default_monitor(self.task)
        self.stop_reason = ""
        self._reporter, self._distributed = run.setup.reporter, run.setup.distributed
        batch_augmentation(self.task, run.setup.inputs, config, 0)  # raises UsageError
        self._callbacks = Callbacks(run.setup.objects.callbacks)
        self._stop_asked: str | None = None
        self._save_wanted = False  # by the clock; all processes write it one step later
        self._val: dict[str, dict[str, float]] = {}
        self._step = TrainStep(run, monitor=self.monitor, weights=weights, frozen=frozen)

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.run.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the model."""
        return self.run.optimizer

    @property
    def state(self) -> TrainerState:
        """Epoch, step and history."""
        return self.run.position

    @property
    def is_leader(self) -> bool:
        """Whether this process writes and reports."""
        return self._distributed.leads

    @property
    def lr_scale(self) -> float:
        """Factor on the learning rate of further steps. Checkpoints keep it."""
        return self.state.lr_scale

    @lr_scale.setter
    def lr_scale(self, value: float) -> None:
        self.state.lr_scale = float(value)

    def stop(self, reason: str) -> None:
        """End the run after this step. For callbacks; call it on every rank."""
        self._stop_asked = reason

    # --- the run ----------------------------------------------------------------------------------

    def fit(self, signals: SignalHandler) -> None:
        """Train until all epochs are done, or validation stops improving, or a callback stops it.

        After a signal a checkpoint is written and Stopped raised.
        """
        self._callbacks.call("on_train_start", self)
        try:
            while (reason := self._end_reason()) is None:
                self._train_epoch(signals)
                if self._stop_asked is not None and self.state.step < self.run.steps:
                    continue  # in the middle of an epoch
                begin = time.monotonic()
                details = self._validate(signals) if self.run.val_loader is not None else {}
                self._finish_epoch(details, time.monotonic() - begin)
            self.stop_reason = reason
        except WdstrainError as error:
            if error is self.run.data_error:
                self._save_before_error()
            raise
        except Stopped:
            self._save()
            if self.run.write_error is not None:  # there is no checkpoint to announce
                raise self.run.write_error from None
            raise
        if self.state.step:
            self._save()
        if self.run.write_error is not None:
            raise self.run.write_error
        self._callbacks.call("on_train_end", self)

    def _end_reason(self) -> str | None:
        """Return why the run is over; None if it goes on."""
        config, since = self.config, self.state.since_best
        if self._stop_asked is not None:
            return self._stop_asked
        if 0 < config.patience <= since:
            return (
                f"{self.monitor} did not improve for {since} epochs (patience={config.patience}). "
                f"Raise patience, or set it to 0, to go on."
            )
        if self.state.epoch >= config.epochs:
            return (
                "the 1 epoch is done"
                if config.epochs == 1
                else f"all {config.epochs} epochs are done"
            )
        return None

    def _save_before_error(self) -> None:
        """Write a checkpoint of the last step after an error of the data, for a later resume.

        Not with several processes: the others are within a step, and a checkpoint needs all sums.
        """
        if self._distributed.size == 1:
            self._save()
            if self.run.write_error is None:
                self._reporter.line(
                    f"A checkpoint of {self.run.title}, step {self.state.step}, was written. "
                    f"Resume continues from it."
                )

    # --- an epoch of training ---------------------------------------------------------------------

    def _train_epoch(self, signals: SignalHandler) -> None:
        """Train the rest of an epoch."""
        state, config = self.state, self.config
        if state.step >= self.run.steps:  # only the validation is missing
            return
        self._step.start_epoch()
        train_mode(self.model)
        epoch = self.run.loader.epoch(state.epoch, start=state.step, until=config.epochs)
        augmentation = batch_augmentation(self.task, self.setup.inputs, config, state.epoch)
        batches = to_device(epoch, self.setup.device, augmentation)
        progress = StepLog(self.run)
        while state.step < self.run.steps:
            state.step += self._step.take(batches, signals, progress.timer)
            progress.update()
            self._callbacks.call("on_step_end", self)
            if self._stop_asked is not None:
                break
            if state.step < self.run.steps:
                self._obey(signals)
        consumer = "GPU" if self.setup.device.type == "cuda" else "model"
        state.verdict = verdict(self.run.loader.report(), progress.seconds, consumer)
        if state.step == len(self.run.loader):
            next(batches, None)  # the loader compares what was planned and what was delivered

    def _obey(self, signals: SignalHandler) -> None:
        """Write a checkpoint or stop where the clock, the count of steps or a signal asks for it."""
        config, step = self.config, self.state.step
        every, minutes = config.checkpoint_every, config.checkpoint_minutes
        # A count of steps is the same on all processes and needs no exchange.
        is_due = bool(every) and step // every > (step - config.accumulate) // every
        waited = time.monotonic() - self.run.saved_at
        is_late = bool(minutes) and self.is_leader and waited > 60 * minutes
        is_late = is_late and not self._save_wanted
        self._save_wanted = self._save_wanted or is_late
        wish = self._distributed.agreed(STOP if signals.number else SAVE if is_late else GO_ON)
        if wish == STOP:
            raise Stopped(signals.number or 15)
        if is_due or wish == SAVE:
            self._save()

    def _save(self, *, best: bool = False) -> None:
        """Write a checkpoint. A failure is kept in `run.write_error`."""
        self._save_wanted = False
        path = self.run.save(best=best)
        if path is not None:
            self._callbacks.call("on_checkpoint", self, path)

    # --- validation, the end of an epoch ----------------------------------------------------------

    def _validate(self, signals: SignalHandler) -> dict[str, Any]:
        """Validate, and return details for the report."""
        assert self.run.val_loader is not None

        def check_stop() -> None:
            if self._distributed.agreed(STOP if signals.number else GO_ON) == STOP:
                raise Stopped(signals.number or 15)

        models = {"val": self.run.scored_model}
        if self.run.average is not None:
            models["val_raw"] = self.model
        found = {}
        limit = self.config.limit_val_batches
        for name, model in models.items():
            self._distributed.shared_buffers(model)
            try:
                found[name] = evaluate_pass(
                    model,
                    self.run.val_loader,
                    self.setup,
                    "validating" if name == "val" else "validating without averaging",
                    limit=limit,
                    check_stop=check_stop,
                )
            except WdstrainError as error:
                self.run.data_error = error
                raise
        self._val = {name: metrics for name, (metrics, _) in found.items()}
        return found["val"][1]

    def _finish_epoch(self, details: dict[str, Any], val_seconds: float) -> None:
        """Record the metrics of the epoch, write a checkpoint, and report."""
        state, title = self.state, self.run.title
        metrics = self._epoch_metrics(details) | {"val_seconds": val_seconds}
        former = state.best, state.since_best
        is_best = self._is_best(metrics)
        state.best, state.since_best = (
            (metrics.get("val"), 0) if is_best else (state.best, state.since_best + 1)
        )
        state.history.append(metrics)
        state.epoch, state.step = state.epoch + 1, 0
        state.seconds = dict.fromkeys(STAGES, 0.0)
        self.run.sums.clear()
        self._save(best=is_best)
        if is_best and self.run.write_error is not None:
            state.best, state.since_best = former
        try:
            self.run.logger.epoch(metrics, details)
        except StorageError as error:  # checkpoints count more, and were written before
            self._reporter.line(f"{error} Training goes on.")
        self._reporter.line(f"{title}: {epoch_sentence(metrics, self.monitor)}")
        if metrics.get("skipped_steps"):
            self._reporter.line(
                f"  {metrics['skipped_steps']} steps overflowed 16 bits and were skipped"
            )
        if metrics["verdict"] not in [epoch["verdict"] for epoch in state.history[-2:-1]]:
            self._reporter.line(textwrap.indent(textwrap.fill(metrics["verdict"], 76), "  "))
        self._callbacks.call("on_epoch_end", self, metrics)

    def _is_best(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether this epoch is the best so far. Without validation every epoch is."""
        if "val" not in metrics:
            return True
        value = metrics["val"].get(self.monitor, math.nan)
        if self.state.best is None:
            return True
        return is_better(
            value,
            self.state.best.get(self.monitor),
            maximize=is_maximized(self.monitor),
            min_delta=self.config.min_delta,
        )

    def _epoch_metrics(self, details: Mapping[str, Any]) -> dict[str, Any]:
        """Return the line of the epoch. Seconds and verdict are those of the first process."""
        state = self.state
        sums = self.run.total_sums()
        metrics: dict[str, Any] = {"epoch": state.epoch}
        metrics |= epoch_metrics(self.task, sums, state.seconds)
        metrics["left_out"] = self.run.loader.plan(state.epoch).left_out
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        metrics["verdict"] = state.verdict
        if self.run.scaler.is_enabled():
            metrics["skipped_steps"] = int(sums["skipped"])
        if self.run.val_loader is not None:
            metrics |= {name: dict(values) for name, values in self._val.items()}
            add_baselines(self.task, metrics)
            if self.monitor not in metrics["val"] and not state.history:
                self._report_missing_monitor(metrics["val"])
        classes = {
            name: head["classes"]
            for name, head in details.get("heads", {}).items()
            if len(head.get("classes", ())) in range(1, _MOST_CLASSES + 1)
        }
        return metrics | ({"classes": classes} if classes else {})

    def _report_missing_monitor(self, val: Mapping[str, float]) -> None:
        if self.config.monitor is not None:
            raise UsageError(
                f"monitor={self.monitor!r} is not among the metrics of validation. Use "
                f"one of: {', '.join(sorted(val))}."
            )
        self._reporter.line(f"{self.monitor} is undefined on this validation data.")
