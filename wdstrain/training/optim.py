"""How weights change: optimizers, the learning rate of every step, moving averages.

The learning rate is a function of the step and of the validations so far. It holds no state, so a
resumed run needs none. Weight decay is for matrices only: norms and biases are not drawn to zero
(He et al., "Bag of tricks", 2018), and neither are class tokens and position embeddings of
transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from wdstrain.training.config import Config, refuse
from wdstrain.training.distributed import local
from wdstrain.training.models import TIMM, import_function, output_layers

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# One-cycle (Smith and Topin, 2017) as torch has it: share of steps that rise, first and last factor.
_RISE, _FIRST, _LAST = 0.3, 1 / 25, 1 / 25 / 1e4
_DROP = 0.1  # factor of the schedules step and plateau

# Tokens and position embeddings of torchvision's and timm's transformers, by the end of their name.
_NOT_DECAYED = frozenset(
    ("class_token", "cls_token", "pos_embedding", "pos_embed", "relative_position_bias_table")
)


def rate_factor(config: Config, updates: int, peak: float, step: int, plateaus: int = 0) -> float:
    """Return the learning rate of a step as a factor of its peak.

    updates: steps of the optimizer in an epoch. peak: highest learning rate; 0: that of the options.
    plateaus: how often validation stopped improving.
    """
    lowest = min(1.0, config.min_lr / (peak or config.lr))
    return lowest + (1 - lowest) * _share(config, updates, step, plateaus)


def _share(config: Config, updates: int, step: int, plateaus: int) -> float:
    """Return the factor of a schedule that falls to 0."""
    total, warmup = config.epochs * updates, round(config.warmup * updates)
    if config.schedule == "onecycle":
        rise = max(1e-9, _RISE * total - 1)
        if step <= rise:
            return _cosine(_FIRST, 1.0, step / rise)
        return _cosine(1.0, _LAST, (step - rise) / max(1.0, total - 1 - rise))
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "cosine":
        return _cosine(1.0, 0.0, (step - warmup) / max(1, total - warmup))
    if config.schedule == "step":
        every = config.step_epochs or max(1, math.ceil(config.epochs / 3))
        return float(_DROP ** (step // updates // every))
    return float(_DROP**plateaus) if config.schedule == "plateau" else 1.0


def _cosine(begin: float, end: float, part: float) -> float:
    """Return the value on half a cosine wave from begin to end."""
    return float(end + (begin - end) * (1 + math.cos(math.pi * min(1.0, part))) / 2)


# --- optimizers -----------------------------------------------------------------------------------


def make_optimizer(
    model: nn.Module,
    config: Config,
    given: str | OptimizerFactory = "",
    losses: nn.Module | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of a model's parameters, and of those of losses.

    given: function that is called with parameter groups; learning rate and weight decay are those
    that it gives. Else config.optimizer names it. Frozen parameters are left out unless they are to
    be trained later.
    """
    groups = parameter_groups(model, config)
    if own := [p for p in losses.parameters() if p.requires_grad] if losses is not None else []:
        groups.append({"params": own, "lr_scale": 1.0, "weight_decay": 0.0})
    if not callable(given) and ":" in config.optimizer:
        given = import_function(config.optimizer)
    if callable(given):
        optimizer = given(groups)
        refuse(
            (
                not isinstance(optimizer, torch.optim.Optimizer),
                f"optimizer= returned {type(optimizer).__name__}: must be a torch.optim.Optimizer.",
            )
        )
        for group in optimizer.param_groups:  # of a factory that made groups of its own
            group.setdefault("lr_scale", 1.0)
        return optimizer
    values: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    # With amp=fp16 others than fused optimizers wait in each step for the check for overflows.
    fused = all(p.is_cuda for group in groups for p in group["params"]) or None
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            groups,
            **values,
            momentum=config.momentum,
            nesterov=config.momentum > 0,
            fused=fused,
        )
    return torch.optim.AdamW(groups, **values, fused=fused)


def parameter_groups(model: nn.Module, config: Config) -> list[dict[str, Any]]:
    """Return groups of parameters with "lr_scale", and "weight_decay" where there is none.

    lr_scale: factor on the learning rate, by `backbone_lr` and `layer_decay`. Parameters with one
    dimension, tokens, position embeddings and those that `no_weight_decay()` of the model or of a
    part of it names have no weight decay.
    """
    scales, decayed = _learning_rate_scales(model, config), _decayed_names(model)
    groups: dict[tuple[float, bool], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or config.unfreeze_epoch is not None:
            groups.setdefault((scales[name], name in decayed), []).append(parameter)
    return [
        {"params": parameters, "lr_scale": scale} | ({} if decays else {"weight_decay": 0.0})
        for (scale, decays), parameters in groups.items()
    ]


def _decayed_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters with weight decay."""
    patterns = [
        f"{prefix}.{pattern}" if prefix else pattern
        for prefix, module in model.named_modules()
        if callable(named := getattr(module, "no_weight_decay", None))  # as timm's models have it
        for pattern in named()
    ]
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
        and name.rpartition(".")[2] not in _NOT_DECAYED
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _learning_rate_scales(model: nn.Module, config: Config) -> dict[str, float]:
    """Return the factor of each parameter's learning rate, by name."""
    last = output_layers(model) if config.backbone_lr != 1.0 else ()
    scales = {
        name: 1.0 if name.startswith(last) else config.backbone_lr
        for name, _ in model.named_parameters()
    }
    if config.layer_decay == 1.0:
        return scales
    refuse(
        (
            not hasattr(model, "group_matcher"),
            "{layer_decay} needs a model of timm, which says the order of its layers.",
            f"Use a model such as {TIMM}vit_small_patch16_224, or {{backbone_lr}}.",
            {"layer_decay": config.layer_decay, "backbone_lr": ...},
        )
    )
    from timm.models import group_parameters

    matcher: Any = model.group_matcher
    layers = group_parameters(model, matcher(coarse=False), reverse=True)
    most = max(layers.values())
    return {name: scales[name] * config.layer_decay ** (most - layers[name]) for name in scales}


# --- averages ---------------------------------------------------------------------------


class ModelEMA:
    """Moving average of a model's weights, and of the means and variances of its batch norms.

    The decay grows with the steps, (1 + n) / (10 + n), up to the given value, so a short run is no
    average of its beginning. torch's AveragedModel has one decay from the start, and counts steps
    on the device.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self._decay = deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Add the weights after this step, counted from 0."""
        mine, others = (
            {name: local(value) for name, value in one.state_dict().items()}
            for one in (self.model, model)
        )
        decay = min(self._decay, (1 + step) / (10 + step))
        floats = [name for name, value in mine.items() if value.is_floating_point()]
        if floats:
            average = cast(Any, get_ema_multi_avg_fn)(decay)  # torch gives it no types
            average([mine[name] for name in floats], [others[name] for name in floats], None)
        for name in mine.keys() - set(floats):
            mine[name].copy_(others[name])
