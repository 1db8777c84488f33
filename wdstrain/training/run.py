"""A training run: its data, model, optimizer and position, and the checkpoints that hold them.

Everything that can be wrong is found when a run is made, before its folder is touched: addresses,
labels, classes, options, the model. `Run.start` then places the model on its device, and continues
from the checkpoint if there is one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from wdstrain.augment.gpu import IMAGENET
from wdstrain.errors import StorageError, WdstrainError
from wdstrain.report.terminal import Reporter
from wdstrain.shards.joining import can_join
from wdstrain.training.checkpoint import (
    CHECKPOINTS,
    FORMAT,
    Setup,
    freeze,
    load,
    read_last,
    write_checkpoint,
)
from wdstrain.training.config import STAGES, Config, TrainArguments, refuse, refusing
from wdstrain.training.data import class_weights, open_data, run_fields, run_loader
from wdstrain.training.distributed import (
    DistributedContext,
    EpochSums,
    load_model_state,
    load_optimizer_state,
    local,
    whole,
)
from wdstrain.training.inputs import ModelInputs, batch_augmentation, specs_of, with_targets
from wdstrain.training.models import (
    TIMM,
    ModelEMA,
    build,
    check_shapes,
    make_optimizer,
    rate_factor,
)
from wdstrain.training.options import is_file
from wdstrain.training.tasks import Monitor, Task, check_objects


@dataclass
class TrainerState:
    """Position and history of a run.

    step: in the epoch, of batches. best: validation of the best epoch. since_best: epochs
    that did not improve on it by more than min_delta. seconds: of the epoch so far, by stage.
    """

    epoch: int = 0
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, float] | None = None
    since_best: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    verdict: str = ""


class Run:
    """State of a run. Callbacks get it.

    setup: what it shares with evaluation. model: trained weights. average: their moving average, if
    there is one. net: what a step calls, compiled and shared by all processes. frozen: names of
    parameters that are not trained. fresh: names of those that the weights lack. steps: batches of
    an epoch. updates: of the optimizer in an epoch. state: position and history. sums: of the epoch
    so far. val_fields: inputs without augmentation. lr_scale: factor on the learning rate of further
    steps, which callbacks set and checkpoints keep. stop_reason: why the run ends. in_step: whether
    a part of a step is done. write_error: of the last checkpoint, if it could not be written.
    """

    def __init__(
        self, arguments: TrainArguments, distributed: DistributedContext, reporter: Reporter
    ) -> None:
        """Open the data and make the model. Raises UsageError and ShardError."""
        self.arguments, self.folder = arguments, os.fspath(arguments.out)
        config = self.config = arguments.config()
        checkpoint, self.unreadable = (
            read_last(os.path.join(self.folder, CHECKPOINTS)) if arguments.resume else (None, [])
        )
        self.checkpoint = checkpoint
        train, val, task = open_data(arguments.urls, arguments.val, config, checkpoint)
        self.train_set, self.val_set, self.task = train, val, task
        self.val_fingerprint = None if val is None else val.fingerprint
        check_objects(arguments, config, task, has_val=val is not None)
        refuse(
            config.record and not (can_join(train, "loss") and can_join(train, "right")),
            "{record} makes the columns 'loss' and 'right', and the shards use one of these names.",
            "Leave it out.",
            record=True,
        )
        train_fields, self.val_fields = run_fields(arguments, train, val, task, config)
        inputs = ModelInputs(specs_of(train_fields))
        weights = config.weights if checkpoint is None else None  # a checkpoint has its own
        torch.manual_seed(config.seed)
        net = build(
            arguments.model,
            task.outputs,
            inputs.image_size or max(config.image_shape),
            title=config.model,
            pretrained=weights is not None and not is_file(weights),
            is_dense=task.is_dense,
        )
        self.model = check_shapes(net, config.model, inputs, task.output_shape(inputs.image_shape))
        classes = [head.classes for head in task.heads]
        self.fresh, normalization = (
            load(self.model, config.model, weights, classes) if weights else ((), None)
        )
        self.frozen = freeze(self.model, config.freeze) if config.freeze else []
        if checkpoint is not None:
            normalization = ModelInputs.from_state(checkpoint["inputs"]).normalization
        self.setup = Setup(
            task=task,
            config=config,
            inputs=ModelInputs(specs_of(self.val_fields), normalization or IMAGENET),
            distributed=distributed,
            reporter=reporter,
            criterion=arguments.criterion,
            training_step=arguments.training_step,
            metrics=arguments.metrics or {},
        )
        self.loader = run_loader(
            train,
            with_targets(train_fields, task),
            config,
            distributed,
            shuffle=True,
            tail="drop",
            seed=config.seed,
            shuffle_buffer=config.shuffle_buffer,
            balance=config.balance,
            # those of the run that is resumed, so that it may have another number of processes
            lanes=config.lanes or (checkpoint and checkpoint["loader"]["lanes"]),
        )
        self.val_loader = (
            run_loader(val, with_targets(self.val_fields, task), config, distributed)
            if val is not None
            else None
        )
        self.monitor = Monitor(config, task.main_metric, self.setup.metrics)
        self.steps = min(len(self.loader), config.limit_train_batches or len(self.loader))
        self.updates = math.ceil(self.steps / config.accumulate)
        self.state = TrainerState()
        self.sums = EpochSums(task, self.setup.device, has_outputs=arguments.training_step is None)
        self.lr_scale, self.stop_reason, self.in_step = 1.0, "", False
        self.write_error: StorageError | None = None

    def check_agreement(self) -> None:
        """Raise UsageError if the processes see different checkpoints, shards or options."""
        distributed, checkpoint = self.setup.distributed, self.checkpoint
        position = checkpoint and [checkpoint["state"][name] for name in ("epoch", "step")]
        facts = (position, self.train_set.fingerprint, self.val_fingerprint, vars(self.config))
        refuse(
            any(other != facts for other in distributed.gather(facts)),
            f"rank {distributed.rank} of {distributed.size}: the processes of this job see "
            f"different checkpoints in {self.folder}, different shards or different options.",
            "Give all of them the same, and a folder that all of them share.",
        )

    def start(self) -> None:
        """Place the model on its device, and make its optimizer. Collective."""
        config, device, distributed = self.config, self.setup.device, self.setup.distributed
        model, criterion = self.model, self.setup.criterion_modules
        if config.channels_last and not config.fsdp:  # which splits contiguous tensors only
            model = model.to(memory_format=torch.channels_last)
        if config.sync_batchnorm and distributed.size > 1:
            refuse(
                device.type == "cpu",
                "{sync_batchnorm}: torch synchronizes batch norms on GPUs only.",
                sync_batchnorm=True,
            )
            model = cast(Any, nn.SyncBatchNorm).convert_sync_batchnorm(model)
        self.average = ModelEMA(model, config.ema) if config.ema else None
        if config.grad_checkpointing:
            refuse(
                not callable(getattr(model, "set_grad_checkpointing", None)),
                "{grad_checkpointing} needs a model that has it, and this one has no method "
                "set_grad_checkpointing().",
                f"Use a model of timm ({TIMM}NAME), or checkpoint in the model's own forward.",
                grad_checkpointing=...,
            )
            cast(Any, model).set_grad_checkpointing()  # of its own library
        self.model = distributed.place(model, device, shards=config.fsdp)
        if self.average is not None:
            self.average.model = distributed.place(self.average.model, device, shards=config.fsdp)
        self.optimizer = make_optimizer(self.model, config, self.arguments.optimizer, criterion)
        groups = self.optimizer.param_groups
        peaks = [float(group["lr"]) for group in groups]
        self.peak_rates = [peak * g["lr_scale"] for peak, g in zip(peaks, groups, strict=True)]
        self.schedule = partial(rate_factor, config, self.updates, max(peaks))
        distributed.broadcast(criterion.state_dict().values())
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.amp == "fp16")
        self.class_weights = [
            class_weights(self.train_set, head, config.class_weights, device)
            for head in self.task.heads
        ]
        batch_augmentation(self.task, self.setup.inputs, config, 0)  # raises UsageError
        self.started_at = self.saved_at = time.monotonic()
        self.wrap()

    def wrap(self) -> None:
        """Make the callable that trains the model: compiled, and shared by all processes.

        DDP knows only parameters that required gradients when it was made.
        """
        net = self.setup.distributed.spread(self.model, self.setup.device)
        # Batches have one shape. Parts that FSDP splits run the same code with different shapes. Torch
        # would compile it for dynamic shapes, which fails for batch norms.
        self.net: Any = torch.compile(net, dynamic=False) if self.config.compile else net

    # --- for callbacks ----------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """Whether this process writes and reports."""
        return self.setup.distributed.leads

    def stop(self, reason: str) -> None:
        """End the run after this step. Call it on every rank."""
        self.stop_reason = reason or "a callback stopped it"

    def call(self, hook: str, *arguments: Any) -> None:
        """Call this method of each callback that has it."""
        for callback in self.arguments.callbacks:
            if (method := getattr(callback, hook, None)) is not None:
                method(self, *arguments)

    # --- what a run knows -------------------------------------------------------------------------

    @property
    def scored_model(self) -> nn.Module:
        """The model that is validated and saved as the result: the average, if there is one."""
        return self.average.model if self.average is not None else self.model

    @property
    def lr(self) -> float:
        """Learning rate of the last step, without the factors of layers."""
        groups = [group for group in self.optimizer.param_groups if group["lr_scale"]]
        return max((float(group["lr"]) / group["lr_scale"] for group in groups), default=0.0)

    @property
    def title(self) -> str:
        """The current epoch, counted from 1."""
        return f"epoch {self.state.epoch + 1}/{self.config.epochs}"

    @property
    def is_stopped(self) -> bool:
        """Whether a callback ended the run in the middle of an epoch."""
        return bool(self.stop_reason) and self.state.step < self.steps

    def is_over(self) -> bool:
        """Return whether the run ends here; `stop_reason` says why."""
        epochs, patience, waited = self.config.epochs, self.config.patience, self.state.since_best
        if self.stop_reason:
            return True
        if 0 < patience <= waited:
            self.stop_reason = (
                f"{self.monitor.name} did not improve for {waited} epochs (patience={patience}). "
                "Raise patience, or set it to 0, to go on."
            )
        elif self.state.epoch >= epochs:
            done = "the 1 epoch is" if epochs == 1 else f"all {epochs} epochs are"
            self.stop_reason = f"{done} done"
        return bool(self.stop_reason)

    def check_finite(self, sums: Mapping[str, float]) -> None:
        """Raise WdstrainError if a loss or a weight is not finite, or no scale fits into 16 bits.

        With 16 bits losses may be so. The last loss may be finite although its step made weights
        that are not.
        """
        # Waits for the device.
        finite = [local(weight.detach()).isfinite().all() for weight in self.model.parameters()]
        is_sound = bool(torch.stack(finite).all()) if finite else True
        if not is_sound or (sums["overflowed"] and not self.scaler.is_enabled()):
            hint = "Look for images with NaN or infinity, lower" if is_sound else "Lower"
            raise WdstrainError(
                f"the loss is not finite at step {self.state.step} of {self.title}.",
                f"{hint} {{lr}} or set {{clip_norm}}. Earlier checkpoints are intact.",
                {"lr": self.config.lr, "clip_norm": ...},
            )
        if sums["skipped"] and self.scaler.get_scale() < 1:
            raise WdstrainError(
                f"16 bits overflow at any scale of the loss, at step {self.state.step} of "
                f"{self.title}.",
                "Use {amp} or none, or set {clip_norm}. Earlier checkpoints are intact.",
                {"amp": "bf16", "clip_norm": ...},
            )

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint. A failure is reported, and kept in `write_error`. Collective."""
        self.saved_at = time.monotonic()
        sums, state = self.sums.read(self.setup.distributed), self.state
        self.check_finite(sums)
        checkpoint = state_dict(self, sums)  # with FSDP all processes share its tensors
        if not self.is_leader:
            return
        folder, step = os.path.join(self.folder, CHECKPOINTS), state.epoch * self.steps + state.step
        try:
            path = write_checkpoint(folder, checkpoint, step, keep=self.config.keep, best=best)
        except StorageError as error:
            self.write_error = error
            self.setup.reporter.line(f"{error} Training goes on.")
        else:
            self.write_error = None
            self.call("on_checkpoint", path)


def state_dict(run: Run, sums: Mapping[str, float]) -> dict[str, Any]:
    """Return what a checkpoint holds. sums: of the epoch so far, of all processes. Collective."""
    state = run.state
    epoch, step = (state.epoch, state.step) if state.step < run.steps else (state.epoch + 1, 0)
    own = bool(step) and run.setup.distributed.size > 1  # each rank counts its own bad samples
    bad = {} if own else {"bad": int(sums["bad"]) if step else 0}
    objects: dict[str, Any] = {
        "callbacks": [(type(one).__name__, one.state_dict()) for one in _stateful(run)],
        "criterion_state": run.setup.criterion_modules.state_dict(),
    }
    return {
        **{name: value for name, value in objects.items() if value},
        **run.arguments.own_losses,
        "format": FORMAT,
        "model": whole(run.scored_model.state_dict()),
        **({"raw": whole(run.model.state_dict())} if run.average is not None else {}),
        "optimizer": whole(run.optimizer.state_dict()),
        "scaler": run.scaler.state_dict(),
        "state": {**vars(state), "lr_scale": float(run.lr_scale)},
        "sums": dict(sums),
        "loader": {**run.loader.state_dict(), "epoch": epoch, "step": step, **bad},
        "val": run.val_fingerprint,
        "config": vars(run.config),
        "task": run.task.state(),
        "inputs": run.setup.inputs.state(),
        **({"recorded": run.loader.recording.state()} if run.config.record else {}),
    }


def _stateful(run: Run) -> list[Any]:
    """Return the callbacks whose state checkpoints keep."""
    return [callback for callback in run.arguments.callbacks if hasattr(callback, "state_dict")]


def resume(run: Run) -> None:
    """Continue from the checkpoint, if there is one.

    Raises UsageError that names what differs from it.
    """
    checkpoint, report = run.checkpoint, run.setup.reporter.line
    if checkpoint is None:
        return
    for reason in run.unreadable:
        report(f"{reason} The checkpoint before it is used.")
    former = Config.of(checkpoint["config"])
    _check_same(run, checkpoint, former)
    run.loader.load_state_dict(checkpoint["loader"])
    if "recorded" in checkpoint:
        run.loader.recording.load(checkpoint["recorded"])
    with refusing("the checkpoint is of another model", "Use the same model, or another folder."):
        load_model_state(run.model, checkpoint.get("raw", checkpoint["model"]))
        if run.average is not None:
            load_model_state(run.average.model, checkpoint["model"])
        load_optimizer_state(run.optimizer, checkpoint["optimizer"])
        run.setup.criterion_modules.load_state_dict(checkpoint.get("criterion_state", {}))
    run.scaler.load_state_dict(checkpoint["scaler"])
    for callback, (_, state) in zip(_stateful(run), checkpoint.get("callbacks", ()), strict=False):
        callback.load_state_dict(state)
    state = dict(checkpoint["state"])
    run.lr_scale = state.pop("lr_scale")
    run.state = TrainerState(**state)
    if run.is_leader:  # the sums of all processes
        run.sums.load(checkpoint["sums"])
    report(f"resuming at epoch {run.state.epoch + 1}, step {run.state.step} of {run.steps}")


def _check_same(run: Run, checkpoint: Mapping[str, Any], former: Config) -> None:
    """Raise UsageError if the checkpoint is of other options, labels, images or data."""
    saved, losses = checkpoint, run.arguments.own_losses
    callbacks = ", ".join(name for name, _ in saved.get("callbacks", ()))
    given = ", ".join(type(callback).__name__ for callback in _stateful(run)) if callbacks else ""
    facts = (  # text, before, now
        ("the task was {}, is {}", Task.from_state(saved["task"]), run.task),
        ("the input was {}, is {}", ModelInputs.from_state(saved["inputs"]), run.setup.inputs),
        ("criterion was {}, is {}", saved.get("criterion"), losses.get("criterion")),
        ("training_step was {}, is {}", saved.get("training_step"), losses.get("training_step")),
        ("callbacks with a state were {}, are {}", callbacks, given),
        ("the validation data differ", saved["val"], run.val_fingerprint),
    )
    differences = former.differing(run.config)
    differences += [text.format(was, now) for text, was, now in facts if was != now]
    refuse(
        differences,
        f"the checkpoint is of another run: {'; '.join(differences)}.",
        "Use the same values, or another folder.",
    )
