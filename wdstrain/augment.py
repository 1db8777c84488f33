"""Which part of an image is taken and which way round, from random numbers that are given.

The numbers belong to the sample (see `bits.uniform`), so the same sample of the same epoch gives the same pixels in any
worker, after a resume, on any number of ranks; and all images of one sample (a picture and its mask) are cut alike.
The crop is the one of Inception training (Szegedy et al., 2014) as torchvision draws it: area 8-100 %, aspect 3/4-4/3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from wdstrain.errors import UsageError

Pixels = npt.NDArray[np.uint8]
Draws = npt.NDArray[np.float64]

DRAWS = 23  # numbers in [0, 1) for one sample: ten tries of area and aspect, a place in two axes, a flip
_TRIES = 10


@dataclass(frozen=True)
class Augment:
    """What is varied. `parse` reads it as people type it: "rrc+flip"."""

    rrc: bool = False  # random resized crop
    flip: bool = False  # left-right, half of the time

    @classmethod
    def parse(cls, text: str | None) -> Augment:
        words = [] if text in (None, "", "none") else str(text).split("+")
        for word in words:
            if word not in ("rrc", "flip"):
                raise UsageError(f"augment={text!r}: {word!r} is not known. Use rrc, flip, both with a + between, or none.")
        return cls(rrc="rrc" in words, flip="flip" in words)


def random_crop(height: int, width: int, draws: Draws) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random region of an image."""
    for attempt in range(_TRIES):
        area = height * width * (0.08 + 0.92 * draws[2 * attempt])
        aspect = math.exp(math.log(3 / 4) + draws[2 * attempt + 1] * math.log(16 / 9))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(draws[20] * (height - h + 1)), int(draws[21] * (width - w + 1)), h, w
    return middle_crop(height, width, min(max(width / height, 3 / 4), 4 / 3))


def middle_crop(height: int, width: int, aspect: float) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the largest region in the middle with this ratio of width to height."""
    w, h = min(width, max(1, round(height * aspect))), min(height, max(1, round(width / aspect)))
    return (height - h) // 2, (width - w) // 2, h, w


def shape(pixels: Pixels, size: tuple[int, int], augment: Augment, draws: Draws, out: Pixels) -> None:
    """Cut a region (random or in the middle), resize it to `size`, flip it perhaps, and lay it into `out`.

    pixels: uint8[h, w, 3]; out: uint8[*size, 3]. Resizing is bilinear with anti-aliasing, as torchvision's.
    """
    height, width = pixels.shape[:2]
    if augment.rrc:
        top, left, h, w = random_crop(height, width, draws)
    else:
        top, left, h, w = middle_crop(height, width, size[1] / size[0])
    region = pixels[top : top + h, left : left + w]
    if (h, w) != size:
        planes = torch.from_numpy(region).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(planes, size=size, mode="bilinear", antialias=True)
        region = resized[0].permute(1, 2, 0).numpy()
    np.copyto(out, region[:, ::-1] if augment.flip and draws[22] < 0.5 else region)
