"""Pixels of decoded images: turned upright by their EXIF orientation, and resized."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.native import kernels

Pixels = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]  # top, left, height, width

# orientations (1 to 8, as EXIF numbers them) of stored images
_BOTTOM_ROW_FIRST = (3, 4, 6, 7)
_RIGHT_COLUMN_FIRST = (2, 3, 7, 8)
_FIRST_TRANSPOSED = 5  # 5 to 8: rows and columns are exchanged


def jpeg_orientation(data: bytes | memoryview) -> int:
    """Return the EXIF orientation of a JPEG, 1 to 8; 0 if only Pillow can tell."""
    if kernels.library is None:
        raw = bytes(data)
        return 0 if b"Exif\0\0" in raw or b"tiff:Orientation" in raw else 1
    source = np.frombuffer(data, np.uint8)
    return int(kernels.library.orientation(source.ctypes.data, len(source)))


def upright_size(height: int, width: int, orientation: int) -> tuple[int, int]:
    """Return (height, width) of a stored image after it is turned upright."""
    return (width, height) if orientation >= _FIRST_TRANSPOSED else (height, width)


def stored_box(box: Box, height: int, width: int, orientation: int) -> Box:
    """Return the region of the stored image, of height x width, that holds a region upright."""
    top, left, h, w = box
    if orientation >= _FIRST_TRANSPOSED:
        top, left, h, w = left, top, w, h
    top = height - top - h if orientation in _BOTTOM_ROW_FIRST else top
    left = width - left - w if orientation in _RIGHT_COLUMN_FIRST else left
    return top, left, h, w


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Return stored pixels turned upright: a copy, or `pixels` itself for orientation 1."""
    if orientation == 1:
        return pixels
    pixels = pixels[::-1] if orientation in _BOTTOM_ROW_FIRST else pixels
    pixels = pixels[:, ::-1] if orientation in _RIGHT_COLUMN_FIRST else pixels
    pixels = pixels.transpose(1, 0, 2) if orientation >= _FIRST_TRANSPOSED else pixels
    if kernels.library is None:
        return np.ascontiguousarray(pixels)
    turned = np.empty(pixels.shape, np.uint8)
    kernels.library.copy_pixels(
        turned.ctypes.data, pixels.ctypes.data, *pixels.shape[:2], *pixels.strides[:2]
    )
    return turned


def resize(pixels: Pixels, out: Pixels) -> None:
    """Resize an image into `out`: bilinear, with anti-aliasing. uint8[height, width, 3] each.

    As torchvision does it. Images of the same size are copied. The two must not overlap.
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
    """Return torch, imported with the first image: a command that only names fields starts quickly."""
    import torch

    return torch
