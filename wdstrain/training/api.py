"""`wt.train` and `wt.evaluate`: they put the parts of a run together, and close them at the end.

Everything that can be wrong is checked before the run's folder is touched: addresses, labels,
classes, options, the model.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.runtime.options import takes
from wdstrain.training import weights as model_weights
from wdstrain.training.arguments import (
    EvaluateArguments,
    TrainArguments,
    check_cache,
    given_options,
)
from wdstrain.training.checkpoint import read_last
from wdstrain.training.config import Config
from wdstrain.training.data import (
    TrainData,
    addresses,
    class_weights,
    open_set,
    train_loader,
    val_loader,
    with_task_labels,
)
from wdstrain.training.distributed import DistributedContext, device_of
from wdstrain.training.epoch_report import best_sentence, samples_sentence
from wdstrain.training.evaluation import Setup, UserObjects, evaluate_pass
from wdstrain.training.inputs import InputSource, ModelInputs, Normalization
from wdstrain.training.loaded_checkpoint import LoadedCheckpoint
from wdstrain.training.models import ModelFactory, build, call_factory, check_shapes
from wdstrain.training.progress import reporting
from wdstrain.training.run_dir import CHECKPOINTS, RunDir, check_out
from wdstrain.training.run_logger import RunLogger
from wdstrain.training.run_state import RunState
from wdstrain.training.sources import (
    check_no_randomness,
    check_source,
    default_source,
    given_source,
    validation_source,
)
from wdstrain.training.stop_signals import SignalHandler
from wdstrain.training.tasks import Task
from wdstrain.training.trainer import Trainer


@dataclass
class TrainResult:
    """Result of a run.

    epochs: metrics of each epoch. best: validation metrics of the best epoch. model: with its
    weights at the end. stop_reason: why training ended. monitor: the metric that chose the best.
    """

    folder: str
    task: Task
    model: nn.Module
    epochs: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, float] | None = None
    stop_reason: str = ""
    monitor: str = ""

    @property
    def val(self) -> dict[str, float]:
        """Validation metrics of the last epoch."""
        return self.epochs[-1].get("val", {}) if self.epochs else {}

    def __repr__(self) -> str:
        last = {name: round(value, 4) for name, value in self.val.items()}
        return f"TrainResult({self.folder!r}, {len(self.epochs)} epochs, val={last})"


@takes(TrainArguments)
@WorkerDeathsAsErrors()
def train(arguments: TrainArguments) -> TrainResult:
    """Train a model, validate it after each epoch, and keep the run in the folder `out`.

    Under torchrun every process calls this, and they share each batch. The first one writes. Raises
    UsageError and ShardError before anything is written, and Stopped after a signal, when a
    checkpoint was written.
    """
    urls, val, model, optimizer = (
        arguments.urls,
        arguments.val,
        arguments.model,
        arguments.optimizer,
    )
    resume, overwrite = arguments.resume, arguments.overwrite
    config = _absolute(arguments.config())
    folder, distributed = os.fspath(arguments.out), DistributedContext()
    if distributed.leads:  # the others may see what it has begun to write
        check_out(folder, overwrite=overwrite, resume=resume)
    data = TrainData.of(urls, val, config, arguments.fields)
    config = replace(config, label=config.label or data.undeclared)
    checkpoint, unreadable = read_last(os.path.join(folder, CHECKPOINTS)) if resume else (None, [])
    if data.val is None and (config.patience or config.schedule == "plateau" or config.monitor):
        raise UsageError(
            "patience, monitor and the schedule plateau need validation data. Give val=."
        )
    task = data.task(checkpoint)
    device = device_of(config.device, distributed)
    torch.manual_seed(config.seed)
    train_source, val_source = _sources(arguments, data, task, config)
    inputs = ModelInputs(train_source.specs)
    net, loaded = _make_model(config, task, model, inputs, checkpoint is None)
    inputs = ModelInputs(val_source.specs, _normalization(checkpoint, loaded))
    frozen = model_weights.freeze(net, config.freeze) if config.freeze else []
    # lanes of the run that is resumed, so that it may have another number of processes
    lanes = config.lanes or (checkpoint["loader"]["lanes"] if checkpoint is not None else None)
    loader = train_loader(data.train, task, train_source, config, distributed, lanes)
    validation = (
        val_loader(data.val, task, val_source, config, distributed)
        if data.val is not None
        else None
    )
    with ExitStack() as stack:
        reporter = stack.enter_context(reporting(arguments.progress, distributed.leads))
        stack.callback(loader.close)
        if validation is not None:
            stack.callback(validation.close)
        stack.enter_context(_arithmetic(config, device))
        stack.enter_context(distributed.joined(device))
        _check_agreement(
            distributed, folder, (_position(checkpoint), data.train.fingerprint, vars(config))
        )
        signals = stack.enter_context(SignalHandler().watched())
        # inside the handler: between the two, a signal could end the process before it reports
        stack.enter_context(distributed.explained())
        if config.channels_last and not config.fsdp:  # which splits contiguous tensors only
            net = net.to(memory_format=torch.channels_last)
        setup = Setup(
            task=task,
            config=config,
            inputs=inputs,
            device=device,
            distributed=distributed,
            reporter=reporter,
            objects=UserObjects(
                criterion=arguments.criterion,
                optimizer=None if isinstance(optimizer, str) else optimizer,
                metrics=arguments.metrics or {},
                callbacks=arguments.callbacks,
            ),
        )
        logger = RunLogger(task)
        run = RunState(net, loader, validation, setup, logger)
        weights = [
            class_weights(data.train, head, config.class_weights, device) for head in task.heads
        ]
        trainer = Trainer(run, weights=weights, frozen=frozen)
        for line in _start_lines(trainer, data, frozen, loaded):
            reporter.line(textwrap.fill(line, 79, subsequent_indent="  "))
        if checkpoint is not None:
            for reason in unreadable:
                reporter.line(f"{reason} The checkpoint before it is used.")
            run.load(checkpoint)
            state = run.position
            reporter.line(f"resuming at epoch {state.epoch + 1}, step {state.step} of {run.steps}")
        if distributed.leads:
            where = {"train": addresses(urls), "val": addresses(val) if val is not None else None}
            run_dir = RunDir(folder, config.toml(where), overwrite=overwrite, resume=resume)
            stack.callback(run_dir.close)
            stack.callback(logger.close)
            indexes = {"train": data.train} | ({"val": data.val} if data.val is not None else {})
            logger.start(run_dir, config, run.position, indexes, run.steps)
        trainer.fit(signals)
        distributed.wait()  # until the last checkpoint is there
        reporter.line(f"training ended: {trainer.stop_reason}")
        state = run.position
        if state.history:
            reporter.line(best_sentence(state.history, state.best, trainer.monitor))
    state = run.position
    return TrainResult(
        folder,
        task,
        run.scored_model,
        state.history,
        state.best,
        trainer.stop_reason,
        trainer.monitor,
    )


@takes(EvaluateArguments)
@WorkerDeathsAsErrors()
def evaluate(arguments: EvaluateArguments) -> tuple[Task, dict[str, float]]:
    """Return (task, metrics) of a checkpoint on shards; every sample counts once.

    Under torchrun all processes share the samples.
    """
    distributed = DistributedContext()
    loaded = LoadedCheckpoint.of(
        arguments.checkpoint, model=arguments.model, options=given_options(arguments)
    )
    undeclared = loaded.config.label is not None
    index = with_task_labels(open_set(arguments.urls), loaded.task, undeclared=undeclared)
    check_cache(given_options(arguments), index)
    loaded.task.check(index)
    config, task = loaded.config, loaded.task
    source = loaded.source(arguments.fields, arguments.transform, index)
    device = device_of(config.device, distributed)
    loader = val_loader(index, task, source, config, distributed)
    with ExitStack() as stack:
        reporter = stack.enter_context(reporting(arguments.progress, distributed.leads))
        stack.callback(loader.close)
        stack.enter_context(distributed.joined(device))
        setup = Setup(
            task=task,
            config=config,
            inputs=loaded.inputs,
            device=device,
            distributed=distributed,
            reporter=reporter,
            objects=UserObjects(criterion=arguments.criterion, metrics=arguments.metrics or {}),
        )
        found, _ = evaluate_pass(loaded.model.to(device), loader, setup, "evaluating")
    return task, found


# --- parts ----------------------------------------------------------------------------------------


def _absolute(config: Config) -> Config:
    """Return options with absolute paths, so that a run is resumed from any folder."""
    paths: dict[str, str | None] = {"cache_dir": config.cache_dir}
    if config.weights is not None and model_weights.is_file(config.weights):
        paths["weights"] = config.weights
    absolute: dict[str, Any] = {n: os.path.abspath(p) for n, p in paths.items() if p is not None}
    return replace(config, **absolute)


def _sources(
    arguments: TrainArguments, data: TrainData, task: Task, config: Config
) -> tuple[InputSource, InputSource]:
    """Return the sources of the inputs for training and validation, checked against the options."""
    val = data.val if data.val is not None else data.train
    for name in ("val_fields", "val_transform"):
        if getattr(arguments, name) is not None and data.val is None:
            raise UsageError(f"{name} has no effect without validation data. Give val=.")
    given = given_source(arguments.fields, arguments.transform, task, data.train, config)
    train_source = given or default_source(config)
    check_source(train_source, config, is_given=given is not None)
    given_val = given_source(
        arguments.val_fields, arguments.val_transform, task, val, config, prefix="val_"
    )
    val_source = validation_source(train_source, given_val)
    if data.val is not None and given_val is None:
        check_no_randomness(data.val, val_source, task, config)
    return train_source, val_source


def _make_model(
    config: Config,
    task: Task,
    model: str | ModelFactory | nn.Module,
    inputs: ModelInputs,
    loads_weights: bool,
) -> tuple[nn.Module, model_weights.LoadedWeights | None]:
    """Return the model and the weights that it starts from. A checkpoint replaces them later."""
    name, weights = config.model, config.weights if loads_weights else None
    if isinstance(model, str):
        pretrained = model_weights.uses_timm_weights(name, weights)
        net = build(
            name,
            task.outputs,
            inputs.image_size or config.image_size,
            pretrained=pretrained,
            is_dense=task.is_dense,
        )
    else:
        net = call_factory(model, name, task.outputs)
    net = check_shapes(net, name, inputs, task.output_shape(inputs.image_shape))
    return net, model_weights.load(net, name, weights) if weights is not None else None


def _normalization(
    checkpoint: Mapping[str, Any] | None, loaded: model_weights.LoadedWeights | None
) -> Normalization:
    """Return the normalization of the checkpoint, or of the weights, or of ImageNet."""
    if checkpoint is not None:
        return ModelInputs.from_state(checkpoint["inputs"]).normalization
    return (loaded.normalization if loaded is not None else None) or Normalization()


def _position(checkpoint: Mapping[str, Any] | None) -> tuple[int, int] | None:
    state = None if checkpoint is None else checkpoint["state"]
    return None if state is None else (state["epoch"], state["step"])


def _check_agreement(distributed: DistributedContext, folder: str, facts: object) -> None:
    """Raise UsageError if the processes see different checkpoints, shards or options."""
    if any(other != facts for other in distributed.gather(facts)):
        raise UsageError(
            f"rank {distributed.rank} of {distributed.size}: the processes of this job see different "
            f"checkpoints in {folder}, different shards or different options. Give all of them the "
            f"same, and a folder that all of them share."
        )


def _start_lines(
    trainer: Trainer,
    data: TrainData,
    frozen: Sequence[str],
    loaded: model_weights.LoadedWeights | None,
) -> Iterator[str]:
    """Yield what a run trains, on which data and where."""
    config, device = trainer.config, trainer.setup.device
    parameters = list(trainer.model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    millions = f"{count / 1e6:.2f} million" if count >= 10_000 else str(count)
    yield f"model {config.model}: {millions} parameters, on {device}"
    yield f"task: {trainer.task}"
    yield f"training: {samples_sentence(data.train, trainer.task)}"
    if data.val is not None:
        yield f"validation: {samples_sentence(data.val, trainer.task)}"
    else:
        yield "no validation: give val=, a split val, or fold="
    if loaded is not None:
        fresh = f"; new: {', '.join(loaded.fresh)}" if loaded.fresh else ""
        yield f"weights: {config.weights}{fresh}"
    if frozen:
        yield f"frozen: {len(frozen)} of {len(parameters)} parameter tensors"


@contextmanager
def _arithmetic(config: Config, device: torch.device) -> Iterator[None]:
    """Set deterministic algorithms and TF32 for a run, and restore them after it."""
    algorithms = torch.are_deterministic_algorithms_enabled()
    benchmark, precision = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    if config.deterministic:
        if device.type == "cuda":  # cuBLAS reads it when it is first used
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if config.tf32:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms)
        torch.backends.cudnn.benchmark = benchmark
        torch.set_float32_matmul_precision(precision)
