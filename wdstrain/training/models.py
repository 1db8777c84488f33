"""A model by name: "small", or any classification model of torchvision.

"small" is four stages of two 3x3 convolutions with a shortcut (He et al., 2016): 0.7 million weights, made for pictures of
8 to 96 pixels and for learning something within minutes on a CPU.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torchvision
from torch import Tensor, nn

from wdstrain.errors import UsageError


def build(name: str, outputs: int, image_size: int) -> nn.Module:
    """A model with `outputs` outputs for square pictures of `image_size` pixels, with random weights."""
    if name == "small":
        return Small(outputs, image_size)
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        near = [one for one in known if one.startswith(name[:6])] or known[:8]
        raise UsageError(f"there is no model {name!r}. Use small, or one of torchvision's, such as: {', '.join(near[:8])}.")
    options: dict[str, Any] = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    options |= {"image_size": image_size} if name.startswith("vit_") else {}
    return cast(nn.Module, torchvision.models.get_model(name, weights=None, num_classes=outputs, **options))


def try_out(model: nn.Module, name: str, image_size: int) -> nn.Module:
    """The model, after it was seen to take such pictures and to give one row of outputs for each. Raises UsageError."""
    try:
        with torch.no_grad():
            shape = tuple(model.eval()(torch.zeros(2, 3, image_size, image_size)).shape)
    except Exception as error:  # what a model says of pictures that are too small is its own affair
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"the model {name} does not take pictures of {image_size} pixels ({what}). Use --image-size 224."
        ) from error
    if len(shape) != 2 or shape[0] != 2:
        raise UsageError(f"the model {name} gives outputs of shape {shape} for two pictures. Use a classification model.")
    return model


class Small(nn.Module):
    """A small residual network. Input [b, 3, image_size, image_size], output [b, outputs]."""

    def __init__(self, outputs: int, image_size: int) -> None:
        super().__init__()
        first = 2 if image_size >= 48 else 1  # large pictures are halved at once
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, first, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
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
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x), inplace=True)
