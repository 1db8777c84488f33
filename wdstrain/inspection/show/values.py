"""Values of samples as short texts and as small images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

SIDE = 256  # pixels of the longer side of a thumbnail
MAX_TEXT = 300  # characters of a text that are kept
_MIN_SIDE = 8  # pixels of the shorter side of an array that is shown as an image
_MAX_ASPECT = 64  # longer side / shorter side of such an array
_MAX_SHARES = 3  # classes of a mixed label that are named


def shortened(text: str) -> str:
    """Return the beginning of a text, as one line."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def number_text(value: Any) -> str:
    """Return a number as short text."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return shortened(str(value))
    if isinstance(value, (bool, int)):
        return str(value)
    is_whole = math.isfinite(number) and number == int(number) and abs(number) < 1e15
    return str(int(number)) if is_whole else f"{number:.4g}"


def array_text(value: Array) -> str:
    """Return type, shape and range of an array."""
    kind = f"{value.dtype}{list(value.shape)}"
    if value.dtype.kind not in "iuf" or not value.size:
        return kind
    if value.size <= 4:
        return f"{kind} {' '.join(number_text(number) for number in value.ravel().tolist())}"
    low, high = value_range(value)
    return f"{kind}, {low:.4g} to {high:.4g}"


def class_shares_text(value: Array, classes: Sequence[str]) -> str:
    """Return a vector of class shares as text, or of 0 and 1 as class names; "" for others."""
    if value.ndim != 1 or value.dtype.kind != "f" or len(value) < 2:
        return ""
    if classes and len(classes) != len(value):
        return ""
    shares = value.astype(np.float64)
    if not (np.isfinite(shares).all() and (shares >= 0).all() and (shares <= 1.001).all()):
        return ""
    names = classes or [str(number) for number in range(len(shares))]
    if np.isin(shares, (0, 1)).all() and (classes or shares.sum() == 1):
        return "|".join(names[i] for i in np.flatnonzero(shares).tolist()) or "none"
    if abs(shares.sum() - 1) > 0.02:
        return ""
    largest = np.argsort(-shares, kind="stable")[:_MAX_SHARES].tolist()
    return ", ".join(f"{names[i]} {shares[i]:.0%}" for i in largest if shares[i] >= 0.005)


def thumbnail(pixels: Pixels) -> Pixels:
    """Return a copy of at most 256 x 256 pixels. uint8[h, w, 3]"""
    if max(pixels.shape[:2]) <= SIDE:
        return np.array(pixels)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((SIDE, SIDE), reducing_gap=2.0)
    return np.array(image)


def is_image_shape(shape: Sequence[int]) -> bool:
    """Return whether an array [h, w], [h, w, 1 or 3] or [1 or 3, h, w] is shown as an image."""
    if len(shape) == 3 and shape[2] in (1, 3):
        shape = shape[:2]
    elif len(shape) == 3 and shape[0] in (1, 3):
        shape = shape[1:]
    return len(shape) == 2 and min(shape) >= _MIN_SIDE and max(shape) <= _MAX_ASPECT * min(shape)


def to_image(value: Array, low: float | None = None, high: float | None = None) -> Pixels | None:
    """Return an array of numbers as an image uint8[h, w, 3]; None if it has not the shape of one.

    uint8 stays as it is. Other numbers are mapped linearly, from `low` (black) to `high` (white).
    Default: 0 to 1 if they all are, else the smallest to the largest.
    """
    if value.dtype.kind not in "biuf" or not is_image_shape(value.shape):
        return None
    if value.ndim == 3 and value.shape[2] not in (1, 3):
        value = np.moveaxis(value, 0, -1)
    planes = value[:, :, None] if value.ndim == 2 else value
    step = max(1, max(planes.shape[:2]) // (2 * SIDE))
    planes = planes[::step, ::step] if step > 2 else planes  # floats need 8 times the memory
    if planes.dtype != np.uint8:
        if low is None or high is None:
            low, high = display_range(*value_range(planes))
        scale = 255 / max(high - low, 1e-30)
        floats = np.nan_to_num(planes.astype(np.float32), nan=low, posinf=high, neginf=low)
        planes = np.clip(np.rint((floats - low) * scale), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(planes, (*planes.shape[:2], 3)))


def display_range(low: float, high: float) -> tuple[float, float]:
    """Return the numbers that are shown as black and white, for numbers from `low` to `high`."""
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def value_range(value: Array) -> tuple[float, float]:
    """Return the smallest and the largest finite number; (0, 0) if there is none."""
    finite = value[np.isfinite(value)] if value.dtype.kind == "f" else value
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
