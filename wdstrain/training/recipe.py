"""How weights change: optimisers, the learning rate of every step, moving averages, 16-bit arithmetic.

The learning rate is a function of the step and holds no state, so a run that goes on needs none. Weight decay is for
matrices alone: norms and biases are not drawn to zero (He et al., "Bag of tricks", 2018).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from wdstrain.training.configuration import Config

# of one-cycle (Smith and Topin, 2017), as torch has them: the part that rises, where it begins, where it ends
_RISE, _FIRST, _LAST = 0.3, 1 / 25, 1 / 25 / 1e4


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a part of its peak, by step. `steps`: of an epoch, each of the optimiser."""

    config: Config
    steps: int

    def __call__(self, step: int) -> float:
        config, total = self.config, self.config.epochs * self.steps
        if config.schedule == "onecycle":
            rise = max(1.0, _RISE * total - 1)
            if step <= rise:
                return _between(_FIRST, 1.0, step / rise)
            return _between(1.0, _LAST, (step - rise) / max(1.0, total - 1 - rise))
        warm = round(config.warmup * self.steps)
        if step < warm:
            return (step + 1) / warm
        if config.schedule == "cosine":
            return _between(1.0, 0.0, (step - warm) / max(1, total - warm))
        if config.schedule == "step":
            every = config.step_epochs or max(1, math.ceil(config.epochs / 3))
            return float(0.1 ** (step // self.steps // every))
        return 1.0


def _between(begin: float, end: float, part: float) -> float:
    """On half a wave of the cosine from begin to end."""
    return float(end + (begin - end) * (1 + math.cos(math.pi * min(1.0, part))) / 2)


def make_optimiser(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimiser of the weights that are learnt: matrices with weight decay, norms and biases without."""
    learnt = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {
            "params": [weight for weight in learnt if weight.ndim > 1],
            "weight_decay": config.weight_decay,
        },
        {"params": [weight for weight in learnt if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimiser == "sgd":
        return torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0
        )
    return torch.optim.AdamW(groups, lr=config.lr)


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate


class Average:
    """A moving average of the weights of a model, and of the means and variances of its batch norms.

    The decay grows with the steps, (1 + n) / (10 + n), until it is what was asked for, so that short runs are not averages of
    their beginning; torch's AveragedModel has one decay from the start and counts steps on the device.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self._decay = deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """After this step, counted from 0."""
        mine, others = self.model.state_dict(), model.state_dict()
        decay = min(self._decay, (1 + step) / (10 + step))
        numbers = [name for name, value in mine.items() if value.is_floating_point()]
        if numbers:
            average = cast(Any, get_ema_multi_avg_fn)(decay)  # torch gives it no types
            average([mine[name] for name in numbers], [others[name] for name in numbers], None)
        for name in mine.keys() - set(numbers):
            mine[name].copy_(others[name])


def arithmetic(config: Config, device: torch.device) -> AbstractContextManager[object]:
    """Where the model is run in: in 16 bits, if that was asked for."""
    if config.amp == "none":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if config.amp == "bf16" else torch.float16)
