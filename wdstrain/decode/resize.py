"""Resizing of images, by the function that torchvision uses.

torch is imported with the first image: a command that only names fields must start quickly.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from wdstrain.decode.orientation import Pixels


def resize(pixels: Pixels, out: Pixels) -> None:
    """Resize an image into `out`: bilinear, with anti-aliasing. uint8[height, width, 3] each.

    Images of the same size are copied. The two must not overlap.
    """
    if pixels.shape == out.shape:
        np.copyto(out, pixels)
        return
    torch = _torch()
    # From a batch of one, permuted after its first stride is set, torch takes and makes images with
    # channels last. Otherwise this takes twice as long.
    source, target = (
        torch.from_numpy(image).unsqueeze(0).permute(0, 3, 1, 2) for image in (pixels, out)
    )
    size = out.shape[:2]
    target.copy_(torch.nn.functional.interpolate(source, size, mode="bilinear", antialias=True))


@cache
def _torch() -> Any:
    import torch

    return torch
