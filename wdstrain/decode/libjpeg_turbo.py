"""Loading of libjpeg-turbo 3, which can decode a region of a JPEG.

`kernels.c` calls it. The library is loaded, not built: that of the package `turbojpeg`, which is a
dependency except on Python 3.14, or that of the system. simplejpeg contains one too, but does not
export it. Without the library, JPEGs are decoded whole, to the same pixels.
"""

from __future__ import annotations

import ctypes
import glob
import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

_FUNCTIONS = (  # in the order of `turbo` in kernels.c
    "tj3DecompressHeader",
    "tj3Get",
    "tj3SetCroppingRegion",
    "tj3Decompress8",
    "tj3Init",
    "tj3Destroy",
)


@lru_cache(maxsize=1)
def functions() -> Any:
    """Return the addresses of the library's functions as `kernels.c` takes them; None without it."""
    for path in _paths():
        try:
            library = ctypes.CDLL(path)
            addresses = [
                ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _FUNCTIONS
            ]
        except (OSError, AttributeError):  # no such library, or version 2
            continue
        return (ctypes.c_void_p * len(addresses))(*addresses)
    return None


def _paths() -> list[str]:
    """Return the files to try: the library of the package, then that of the system."""
    spec = find_spec("turbojpeg")
    packaged: list[str] = []
    # only an absolute folder is searched: a relative pattern could load a file of the working
    # directory, and so run its code
    if spec is not None and spec.origin:
        folder = os.path.join(os.path.dirname(spec.origin), "turbojpeg.libs")
        packaged = sorted(glob.glob(os.path.join(glob.escape(folder), "libturbojpeg*")))
    return [*packaged, "libturbojpeg.so.0"]
