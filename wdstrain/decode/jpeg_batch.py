"""Decoding of many JPEGs by one call of C: the region of each that is needed, at its final size.

Image by image, each call would release the GIL and wait for it. Threads that decode small images
would spend more time on that than on decoding.

Only plain JPEGs are decoded here. For damaged images, other color spaces, unclear EXIF
orientations and huge images, `wdstrain.decode.codecs` decides.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.decode.codecs import (
    Pixels,
    has_few_scans,
    resize,
    stored_box,
    upright,
    upright_size,
)
from wdstrain.decode.formats import MAX_PIXELS
from wdstrain.decode.transforms import FLIP_DRAW, Augment, Draws, region
from wdstrain.native import kernels

Ints = npt.NDArray[np.int64]

# bytes of decoded regions that wait for resizing; with more they would leave the CPU cache
_SCRATCH_BYTES = 1 << 20
_of_thread = threading.local()


class EncodedImages(NamedTuple):
    """Encoded images in the memory of this process. address, size: int64[b] each, in bytes."""

    address: Ints
    size: Ints

    @classmethod
    def of(cls, data: bytes | memoryview) -> EncodedImages:
        """Return a batch of one image, valid as long as `data` exists."""
        address = np.frombuffer(data, np.uint8).ctypes.data
        return cls(np.array([address]), np.array([len(data)]))


class _PlainImages(NamedTuple):
    """The plain JPEGs of a batch: n images.

    rows: int64[n], their rows. box: int32[n, 4], region to decode in the stored image (top, left,
    height, width). orientation: int32[n].
    """

    rows: Ints
    box: npt.NDArray[np.int32]
    orientation: npt.NDArray[np.int32]


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
    library, functions = kernels.library, kernels.libjpeg_turbo()
    if library is None or functions is None or not out.flags.c_contiguous:
        return set()
    plain = _find_plain(library, functions, images, rows, out.shape[1:3], augment, draws)
    mirrored = (draws[plain.rows, FLIP_DRAW] < 0.5) & augment.flip
    done = set[int]()
    for i, pixels in _decode_regions(functions, images, plain, mirrored, out):
        row = int(plain.rows[i])
        if pixels is not None:
            _finish(upright(pixels, int(plain.orientation[i])), out[row], bool(mirrored[i]))
        augment.apply_policy(out[row], draws[row])
        done.add(row)
    return done


def _decode_regions(
    functions: Any,
    images: EncodedImages,
    plain: _PlainImages,
    mirrored: npt.NDArray[np.bool_],
    out: Pixels,
) -> Iterator[tuple[int, Pixels | None]]:
    """Yield the number of each decoded image, and its region as stored. Failed images are left out.

    The pixels are valid until the next image is asked for; None: they are in `out`, complete.
    """
    arrays = (
        images.address[plain.rows],
        images.size[plain.rows],
        plain.box,
        plain.orientation != 1,
        mirrored,
        out.ctypes.data + plain.rows * out.strides[0],
    )
    decoded, scratch, first = np.zeros((len(plain.rows), 5), np.int64), _scratch(), 0
    while first < len(plain.rows):
        count = kernels.library.decode_regions(
            functions,
            len(plain.rows) - first,
            *(array[first:].ctypes.data for array in arrays),
            *out.shape[1:3],
            scratch.ctypes.data,
            len(scratch),
            decoded[first:].ctypes.data,
        )
        regions = decoded[first : first + count].tolist()
        for i, (start, top, left, height, width) in enumerate(regions, first):
            if height > 0:
                pixels = scratch[start : start + height * width * 3].reshape(height, width, 3)
                y, x, h, w = plain.box[i].tolist()
                yield i, pixels[y - top : y - top + h, x - left : x - left + w]
            elif not height:
                yield i, None
        first += count


def _finish(pixels: Pixels, out: Pixels, mirrored: bool) -> None:
    """Resize a region into `out`. A mirrored region is BGR, and becomes RGB in mirror image.

    Reversing the bytes of a row does both, in two thirds of the time of reversing its pixels.
    """
    if not mirrored:
        resize(pixels, out)
        return
    if pixels.shape != out.shape:
        resized = np.empty(out.shape, np.uint8)
        resize(pixels, resized)
        pixels = resized
    pixels = np.ascontiguousarray(pixels)
    rows, row_bytes = out.shape[0], out.shape[1] * 3
    kernels.library.reverse_rows(out.ctypes.data, pixels.ctypes.data, rows, row_bytes)


def _scratch() -> Pixels:
    """Return this thread's memory for decoded regions. uint8[bytes]"""
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = np.empty(_SCRATCH_BYTES, np.uint8)
    scratch: Pixels = _of_thread.scratch
    return scratch


def _find_plain(
    library: Any,
    functions: Any,
    images: EncodedImages,
    rows: Sequence[int],
    size: tuple[int, ...],
    augment: Augment,
    draws: Draws,
) -> _PlainImages:
    """Return which of these rows are plain JPEGs, and the region to decode of each."""
    address, length = images.address[rows], images.size[rows]
    shapes = np.zeros((len(rows), 3), np.int32)
    library.read_headers(
        functions, len(rows), *(array.ctypes.data for array in (address, length, shapes))
    )
    plain, boxes, orientations = list[int](), [], []
    for row, data_size, (height, width, orientation) in zip(
        rows, length.tolist(), shapes.tolist(), strict=True
    ):
        pixels = height * width
        if height > 0 and width > 0 and pixels <= MAX_PIXELS and has_few_scans(data_size, pixels):
            shape = upright_size(height, width, orientation)
            box = region(*shape, (size[0], size[1]), augment, draws[row])
            boxes.append(stored_box(box, height, width, orientation))
            plain.append(row)
            orientations.append(orientation)
    return _PlainImages(
        np.array(plain, np.int64),
        np.array(boxes, np.int32).reshape(-1, 4),
        np.array(orientations, np.int32),
    )
