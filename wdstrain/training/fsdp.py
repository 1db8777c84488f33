"""FSDP2: parameters, gradients and optimizer state are split over the processes of a run.

Each process keeps an even part of every tensor. Blocks of the model are completed one after the
other while they compute. Checkpoints hold whole tensors, so a run resumes on any number of
processes, and also without FSDP. Every function here is collective: all processes call it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wdstrain.training.models import blocks_in

_SMALLEST_BLOCK = 100_000  # parameters; smaller blocks are completed together with what is around


def shard_model(model: nn.Module, device: torch.device, cpu_group: Any) -> None:
    """Split the parameters of a model on the CPU, in place, and move them to the device.

    All processes start from the weights and buffers of rank 0, which `cpu_group` copies. Make the
    optimizer afterwards.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for value in model.state_dict().values():
        if isinstance(value, Tensor):
            dist.broadcast(value, 0, group=cpu_group)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in [*_parts(model), model]:
        fully_shard(block, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    """Return whether `shard_model` split the model, also while its tensors are complete.

    Names of methods tell: importing the classes of torch takes half a second.
    """
    return any(hasattr(module, "set_requires_gradient_sync") for module in model.modules())


def local(value: Tensor) -> Tensor:
    """Return the part of a tensor that this process has; the tensor itself if it is not split."""
    return cast(Tensor, cast(Any, value).to_local()) if _is_split(value) else value


def _is_split(value: object) -> bool:
    return hasattr(value, "full_tensor")


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Add gradients up in this process; the next backward pass outside the context shares them."""
    sharded: Any = model
    sharded.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        sharded.set_requires_gradient_sync(True)


# --- state dicts with whole tensors ---------------------------------------------------------------


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict with whole tensors; those of split ones on the CPU of rank 0 only."""
    return {name: _whole(value) for name, value in model.state_dict().items()}


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state dict with whole tensors, which each process has.

    Raises RuntimeError if it is of another model.
    """
    own = model.state_dict()
    model.load_state_dict(
        {name: _split_like(value, own.get(name)) for name, value in state.items()}
    )


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict with whole tensors, as the optimizer of a whole model has it.

    torch's get_optimizer_state_dict fails for groups that hold frozen parameters.
    """
    state = optimizer.state_dict()
    whole = {i: {name: _whole(v) for name, v in of.items()} for i, of in state["state"].items()}
    return {**state, "state": whole}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state dict with whole tensors, which each process has.

    Raises ValueError if it is of another optimizer.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    split = {
        i: {name: _split_like(value, parameters[i]) for name, value in of.items()}
        for i, of in state["state"].items()
        if i < len(parameters)
    }
    optimizer.load_state_dict({**state, "state": split})


def _whole(value: Any) -> Any:
    """Return a whole tensor; of a split one on the CPU of rank 0, None on other ranks."""
    if not _is_split(value):
        return value
    whole = value.full_tensor()
    return whole.cpu() if dist.get_rank() == 0 else None


def _split_like(value: Any, like: Any) -> Any:
    """Return a tensor of the same shape as a split one split as that is; others as they are."""
    if not isinstance(value, Tensor) or not _is_split(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


# --- parts ----------------------------------------------------------------------------------------


def _parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules to split by themselves: large blocks of sequences.

    Only these are known to be called as modules. Attention, for example, reads the weights of its
    layers without calling them. Blocks that share a parameter with other modules are left out.
    """
    uses = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    parts = []
    for block in blocks_in(model):
        parameters = list(block.parameters())
        is_alone = all(uses[parameter] == 1 for parameter in parameters)
        if is_alone and sum(parameter.numel() for parameter in parameters) >= _SMALLEST_BLOCK:
            parts.append(block)
    return parts
