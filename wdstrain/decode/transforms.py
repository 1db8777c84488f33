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
from PIL import Image

from wdstrain.decode import augment_policies
from wdstrain.errors import UsageError

Pixels = npt.NDArray[np.uint8]
Draws = npt.NDArray[np.float64]

_OF_CROP = 23  # ten tries of area and aspect, a place in two axes, a flip
DRAWS = _OF_CROP + augment_policies.DRAWS  # numbers in [0, 1) for one sample
_TRIES = 10
_POLICIES = {
    "trivialaugment": augment_policies.trivial_augment,
    "randaugment": augment_policies.rand_augment,
}


@dataclass(frozen=True)
class Augment:
    """What is varied. `parse` reads it as people type it: "rrc+flip"."""

    rrc: bool = False  # random resized crop
    flip: bool = False  # left-right, half of the time
    policy: str = ""  # trivialaugment or randaugment

    @classmethod
    def parse(cls, text: str | None) -> Augment:
        words = [] if text in (None, "", "none") else str(text).split("+")
        drawn = [word for word in words if word in _POLICIES]
        for word in words:
            if word not in ("rrc", "flip", *_POLICIES):
                raise UsageError(
                    f"augment={text!r}: {word!r} is not known. Use rrc, flip, {' or '.join(_POLICIES)}, with + between, or none."
                )
        if len(drawn) > 1:
            raise UsageError(
                f"augment={text!r}: {' and '.join(drawn)} are two ways to do one thing. Use one of them."
            )
        return cls(rrc="rrc" in words, flip="flip" in words, policy=drawn[0] if drawn else "")

    def change(self, pixels: Pixels, draws: Draws) -> None:
        """Change the colours or the shape of a picture by the policy, in its place. pixels: uint8[h, w, 3]; draws: a sample's own."""
        if self.policy:
            pixels[...] = np.asarray(
                _POLICIES[self.policy](Image.fromarray(pixels), draws[_OF_CROP:])
            )


def random_crop(height: int, width: int, draws: Draws) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a random region of an image."""
    for attempt in range(_TRIES):
        area = height * width * (0.08 + 0.92 * draws[2 * attempt])
        aspect = math.exp(math.log(3 / 4) + draws[2 * attempt + 1] * math.log(16 / 9))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(draws[20] * (height - h + 1)), int(draws[21] * (width - w + 1)), h, w
    return middle_crop(height, width, min(max(width / height, 3 / 4), 4 / 3))


def random_crops(height: int, width: int, draws: Draws) -> npt.NDArray[np.int64]:
    """`random_crop` for many pictures of one size at once: int64[b, 4] for draws float64[b, 23 or more]."""
    area = height * width * (0.08 + 0.92 * draws[:, 0 : 2 * _TRIES : 2])
    aspect = np.exp(math.log(3 / 4) + draws[:, 1 : 2 * _TRIES : 2] * math.log(16 / 9))
    w, h = (
        np.rint(np.sqrt(area * aspect)).astype(np.int64),
        np.rint(np.sqrt(area / aspect)).astype(np.int64),
    )
    fits: npt.NDArray[np.bool_] = np.logical_and.reduce([w > 0, w <= width, h > 0, h <= height])
    rows, first = np.arange(len(draws)), fits.argmax(1)
    w, h = w[rows, first], h[rows, first]
    top, left = (
        (draws[:, 20] * (height - h + 1)).astype(np.int64),
        (draws[:, 21] * (width - w + 1)).astype(np.int64),
    )
    fallback = middle_crop(height, width, min(max(width / height, 3 / 4), 4 / 3))
    drawn = np.stack([top, left, h, w], 1)
    drawn[~np.logical_or.reduce(fits, axis=1)] = fallback
    return drawn


def middle_crop(height: int, width: int, aspect: float) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the largest region in the middle with this ratio of width to height."""
    w, h = min(width, max(1, round(height * aspect))), min(height, max(1, round(width / aspect)))
    return (height - h) // 2, (width - w) // 2, h, w


def region(
    height: int, width: int, size: tuple[int, int], augment: Augment, draws: Draws
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the part of an image that is taken for this size."""
    if augment.rrc:
        return random_crop(height, width, draws)
    return middle_crop(height, width, size[1] / size[0])
