"""`wt.train` and `wt.evaluate`: they put the parts of a run together, and close them at the end."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.report.terminal import Reporter, reporting
from wdstrain.runtime.options import takes
from wdstrain.shards.resolve import open_shards
from wdstrain.training.arguments import (
    EvaluateArguments,
    TrainArguments,
    check_cache,
    given_options,
)
from wdstrain.training.checked_run import CheckedRun
from wdstrain.training.config import Config
from wdstrain.training.data import (
    addresses,
    class_weights,
    val_loader,
    with_task_labels,
)
from wdstrain.training.distributed import DistributedContext, device_of
from wdstrain.training.epoch_report import best_sentence, samples_sentence
from wdstrain.training.evaluation import Setup, UserObjects, evaluate_pass
from wdstrain.training.loaded_checkpoint import LoadedCheckpoint
from wdstrain.training.run_dir import RunDir
from wdstrain.training.run_logger import RunLogger
from wdstrain.training.run_state import RunState
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
    distributed = DistributedContext()
    checked = CheckedRun.of(arguments, distributed)
    with ExitStack() as stack:
        reporter = stack.enter_context(reporting(arguments.progress, distributed.leads))
        stack.callback(checked.loader.close)
        if checked.val_loader is not None:
            stack.callback(checked.val_loader.close)
        stack.enter_context(_arithmetic(checked.config, checked.device))
        stack.enter_context(distributed.joined(checked.device))
        checked.check_agreement(distributed)
        signals = stack.enter_context(SignalHandler().watched())
        # inside the handler: between the two, a signal could end the process before it reports
        stack.enter_context(distributed.explained())
        trainer = _trainer(arguments, checked, distributed, reporter)
        for line in _start_lines(trainer, checked):
            reporter.line(textwrap.fill(line, 79, subsequent_indent="  "))
        _resume(trainer.run, checked, reporter)
        if distributed.leads:
            _open_folder(arguments, trainer.run, checked, stack)
        trainer.fit(signals)
        distributed.wait()  # until the last checkpoint is there
        reporter.line(f"training ended: {trainer.stop_reason}")
        state = trainer.state
        if state.history:
            reporter.line(best_sentence(state.history, state.best, trainer.monitor))
    return TrainResult(
        checked.folder,
        checked.task,
        trainer.run.scored_model,
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
    index = with_task_labels(open_shards(arguments.urls), loaded.task, undeclared=undeclared)
    check_cache(given_options(arguments), index)
    loaded.task.check(index)
    config, task = loaded.config, loaded.task
    source = loaded.source(arguments.fields, arguments.transform, index, reads_labels=True)
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


# --- parts of a run -------------------------------------------------------------------------------


def _trainer(
    arguments: TrainArguments,
    checked: CheckedRun,
    distributed: DistributedContext,
    reporter: Reporter,
) -> Trainer:
    """Return the trainer of a run, at its first step."""
    config, net = checked.config, checked.model.net
    if config.channels_last and not config.fsdp:  # which splits contiguous tensors only
        net = net.to(memory_format=torch.channels_last)
    optimizer = None if isinstance(arguments.optimizer, str) else arguments.optimizer
    setup = Setup(
        task=checked.task,
        config=config,
        inputs=checked.inputs,
        device=checked.device,
        distributed=distributed,
        reporter=reporter,
        objects=UserObjects(
            criterion=arguments.criterion,
            optimizer=optimizer,
            metrics=arguments.metrics or {},
            callbacks=arguments.callbacks,
        ),
    )
    run = RunState(net, checked.loader, checked.val_loader, setup, RunLogger(checked.task))
    weights = [
        class_weights(checked.data.train, head, config.class_weights, checked.device)
        for head in checked.task.heads
    ]
    return Trainer(run, weights=weights, frozen=checked.model.frozen)


def _resume(run: RunState, checked: CheckedRun, reporter: Reporter) -> None:
    """Load the checkpoint, if there is one."""
    if checked.checkpoint is None:
        return
    for reason in checked.unreadable:
        reporter.line(f"{reason} The checkpoint before it is used.")
    run.load(checked.checkpoint)
    state = run.position
    reporter.line(f"resuming at epoch {state.epoch + 1}, step {state.step} of {run.steps}")


def _open_folder(
    arguments: TrainArguments, run: RunState, checked: CheckedRun, stack: ExitStack
) -> None:
    """Open the folder of the run, and start its log. stack: closes both."""
    val, data = arguments.val, checked.data
    where = {
        "train": addresses(arguments.urls),
        "val": addresses(val) if val is not None else None,
    }
    run_dir = RunDir(
        checked.folder,
        checked.config.toml(where),
        overwrite=arguments.overwrite,
        resume=arguments.resume,
    )
    stack.callback(run_dir.close)
    stack.callback(run.logger.close)
    indexes = {"train": data.train} | ({"val": data.val} if data.val is not None else {})
    run.logger.start(run_dir, checked.config, run.position, indexes, run.steps)


def _start_lines(trainer: Trainer, checked: CheckedRun) -> Iterator[str]:
    """Yield what a run trains, on which data and where."""
    config, data = checked.config, checked.data
    frozen, loaded = checked.model.frozen, checked.model.weights
    parameters = list(trainer.model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    millions = f"{count / 1e6:.2f} million" if count >= 10_000 else str(count)
    yield f"model {config.model}: {millions} parameters, on {checked.device}"
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
