"""Decoding of many JPEGs by one call of C: the region of each that is needed, at its final size.

Image by image, each call would release the GIL and wait for it. Threads that decode small images
would spend more time on that than on decoding.

Only plain JPEGs are decoded here. For damaged images, other color spaces, unclear EXIF
orientations and huge images, `wdstrain.decode.codecs` decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.decode.codecs import (
    FIRST_TRANSPOSED,
    Pixels,
    has_few_scans,
    resize,
    stored_box,
    upright,
)
from wdstrain.decode.formats import MAX_PIXELS
from wdstrain.decode.transforms import FLIP_DRAW, Augment, Draws, region
from wdstrain.native import kernels

Ints = npt.NDArray[np.int64]

# bytes of decoded regions that wait for resizing; with more they would leave the CPU cache
_SCRATCH_BYTES = 1 << 20


class EncodedImages(NamedTuple):
    """Encoded images in the memory of this process. address, size: int64[b] each, in bytes."""

    address: Ints
    size: Ints

    @classmethod
    def of(cls, data: bytes | memoryview) -> EncodedImages:
        """Return a batch of one image, valid as long as `data` exists."""
        address = np.frombuffer(data, np.uint8).ctypes.data
        return cls(np.array([address]), np.array([len(data)]))


def decode(
    images: EncodedImages,
    rows: Sequence[int],
    out: Pixels,
    augment: Augment,
    draws: Draws,
) -> set[int]:
    """Decode these rows of a batch into `out`. Returns the rows that are done.

    The other rows are not plain JPEGs, or damaged. All rows are left if the compiled library or
    libjpeg-turbo 3 is missing.

    out: uint8[b, height, width, 3]. draws: float64[b, DRAWS].
    """
    library, turbo = kernels.library, kernels.libjpeg_turbo()
    if library is None or turbo is None or not out.flags.c_contiguous:
        return set()
    plain = _plain_images(turbo, images, rows, out.shape[1:3], augment, draws)
    row, box, orientation = plain[:, 0], plain[:, 1:5].astype(np.int32), plain[:, 5]
    mirrored = (draws[row, FLIP_DRAW] < 0.5) & augment.flip
    to, done = out.ctypes.data + row * out.strides[0], set[int]()
    inputs = (images.address[row], images.size[row], box, orientation != 1, mirrored, to)
    for i, pixels in _decode_regions(turbo, inputs, out.shape[1:3]):
        target = out[row[i]]
        if pixels.size:
            _finish(upright(pixels, int(orientation[i])), target, bool(mirrored[i]))
        augment.apply_policy(target, draws[row[i]])
        done.add(int(row[i]))
    return done


def _plain_images(
    turbo: Any,
    images: EncodedImages,
    rows: Sequence[int],
    size: tuple[int, ...],
    augment: Augment,
    draws: Draws,
) -> Ints:
    """Return the plain JPEGs of these rows, and the region to decode of each.

    int64[n, 6]: row; top, left, height and width in the stored image; orientation.
    """
    address, length = images.address[rows], images.size[rows]
    shapes, plain = np.zeros((len(rows), 3), np.int32), []
    kernels.library.read_headers(
        turbo, len(rows), address.ctypes.data, length.ctypes.data, shapes.ctypes.data
    )
    for row, data_size, shape in zip(rows, length.tolist(), shapes.tolist(), strict=True):
        height, width, orientation = shape
        pixels = height * width
        if height > 0 and width > 0 and pixels <= MAX_PIXELS and has_few_scans(data_size, pixels):
            upright_shape = (width, height) if orientation >= FIRST_TRANSPOSED else (height, width)
            box = region(*upright_shape, size, augment, draws[row])
            plain.append((row, *stored_box(box, height, width, orientation), orientation))
    return np.array(plain, np.int64).reshape(-1, 6)


def _decode_regions(
    turbo: Any, inputs: tuple[npt.NDArray[Any], ...], size: tuple[int, ...]
) -> Iterator[tuple[int, Pixels]]:
    """Yield the number of each decoded image, and its region as stored. Failed images are left out.

    The pixels are valid until the next image is asked for; none: they are in `out`, complete.
    inputs: arrays of the six arguments of `decode_regions` in kernels.c that have a value for each
    image. size: height and width of the final images.
    """
    count, first, boxes = len(inputs[0]), 0, inputs[2].tolist()
    decoded, scratch = np.zeros((count, 5), np.int64), np.empty(_SCRATCH_BYTES, np.uint8)
    while first < count:
        addresses = [array[first:].ctypes.data for array in (*inputs, decoded)]
        stop = first + kernels.library.decode_regions(
            turbo,
            count - first,
            *addresses[:-1],
            *size,
            scratch.ctypes.data,
            len(scratch),
            addresses[-1],
        )
        for i in range(first, stop):
            start, top, left, height, width = decoded[i].tolist()
            if height >= 0:
                pixels = scratch[start : start + height * width * 3].reshape(height, width, 3)
                y, x, h, w = boxes[i]
                yield i, pixels[y - top : y - top + h, x - left : x - left + w]
        first = stop


def _finish(pixels: Pixels, out: Pixels, mirrored: bool) -> None:
    """Resize a region into `out`. A mirrored region is BGR, and becomes RGB in mirror image.

    Reversing the bytes of a row does both, in two thirds of the time of reversing its pixels.
    """
    resized = np.empty(out.shape, np.uint8) if mirrored else out
    resize(pixels, resized)
    if mirrored:
        height, width, _ = out.shape
        kernels.library.reverse_rows(out.ctypes.data, resized.ctypes.data, height, width * 3)
