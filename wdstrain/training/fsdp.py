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
    """Return whether `shard_model` split the model, also while its tensors are complete."""
    if not _may_be_split():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def local(value: Tensor) -> Tensor:
    """Return the part of a tensor that this process has; the tensor itself if it is not split."""
    split: Any = value
    return cast(Tensor, split.to_local()) if _is_split(value) else value


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
    """Return the state dict with whole tensors.

    Of a split model they are on the CPU, and ranks other than 0 get none.
    """
    if not is_sharded(model):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state dict with whole tensors, which each process has.

    Raises RuntimeError or ValueError if it is of another model.
    """
    if not is_sharded(model):
        model.load_state_dict(dict(state))
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    # torch would leave tensors as they are that the state lacks
    own, given = (
        {n: getattr(v, "shape", None) for n, v in d.items()} for d in (model.state_dict(), state)
    )
    if own != given:
        names = sorted(
            name for name in own.keys() | given.keys() if own.get(name) != given.get(name)
        )
        raise ValueError(f"names or shapes differ: {', '.join(names)}")
    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict with whole tensors, as the optimizer of a whole model has it.

    torch's get_optimizer_state_dict fails for groups that hold frozen parameters.
    """
    state = optimizer.state_dict()
    return {**state, "state": {i: _whole(of) for i, of in state["state"].items()}}


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


def _may_be_split() -> bool:
    """Return whether there may be split tensors: importing their class takes half a second."""
    return dist.is_available() and dist.is_initialized()


def _is_split(value: object) -> bool:
    if not _may_be_split():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with whole tensors; those of split ones on the CPU of rank 0 only."""
    whole = {}
    for name, value in values.items():
        if _is_split(value):
            value = value.full_tensor()
            value = value.cpu() if dist.get_rank() == 0 else None
        whole[name] = value
    return whole


def _split_like(value: Any, parameter: Tensor) -> Any:
    """Return a tensor of the parameter's shape split like the parameter; others as they are."""
    from torch.distributed.tensor import distribute_tensor

    split: Any = parameter
    if not isinstance(value, Tensor) or not _is_split(split) or value.shape != split.shape:
        return value
    return distribute_tensor(value.to(split.device), split.device_mesh, split.placements)
