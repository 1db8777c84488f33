"""TrivialAugment and RandAugment: random changes of color or geometry, by Pillow.

Operations, ranges and draws are those of torchvision: TrivialAugment (Müller and Hutter, 2021) with
the "wide" ranges; RandAugment (Cubuk et al., 2019) with two operations of magnitude 9 of 31 bins.
Operation names are torchvision's. Pixels that come in from outside the image are black.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageOps

Draws = npt.NDArray[np.float64]
Operation = Callable[[Image.Image, float], Image.Image]
Range = Callable[[float], float]  # strength, 0 to 1 -> magnitude

DRAWS = 4  # random numbers of one sample

_BINS = 31  # magnitudes, from none to the largest
_RAND_AUGMENT_STRENGTH = 9 / (_BINS - 1)
_MAX_TRANSLATION = 150 / 331  # RandAugment, share of the side


def trivial_augment(image: Image.Image, draws: Draws) -> Image.Image:
    """Return the image after one operation of random magnitude. draws: float64[4] in [0, 1)."""
    name = _pick(TRIVIAL_AUGMENT_RANGES, draws[0])
    strength = int(draws[1] * _BINS) / (_BINS - 1)
    magnitude = TRIVIAL_AUGMENT_RANGES[name](strength)
    return apply(image, name, _signed(name, magnitude, draws[2]))


def rand_augment(image: Image.Image, draws: Draws) -> Image.Image:
    """Return the image after two operations of magnitude 9. draws: float64[4] in [0, 1)."""
    for turn in range(2):
        name = _pick(_RAND_AUGMENT_RANGES, draws[2 * turn])
        magnitude = _RAND_AUGMENT_RANGES[name](_RAND_AUGMENT_STRENGTH)
        if name.startswith("Translate"):
            side = image.size[0 if name == "TranslateX" else 1]
            magnitude = _RAND_AUGMENT_STRENGTH * side * _MAX_TRANSLATION
        image = apply(image, name, _signed(name, magnitude, draws[2 * turn + 1]))
    return image


def apply(image: Image.Image, name: str, magnitude: float) -> Image.Image:
    """Return an RGB image after one operation.

    magnitude: slope (Shear), pixels (Translate), degrees (Rotate), factor - 1 (Brightness, Color,
    Contrast, Sharpness), bits (Posterize), or level (Solarize).
    """
    return _OPERATIONS[name](image, magnitude)


def _pick(ranges: Mapping[str, Range], draw: float) -> str:
    return list(ranges)[int(draw * len(ranges))]


def _signed(name: str, magnitude: float, draw: float) -> float:
    """Return the magnitude, negated half of the time if the operation has a direction."""
    return -magnitude if draw < 0.5 and name in SIGNED else magnitude


def _affine(
    image: Image.Image, matrix: tuple[float, float, float, float, float, float]
) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def _enhance(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return lambda image, magnitude: kind(image).enhance(1 + magnitude)


_OPERATIONS: dict[str, Operation] = {
    "Identity": lambda image, _: image,
    "ShearX": lambda image, m: _affine(image, (1, m, 0, 0, 1, 0)),
    "ShearY": lambda image, m: _affine(image, (1, 0, 0, m, 1, 0)),
    "TranslateX": lambda image, m: _affine(image, (1, 0, -int(m), 0, 1, 0)),
    "TranslateY": lambda image, m: _affine(image, (1, 0, 0, 0, 1, -int(m))),
    "Rotate": lambda image, m: image.rotate(m, Image.Resampling.NEAREST),
    "Brightness": _enhance(ImageEnhance.Brightness),
    "Color": _enhance(ImageEnhance.Color),
    "Contrast": _enhance(ImageEnhance.Contrast),
    "Sharpness": _enhance(ImageEnhance.Sharpness),
    "Posterize": lambda image, m: ImageOps.posterize(image, int(m)),
    "Solarize": lambda image, m: ImageOps.solarize(image, math.ceil(m)),
    "AutoContrast": lambda image, _: ImageOps.autocontrast(image),
    "Equalize": lambda image, _: ImageOps.equalize(image),
}
SIGNED = frozenset(  # operations with a direction
    [
        "ShearX",
        "ShearY",
        "TranslateX",
        "TranslateY",
        "Rotate",
        "Brightness",
        "Color",
        "Contrast",
        "Sharpness",
    ]
)


def _up_to(largest: float) -> Range:
    return lambda strength: strength * largest


def _ranges(
    slope: float, pixels: float, degrees: float, factor: float, bits: int
) -> dict[str, Range]:
    """Return the magnitude of each operation by strength. Arguments: the largest magnitudes.

    The order of the operations decides which random number picks which.
    """
    return {
        "Identity": _up_to(0),
        "ShearX": _up_to(slope),
        "ShearY": _up_to(slope),
        "TranslateX": _up_to(pixels),
        "TranslateY": _up_to(pixels),
        "Rotate": _up_to(degrees),
        "Brightness": _up_to(factor),
        "Color": _up_to(factor),
        "Contrast": _up_to(factor),
        "Sharpness": _up_to(factor),
        "Posterize": lambda strength: 8 - round(strength * bits),
        "Solarize": lambda strength: 255 - strength * 255,
        "AutoContrast": _up_to(0),
        "Equalize": _up_to(0),
    }


TRIVIAL_AUGMENT_RANGES = _ranges(slope=0.99, pixels=32, degrees=135, factor=0.99, bits=6)
# translations are a share of the image's side; see `rand_augment`
_RAND_AUGMENT_RANGES = _ranges(slope=0.3, pixels=0, degrees=30, factor=0.9, bits=4)
