"""Arrays as pictures that a person can look at, and pictures made small for looking at many.

What looks like a picture is shown as one whatever its field is called, because masks, depths and planes of detectors are stored as
arrays; what range was spread over the greys is told beside it (`wording.array_said`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

SIDE = 256  # pixels of the longer side of what is kept of a picture
NARROWEST = 8  # pixels of the shorter side of an array that is taken for a picture
_LONGEST = 64  # times the shorter side


def small(pixels: Pixels) -> Pixels:
    """A picture, at most 256 pixels wide and high; a copy. uint8[h, w, 3]"""
    if max(pixels.shape[:2]) <= SIDE:
        return np.array(pixels)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((SIDE, SIDE), reducing_gap=2.0)
    return np.array(image)


def picture_in(value: Array) -> Pixels | None:
    """An array that looks like a picture as one: [h, w], [h, w, 1 or 3] or [1 or 3, h, w] of numbers; None for another.

    uint8 stays as it is, numbers from 0 to 1 are shares of white, colours from 0 to 255 stay; everything else is spread from its least to
    its greatest.
    """
    if value.dtype.kind not in "biuf" or value.ndim not in (2, 3):
        return None
    if value.ndim == 3 and value.shape[0] in (1, 3) and value.shape[2] not in (1, 3):
        value = np.moveaxis(value, 0, -1)
    if value.ndim == 3 and value.shape[2] not in (1, 3):
        return None
    if min(value.shape[:2]) < NARROWEST or max(value.shape[:2]) > _LONGEST * min(value.shape[:2]):
        return None
    planes = value[:, :, None] if value.ndim == 2 else value
    if (
        max(planes.shape[:2]) > 4 * SIDE
    ):  # nobody needs more of it, and floats are eight times as large
        planes = planes[
            :: max(planes.shape[:2]) // (2 * SIDE), :: max(planes.shape[:2]) // (2 * SIDE)
        ]
    if planes.dtype != np.uint8:
        low, high = ends(planes)
        floats = np.nan_to_num(planes.astype(np.float32), nan=low, posinf=high, neginf=low)
        if planes.dtype.kind in "bf" and low >= 0 and high <= 1:
            low, high = 0.0, 1.0
        elif planes.shape[2] == 3 and low >= 0 and high <= 255:
            low, high = 0.0, 255.0
        planes = np.clip(np.rint((floats - low) * (255 / max(high - low, 1e-30))), 0, 255).astype(
            np.uint8
        )
    return np.ascontiguousarray(np.broadcast_to(planes, (*planes.shape[:2], 3)))


def ends(value: Array) -> tuple[float, float]:
    """The least and the greatest of its finite numbers; 0 and 0 if there are none."""
    finite = value[np.isfinite(value)] if value.dtype.kind == "f" else value
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
