"""State of a run: everything that a checkpoint holds, and the checkpoints themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from wdstrain.errors import StorageError, UsageError, WdstrainError
from wdstrain.loader.loader import Loader
from wdstrain.training.checkpoint import FORMAT
from wdstrain.training.config import Config
from wdstrain.training.distributed import synchronize_batch_norms
from wdstrain.training.epoch_sums import EpochSums, TrainerState
from wdstrain.training.evaluation import Setup
from wdstrain.training.fsdp import (
    load_model_state,
    load_optimizer_state,
    local,
    model_state,
    optimizer_state,
)
from wdstrain.training.inputs import ModelInputs
from wdstrain.training.optim import ModelEMA, make_optimizer
from wdstrain.training.run_logger import RunLogger
from wdstrain.training.tasks import Task


class RunState:
    """Weights, optimizer, position and sums of a run. It writes and reads checkpoints.

    model: trained weights. average: their moving average, if there is one. steps: of an epoch.
    sums: of the epoch so far. write_error: of the last checkpoint, if it could not be written.
    data_error: of a loader; the weights are sound.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Loader,
        val_loader: Loader | None,
        setup: Setup,
        logger: RunLogger,
    ) -> None:
        config = setup.config
        self.loader, self.val_loader, self.setup = loader, val_loader, setup
        self.config, self.task, self.logger = config, setup.task, logger
        if config.sync_batchnorm:
            model = synchronize_batch_norms(model, setup.device, setup.distributed.size)
        self.average = ModelEMA(model, config.ema) if config.ema else None
        place = partial(setup.distributed.place, device=setup.device, shards=config.fsdp)
        self.model = place(model)
        if self.average is not None:
            self.average.model = place(self.average.model)
        self.optimizer = make_optimizer(self.model, config, setup.objects.optimizer)
        self.scaler = torch.amp.GradScaler(setup.device.type, enabled=config.amp == "fp16")
        self.steps = min(len(loader), config.limit_train_batches or len(loader))
        self.position = TrainerState()
        self.sums = EpochSums(self.task, setup.device)
        self.started_at = time.monotonic()
        self.write_error: StorageError | None = None
        self.data_error: WdstrainError | None = None

    @property
    def scored_model(self) -> nn.Module:
        """The model that is validated and saved as the result: the average, if there is one."""
        return self.average.model if self.average is not None else self.model

    @property
    def title(self) -> str:
        """The current epoch, counted from 1."""
        return f"epoch {self.position.epoch + 1}/{self.config.epochs}"

    def total_sums(self) -> dict[str, float]:
        """Return the sums of the epoch so far, of all processes."""
        # before the first step the loader's report is that of the epoch before
        bad = self.loader.report()["bad"] if self.position.step else 0
        return self.sums.reduced(self.setup.distributed, bad)

    def check_loss(self, loss: float) -> None:
        """Raise WdstrainError if the loss or a weight is not finite.

        The last loss may be finite although its step made weights that are not.
        """
        is_sound = self._has_finite_weights()
        if not math.isfinite(loss) or not is_sound:
            hint = "Look for images with NaN or infinity, lower" if is_sound else "Lower"
            raise WdstrainError(
                f"the loss is not finite at step {self.position.step} of {self.title}. {hint} "
                f"lr={self.config.lr} or set clip_norm. Earlier checkpoints are intact."
            )

    def _has_finite_weights(self) -> bool:
        """Return whether all weights of this process are finite. Waits for the device."""
        finite = [local(weight.detach()).isfinite().all() for weight in self.model.parameters()]
        return bool(torch.stack(finite).all()) if finite else True

    def save(self, *, best: bool = False) -> str | None:
        """Write a checkpoint, and return its path on the rank that wrote it.

        A failure is reported, and kept in `write_error`.
        """
        sums = self.total_sums()
        self.check_loss(sums["loss"])
        checkpoint = self._checkpoint(sums)  # with FSDP all processes share its tensors
        if not self.setup.distributed.leads:
            return None
        state = self.position
        try:
            position = state.epoch * self.steps + state.step
            path = self.logger.save(checkpoint, position, best=best)
            self.write_error = None
        except StorageError as error:
            self.write_error = error
            self.setup.reporter.line(f"{error} Training goes on.")
            return None
        return path

    def _checkpoint(self, sums: Mapping[str, float]) -> dict[str, Any]:
        state = self.position
        is_over = state.step >= self.steps
        epoch, step = (state.epoch + 1, 0) if is_over else (state.epoch, state.step)
        raw = {"raw": model_state(self.model)} if self.average is not None else {}
        return {
            "format": FORMAT,
            "model": model_state(self.scored_model),
            **raw,
            "optimizer": optimizer_state(self.optimizer),
            "scaler": self.scaler.state_dict(),
            "state": dict(vars(state)),
            "sums": dict(sums),
            "loader": {**self.loader.state_dict(), "epoch": epoch, "step": step},
            "val": self.val_loader.index.fingerprint if self.val_loader is not None else None,
            "config": vars(self.config),
            "task": self.task.state(),
            "inputs": self.setup.inputs.state(),
        }

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Raises UsageError that names what differs from it."""
        former = Config.of(checkpoint["config"])
        self._check_same(checkpoint, former)
        self.loader.load_state_dict(checkpoint["loader"])
        try:
            load_model_state(self.model, checkpoint.get("raw", checkpoint["model"]))
            if self.average is not None:
                load_model_state(self.average.model, checkpoint["model"])
            load_optimizer_state(self.optimizer, checkpoint["optimizer"])
        except (RuntimeError, ValueError) as error:
            cause = " ".join(str(error).split())[:300]
            raise UsageError(
                f"the checkpoint is of another model: {cause}. Use the same model, or another folder."
            ) from error
        self.scaler.load_state_dict(checkpoint["scaler"])
        if former.epochs != self.config.epochs and self.config.schedule != "constant":
            self.setup.reporter.line(
                f"epochs was {former.epochs}, is {self.config.epochs}: the learning rate follows "
                f"the schedule of {self.config.epochs} epochs"
            )
        self.position = TrainerState(**checkpoint["state"])
        self.position.history = list(self.position.history)
        if self.setup.distributed.leads:  # the sums of all processes
            self.sums.load(checkpoint["sums"])

    def _check_same(self, checkpoint: Mapping[str, Any], former: Config) -> None:
        """Raise UsageError if the checkpoint is of other options, labels, images or data."""
        differences = former.differing(self.config)
        if checkpoint["task"] != self.task.state():
            learned = Task.from_state(checkpoint["task"])
            differences.append(f"the task was {learned}, is {self.task}")
        if checkpoint["inputs"] != self.setup.inputs.state():
            inputs = ModelInputs.from_state(checkpoint["inputs"])
            differences.append(f"the input was {inputs}, is {self.setup.inputs}")
        val = self.val_loader.index.fingerprint if self.val_loader is not None else None
        if checkpoint["val"] != val:
            differences.append("the validation data differ")
        if differences:
            raise UsageError(
                f"the checkpoint is of another run: {'; '.join(differences)}. "
                f"Use the same values, or another folder."
            )
