"""One step of the optimizer: forward, loss, backward and update of one or several batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.order.rng import key
from wdstrain.training.epoch_sums import StageTimer, StepSnapshot
from wdstrain.training.metrics import Monitor
from wdstrain.training.optim import Schedule, set_learning_rate
from wdstrain.training.run_state import RunState
from wdstrain.training.stop_signals import SignalHandler
from wdstrain.training.weights import set_frozen

_CONTAINERS = (nn.Sequential, nn.ModuleList)


class TrainStep:
    """Takes the steps of a run. What a step computes is a function of the position."""

    def __init__(
        self, run: RunState, *, monitor: Monitor, weights: list[Tensor | None], frozen: list[str]
    ) -> None:
        """weights: of the classes of each head. frozen: names of parameters that are not trained."""
        self._run, self._config, self._monitor = run, run.config, monitor
        self._distributed, self._device = run.setup.distributed, run.setup.device
        self._weights, self._frozen = weights, frozen
        # optimizer steps of an epoch
        self._updates = math.ceil(run.steps / run.config.accumulate)
        self._schedule = Schedule(run.config, self._updates)
        self._blocks = blocks_of(run.model) if run.config.grad_checkpointing else []
        self._wrap()

    def _wrap(self) -> None:
        """Make the callable that trains the model: compiled, and shared by all processes."""
        net = self._distributed.spread(self._run.model, self._device)
        # Batches have one shape. Parts that FSDP splits run the same code with different shapes. Torch
        # would compile it for dynamic shapes, which fails for batch norms.
        self._net: Any = torch.compile(net, dynamic=False) if self._config.compile else net

    def start_epoch(self) -> None:
        """Train all parameters from the epoch config.unfreeze_epoch on."""
        first = self._config.unfreeze_epoch
        if self._frozen and first is not None and self._run.position.epoch >= first:
            set_frozen(self._run.model, ())
            self._frozen = []
            self._wrap()  # DDP knows only parameters that required gradients when it was made

    def take(
        self, batches: Iterator[dict[str, Any]], signals: SignalHandler, timer: StageTimer
    ) -> int:
        """Take one step, and return the number of batches that it used."""
        run, state, config = self._run, self._run.position, self._config
        group = min(config.accumulate, run.steps - state.step)
        update = state.epoch * self._updates + state.step // config.accumulate
        rate = self._schedule(update, self._monitor.plateaus(state.history)) * state.lr_scale
        set_learning_rate(run.optimizer, config.lr * rate)
        torch.manual_seed(key("step", config.seed, state.epoch, state.step, self._distributed.rank))
        run.optimizer.zero_grad(set_to_none=True)
        snapshot = StepSnapshot(run.sums, run.model) if group > 1 else None
        for turn in range(group):
            try:
                batch = self._next_batch(batches, signals, is_first=turn == 0)
            except WdstrainError as error:
                run.data_error = error
                if snapshot is not None:
                    snapshot.restore()
                raise
            timer.lap("data")
            is_last = turn == group - 1
            with nullcontext() if is_last else self._distributed.accumulating(self._net):
                self._backward(batch, group)
            del batch
            timer.lap("compute")
        self._update(update)
        timer.lap("optimizer")
        return group

    def _next_batch(
        self, batches: Iterator[dict[str, Any]], signals: SignalHandler, *, is_first: bool
    ) -> dict[str, Any]:
        # All processes must stop at the same step, and none within a step of the optimizer.
        if self._distributed.size > 1 or not is_first:
            return next(batches)
        with signals.waiting():
            return next(batches)

    def _backward(self, batch: Mapping[str, Any], group: int) -> None:
        """Add the gradient of one batch of `group`."""
        run, setup = self._run, self._run.setup
        targets = run.task.targets(batch)
        with checkpointed(self._blocks):
            outputs = setup.call(self._net, batch)
            losses = run.task.losses(
                outputs,
                targets,
                smoothing=self._config.label_smoothing,
                weights=self._weights,
                criterion=setup.objects.criterion,
            )
            loss = run.scaler.scale(losses.mean() / group)
            loss.backward()  # type: ignore[no-untyped-call]
        # The scaler skips a step that overflows 16 bits, and tries a smaller scale.
        may_overflow = run.scaler.is_enabled()
        run.sums.add(outputs.detach(), targets, losses.detach(), may_overflow=may_overflow)

    def _update(self, update: int) -> None:
        """Change the weights, with clipped gradients."""
        run, config = self._run, self._config
        parameters = run.model.parameters()
        if config.clip_norm or config.clip_value:
            run.scaler.unscale_(run.optimizer)
        if config.clip_value:
            nn.utils.clip_grad_value_(parameters, config.clip_value)
        elif config.clip_norm:
            nn.utils.clip_grad_norm_(parameters, config.clip_norm)
        scale = self._loss_scale()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        if scale is not None and self._distributed.leads:  # other ranks skip the same steps
            run.sums.add_skipped(cast(Tensor, self._loss_scale()) < scale)
        if run.average is not None:
            run.average.update(run.model, update)

    def _loss_scale(self) -> Tensor | None:
        """Return the scale of the loss with fp16, without waiting for the device."""
        scaler = self._run.scaler
        if not scaler.is_enabled():
            return None
        return scaler.scale(torch.ones((), device=self._device))


# --- gradient checkpointing -----------------------------------------------------------------------
# It keeps only the inputs of a model's blocks, and computes the blocks again. It works for models of
# any origin whose blocks are in `nn.Sequential` or `nn.ModuleList`. timm's `set_grad_checkpointing`
# updates the means and variances of batch norms a second time in the backward pass; here only the
# first pass does, so validation is the same as without checkpointing.


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the outermost members of sequences and module lists that consist of several layers.

    Raises UsageError for a model without any.
    """
    blocks = list(_blocks(model, type(model) in _CONTAINERS))
    if not blocks:
        raise UsageError(
            "grad_checkpointing: the model has no blocks in a torch.nn.Sequential or "
            "torch.nn.ModuleList. Leave it out, or checkpoint in the model's own forward."
        )
    return blocks


def _blocks(module: nn.Module, is_container: bool) -> Iterator[nn.Module]:
    for child in module.children():
        layers = list(child.children())
        is_list = type(child) in _CONTAINERS
        is_nested = any(True for layer in layers for _ in layer.children())
        is_callable = type(child) is not nn.ModuleList and not (is_list and is_nested)
        if is_container and layers and is_callable:
            yield child
        else:
            yield from _blocks(child, is_list)


@contextmanager
def checkpointed(blocks: list[nn.Module]) -> Iterator[None]:
    """Checkpoint these blocks while the context is open.

    Copies of a model, such as its moving average, must not be made in the context: their blocks
    would run those of the original.
    """
    for block in blocks:
        block.forward = partial(_run, block, block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _run(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _frozen_statistics(block)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """Let batch norms update copies of their means and variances."""
    modules = block.modules()
    norms = [norm for norm in modules if isinstance(norm, _BatchNorm) and norm.training]
    buffers = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers()]
    for norm, name, buffer in buffers:
        setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, name, buffer in buffers:
            setattr(norm, name, buffer)
