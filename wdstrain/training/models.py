"""A model by name: "small", any classification model of torchvision, or a function of the user's.

"small" is four stages of two 3x3 convolutions with a shortcut (He et al., 2016): 0.7 million weights, made for pictures of
8 to 96 pixels and for learning something within minutes on a CPU.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from difflib import get_close_matches
from typing import Any, cast

import torch
from torch import Tensor, nn

from wdstrain.errors import UsageError

Maker = Callable[[int], nn.Module]

_AUXILIARY = (
    "aux1.",
    "aux2.",
    "AuxLogits.",
)  # heads of torchvision's Inception models that are of use in training from nothing


def build(name: str, outputs: int, image_size: int) -> nn.Module:
    """A model with `outputs` outputs for square pictures of `image_size` pixels, with weights as its maker gives them.

    name: small, a torchvision model, or module:function, which is called with the number of outputs.
    """
    if name == "small":
        return Small(outputs, image_size)
    if ":" in name:
        return made_by(_function(name), name, outputs)
    import torchvision  # which brings torch's compiler with it: 2 seconds that "small" should not wait for

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        near = (
            [one for one in known if one.startswith(name[:6])]
            or get_close_matches(name, known, 8, 0.4)
            or known[:8]
        )
        raise UsageError(
            f"there is no model {name!r}. Use small, one of torchvision's, such as {', '.join(near[:8])}, or module:function."
        )
    options: dict[str, Any] = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    options |= {"image_size": image_size} if name.startswith("vit_") else {}
    try:
        return cast(
            nn.Module,
            torchvision.models.get_model(name, weights=None, num_classes=outputs, **options),
        )
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the model {name} cannot be made for pictures of {image_size} pixels ({error}). Use --image-size 224."
        ) from error


def made_by(maker: Maker | nn.Module, name: str, outputs: int) -> nn.Module:
    """What a function of the user's makes, or a copy of a model. Raises UsageError if it is none."""
    if isinstance(maker, nn.Module):
        return deepcopy(maker)
    try:
        model = maker(outputs)
    except TypeError as error:
        raise UsageError(
            f"model={name}: it is called with the number of outputs, and that failed ({error})."
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"model={name} made {type(model).__name__}, which is no torch.nn.Module.")
    return model


def try_out(model: nn.Module, name: str, picture: tuple[int, ...], outputs: int) -> nn.Module:
    """The model, after it was seen to take such pictures and to give a row of outputs for each. Raises UsageError."""
    trained = model.training
    try:
        with torch.no_grad():
            shape = tuple(model.eval()(torch.zeros(2, *picture)).shape)
    except Exception as error:  # what a model says of pictures that are too small is its own affair
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"the model {name} does not take pictures of {picture[-1]} pixels ({what}). Use --image-size 224."
        ) from error
    if shape != (2, outputs):
        raise UsageError(
            f"the model {name} gives outputs of shape {list(shape)} for two pictures, and {[2, outputs]} is wanted. "
            f"Use a classification model, with as many outputs as it is asked for."
        )
    return model.train(trained)


def head_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The name of the last layer that has weights of its own and gives outputs, and the layer."""
    layers = [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, (nn.Linear, nn.Conv2d))
    ]
    if not layers:
        raise UsageError(
            "the model has no linear layer and no convolution, so none that could be its last one."
        )
    return layers[-1]


def begin_with(model: nn.Module, path: str) -> list[str]:
    """Take weights from a file, but for a last layer of another shape; returns the names of those that stay as they were.

    Raises UsageError for weights of another model, naming what differs.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"weights={path} cannot be read: {error.strerror or error}.") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise UsageError(
            f"weights={path} is no file of weights that torch.load reads with weights_only=True."
        ) from error
    for name in ("model", "state_dict"):  # a checkpoint of ours, or of many another
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if not isinstance(found, Mapping) or not all(
        isinstance(value, Tensor) for value in found.values()
    ):
        raise UsageError(f"weights={path} holds no state dict: names and tensors.")
    mine, last = model.state_dict(), head_of(model)[0]
    theirs = {name.removeprefix("module."): value for name, value in found.items()}
    theirs = {
        name: value
        for name, value in theirs.items()
        if name in mine or not name.startswith(_AUXILIARY)
    }
    fresh = [
        name
        for name in mine
        if name.startswith(f"{last}.")
        and (name not in theirs or theirs[name].shape != mine[name].shape)
    ]
    differing = [f"{name} is missing" for name in mine if name not in theirs and name not in fresh]
    differing += [
        f"{name} is unknown"
        for name in theirs
        if name not in mine and not name.startswith(f"{last}.")
    ]
    differing += [
        f"{name} is {list(theirs[name].shape)}, not {list(value.shape)}"
        for name, value in mine.items()
        if name in theirs and name not in fresh and theirs[name].shape != value.shape
    ]
    if differing:
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise UsageError(
            f"weights={path} are of another model: {'; '.join(differing[:3])}{more}. Name the model they are of."
        )
    model.load_state_dict(
        {
            **mine,
            **{name: value for name, value in theirs.items() if name in mine and name not in fresh},
        }
    )
    return fresh


def freeze(model: nn.Module) -> None:
    """Let the last layer alone learn. What is frozen is to stay in eval mode, for its batch norms: see `train_mode`."""
    last = head_of(model)[1]
    for weight in model.parameters():
        weight.requires_grad_(False)
    for weight in last.parameters():
        weight.requires_grad_(True)


def train_mode(model: nn.Module) -> None:
    """Training mode for all that learns; frozen parts stay as they are, with the means and variances of their batch norms."""
    model.train()
    if all(weight.requires_grad for weight in model.parameters()):
        return
    for part in model.modules():
        own, kept = list(part.parameters(recurse=False)), list(part.buffers(recurse=False))
        if (own or kept) and not any(weight.requires_grad for weight in own):
            part.eval()


def _function(name: str) -> Maker:
    module, _, function = name.partition(":")
    if not function or not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(
            f"model={name}: a function of your own is named as module:function. Write for example models:make_net."
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(
            0, here
        )  # as `python -m` has it, and for good: a model may import its neighbours when it is made or run
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise UsageError(
            f"model={name}: {error}. The module is looked for in {here} and where Python looks."
        ) from error
    except Exception as error:  # the module is the user's
        what = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"model={name}: importing {module} failed ({what}). Run: python -c 'import {module}'"
        ) from error
    if not callable(found):
        raise UsageError(f"model={name}: the module {module} has no function {function!r}.")
    return cast(Maker, found)


class Small(nn.Module):
    """A small residual network. Input [b, 3, image_size, image_size], output [b, outputs]."""

    def __init__(self, outputs: int, image_size: int) -> None:
        super().__init__()
        first = 2 if image_size >= 48 else 1  # large pictures are halved at once
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 3, first, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)
        )
        self.stages = nn.Sequential(_Block(32, 32, 1), _Block(32, 64, 2), _Block(64, 128, 2))
        self.head = nn.Linear(128, outputs)

    def forward(self, pixels: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.stages(self.stem(pixels)).mean((2, 3))))


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
