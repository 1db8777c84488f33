"""The part in C (`kernels.c`), loaded where it was compiled; everything that it does is done in Python too, slower.

It is compiled when the package is installed, where there is a compiler (`scripts/compile.py`). The checksum is isal's here too.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from isal import isal_zlib

SOURCE, PATH = (os.path.join(os.path.dirname(__file__), name) for name in ("kernels.c", "libkernels.so"))
_KNOWN = b"123456789", 0xCBF43926  # of which any crc32 is checked


class Packed(ctypes.Structure):
    """What an index says of samples, and the memory they come to: addresses of its arrays, as `kernels.c` has them."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("of", "start", "stop", "first", "offset", "size", "crc", "field", "compared")),
        *((name, ctypes.c_int64) for name in ("fields", "memory", "room")),
    ]


class Lane(ctypes.Structure):
    """Where the samples of a lane are put, by place, and whether they were found sound."""

    _fields_ = [("by", ctypes.c_void_p), ("where", ctypes.c_void_p), ("sound", ctypes.c_void_p), ("ring", ctypes.c_int64)]


class Samples(ctypes.Structure):
    """Those of one read."""

    _fields_ = [("in", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("place", "id", "count", "begun"))]


def _checksum() -> int | None:
    """The address of isal's crc32; its function for Python takes Python's lock for each call."""
    with suppress(OSError, AttributeError):
        crc = ctypes.CDLL(isal_zlib.__file__).crc32_gzip_refl
        crc.argtypes, crc.restype = (ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64), ctypes.c_uint32
        if crc(0, _KNOWN[0], len(_KNOWN[0])) == _KNOWN[1]:
            return ctypes.cast(crc, ctypes.c_void_p).value
    return None


def _compiled() -> Any:
    """The library of `kernels.c`; None where it was not compiled."""
    with suppress(OSError, AttributeError, ValueError):
        library: Any = ctypes.CDLL(PATH)
        array, number = ctypes.c_void_p, ctypes.c_int64
        brief = ctypes.PyDLL(PATH)  # too short to give Python's lock away, and wait for it
        library.queue_put, library.orientation = brief.queue_put, brief.orientation
        with open(SOURCE, "rb") as file:
            source = int.from_bytes(blake2b(file.read(), digest_size=8).digest(), "little")
        if ctypes.c_uint64.in_dll(library, "source").value != source:  # the clone was updated and not installed again
            return None
        library.sums.argtypes = (array, number, *[array] * 4)
        library.compare.argtypes = (array, number, number)
        library.fill.argtypes = (ctypes.c_int, *[number] * 5, array, array, *library.sums.argtypes, array, number, array)
        library.turn.argtypes = (array, array, number, number)
        library.orientation.argtypes = (array, number)
        library.place.argtypes = (array, array, *[number] * 4)
        library.heads.argtypes = (array, number, *[array] * 3)
        library.parts.argtypes = (array, number, *[array] * 6, number, number, array, number, *[array] * 3)
        library.queue_size.argtypes = ()
        for function in (library.queue_begin, library.queue_work, library.queue_close):
            function.argtypes = (array,)
        library.queue_put.argtypes = (array, number, *library.fill.argtypes)
        library.queue_next.argtypes = (array, array)
        for function in (
            library.sums,
            library.compare,
            library.turn,
            library.place,
            library.heads,
            library.queue_begin,
            library.queue_work,
            library.queue_close,
        ):
            function.restype = None
        for function in (library.fill, library.queue_size, library.queue_next, library.parts):
            function.restype = number
        library.queue_put.restype = library.orientation.restype = ctypes.c_int
        return library if checksum else None
    return None


checksum = _checksum()
library = _compiled()
