"""Epochs of training and validation: forward, loss, backward, step, as in every PyTorch script.

The state of a run is its weights, the optimizer's state and a position: epoch and step. Order,
images, learning rate and the random numbers of the model (dropout) are functions of the position:
torch is seeded at every step. So a resumed run computes what the first run would have, bit
for bit where the arithmetic is deterministic. Checkpoints are written between two optimizer steps.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wdstrain.errors import StorageError, WdstrainError
from wdstrain.loader.device import to_device
from wdstrain.training.epoch_report import Passes, StepLog, epoch_lines, epoch_metrics, verdict
from wdstrain.training.epoch_sums import TrainerState
from wdstrain.training.evaluation import evaluate_pass
from wdstrain.training.inputs import batch_augmentation
from wdstrain.training.metrics import Monitor
from wdstrain.training.run_state import RunState
from wdstrain.training.stop_signals import (
    CheckpointSchedule,
    SignalHandler,
    Stopped,
    raise_stopped,
)
from wdstrain.training.train_step import TrainStep
from wdstrain.training.weights import train_mode


class Trainer:
    """A run from its position to its end.

    run: its weights, optimizer and position. monitor: the metric that chooses the best checkpoint.
    stop_reason: why `fit` ended.
    """

    def __init__(self, run: RunState, *, weights: list[Tensor | None], frozen: list[str]) -> None:
        """weights: of the classes of each head. frozen: names of parameters that are not trained."""
        config = run.config
        self.run, self.setup, self.config, self.task = run, run.setup, config, run.task
        self._monitor = Monitor(config, self.task)
        self.monitor = self._monitor.name
        self.stop_reason = ""
        self._reporter, self._distributed = run.setup.reporter, run.setup.distributed
        batch_augmentation(self.task, run.setup.inputs, config, 0)  # raises UsageError
        self._stop_asked: str | None = None
        self._schedule = CheckpointSchedule(config, self._distributed)
        self._step = TrainStep(run, monitor=self._monitor, weights=weights, frozen=frozen)

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
        self._call("on_train_start")
        try:
            while (reason := self._end_reason()) is None:
                self._train_epoch(signals)
                if self._stop_asked is not None and self.state.step < self.run.steps:
                    continue  # in the middle of an epoch
                begin = time.monotonic()
                passes = self._validate(signals)
                self._finish_epoch(passes, time.monotonic() - begin)
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
        self._call("on_train_end")

    def _end_reason(self) -> str | None:
        """Return why the run is over; None if it goes on."""
        if self._stop_asked is not None:
            return self._stop_asked
        reason = self._monitor.stop_reason(self.state.since_best)
        epochs = self.config.epochs
        if reason is None and self.state.epoch >= epochs:
            return "the 1 epoch is done" if epochs == 1 else f"all {epochs} epochs are done"
        return reason

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

    def _call(self, hook: str, *arguments: Any) -> None:
        """Call this method of each callback that has it."""
        for callback in self.setup.objects.callbacks:
            if (method := getattr(callback, hook, None)) is not None:
                method(self, *arguments)

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
            self._call("on_step_end")
            if self._stop_asked is not None:
                break
            if state.step < self.run.steps and self._schedule.is_due(state.step, signals):
                self._save()
        consumer = "GPU" if self.setup.device.type == "cuda" else "model"
        state.verdict = verdict(self.run.loader.report(), progress.seconds, consumer)
        if state.step == len(self.run.loader):
            next(batches, None)  # the loader compares what was planned and what was delivered

    def _save(self, *, best: bool = False) -> None:
        """Write a checkpoint. A failure is kept in `run.write_error`."""
        self._schedule.restart()
        path = self.run.save(best=best)
        if path is not None:
            self._call("on_checkpoint", path)

    # --- validation, the end of an epoch ----------------------------------------------------------

    def _validate(self, signals: SignalHandler) -> Passes:
        """Validate the scored weights and, beside averaged ones, the trained weights."""
        if self.run.val_loader is None:
            return {}
        models = {"val": (self.run.scored_model, "validating")}
        if self.run.average is not None:
            models["val_raw"] = (self.model, "validating without averaging")
        passes = {}
        for name, (model, title) in models.items():
            self._distributed.shared_buffers(model)
            try:
                passes[name] = evaluate_pass(
                    model,
                    self.run.val_loader,
                    self.setup,
                    title,
                    limit=self.config.limit_val_batches,
                    check_stop=partial(raise_stopped, signals, self._distributed),
                )
            except WdstrainError as error:
                self.run.data_error = error
                raise
        return passes

    def _finish_epoch(self, passes: Passes, val_seconds: float) -> None:
        """Record the metrics of the epoch, write a checkpoint, and report."""
        state, title = self.state, self.run.title
        metrics = epoch_metrics(self.run, passes) | {"val_seconds": val_seconds}
        if passes and not state.history and (warning := self._monitor.check(metrics["val"])):
            self._reporter.line(warning)
        former = state.best, state.since_best
        is_best = self._monitor.is_best(metrics.get("val"), state.best)
        state.finish_epoch(metrics, is_best=is_best)
        self.run.sums.clear()
        self._save(best=is_best)
        if is_best and self.run.write_error is not None:
            state.best, state.since_best = former
        try:
            self.run.logger.epoch(state.history, passes["val"][1] if passes else {})
        except StorageError as error:  # checkpoints count more, and were written before
            self._reporter.line(f"{error} Training goes on.")
        for line in epoch_lines(title, state.history, self.monitor):
            self._reporter.line(line)
        self._call("on_epoch_end", metrics)
