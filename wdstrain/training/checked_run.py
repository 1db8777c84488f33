"""A training run whose arguments are checked: its data, model and loaders.

Everything that can be wrong is found here, before the run's folder is touched: addresses, labels,
classes, options, the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from wdstrain.errors import UsageError
from wdstrain.loader.loader import Loader
from wdstrain.training import weights as model_weights
from wdstrain.training.arguments import TrainArguments
from wdstrain.training.callbacks import check_callback
from wdstrain.training.checkpoint import read_last
from wdstrain.training.config import OPTIONS, Config
from wdstrain.training.data import TrainData, train_loader, val_loader
from wdstrain.training.distributed import DistributedContext, device_of
from wdstrain.training.inputs import InputSource, ModelInputs, Normalization
from wdstrain.training.models import build, call_factory, check_shapes
from wdstrain.training.run_dir import CHECKPOINTS, check_out
from wdstrain.training.sources import (
    check_no_randomness,
    check_source,
    default_source,
    given_source,
    try_samples,
    validation_source,
)
from wdstrain.training.tasks import Task


@dataclass(frozen=True, kw_only=True)
class InitialModel:
    """The model of a run before its first step.

    weights: that it starts from, if they were loaded. frozen: names of parameters that are not
    trained.
    """

    net: nn.Module
    weights: model_weights.LoadedWeights | None
    frozen: list[str]


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """A run that can start.

    checkpoint: to resume from. unreadable: why later checkpoints are not used. inputs: of the
    model, as in validation.
    """

    config: Config
    folder: str
    data: TrainData
    task: Task
    device: torch.device
    inputs: ModelInputs
    model: InitialModel
    loader: Loader
    val_loader: Loader | None
    checkpoint: Mapping[str, Any] | None
    unreadable: list[str]

    @classmethod
    def of(cls, arguments: TrainArguments, distributed: DistributedContext) -> CheckedRun:
        """Open the data and make the model of a run. Raises UsageError and ShardError."""
        config, folder = _absolute(arguments.config()), os.fspath(arguments.out)
        resume = arguments.resume
        if distributed.leads:  # other ranks may see files that it has written already
            check_out(folder, overwrite=arguments.overwrite, resume=resume)
        data = TrainData.of(arguments.urls, arguments.val, config, arguments.fields)
        config = replace(config, label=config.label or data.undeclared)
        _check_validation(arguments, data, config)
        checkpoint, unreadable = (
            read_last(os.path.join(folder, CHECKPOINTS)) if resume else (None, [])
        )
        task = data.task(checkpoint)
        _check_objects(arguments, config, task)
        device = device_of(config.device, distributed)
        train_source, val_source = _sources(arguments, data, task, config)
        torch.manual_seed(config.seed)
        model = _initial_model(
            arguments, config, task, ModelInputs(train_source.specs), checkpoint is None
        )
        # lanes of the run that is resumed, so that it may have another number of processes
        lanes = config.lanes or (checkpoint["loader"]["lanes"] if checkpoint is not None else None)
        loader = train_loader(data.train, task, train_source, config, distributed, lanes)
        return cls(
            config=config,
            folder=folder,
            data=data,
            task=task,
            device=device,
            inputs=ModelInputs(val_source.specs, _normalization(checkpoint, model.weights)),
            model=model,
            loader=loader,
            val_loader=None
            if data.val is None
            else val_loader(data.val, task, val_source, config, distributed),
            checkpoint=checkpoint,
            unreadable=unreadable,
        )

    def check_agreement(self, distributed: DistributedContext) -> None:
        """Raise UsageError if the processes see different checkpoints, shards or options."""
        state = None if self.checkpoint is None else self.checkpoint["state"]
        position = None if state is None else (state["epoch"], state["step"])
        facts = (position, self.data.train.fingerprint, vars(self.config))
        if any(other != facts for other in distributed.gather(facts)):
            raise UsageError(
                f"rank {distributed.rank} of {distributed.size}: the processes of this job see "
                f"different checkpoints in {self.folder}, different shards or different options. "
                f"Give all of them the same, and a folder that all of them share."
            )


def _absolute(config: Config) -> Config:
    """Return options with absolute paths, so that a run is resumed from any folder."""
    paths: dict[str, str | None] = {"cache_dir": config.cache_dir}
    if config.weights is not None and model_weights.is_file(config.weights):
        paths["weights"] = config.weights
    absolute: dict[str, Any] = {n: os.path.abspath(p) for n, p in paths.items() if p is not None}
    return replace(config, **absolute)


def _check_objects(arguments: TrainArguments, config: Config, task: Task) -> None:
    """Raise UsageError for objects of the user's that are none, and for options without effect."""
    criterion, metrics = arguments.criterion, arguments.metrics
    own = criterion if isinstance(criterion, Mapping) else {"criterion": criterion}
    for name, value in own.items():
        if value is not None and not callable(value):
            raise UsageError(
                f"criterion={value!r}: must be a function (outputs, target) -> loss, such as "
                f"torch.nn.CrossEntropyLoss()."
            )
        if isinstance(criterion, Mapping) and name not in [head.name for head in task.heads]:
            raise UsageError(
                f"criterion names {name!r}, and the labels are "
                f"{', '.join(head.name for head in task.heads)}."
            )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(
            f"metrics={metrics!r}: must be a dict of torchmetrics by name, such as "
            f'{{"kappa": torchmetrics.CohenKappa(...)}}.'
        )
    if not isinstance(arguments.optimizer, str) and not callable(arguments.optimizer):
        raise UsageError(
            "optimizer= must be a name, or a function of parameter groups that returns an optimizer, "
            "such as lambda groups: torch.optim.Adam(groups, lr=1e-3)."
        )
    replaces_all = criterion is not None and len(own) >= len(task.heads)
    if replaces_all or (criterion is not None and not isinstance(criterion, Mapping)):
        for option in ("label_smoothing", "class_weights"):
            if getattr(config, option) != OPTIONS[option].default:
                raise UsageError(f"{option} has no effect with criterion=. Give it to the loss.")
    for callback in arguments.callbacks:
        check_callback(callback)


def _check_validation(arguments: TrainArguments, data: TrainData, config: Config) -> None:
    """Raise UsageError for arguments that need validation data where there are none."""
    if data.val is not None:
        return
    if config.patience or config.schedule == "plateau" or config.monitor:
        raise UsageError(
            "patience, monitor and the schedule plateau need validation data. Give val=."
        )
    for name in ("val_fields", "val_transform"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"{name} has no effect without validation data. Give val=.")


def _sources(
    arguments: TrainArguments, data: TrainData, task: Task, config: Config
) -> tuple[InputSource, InputSource]:
    """Return the sources of the inputs for training and validation, checked against the options."""
    val = data.val if data.val is not None else data.train
    given = given_source(arguments.fields, arguments.transform, task, data.train, config)
    train_source = given or default_source(config)
    check_source(train_source, config, is_given=given is not None)
    given_val = given_source(
        arguments.val_fields,
        arguments.val_transform,
        task,
        val,
        config,
        prefix="val_",
        known=train_source.specs,
    )
    val_source = validation_source(train_source, given_val)
    if given is not None:
        try_samples(data.train, train_source, task, config)
    if given_val is not None:
        try_samples(val, val_source, task, config)
    if data.val is not None and given_val is None:
        check_no_randomness(data.val, val_source, task, config)
    return train_source, val_source


def _initial_model(
    arguments: TrainArguments,
    config: Config,
    task: Task,
    inputs: ModelInputs,
    loads_weights: bool,
) -> InitialModel:
    """Return the model with the weights that it starts from; a checkpoint replaces them later."""
    model, name = arguments.model, config.model
    weights = config.weights if loads_weights else None
    if isinstance(model, str):
        net = build(
            name,
            task.outputs,
            inputs.image_size or config.image_size,
            pretrained=model_weights.uses_timm_weights(name, weights),
            is_dense=task.is_dense,
        )
    else:
        net = call_factory(model, name, task.outputs)
    net = check_shapes(net, name, inputs, task.output_shape(inputs.image_shape))
    loaded = model_weights.load(net, name, weights) if weights is not None else None
    frozen = model_weights.freeze(net, config.freeze) if config.freeze else []
    return InitialModel(net=net, weights=loaded, frozen=frozen)


def _normalization(
    checkpoint: Mapping[str, Any] | None, loaded: model_weights.LoadedWeights | None
) -> Normalization:
    """Return the normalization of the checkpoint, or of the weights, or of ImageNet."""
    if checkpoint is not None:
        return ModelInputs.from_state(checkpoint["inputs"]).normalization
    return (loaded.normalization if loaded is not None else None) or Normalization()
