"""Random crops and flips of images, computed from given random numbers.

The random numbers belong to the sample (see `wdstrain.order.rng.uniform`). The pixels of a sample
in an epoch are therefore the same in any worker, after a resume, and on any number of ranks. All
images of one sample, such as an image and its mask, get the same crop and flip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from wdstrain.decode import augment_policies
from wdstrain.decode.pixels import Box, Pixels
from wdstrain.errors import UsageError

Draws = npt.NDArray[np.float64]

# order of a sample's random numbers
_TRIES = 10  # numbers 0 to 19: area and aspect ratio of up to ten crops
_TOP_DRAW, _LEFT_DRAW, FLIP_DRAW, _POLICY_DRAWS = 20, 21, 22, 23
DRAWS = _POLICY_DRAWS + augment_policies.DRAWS  # random numbers of one sample, in [0, 1)

_MIN_AREA = 0.08  # of a crop, as a share of the image
_MIN_ASPECT, _MAX_ASPECT = 3 / 4, 4 / 3  # width / height of a crop
_POLICIES = {
    "trivialaugment": augment_policies.trivial_augment,
    "randaugment": augment_policies.rand_augment,
}


@dataclass(frozen=True)
class Augment:
    """Augmentation of images.

    rrc: random resized crop. flip: mirror left-right, with probability 0.5.
    policy: "trivialaugment", "randaugment", or "" for neither.
    """

    rrc: bool = False
    flip: bool = False
    policy: str = ""

    @classmethod
    def parse(cls, text: str | None) -> Augment:
        """Return the augmentation for text such as "rrc+flip"; None, "" and "none" are none.

        Raises UsageError for unknown words, and for two policies.
        """
        words = [] if text in (None, "", "none") else str(text).split("+")
        policies = [word for word in words if word in _POLICIES]
        for word in words:
            if word not in ("rrc", "flip", *_POLICIES):
                raise UsageError(
                    f"augment={text!r}: {word!r} is not known. "
                    f"Use rrc, flip, {' or '.join(_POLICIES)}, joined by +, or none."
                )
        if len(policies) > 1:
            raise UsageError(f"augment={text!r}: use one of {' and '.join(policies)}, not both.")
        return cls(rrc="rrc" in words, flip="flip" in words, policy="".join(policies))

    def apply_policy(self, pixels: Pixels, draws: Draws) -> None:
        """Apply the policy in place. pixels: uint8[h, w, 3]. draws: float64[DRAWS] of the sample."""
        if self.policy:
            policy = _POLICIES[self.policy]
            pixels[...] = np.asarray(policy(Image.fromarray(pixels), draws[_POLICY_DRAWS:]))


def region(height: int, width: int, size: tuple[int, int], augment: Augment, draws: Draws) -> Box:
    """Return the region of an image that is resized to `size` (height, width).

    With rrc a random crop, else the largest region in the center with the aspect ratio of `size`.
    """
    if augment.rrc:
        return random_crop(height, width, draws)
    return center_crop(height, width, size[1] / size[0])


def random_crop(height: int, width: int, draws: Draws) -> Box:
    """Return the region of a random resized crop of a height x width image.

    As torchvision draws it (Inception training, Szegedy et al., 2014): 8 to 100 % of the area,
    aspect ratio 3/4 to 4/3. draws: float64[DRAWS] of the sample.
    """
    for attempt in range(_TRIES):
        area = height * width * (_MIN_AREA + (1 - _MIN_AREA) * draws[2 * attempt])
        log_range = math.log(_MAX_ASPECT / _MIN_ASPECT)
        aspect = math.exp(math.log(_MIN_ASPECT) + draws[2 * attempt + 1] * log_range)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(draws[_TOP_DRAW] * (height - h + 1))
            return top, int(draws[_LEFT_DRAW] * (width - w + 1)), h, w
    return _fallback_crop(height, width)


def random_crops(height: int, width: int, draws: Draws) -> npt.NDArray[np.int64]:
    """Return `random_crop` of b images of one size at once. int64[b, 4]; draws: float64[b, DRAWS].

    One image takes ten times as long as with `random_crop`; a batch is much faster.
    """
    area = height * width * (_MIN_AREA + (1 - _MIN_AREA) * draws[:, 0 : 2 * _TRIES : 2])
    log_range = math.log(_MAX_ASPECT / _MIN_ASPECT)
    aspect = np.exp(math.log(_MIN_ASPECT) + draws[:, 1 : 2 * _TRIES : 2] * log_range)
    w = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    h = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    fits: npt.NDArray[np.bool_] = np.logical_and.reduce([w > 0, w <= width, h > 0, h <= height])
    rows, first = np.arange(len(draws)), fits.argmax(1)
    w, h = w[rows, first], h[rows, first]
    top = (draws[:, _TOP_DRAW] * (height - h + 1)).astype(np.int64)
    left = (draws[:, _LEFT_DRAW] * (width - w + 1)).astype(np.int64)
    crops = np.stack([top, left, h, w], 1)
    crops[~np.logical_or.reduce(fits, axis=1)] = _fallback_crop(height, width)
    return crops


def center_crop(height: int, width: int, aspect: float) -> Box:
    """Return the largest region in the center of an image with this ratio of width to height."""
    w, h = min(width, max(1, round(height * aspect))), min(height, max(1, round(width / aspect)))
    return (height - h) // 2, (width - w) // 2, h, w


def _fallback_crop(height: int, width: int) -> Box:
    """Return the crop of an image so narrow that no random crop fits."""
    return center_crop(height, width, min(max(width / height, _MIN_ASPECT), _MAX_ASPECT))
