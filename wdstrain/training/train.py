"""`wt.train`: a run from its first line to its report.

Refuse everything before a file is written; build; epochs; steps; validate; save. The state of a run
is its weights, the optimizer's state and a position: epoch and step. Order, images, learning rate
and the random numbers of the model (dropout) are functions of the position: torch is seeded at every
step. So a resumed run computes what the first run would have, bit for bit where the arithmetic is
deterministic. Checkpoints are written between two optimizer steps.
"""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import WdstrainError
from wdstrain.loader.device import to_device
from wdstrain.loader.epoch import EpochBatches
from wdstrain.order.rng import key
from wdstrain.report.terminal import reporting
from wdstrain.runtime.options import takes
from wdstrain.training.checkpoint import train_mode
from wdstrain.training.config import STAGES, Config, TrainArguments, refuse
from wdstrain.training.distributed import (
    GO_ON,
    SAVE,
    DistributedContext,
    SignalHandler,
    Stopped,
    raise_stopped,
)
from wdstrain.training.evaluate import evaluate_pass
from wdstrain.training.inputs import batch_augmentation
from wdstrain.training.predict import Scored
from wdstrain.training.run import Run, resume
from wdstrain.training.run_dir import (
    Passes,
    RunLog,
    best_sentence,
    check_out,
    epoch_lines,
    epoch_metrics,
    samples_sentence,
    verdict,
)
from wdstrain.training.tasks import Task


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


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Raise UsageError for a method on_... that no run calls."""
    known = [name for name in vars(Callback) if name.startswith("on_")]
    unknown = [
        f"{type(callback).__name__}.{name}"
        for callback in callbacks
        for name in dir(callback)
        if name.startswith("on_") and name not in known and callable(getattr(callback, name))
    ]
    refuse(
        unknown,
        f"{', '.join(unknown)} is never called. Methods of callbacks are {', '.join(known)}.",
    )


@dataclass
class TrainResult:
    """Result of a run.

    epochs: metrics of each epoch. best: validation metrics of the best epoch. model: with its
    weights at the end. stop_reason: why training ended. monitor: the metric that chose the best.
    """

    folder: str
    task: Task
    model: nn.Module = field(repr=False)
    epochs: list[dict[str, Any]] = field(default_factory=list, repr=False)
    best: dict[str, float] | None = None
    stop_reason: str = ""
    monitor: str = ""

    @property
    def val(self) -> dict[str, float]:
        """Validation metrics of the last epoch."""
        return self.epochs[-1].get("val", {}) if self.epochs else {}


@takes(TrainArguments)
@WorkerDeathsAsErrors()
def train(arguments: TrainArguments) -> TrainResult:
    """Train a model, validate it after each epoch, and keep the run in the folder `out`.

    Under torchrun every process calls this, and they share each batch. The first one writes. Raises
    UsageError and ShardError before anything is written, and Stopped after a signal, when a
    checkpoint was written.
    """
    check_callbacks(arguments.callbacks)
    distributed = DistributedContext()
    with ExitStack() as stack:
        reporter = stack.enter_context(reporting(arguments.progress, distributed.leads))
        if distributed.leads:  # other ranks may see files that it has written already
            check_out(
                os.fspath(arguments.out), overwrite=arguments.overwrite, resume=arguments.resume
            )
        run = Run(arguments, distributed, reporter)
        for loader in filter(None, (run.loader, run.val_loader)):
            stack.callback(loader.close)
        _set_arithmetic(run.config, stack)
        stack.enter_context(distributed.joined(run.setup.device))
        # not before: a process that waits for others in C code would not end at SIGTERM
        signals = stack.enter_context(SignalHandler().watched())
        run.check_agreement()
        run.start()
        for line in _start_lines(run):
            reporter.line(textwrap.fill(line, 79, subsequent_indent="  "))
        resume(run)
        _fit(run, signals, RunLog(run, stack))
        distributed.gather(None)  # waits until the last checkpoint is there
        reporter.line(f"training ended: {run.stop_reason}")
        if run.state.history:
            reporter.line(best_sentence(run.state.history, run.state.best, run.monitor))
    return TrainResult(
        run.folder,
        run.task,
        run.scored_model,
        run.state.history,
        run.state.best,
        run.stop_reason,
        run.monitor.name,
    )


def _start_lines(run: Run) -> list[str]:
    """Return what a run trains, on which data and where."""
    config = run.config
    sizes = [parameter.numel() for parameter in run.model.parameters()]
    lines = (
        f"model {config.model}: {sum(sizes):,} parameters, on {run.setup.device}",
        f"task: {run.task}",
        f"training: {samples_sentence(run.train_set, run.task)}",
        "no validation: give val=, a split val, or fold="
        if run.val_set is None
        else f"validation: {samples_sentence(run.val_set, run.task)}",
        f"weights: {config.weights}" if config.weights and run.checkpoint is None else "",
        f"new weights: {', '.join(run.fresh)}" if run.fresh else "",
        f"frozen: {len(run.frozen)} parameter tensors" if run.frozen else "",
    )
    return list(filter(None, lines))


def _set_arithmetic(config: Config, stack: ExitStack) -> None:
    """Set deterministic algorithms and TF32 for a run. stack: restores them."""
    cudnn = torch.backends.cudnn
    stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
    stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
    if config.deterministic:
        # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        cudnn.benchmark = False
    if config.tf32:
        torch.set_float32_matmul_precision("high")


# --- epochs ---------------------------------------------------------------------------------------


def _fit(run: Run, signals: SignalHandler, log: RunLog) -> None:
    """Train until all epochs are done, or validation stops improving, or a callback stops it.

    After a signal a checkpoint is written and Stopped raised. After an error, such as one of the
    data, one of the last step is written too, for a later resume; not within a step, as with the
    second of accumulated batches, and not with several processes: a checkpoint needs all sums.
    """
    run.call("on_train_start")
    try:
        while not run.is_over():
            _train_epoch(run, signals, log)
            if not run.is_stopped:
                _finish_epoch(run, signals, log)
    except (WdstrainError, Stopped) as error:
        is_signal = isinstance(error, Stopped)
        if not is_signal and (run.in_step or run.setup.distributed.size > 1):
            raise
        run.save()
        if run.write_error is None:
            run.setup.reporter.line(
                f"A checkpoint of {run.title}, step {run.state.step}, was written. Resume continues "
                "from it."
            )
        elif is_signal:  # there is no checkpoint to announce
            raise run.write_error from None
        raise
    if run.state.step:
        run.save()
    if run.write_error is not None:
        raise run.write_error
    run.call("on_train_end")


def _train_epoch(run: Run, signals: SignalHandler, log: RunLog) -> None:
    """Train the rest of an epoch."""
    state, config, device = run.state, run.config, run.setup.device
    if state.step >= run.steps:  # only the validation is missing
        return
    if run.frozen and config.unfreeze_epoch is not None and state.epoch >= config.unfreeze_epoch:
        for name in run.frozen:
            run.model.get_parameter(name).requires_grad_(True)
        run.frozen = []
        run.wrap()
    train_mode(run.model)
    run.setup.criterion_modules.train()
    epoch = run.loader.epoch(state.epoch, start=state.step, until=config.epochs)
    augmentation = batch_augmentation(run.task, run.setup.inputs, config, state.epoch)
    batches = to_device(epoch, device, augmentation)
    log.start_epoch()
    plateaus = run.monitor.plateaus(state.history)
    while state.step < run.steps:
        state.step += _take_step(run, epoch, batches, signals, log, plateaus)
        log.update()
        run.call("on_step_end")
        if run.is_stopped:
            break
        if state.step < run.steps and _checkpoint_is_due(run, signals):
            run.save()
    state.verdict = verdict(
        run.loader.report(), log.seconds, "GPU" if device.type == "cuda" else "model"
    )
    if state.step == len(run.loader):
        next(batches, None)  # the loader compares what was planned and what was delivered


def _finish_epoch(run: Run, signals: SignalHandler, log: RunLog) -> None:
    """Validate, record the metrics of the epoch, write a checkpoint, and report."""
    state, title, report = run.state, run.title, run.setup.reporter.line
    begin = time.monotonic()
    passes = _validate(run, signals)
    metrics = epoch_metrics(run, passes) | {"val_seconds": time.monotonic() - begin}
    if passes:
        run.monitor.check(metrics["val"])
    former, is_best = state.best, run.monitor.is_best(metrics.get("val"), state.best)
    metrics["is_best"] = is_best
    state.history.append(metrics)
    state.epoch, state.step, state.seconds = state.epoch + 1, 0, dict.fromkeys(STAGES, 0.0)
    state.best = metrics.get("val") if is_best else former
    state.since_best = run.monitor.waits(state.history, run.config.min_delta)[-1]
    recorded = run.loader.recorded() if run.config.record else None
    if run.is_leader:
        best = best_sentence(state.history, state.best, run.monitor)
        log.epoch(passes["val"][1] if passes else {}, best, recorded)
    for line in epoch_lines(title, state.history, run.monitor.name):
        report(line)
    run.call("on_epoch_end", metrics)
    run.sums.values.zero_()
    run.save(best=is_best)  # last: it has what callbacks changed
    if is_best and run.write_error is not None:
        state.best = former


def _checkpoint_is_due(run: Run, signals: SignalHandler) -> bool:
    """Return whether to write a checkpoint between two steps, by count of steps or by the clock.

    Raises Stopped after a signal. Collective.
    """
    step, config, wish, now = run.state.step, run.config, GO_ON, time.monotonic()
    if run.is_leader and 0 < 60 * config.checkpoint_minutes < now - run.saved_at:
        wish, run.saved_at = SAVE, now  # asked once; all processes write it one step later
    wish = raise_stopped(signals, run.setup.distributed, wish)
    # A count of steps is the same on all processes and needs no exchange.
    every = config.checkpoint_every
    return wish == SAVE or bool(every and step // every > (step - config.accumulate) // every)


def _validate(run: Run, signals: SignalHandler) -> Passes:
    """Validate the scored weights and, beside averaged ones, the trained weights."""
    if run.val_loader is None:
        return {}
    models = {"val": (run.scored_model, "validating")}
    if run.average is not None:
        models["val_raw"] = (run.model, "validating without averaging")
    passes, distributed = {}, run.setup.distributed

    def until_stopped(batches: Iterator[Scored]) -> None:
        for _ in batches:
            raise_stopped(signals, distributed)

    for name, (model, title) in models.items():
        # Batch norms of each process saw other images.
        distributed.broadcast([*model.buffers(), *run.setup.criterion_modules.buffers()])
        passes[name] = evaluate_pass(
            model,
            run.val_loader,
            run.setup,
            title,
            limit=run.config.limit_val_batches,
            consume=until_stopped,
        )
    return passes


# --- a step ---------------------------------------------------------------------------------------


def _take_step(
    run: Run,
    epoch: EpochBatches,
    batches: Iterator[dict[str, Any]],
    signals: SignalHandler,
    log: RunLog,
    plateaus: int,
) -> int:
    """Take one step of the optimizer, and return the number of batches that it used.

    batches: of the epoch, on the device. plateaus: how often validation stopped improving.
    """
    state, config, distributed = run.state, run.config, run.setup.distributed
    group = min(config.accumulate, run.steps - state.step)
    update = state.epoch * run.updates + state.step // config.accumulate
    rate = run.schedule(update, plateaus) * float(run.lr_scale)
    for values, peak in zip(run.optimizer.param_groups, run.peak_rates, strict=True):
        values["lr"] = peak * rate
    torch.manual_seed(key("step", config.seed, state.epoch, state.step, distributed.rank))
    run.optimizer.zero_grad(set_to_none=True)
    for turn in range(group):
        # all processes must stop at the same step, and none within a step of the optimizer
        may_stop = distributed.size == 1 and turn == 0
        with signals.waiting() if may_stop else nullcontext():
            batch = next(batches)
        run.in_step = True  # sums and buffers change from here on
        run.sums.count("bad", len(epoch.delivered.bad))
        log.timer.lap("data")
        with nullcontext() if turn == group - 1 else distributed.accumulating(run.net):
            _backward(run, batch, group)
        del batch
        log.timer.lap("compute")
    _update_weights(run, update)
    run.in_step = False
    log.timer.lap("optimizer")
    return group


def _backward(run: Run, batch: Mapping[str, Any], group: int) -> None:
    """Add the gradient of one batch of `group`."""
    setup, targets, outputs = run.setup, run.task.targets(batch), None
    if setup.training_step is not None:
        losses = setup.step_losses(run.net, batch)
    else:
        outputs = setup.call(run.net, batch)
        losses = run.task.losses(
            outputs,
            targets,
            smoothing=run.config.label_smoothing,
            weights=run.class_weights,
            criterion=setup.criterion,
        )
    loss = run.scaler.scale(losses.mean() / group)
    loss.backward()  # type: ignore[no-untyped-call]
    run.sums.add(outputs, targets, losses.detach())
    if run.config.record:
        right = (
            {"right": run.task.heads[0].right(run.task.split(outputs)[0], targets[0])}
            if outputs is not None and run.task.main_metric == "accuracy"  # of a single label
            else {}
        )
        run.loader.record(batch, loss=losses, **right)


def _update_weights(run: Run, update: int) -> None:
    """Change the weights, with clipped gradients. update: number of the step of the optimizer."""
    config, distributed = run.config, run.setup.distributed
    own = list(run.setup.criterion_modules.parameters())
    parameters = [*run.model.parameters(), *own]
    for parameter in own:  # DDP shares the gradients of the model only
        if parameter.grad is not None:
            parameter.grad = distributed.reduce(parameter.grad) / distributed.size
    if config.clip_value or config.clip_norm:
        run.scaler.unscale_(run.optimizer)
    if config.clip_value:
        nn.utils.clip_grad_value_(parameters, config.clip_value)
    elif config.clip_norm:
        nn.utils.clip_grad_norm_(parameters, config.clip_norm)
    one = torch.ones((), device=run.setup.device)
    scale = run.scaler.scale(one)  # as a tensor, so that the step does not wait for the device
    run.scaler.step(run.optimizer)
    run.scaler.update()
    if run.scaler.is_enabled() and run.is_leader:  # other ranks skip the same steps
        run.sums.count("skipped", run.scaler.scale(one) < scale)
    if run.average is not None:
        run.average.update(run.model, update)
