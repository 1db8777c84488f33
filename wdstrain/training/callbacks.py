"""Callbacks: code of the user's that runs at points of a training run."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from wdstrain.errors import UsageError
from wdstrain.training.config import Config
from wdstrain.training.epoch_sums import TrainerState


class RunningTrainer(Protocol):
    """The part of a trainer that callbacks use.

    config: options of the run. state: epoch, step and history. stop_reason: why the run ended, at
    its end. is_leader: whether this process writes and reports. lr_scale:
    factor on the learning rate of all further steps, which checkpoints keep.
    """

    lr_scale: float
    config: Config
    stop_reason: str

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def state(self) -> TrainerState: ...
    @property
    def is_leader(self) -> bool: ...

    def stop(self, reason: str) -> None:
        """End the run after this step. Call it on every rank."""


class Callback:
    """Base class of callbacks. Override the methods that you need; each is called on every rank.

    A callback may read `trainer.model`, `trainer.optimizer`, `trainer.config`, `trainer.state` and
    `trainer.is_leader`, call `trainer.stop(reason)`, and set `trainer.lr_scale`.
    """

    def on_train_start(self, trainer: RunningTrainer) -> None:
        """Before the first step, also of a resumed run."""

    def on_step_end(self, trainer: RunningTrainer) -> None:
        """After each step of the optimizer. Reading a loss here would wait for the GPU."""

    def on_epoch_end(self, trainer: RunningTrainer, metrics: dict[str, Any]) -> None:
        """After the validation of an epoch. metrics: the line of metrics.jsonl."""

    def on_checkpoint(self, trainer: RunningTrainer, path: str) -> None:
        """After a checkpoint was written, on the rank that wrote it."""

    def on_train_end(self, trainer: RunningTrainer) -> None:
        """After the last epoch, or when the run ended early; not after an error."""


def check_callback(callback: object) -> None:
    """Raise UsageError for a method on_... that no run calls."""
    known = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(callback):
        if name.startswith("on_") and name not in known and callable(getattr(callback, name)):
            raise UsageError(
                f"{type(callback).__name__}.{name} is never called. Methods of callbacks are "
                f"{', '.join(known)}."
            )
