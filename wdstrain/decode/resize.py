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
    # torch.nn.functional.interpolate calls this too, but has no `out`; a copy costs 0.6 as much
    function = torch.ops.aten._upsample_bilinear2d_aa.out
    source, target = (torch.from_numpy(image.transpose(2, 0, 1)[None]) for image in (pixels, out))
    function(source, out.shape[:2], False, None, None, out=target)


@cache
def _torch() -> Any:
    import torch

    return torch
