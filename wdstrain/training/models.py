"""Models by name: "small", torchvision's, timm's, or a function of the user's.

"small" is four stages of two 3x3 convolutions with a shortcut (He et al., 2016). It has 0.7 million
parameters, for images of 8 to 96 pixels and for training within minutes on a CPU.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from wdstrain.errors import UsageError
from wdstrain.training.config import refuse
from wdstrain.training.inputs import ModelInputs

ModelFactory = Callable[[int], nn.Module]  # number of outputs -> model

_CONTAINERS = (nn.Sequential, nn.ModuleList)

TIMM = "timm:"  # prefix of the names of timm's models


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
    if name not in known:
        near = ", ".join(get_close_matches(name, known, 8, 0.4) or known[:8])
        raise UsageError(
            f"no model{' for masks' if is_dense else ''} has this name.",
            f"Use small, a model of torchvision such as {near}, timm:NAME, or module:function.",
            option="model",
            value=name,
        )
    options: dict[str, Any] = {"weights": None, "num_classes": outputs}
    own = {"googlenet": {"aux_logits": False}, "inception_v3": {"aux_logits": False}}
    options |= {"weights_backbone": None} if is_dense else own.get(name, {})
    options |= {"image_size": image_size} if name.startswith("vit_") else {}
    try:
        return cast(nn.Module, models.get_model(name, **options))
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{{model}} cannot be built for images of {image_size} pixels ({error}).",
            "Use {image_size}.",
            {"model": name, "image_size": 224},
        ) from error


def _timm_model(name: str, outputs: int, image_size: int, pretrained: bool) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise UsageError(
            f"{{model}} needs timm ({error}).",
            "Install it: pip install 'wdstrain[timm]'",
            {"model": f"{TIMM}{name}"},
        ) from None
    create: Callable[..., nn.Module] = timm.create_model
    create = partial(create, name, pretrained=pretrained, num_classes=outputs)
    try:
        with suppress(TypeError):  # of models that take images of any size
            return create(img_size=image_size)
        return create()
    except Exception as error:  # timm and its hub client raise errors of many types
        raise UsageError(
            f"{{model}} cannot be created: {' '.join(str(error).split())[:300]}.",
            "Name one of timm.list_models(), or try another {image_size}, or without a network "
            "{weights}.",
            {"model": f"{TIMM}{name}", "image_size": ..., "weights": "FILE"},
        ) from error


def call_factory(factory: ModelFactory | nn.Module, name: str, outputs: int) -> nn.Module:
    """Return the model that a user's function makes, or a copy of a user's model."""
    if isinstance(factory, nn.Module):
        return deepcopy(factory)
    try:
        model = factory(outputs)
    except TypeError as error:
        raise UsageError(
            f"it is called with the number of outputs, and that failed ({error}).",
            option="model",
            value=name,
        ) from error
    refuse(
        (
            not isinstance(model, nn.Module),
            f"{{model}} returned {type(model).__name__}: must be a torch.nn.Module.",
            "",
            {"model": name},
        )
    )
    return model


def check_shapes(
    model: nn.Module, name: str, inputs: ModelInputs, outputs: tuple[int, ...]
) -> nn.Module:
    """Return the model after a trial run with two samples of zeros.

    outputs: shape for one sample. Raises UsageError if the model does not take the inputs, or
    returns another shape.
    """
    was_training = model.training
    try:
        with torch.no_grad():
            blank = inputs.blank(2, torch.device("cpu"))
            shape = tuple(inputs.call(model.eval(), blank, channels_last=False).shape)
    except Exception as error:  # a model may raise anything for images that are too small
        several = f"the keyword arguments {', '.join(inputs.specs)}"
        kinds = [f"a batch of {spec.kind}, or returns no tensor" for spec in inputs.specs.values()]
        raise UsageError(
            f"the model {name} does not take {several if len(kinds) > 1 else kinds[0]} "
            f"({' '.join(str(error).split())[:300]}).",
            "Use images of another size, such as {image_size}, or a model for these inputs.",
            {"image_size": 224},
        ) from error
    refuse(
        (
            shape != (2, *outputs),
            f"the model {name} returns {list(shape)} for two samples: must be {[2, *outputs]}.",
            "Use a model for this kind of label that takes the number of outputs.",
        )
    )
    return model.train(was_training)


def last_layer(model: nn.Module) -> tuple[str, nn.Module]:
    """Return (name, module) of the last linear or convolution layer."""
    kinds = nn.Linear, nn.Conv2d
    layers = [(name, own) for name, own in model.named_modules() if isinstance(own, kinds)]
    refuse((not layers, "the model has neither a linear layer nor a convolution: no last layer."))
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
    refuse((not callable(value), f"{name}: must be a function, not {type(value).__name__}."))
    return cast(Callable[..., Any], value)


def make_small(outputs: int, image_size: int) -> nn.Module:
    """Return a small residual network. Input [b, 3, image_size, image_size], output [b, outputs]."""
    first = 2 if image_size >= 48 else 1  # large pictures are halved at once
    stem = nn.Conv2d(3, 32, 3, first, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)
    parts = {
        "stem": nn.Sequential(*stem),
        "stages": nn.Sequential(_Block(32, 32, 1), _Block(32, 64, 2), _Block(64, 128, 2)),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "head": nn.Linear(128, outputs),
    }
    return nn.Sequential(OrderedDict(parts))


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


def enable_checkpointing(model: nn.Module) -> None:
    """Let a model compute its blocks again for the gradient, as its own library does it.

    Raises UsageError for a model without such a method.
    """
    for name in ("set_grad_checkpointing", "gradient_checkpointing_enable"):  # timm, transformers
        if callable(enable := getattr(model, name, None)):
            enable()
            return
    raise UsageError(
        "{grad_checkpointing} needs a model that has it, and this one has no method "
        "set_grad_checkpointing().",
        f"Use a model of timm ({TIMM}NAME), or checkpoint in the model's own forward.",
        {"grad_checkpointing": ...},
    )


def blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost members of sequences and module lists that consist of several layers."""
    for child in module.children():
        layers = list(child.children())
        is_list = type(child) is nn.ModuleList
        is_nested = type(child) is nn.Sequential and any(list(layer.children()) for layer in layers)
        if type(module) in _CONTAINERS and layers and not is_list and not is_nested:
            yield child
        else:
            yield from blocks_in(child)
