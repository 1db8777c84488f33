"""TrivialAugment and RandAugment: a change of colour or shape drawn from fourteen, by a sample's own random numbers.

As torchvision draws and does them (Müller and Hutter, 2021, the "wide" ranges; Cubuk et al., 2019, two changes of magnitude 9 of 31),
by Pillow, whose filters are the original ones; compared with torchvision's in the tests. Where a picture is turned, moved or
sheared, what comes in from outside is black.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageOps

Draws = npt.NDArray[np.float64]
Change = Callable[[Image.Image, float], Image.Image]

DRAWS = 4  # numbers for one sample

_BINS = 31  # magnitudes from none to the most


def trivial_augment(image: Image.Image, draws: Draws) -> Image.Image:
    """One change of any magnitude. image: RGB; draws: float64[4] in [0, 1)."""
    name = _pick(tuple(_WIDE), draws[0])
    part = int(draws[1] * _BINS) / (_BINS - 1)
    return _done(image, name, _WIDE[name](part), draws[2] < 0.5)


def rand_augment(image: Image.Image, draws: Draws) -> Image.Image:
    """Two changes of magnitude 9 of 30. image: RGB; draws: float64[4] in [0, 1)."""
    for turn in range(2):
        name = _pick(tuple(_USUAL), draws[2 * turn])
        move = image.size[0 if name == "translate x" else 1] * 150 / 331
        size = 9 / (_BINS - 1)
        magnitude = size * move if name.startswith("translate") else _USUAL[name](size)
        image = _done(image, name, magnitude, draws[2 * turn + 1] < 0.5)
    return image


def change(image: Image.Image, name: str, magnitude: float) -> Image.Image:
    """The picture after a change by its name. Magnitudes: a slope, pixels, degrees, a factor above 1, bits, a level."""
    return _CHANGES[name](image, magnitude)


def _pick(names: tuple[str, ...], draw: float) -> str:
    return names[int(draw * len(names))]


def _done(image: Image.Image, name: str, magnitude: float, turned: bool) -> Image.Image:
    return change(image, name, -magnitude if turned and name in _SIGNED else magnitude)


def _affine(
    image: Image.Image, matrix: tuple[float, float, float, float, float, float]
) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def _rotated(image: Image.Image, degrees: float) -> Image.Image:
    return image.rotate(degrees, Image.Resampling.NEAREST)


def _enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Change:
    return lambda image, magnitude: kind(image).enhance(1 + magnitude)


_CHANGES: dict[str, Change] = {
    "identity": lambda image, _: image,
    "shear x": lambda image, m: _affine(image, (1, m, 0, 0, 1, 0)),
    "shear y": lambda image, m: _affine(image, (1, 0, 0, m, 1, 0)),
    "translate x": lambda image, m: _affine(image, (1, 0, -int(m), 0, 1, 0)),
    "translate y": lambda image, m: _affine(image, (1, 0, 0, 0, 1, -int(m))),
    "rotate": _rotated,
    "brightness": _enhanced(ImageEnhance.Brightness),
    "colour": _enhanced(ImageEnhance.Color),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
    "posterize": lambda image, m: ImageOps.posterize(image, int(m)),
    "solarize": lambda image, m: ImageOps.solarize(image, math.ceil(m)),
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
}
_SIGNED = {
    "shear x",
    "shear y",
    "translate x",
    "translate y",
    "rotate",
    "brightness",
    "colour",
    "contrast",
    "sharpness",
}

Range = Callable[[float], float]


def _up_to(most: float) -> Range:
    return lambda part: part * most


def _ranges(
    slope: float, move: float, degrees: float, factor: float, bits: int
) -> dict[str, Range]:
    """The magnitude of each change for a part, 0 to 1, of the most."""
    return {
        "identity": _up_to(0),
        "shear x": _up_to(slope),
        "shear y": _up_to(slope),
        "translate x": _up_to(move),
        "translate y": _up_to(move),
        "rotate": _up_to(degrees),
        "brightness": _up_to(factor),
        "colour": _up_to(factor),
        "contrast": _up_to(factor),
        "sharpness": _up_to(factor),
        "posterize": lambda part: 8 - round(part * bits),
        "solarize": lambda part: 255 - part * 255,
        "autocontrast": _up_to(0),
        "equalize": _up_to(0),
    }


_WIDE = _ranges(0.99, 32, 135, 0.99, 6)
_USUAL = _ranges(0.3, 0, 30, 0.9, 4)  # pictures are moved by a part of their size
