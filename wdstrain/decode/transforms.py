"""Random crops, flips and policies of images, computed from given random numbers.

The random numbers belong to the sample (see `wdstrain.order.rng.uniform`). The pixels of a sample
in an epoch are therefore the same in any worker, after a resume, and on any number of ranks. All
images of one sample, such as an image and its mask, get the same crop and flip.

The policies are TrivialAugment (Müller and Hutter, 2021) with the "wide" ranges, and RandAugment
(Cubuk et al., 2019) with two operations of magnitude 9 of 31 bins. Operations, their names, ranges
and draws are those of torchvision. Pixels that come in from outside the image are black.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageOps

from wdstrain.decode.crops import RATIO, SCALE
from wdstrain.errors import UsageError

Draws = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]
Size = tuple[int, int]  # height, width
Box = tuple[int, int, int, int]  # top, left, height, width

# order of a sample's random numbers
_TRIES = 10  # numbers 0 to 19: area and aspect ratio of up to ten crops
_TOP_DRAW, _LEFT_DRAW, FLIP_DRAW, _POLICY_DRAWS = 20, 21, 22, 23
DRAWS = _POLICY_DRAWS + 4  # random numbers of one sample, in [0, 1)

Operation = Callable[[Image.Image, float], Image.Image]  # (image, magnitude) -> image

_BINS = 31  # magnitudes, from none to the largest
_RAND_AUGMENT_STRENGTH = 9 / (_BINS - 1)
_MAX_TRANSLATION = 150 / 331  # RandAugment, share of the side


@dataclass(frozen=True)
class Augment:
    """Augmentation of images.

    rrc: random resized crop. flip: mirror left-right, with probability 0.5.
    policy: "trivialaugment", "randaugment", or "" for neither. scale, ratio: least and largest area
    of a random crop as a share of the image, and its width / height. crop_pct: without rrc, side of
    the center crop as a share of the largest.
    """

    rrc: bool = False
    flip: bool = False
    policy: str = ""
    scale: tuple[float, float] = SCALE
    ratio: tuple[float, float] = RATIO
    crop_pct: float = 1.0

    def __post_init__(self) -> None:
        for name in ("scale", "ratio"):  # a checkpoint may hold lists
            object.__setattr__(self, name, check_range(name, getattr(self, name)))
            if not self.rrc and getattr(self, name) != getattr(type(self), name):
                raise UsageError(
                    f"{name} is that of random crops.",
                    "Add rrc to augment.",
                )
        if not 0 < self.crop_pct <= 1:
            raise UsageError(
                "must be above 0 and at most 1.", option="crop_pct", value=self.crop_pct
            )

    @classmethod
    def parse(
        cls,
        text: str | None,
        *,
        scale: tuple[float, float] = SCALE,
        ratio: tuple[float, float] = RATIO,
        crop_pct: float = 1.0,
    ) -> Augment:
        """Return the augmentation for text such as "rrc+flip"; None, "" and "none" are none.

        Raises UsageError for unknown words, for two policies, and for values out of range.
        """
        words = [] if text in (None, "", "none") else str(text).split("+")
        policies = [word for word in words if word in _POLICIES]
        for word in words:
            if word not in ("rrc", "flip", *_POLICIES):
                raise UsageError(
                    f"{word!r} is not known.",
                    f"Use rrc, flip, {' or '.join(_POLICIES)}, joined by +, or none.",
                    option="augment",
                    value=text,
                )
        if len(policies) > 1:
            raise UsageError(
                f"use one of {' and '.join(policies)}, not both.",
                option="augment",
                value=text,
            )
        return cls(
            "rrc" in words, "flip" in words, "".join(policies), scale, ratio, float(crop_pct)
        )

    def without_randomness(self) -> Augment:
        """Return the augmentation for validation, with the same center crop."""
        return Augment(crop_pct=self.crop_pct)

    def mirrors(self, draws: Draws) -> bool:
        """Return whether the images of a sample are mirrored left-right."""
        return self.flip and bool(draws[FLIP_DRAW] < 0.5)

    def apply_policy(self, pixels: Pixels, draws: Draws) -> None:
        """Apply the policy in place. pixels: uint8[h, w, 3]. draws: float64[DRAWS] of the sample."""
        if self.policy:
            policy = _POLICIES[self.policy]
            pixels[...] = np.asarray(policy(Image.fromarray(pixels), draws[_POLICY_DRAWS:]))


def check_range(name: str, value: object) -> tuple[float, float]:
    """Return (low, high) of the option `scale` or `ratio`. Raises UsageError."""
    highest, rule = (1.0, "<= 1") if name == "scale" else (math.inf, "finite")
    if (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(end, (int, float)) for end in value)
    ):
        low, high = map(float, value)
        if 0 < low <= high <= highest and high < math.inf:
            return low, high
    raise UsageError(
        f"must be (low, high) with 0 < low <= high and high {rule}.", option=name, value=value
    )


def region(height: int, width: int, size: tuple[int, ...], augment: Augment, draws: Draws) -> Box:
    """Return the region of an image that is resized to `size` (height, width).

    With rrc a random crop, else a region in the center with the aspect ratio of `size`.
    """
    if augment.rrc:
        return random_crop(height, width, draws, augment.scale, augment.ratio)
    return center_crop(height, width, size[1] / size[0], augment.crop_pct)


def nearest_size(shape: Any, sizes: Sequence[Size]) -> Any:
    """Return which of `sizes` is nearest in shape; shape: width / height, or an array of them.

    sizes: (height, width), from the narrowest to the widest.
    """
    shapes = np.array([width / height for height, width in sizes])
    return np.searchsorted(np.sqrt(shapes[:-1] * shapes[1:]), shape)


def random_crop(
    height: int,
    width: int,
    draws: Draws,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
) -> Box:
    """Return the region of a random resized crop of a height x width image.

    As torchvision draws it (Inception training, Szegedy et al., 2014). scale: least and largest
    area, as a share of the image. ratio: of width to height. draws: float64[DRAWS] of the sample.
    """
    log_range = math.log(ratio[1] / ratio[0])
    for attempt in range(_TRIES):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[2 * attempt])
        aspect = math.exp(math.log(ratio[0]) + draws[2 * attempt + 1] * log_range)
        exact_w, exact_h = math.sqrt(area * aspect), math.sqrt(area / aspect)
        w, h = round(exact_w), round(exact_h)
        # The rounded sides may fit a small mask and not its larger image.
        if min(w, h) > 0 and exact_w <= width and exact_h <= height:
            top = int(draws[_TOP_DRAW] * (height - h + 1))
            return top, int(draws[_LEFT_DRAW] * (width - w + 1)), h, w
    return _fallback_crop(height, width, ratio)


def random_crops(
    height: int,
    width: int,
    draws: Draws,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
) -> npt.NDArray[np.int64]:
    """Return `random_crop` of b images of one size at once. int64[b, 4]; draws: float64[b, DRAWS].

    One image takes ten times as long as with `random_crop`; a batch is much faster.
    """
    crops, fits = random_boxes(height, width, draws, scale, ratio)
    crops[~fits] = _fallback_crop(height, width, ratio)
    return crops


def random_boxes(
    height: int,
    width: int,
    draws: Draws,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    *,
    within: bool = False,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return a random box (top, left, height, width) for each row, and whether it fits the image.

    int64[b, 4], bool[b]. The first of ten boxes that fits is taken. draws: float64[b, 22]: area and
    aspect ratio of each try, top and left. within: boxes are smaller than the image on both sides.
    """
    most_h, most_w = height - within, width - within
    area = height * width * (scale[0] + (scale[1] - scale[0]) * draws[:, 0 : 2 * _TRIES : 2])
    log_range = math.log(ratio[1] / ratio[0])
    aspect = np.exp(math.log(ratio[0]) + draws[:, 1 : 2 * _TRIES : 2] * log_range)
    exact_w, exact_h = np.sqrt(area * aspect), np.sqrt(area / aspect)
    w, h = np.rint(exact_w).astype(np.int64), np.rint(exact_h).astype(np.int64)
    inside_w, inside_h = (w, h) if within else (exact_w, exact_h)
    is_inside = [w > 0, inside_w <= most_w, h > 0, inside_h <= most_h]
    fits: npt.NDArray[np.bool_] = np.logical_and.reduce(is_inside)
    rows, first = np.arange(len(draws)), fits.argmax(1)
    w, h = w[rows, first], h[rows, first]
    top = (draws[:, _TOP_DRAW] * (height - h + 1)).astype(np.int64)
    left = (draws[:, _LEFT_DRAW] * (width - w + 1)).astype(np.int64)
    return np.stack([top, left, h, w], 1), np.logical_or.reduce(fits, axis=1)


def center_crop(height: int, width: int, aspect: float, share: float = 1.0) -> Box:
    """Return a region in the center of an image with this ratio of width to height.

    share: of the sides of the largest such region.
    """
    w = max(1, round(min(width, height * aspect) * share))
    h = max(1, round(min(height, width / aspect) * share))
    return (height - h) // 2, (width - w) // 2, h, w


def _fallback_crop(height: int, width: int, ratio: tuple[float, float]) -> Box:
    """Return the crop of an image so narrow that no random crop fits."""
    return center_crop(height, width, min(max(width / height, ratio[0]), ratio[1]))


def _trivial_augment(image: Image.Image, draws: Draws) -> Image.Image:
    """Return the image after one operation of random strength. draws: float64[4] in [0, 1)."""
    strength = int(draws[1] * _BINS) / (_BINS - 1)
    return _changed(image, draws[0], draws[2], strength, _WIDE)


def _rand_augment(image: Image.Image, draws: Draws) -> Image.Image:
    """Return the image after two operations of strength 9 of 31. draws: float64[4] in [0, 1)."""
    x, y = (side * _MAX_TRANSLATION for side in image.size)
    largest = _magnitudes(slope=0.3, x=x, y=y, degrees=30, factor=0.9, bits=4)
    for pick, sign in draws.reshape(2, 2):
        image = _changed(image, pick, sign, _RAND_AUGMENT_STRENGTH, largest)
    return image


def _changed(
    image: Image.Image, pick: float, sign: float, strength: float, largest: Sequence[float]
) -> Image.Image:
    """Return the image after one operation, which `pick` chooses.

    strength: share of the largest magnitude, 0 to 1. An operation with a direction takes the
    opposite one half of the time, by `sign`.
    """
    number = int(pick * len(_OPERATIONS))
    operation, magnitude = _OPERATIONS[number], strength * largest[number]
    return operation(image, -magnitude if sign < 0.5 and number in _SIGNED else magnitude)


# in the order in which torchvision draws them: identity, shears, translations, rotation, brightness,
# color, contrast, sharpness, posterize, solarize, autocontrast, equalize
_OPERATIONS: tuple[Operation, ...] = (
    lambda image, _: image,
    lambda image, m: image.transform(image.size, Image.Transform.AFFINE, (1, m, 0, 0, 1, 0)),
    lambda image, m: image.transform(image.size, Image.Transform.AFFINE, (1, 0, 0, m, 1, 0)),
    lambda image, m: image.transform(image.size, Image.Transform.AFFINE, (1, 0, -int(m), 0, 1, 0)),
    lambda image, m: image.transform(image.size, Image.Transform.AFFINE, (1, 0, 0, 0, 1, -int(m))),
    lambda image, m: image.rotate(m),
    lambda image, m: ImageEnhance.Brightness(image).enhance(1 + m),
    lambda image, m: ImageEnhance.Color(image).enhance(1 + m),
    lambda image, m: ImageEnhance.Contrast(image).enhance(1 + m),
    lambda image, m: ImageEnhance.Sharpness(image).enhance(1 + m),
    lambda image, m: ImageOps.posterize(image, 8 - round(m)),
    lambda image, m: ImageOps.solarize(image, math.ceil(255 - m)),
    lambda image, _: ImageOps.autocontrast(image),
    lambda image, _: ImageOps.equalize(image),
)
_SIGNED = range(1, 10)  # operations with a direction: shears to sharpness


def _magnitudes(
    slope: float, x: float, y: float, degrees: float, factor: float, bits: int
) -> tuple[float, ...]:
    """Return the largest magnitude of each operation. x, y: of translations, in pixels."""
    return (0, slope, slope, x, y, degrees, factor, factor, factor, factor, bits, 255, 0, 0)


_WIDE = _magnitudes(slope=0.99, x=32, y=32, degrees=135, factor=0.99, bits=6)
_POLICIES = {"trivialaugment": _trivial_augment, "randaugment": _rand_augment}
