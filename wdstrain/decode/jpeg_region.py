"""Only the part of a JPEG that is wanted, by libjpeg-turbo 3.

A random resized crop takes 42 % of a picture on average. libjpeg-turbo 3 can leave out the transforms and colours of the rest; what
is before it has to be read all the same, so it takes 0.8 of the time of the whole. The pixels are exactly those of the whole:
the part is taken one block wider on each side, for what upsampling looks at beyond its edge.

The library is loaded, not built: that of the package `turbojpeg`, which pip installs with this one (not yet for Python 3.14), or
of the system. simplejpeg has one inside that it does not let others use. Without one, pictures are decoded whole, to the same pixels.
"""

from __future__ import annotations

import ctypes
import glob
import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]  # top, left, height, width

_DECOMPRESS, _RGB, _BGR = 1, 0, 1
_SUBSAMPLING, _WIDTH, _HEIGHT, _COLOURS, _PROGRESSIVE = 4, 5, 6, 8, 12  # parameters
_BLOCKS = {
    0: (8, 8),
    1: (16, 8),
    2: (16, 16),
    3: (8, 8),
    4: (8, 16),
    5: (32, 8),
    6: (8, 32),
}  # width, height by subsampling
_KNOWN = (0, 1, 2)  # RGB, YCbCr, grey


class _Region(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_int),
        ("y", ctypes.c_int),
        ("width", ctypes.c_int),
        ("height", ctypes.c_int),
    )


def decode_part(
    data: memoryview | bytes,
    box: Box,
    most_pixels: int,
    out: Pixels | None = None,
    *,
    blue_first: bool = False,
) -> Pixels | None:
    """The pixels of a part of a JPEG. uint8[height, width, 3], RGB or BGR; over `out` if it has that shape and is contiguous.

    None where there is no library, for a picture that is damaged down to the part's lower edge or of which only the beginning is
    there, and for colours it does not turn into RGB: then another decoder decides. What is below the part is not looked at.
    """
    turbo = _library()
    if turbo is None or bytes(data[-2:]) != b"\xff\xd9":
        return None
    # each has a handle of its own: it keeps the tables of the pictures before, for one that has none, and may be left in the middle
    handle = turbo.tj3Init(_DECOMPRESS)
    if not handle:
        return None
    try:
        return _decode(turbo, handle, data, box, most_pixels, out, _BGR if blue_first else _RGB)
    finally:
        turbo.tj3Destroy(handle)


def functions() -> Any:
    """What `kernels.c` decodes with, as it takes it; None where there is no library."""
    turbo = _library()
    return None if turbo is None else turbo.functions


def _decode(
    turbo: Any,
    handle: int,
    data: memoryview | bytes,
    box: Box,
    most_pixels: int,
    out: Pixels | None,
    colours: int,
) -> Pixels | None:
    source = np.frombuffer(data, np.uint8)
    begin = source.ctypes.data
    if turbo.tj3DecompressHeader(handle, begin, len(source)):
        return None
    width, height = turbo.tj3Get(handle, _WIDTH), turbo.tj3Get(handle, _HEIGHT)
    block = _BLOCKS.get(turbo.tj3Get(handle, _SUBSAMPLING))
    if (
        block is None
        or turbo.tj3Get(handle, _COLOURS) not in _KNOWN
        or width * height > most_pixels
    ):
        return None
    # an end marker before the end: scans of a progressive picture may be missing, which versions of libjpeg smooth differently
    if turbo.tj3Get(handle, _PROGRESSIVE) == 1 and bytes(data).find(b"\xff\xd9") != len(data) - 2:
        return None
    top, left, h, w = box
    x, y = max(0, (left // block[0] - 1) * block[0]), max(0, top - block[1])
    right, bottom = min(width, left + w + block[0]), min(height, top + h + block[1])
    exact = (y, x, bottom, right) == (top, left, top + h, left + w)
    if out is not None and exact and out.shape == (h, w, 3) and out.flags.c_contiguous:
        target = out
    else:
        target = np.empty((bottom - y, right - x, 3), np.uint8)
    if turbo.tj3SetCroppingRegion(handle, _Region(x, y, right - x, bottom - y)):
        return None
    if turbo.tj3Decompress8(handle, begin, len(source), target.ctypes.data, 0, colours):
        return None
    return target[top - y : top - y + h, left - x : left - x + w]


@lru_cache(maxsize=1)
def _library() -> Any:
    """libturbojpeg of version 3 or later, None if there is none."""
    spec = find_spec("turbojpeg")
    # without the package no folder is searched: a relative pattern would load and run files of the working directory
    packaged = (
        os.path.join(os.path.dirname(spec.origin), "turbojpeg.libs")
        if spec is not None and spec.origin
        else None
    )
    paths = (
        []
        if packaged is None
        else sorted(glob.glob(os.path.join(glob.escape(packaged), "libturbojpeg*")))
    )
    for path in [*paths, "libturbojpeg.so.0"]:
        try:
            found: Any = ctypes.CDLL(path)
            brief = ctypes.PyDLL(path)
            # too short to give the interpreter's lock away: with four threads each time may be a wait for another
            for name in (
                "tj3Init",
                "tj3Destroy",
                "tj3Get",
                "tj3DecompressHeader",
                "tj3SetCroppingRegion",
            ):
                setattr(found, name, getattr(brief, name))
            number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
            found.tj3Init.restype, found.tj3Init.argtypes = pointer, [number]
            found.tj3Destroy.restype, found.tj3Destroy.argtypes = None, [pointer]
            found.tj3Get.argtypes = [pointer, number]
            found.tj3DecompressHeader.argtypes = [pointer, pointer, size]
            found.tj3SetCroppingRegion.argtypes = [pointer, _Region]
            found.tj3Decompress8.argtypes = [pointer, pointer, size, pointer, number, number]
            calls = (
                found.tj3DecompressHeader,
                found.tj3Get,
                found.tj3SetCroppingRegion,
                found.tj3Decompress8,
                found.tj3Init,
                found.tj3Destroy,
            )
            found.functions = (pointer * len(calls))(
                *(ctypes.cast(one, pointer).value for one in calls)
            )
            return found
        except (OSError, AttributeError):
            continue  # not there, or of version 2
    return None
