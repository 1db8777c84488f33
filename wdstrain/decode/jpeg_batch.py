"""The pictures of a batch at once: those that are plain JPEGs, by one call in C (`kernels.c`) for as many as stay in the processor's cache.

Picture by picture the interpreter's lock is given away at each and waited for again, and threads that decode small ones
spend more time on that than on decoding; and each takes some 20 us of Python. What is not plain (progressive, with EXIF that only
Pillow reads, in other colours, larger than a photograph, damaged) is left to the decoder of single pictures, and comes out as it does there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.decode import jpeg_region
from wdstrain.decode.codecs import is_little_work, stored_box, upright
from wdstrain.decode.image_formats import MAX_PIXELS
from wdstrain.decode.resize import fit
from wdstrain.decode.transforms import Augment, Draws, region
from wdstrain.native import kernels

Ints = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]

_ROOM = (
    1 << 20
)  # bytes of pixels that wait to be resized: more would leave the processor's cache before
_of_thread = threading.local()


class EncodedImages(NamedTuple):
    """Where the encoded pictures of a batch lie. address: in this process, size: bytes; int64[b] each."""

    address: Ints
    size: Ints


def read(
    images: EncodedImages, rows: Sequence[int], out: Pixels, augment: Augment, draws: Draws, at: Any
) -> set[int]:
    """Decode these rows of a batch into `out`, each as `wdstrain.decode.fields.image` has it. Which of them were; the others are as they were.

    out: uint8[b, height, width, 3]; draws: float64[b, 27]; at: address of an int64 that becomes the row which is being decoded.
    """
    library, functions = kernels.library, jpeg_region.functions()
    if library is None or functions is None or not out.flags.c_contiguous:
        return set()
    rows, boxes, orientations = _plain(
        library, functions, images, rows, (out.shape[1], out.shape[2]), augment, draws
    )
    turned = orientations != 1  # bool[n]
    mirrored = (draws[rows, 22] < 0.5) & augment.flip  # bool[n]
    address, size, to = (
        images.address[rows],
        images.size[rows],
        out.ctypes.data + np.array(rows, np.int64) * out.strides[0],
    )
    ids, done, first = np.array(rows, np.int64), set[int](), 0
    lies, scratch = np.zeros((len(rows), 5), np.int64), _scratch()
    while first < len(rows):
        arrays = (one[first:].ctypes.data for one in (address, size, boxes, turned, mirrored, to))
        count = library.decode_regions(
            functions,
            len(rows) - first,
            *arrays,
            *out.shape[1:3],
            scratch.ctypes.data,
            _ROOM,
            lies[first:].ctypes.data,
            at,
            ids[first:].ctypes.data,
        )
        for i, (begin, top, left, height, width) in enumerate(
            lies[first : first + count].tolist(), first
        ):
            if height < 0:
                continue
            if height:
                y, x, h, w = boxes[i].tolist()
                part = scratch[begin : begin + height * width * 3].reshape(height, width, 3)
                part = upright(
                    part[y - top : y - top + h, x - left : x - left + w], int(orientations[i])
                )
                fit(part, out[rows[i]], mirrored=bool(mirrored[i]))
            augment.change(out[rows[i]], draws[rows[i]])
            done.add(rows[i])
        first += count
    return done


def _scratch() -> Pixels:
    """Room for pixels that wait, this thread's own and the same each time. uint8[bytes]"""
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = np.empty(_ROOM, np.uint8)
    found: Pixels = _of_thread.scratch
    return found


def _plain(
    library: Any,
    functions: Any,
    images: EncodedImages,
    rows: Sequence[int],
    size: tuple[int, int],
    augment: Augment,
    draws: Draws,
) -> tuple[list[int], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Those rows that are plain JPEGs; the part of each as it is stored: top, left, height, width, int32[n, 4]; and its orientation,
    int32[n]."""
    address, length = images.address[rows], images.size[rows]
    shapes = np.zeros((len(rows), 3), np.int32)
    library.read_headers(
        functions, len(rows), *(one.ctypes.data for one in (address, length, shapes))
    )
    found, boxes, orientations = list[int](), [], []
    for row, bytes_, (height, width, orientation) in zip(
        rows, length.tolist(), shapes.tolist(), strict=True
    ):
        if (
            height > 0
            and width > 0
            and height * width <= MAX_PIXELS
            and is_little_work(bytes_, height * width)
        ):
            sides = (width, height) if orientation >= 5 else (height, width)
            found.append(row)
            boxes.append(
                stored_box(region(*sides, size, augment, draws[row]), height, width, orientation)
            )
            orientations.append(orientation)
    return found, np.array(boxes, np.int32).reshape(-1, 4), np.array(orientations, np.int32)
