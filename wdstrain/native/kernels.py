"""Binding of the C library (`kernels.c`). Without the library, Python does the same work, slower.

`scripts/compile.py` compiles it when the package is installed and a C compiler is there. `library`
is None if it is missing, was compiled from another source, or isal's crc32 cannot be called. The
environment variable WDSTRAIN_NATIVE=0 leaves it out, to find out whether it is at fault.
"""

from __future__ import annotations

import ctypes
import glob
import os
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any

from isal import isal_zlib

SOURCE, PATH = (
    os.path.join(os.path.dirname(__file__), name) for name in ("kernels.c", "libkernels.so")
)
_TURBO_FUNCTIONS = (  # in the order of `turbo` in kernels.c
    "tj3DecompressHeader",
    "tj3Get",
    "tj3SetCroppingRegion",
    "tj3Decompress8",
    "tj3Init",
    "tj3Destroy",
)
DISABLE = "WDSTRAIN_NATIVE"
_CRC32_CHECK = b"123456789", 0xCBF43926  # the check value of crc32


def _crc32_address() -> int | None:
    """Return the address of isal's crc32 for use in C; None if isal has none that works."""
    with suppress(OSError, AttributeError):
        function = ctypes.CDLL(isal_zlib.__file__).crc32_gzip_refl
        function.argtypes, function.restype = (
            (ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64),
            ctypes.c_uint32,
        )
        data, expected = _CRC32_CHECK
        if function(0, data, len(data)) == expected:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def load_library(source: str = SOURCE, path: str = PATH) -> Any:
    """Return the C library with the types of its functions; None if it cannot be used.

    source: path of `kernels.c`. path: path of the library. None if either cannot be read, the
    library was compiled from another source, or there is no crc32 for it.
    """
    with suppress(OSError, AttributeError, ValueError):
        library: Any = ctypes.CDLL(path)
        with open(source, "rb") as file:
            source_hash = int.from_bytes(blake2b(file.read(), digest_size=8).digest(), "little")
        if ctypes.c_uint64.in_dll(library, "source").value != source_hash:
            return None
        _declare(library, ctypes.PyDLL(path))
        return library if checksum else None
    return None


def _declare(library: Any, keeping_gil: Any) -> None:
    """Set argument and result types. Raises AttributeError if a function is missing.

    keeping_gil: the same library, whose functions are called with the GIL held. It is for short
    functions, where releasing the GIL and waiting for it takes longer than the call.
    """
    array, integer, c_int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.orientation = keeping_gil.orientation
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "checksum_runs": (None, (array, integer, *[array] * 3)),
        "copy_arrays": (None, (integer, *[array] * 3, integer, array, integer, array)),
        "reverse_rows": (None, (array, array, integer, integer)),
        "copy_pixels": (None, (array, array, *[integer] * 4)),
        "orientation": (c_int, (array, integer)),
        "read_headers": (None, (array, integer, *[array] * 3)),
        "decode_regions": (
            integer,
            (array, integer, *[array] * 6, integer, integer, array, integer, array),
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


@lru_cache(maxsize=1)
def libjpeg_turbo() -> Any:
    """Return the addresses of functions of libjpeg-turbo 3 for `kernels.c`; None without it.

    It can decode a region of a JPEG. It is loaded, not built: from the package `turbojpeg`, which is
    a dependency except on Python 3.14, or from the system. simplejpeg contains one too, but does
    not export it. Without it, JPEGs are decoded whole, to the same pixels.
    """
    for path in _turbo_paths():
        try:
            library = ctypes.CDLL(path)
            addresses = [
                ctypes.cast(getattr(library, name), ctypes.c_void_p).value
                for name in _TURBO_FUNCTIONS
            ]
        except (OSError, AttributeError):  # no such library, or version 2
            continue
        return (ctypes.c_void_p * len(addresses))(*addresses)
    return None


def _turbo_paths() -> list[str]:
    """Return the files to try: the library of the package, then that of the system."""
    spec = find_spec("turbojpeg")
    packaged: list[str] = []
    # only an absolute folder is searched: a relative pattern could load a file of the working
    # directory, and so run its code
    if spec is not None and spec.origin:
        folder = os.path.join(os.path.dirname(spec.origin), "turbojpeg.libs")
        packaged = sorted(glob.glob(os.path.join(glob.escape(folder), "libturbojpeg*")))
    return [*packaged, "libturbojpeg.so.0"]


checksum = _crc32_address()
library: Any = None if os.environ.get(DISABLE) == "0" else load_library()
