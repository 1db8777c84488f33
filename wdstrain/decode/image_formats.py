"""Which picture formats are read: a list, because everything else would be more than reading.

Left to itself Pillow opens some forty formats by their first bytes, whatever a file is called. One of them is EPS, for which it
starts Ghostscript, so that a "picture" in a stranger's shard would be a program that is run; others are parsers that nobody has
looked at for years. Only the formats below are ever opened.
"""

from __future__ import annotations

import io
from functools import lru_cache

from PIL import Image

EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "avif")
MAX_PIXELS = 178_956_970  # Pillow's own bound for an image that is taken for an attack
_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "AVIF")


def open_picture(data: bytes | memoryview) -> Image.Image:
    """A picture of one of our formats whose header was read and no pixel yet. Raises whatever Pillow's parsers meet."""
    return Image.open(io.BytesIO(data), formats=_known())


@lru_cache(maxsize=1)
def _known() -> tuple[str, ...]:
    """Those that this Pillow has: AVIF came late."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)
