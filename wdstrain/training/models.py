"""Models by name: "small", torchvision's, timm's, or a function of the user's.

Also here: their optimizers, the learning rate of every step, and their moving averages.

"small" is four stages of two 3x3 convolutions with a shortcut (He et al., 2016). It has 0.7 million
parameters, for images of 8 to 96 pixels and for training within minutes on a CPU.
"""

from __future__ import annotations

import math
import os
import pkgutil
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from wdstrain.errors import UsageError
from wdstrain.training.config import Config, refuse, refusing
from wdstrain.training.distributed import local
from wdstrain.training.inputs import ModelInputs

ModelFactory = Callable[[int], nn.Module]  # number of outputs -> model

TIMM = "timm:"  # prefix of the names of timm's models

# One-cycle (Smith and Topin, 2017) as torch has it: share of steps that rise, first and last factor.
_RISE, _FIRST, _LAST = 0.3, 1 / 25, 1 / 25 / 1e4
_DROP = 0.1  # factor of the schedules step and plateau


def build(
    name: str | ModelFactory | nn.Module,
    outputs: int,
    image_size: int,
    *,
    title: str = "model",
    pretrained: bool = False,
    is_dense: bool = False,
) -> nn.Module:
    """Return a model with `outputs` outputs for square images of `image_size` pixels.

    name: small, a torchvision model, timm:NAME, module:function, which is called with the number of
    outputs, such a function, or a model, which is copied. title: of these, in errors.
    pretrained: with the weights that timm has for NAME; see also `weights.load`.
    is_dense: the outputs are for each pixel, [b, outputs, h, w]. Raises UsageError for an unknown
    name and for images that the model cannot take.
    """
    if not isinstance(name, str):
        model = call_factory(name, title, outputs)
    elif ":" in name and not name.startswith(TIMM):
        model = call_factory(import_function(name), name, outputs)
    elif name == "small":
        model = SmallSegmentation(outputs) if is_dense else make_small(outputs, image_size)
    elif name.startswith(TIMM) and not is_dense:
        model = _timm_model(name.removeprefix(TIMM), outputs, image_size, pretrained)
    else:
        model = _torchvision_model(name, outputs, image_size, is_dense)
    model.register_forward_hook(_main_output)
    return model


def _main_output(model: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Return the entry "out" of a dict, as torchvision's models for segmentation return it.

    As a hook it leaves the names of the weights as they are.
    """
    return outputs["out"] if isinstance(outputs, dict) and "out" in outputs else outputs


def _torchvision_model(name: str, outputs: int, image_size: int, is_dense: bool) -> nn.Module:
    # torchvision imports torch's compiler, which takes 2 seconds. "small" does not need it.
    from torchvision import models

    known = models.list_models(module=models.segmentation if is_dense else models)
    near = ", ".join(get_close_matches(name, known, 8, 0.4) or known[:8])
    refuse(
        name not in known,
        f"{{model}}: no model{' for masks' if is_dense else ''} has this name.",
        f"Use small, a model of torchvision such as {near}, timm:NAME, or module:function.",
        model=name,
    )
    options: dict[str, Any] = {"weights": None, "num_classes": outputs}
    own = {"googlenet": {"aux_logits": False}, "inception_v3": {"aux_logits": False}}
    options |= {"weights_backbone": None} if is_dense else own.get(name, {})
    options |= {"image_size": image_size} if name.startswith("vit_") else {}
    with refusing(
        f"{{model}} cannot be built for images of {image_size} pixels",
        "Use {image_size}.",
        model=name,
        image_size=224,
    ):
        return cast(nn.Module, models.get_model(name, **options))


def _timm_model(name: str, outputs: int, image_size: int, pretrained: bool) -> nn.Module:
    with refusing(
        "{model} needs timm",
        "Install it: pip install 'wdstrain[timm]'",
        errors=(ImportError,),
        model=f"{TIMM}{name}",
    ):
        import timm
    create = partial(timm.create_model, name, pretrained=pretrained, num_classes=outputs)
    with refusing(
        "{model} cannot be created",
        "Name one of timm.list_models(), or try another {image_size}, or without a network {weights}.",
        model=f"{TIMM}{name}",
        image_size=...,
        weights="FILE",
    ):
        with suppress(TypeError):  # of models that take images of any size
            return cast(nn.Module, create(img_size=image_size))
        return cast(nn.Module, create())


def call_factory(factory: ModelFactory | nn.Module, name: str, outputs: int) -> nn.Module:
    """Return the model that a user's function makes, or a copy of a user's model."""
    if isinstance(factory, nn.Module):
        return deepcopy(factory)
    with refusing(
        "{model} is called with the number of outputs, and that failed",
        errors=(TypeError,),
        model=name,
    ):
        model = factory(outputs)
    refuse(
        not isinstance(model, nn.Module),
        f"{{model}} returned {type(model).__name__}: must be a torch.nn.Module.",
        model=name,
    )
    return model


def check_shapes(
    model: nn.Module, name: str, inputs: ModelInputs, outputs: tuple[int, ...]
) -> nn.Module:
    """Return the model after a trial run with two samples of zeros.

    outputs: shape for one sample. Raises UsageError if the model does not take the inputs, or
    returns another shape.
    """
    kinds = [f"a batch of {spec.kind}" for spec in inputs.specs.values()]
    given = kinds[0] if len(kinds) == 1 else f"the keyword arguments {', '.join(inputs.specs)}"
    # a model may raise anything for images that are too small
    with (
        torch.no_grad(),
        refusing(
            f"the model {name} does not take {given} or returns no tensor",
            "Use images of another size, such as {image_size}, or a model for these inputs.",
            image_size=224,
        ),
    ):
        blank = inputs.blank(2, torch.device("cpu"))
        shape = tuple(inputs.call(model.eval(), blank, channels_last=False).shape)
    refuse(
        shape != (2, *outputs),
        f"the model {name} returns {list(shape)} for two samples: must be {[2, *outputs]}.",
        "Use a model for this kind of label that takes the number of outputs.",
    )
    return model.train()


def last_layer(model: nn.Module) -> tuple[str, nn.Module]:
    """Return (name, module) of the last linear or convolution layer."""
    layers = [
        (name, own) for name, own in model.named_modules() if isinstance(own, nn.Linear | nn.Conv2d)
    ]
    refuse(not layers, "the model has neither a linear layer nor a convolution: no last layer.")
    return layers[-1]


def output_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the parameters that make the outputs: of the last layer, as a rule.

    torchvision's LR-ASPP adds the outputs of two layers.
    """
    name = last_layer(model)[0]
    low = name.replace("high_classifier", "low_classifier")
    return tuple(f"{own}." for own in dict.fromkeys((low, name)))


def import_function(name: str) -> Callable[..., Any]:
    """Return the function that module:function names."""
    here = os.getcwd()
    if here not in sys.path:
        # as `python -m` does, and for good: a model may import its neighbors when it runs
        sys.path.insert(0, here)
    try:
        value = pkgutil.resolve_name(name)
    except Exception as error:  # the module is the user's
        raise UsageError(
            f"{name}: {type(error).__name__}: {error}.",
            f"Use module:function, for example models:make_net, in {here} or on Python's path.",
        ) from error
    refuse(not callable(value), f"{name}: must be a function, not {type(value).__name__}.")
    return cast(Callable[..., Any], value)


def make_small(outputs: int, image_size: int) -> nn.Module:
    """Return a small residual network. Input [b, 3, image_size, image_size], output [b, outputs]."""
    first = 2 if image_size >= 48 else 1  # large pictures are halved at once
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        stem=nn.Sequential(
            nn.Conv2d(3, 32, 3, first, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)
        ),
        stages=nn.Sequential(_Block(32, 32, 1), _Block(32, 64, 2), _Block(64, 128, 2)),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        head=nn.Linear(128, outputs),
    )
    return nn.Sequential(parts)


class SmallSegmentation(nn.Module):
    """A small network for masks. Input [b, 3, h, w], output [b, outputs, h, w].

    Two stages at half and a quarter of the resolution, whose features are added to those of the
    full resolution, as in a U-Net (Ronneberger et al., 2015).
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList([_Block(3, 16, 1), _Block(16, 32, 2), _Block(32, 64, 2)])
        self.from_half, self.from_quarter = nn.Conv2d(32, 16, 1), nn.Conv2d(64, 32, 1)
        self.head = nn.Conv2d(16, outputs, 3, 1, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        full = self.stages[0](pixels)
        half = self.stages[1](full)
        half = half + _enlarged(self.from_quarter(self.stages[2](half)), half)
        return cast(Tensor, self.head(full + _enlarged(self.from_half(half), full)))


def _enlarged(features: Tensor, like: Tensor) -> Tensor:
    """Return features at the resolution of others."""
    return nn.functional.interpolate(features, like.shape[2:], mode="bilinear")


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = (
            nn.Identity()
            if inputs == outputs
            else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x), inplace=True)


# --- optimizers -----------------------------------------------------------------------------------
# Weight decay is for matrices only: norms and biases are not drawn to zero (He et al., "Bag of
# tricks", 2018), and neither are class tokens and position embeddings of transformers: these are
# those of torchvision and timm, by the end of their name.

_NOT_DECAYED = frozenset(
    ("class_token", "cls_token", "pos_embedding", "pos_embed", "relative_position_bias_table")
)


def make_optimizer(
    model: nn.Module,
    config: Config,
    given: str | Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = "",
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
            not isinstance(optimizer, torch.optim.Optimizer),
            f"optimizer= returned {type(optimizer).__name__}: must be a torch.optim.Optimizer.",
        )
        for group in optimizer.param_groups:  # of a factory that made groups of its own
            group.setdefault("lr_scale", 1.0)
        return optimizer
    values: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    # With amp=fp16 others than fused optimizers wait in each step for the check for overflows.
    fused = all(p.is_cuda for group in groups for p in group["params"]) or None
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            groups, **values, momentum=config.momentum, nesterov=config.momentum > 0, fused=fused
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
        not hasattr(model, "group_matcher"),
        "{layer_decay} needs a model of timm, which says the order of its layers.",
        f"Use a model such as {TIMM}vit_small_patch16_224, or {{backbone_lr}}.",
        layer_decay=config.layer_decay,
        backbone_lr=...,
    )
    from timm.models import group_parameters

    layers = group_parameters(model, cast(Any, model).group_matcher(coarse=False), reverse=True)
    most = max(layers.values())
    return {name: scales[name] * config.layer_decay ** (most - layers[name]) for name in scales}


# --- the learning rate -----------------------------------------------------------------------------
# It is a function of the step and of the validations so far. It holds no state, so a resumed run
# needs none.


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


# --- averages -------------------------------------------------------------------------------------


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
