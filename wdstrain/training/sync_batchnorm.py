"""Batch norms over the batches of all processes, as one process with the whole batch has them."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wdstrain.errors import UsageError


def synchronize_batch_norms(model: nn.Module, device: torch.device, processes: int) -> nn.Module:
    """Return the model with synchronized batch norms; names and shapes of its state stay the same.

    A single process needs no change. Raises UsageError for a model without batch norms.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        raise UsageError("sync_batchnorm=True: the model has no batch norm. Leave it out.")
    if processes == 1:
        return model
    if device.type != "cpu":
        convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        return cast(nn.Module, convert(model))
    for module in norms:  # torch's own class refuses the CPU
        module.__class__ = _SyncBatchNormOnCpu
    return model


class _SyncBatchNormOnCpu(_BatchNorm):
    """Batch norm that shares its statistics by gloo. The batches of all processes are equally large."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Take any number of dimensions."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        values = input.float()
        dims, shape = [0, *range(2, input.ndim)], [1, -1, *[1] * (input.ndim - 2)]
        mean = _mean_of_all(values.mean(dims))
        centered = values - mean.view(shape)
        variance = _mean_of_all(centered.square().mean(dims))
        self._track(mean, variance, input.numel() // input.shape[1] * dist.get_world_size())
        scale = (variance + self.eps).rsqrt()
        if self.affine:
            scale = scale * self.weight
        normalized = centered * scale.view(shape)
        if self.affine:
            normalized = normalized + self.bias.view(shape)
        return normalized.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Update the running mean and variance. count: values per channel of all processes."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1 / int(self.num_batches_tracked)
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(variance * count / max(1, count - 1), factor)


def _mean_of_all(values: Tensor) -> Tensor:
    """Return the mean over all processes; gradients flow back to each of them."""
    from torch.distributed.nn import functional

    all_reduce: Any = functional.all_reduce
    return cast(Tensor, all_reduce(values)) / dist.get_world_size()
