"""Callbacks: code of the user's that runs at points of a training run."""

from __future__ import annotations

from typing import Any

from wdstrain.errors import UsageError


class Callback:
    """Base class of callbacks. Override the methods that you need; each is called on every rank.

    `trainer` is the run (`wdstrain.training.run.Run`). A callback may read `trainer.model`,
    `trainer.optimizer`, `trainer.config`, `trainer.state` and `trainer.is_leader`, call
    `trainer.stop(reason)`, and set `trainer.lr_scale`, a factor on the learning rate of all further
    steps. What `state_dict()` of a callback returns is kept in checkpoints, and given to its
    `load_state_dict` on a resume.
    """

    def on_train_start(self, trainer: Any) -> None:
        """Before the first step, also of a resumed run."""

    def on_step_end(self, trainer: Any) -> None:
        """After each step of the optimizer. Reading a loss here would wait for the GPU."""

    def on_epoch_end(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """After the validation of an epoch. metrics: the line of metrics.jsonl."""

    def on_checkpoint(self, trainer: Any, path: str) -> None:
        """After a checkpoint was written, on the rank that wrote it."""

    def on_train_end(self, trainer: Any) -> None:
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
