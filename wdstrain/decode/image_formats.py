"""The image formats that are opened, and no others.

Pillow knows some forty formats and chooses by the first bytes, not by the file name. For EPS it
starts Ghostscript: an "image" in a shard of unknown origin would run as a program. Others have
parsers that are rarely reviewed.
"""

from __future__ import annotations

import io
from functools import lru_cache

from PIL import Image

EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "avif")
MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs
_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "AVIF")


def open_picture(data: bytes | memoryview) -> Image.Image:
    """Return an image whose header was read, and no pixels yet.

    Raises any error of Pillow's parsers; UnidentifiedImageError for other formats.
    """
    return Image.open(io.BytesIO(data), formats=_available_formats())


@lru_cache(maxsize=1)
def _available_formats() -> tuple[str, ...]:
    """Return the formats that this release of Pillow supports. Older ones lack AVIF."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)
