"""Gradient checkpointing: keep only the inputs of a model's blocks, and compute the blocks again.

It works for models of any origin whose blocks are in `nn.Sequential` or `nn.ModuleList`. timm's
`set_grad_checkpointing` updates the means and variances of batch norms a second time in the
backward pass; here only the first pass does, so validation is the same as without checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from wdstrain.errors import UsageError

_CONTAINERS = (nn.Sequential, nn.ModuleList)


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
