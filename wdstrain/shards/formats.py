"""Image formats, and what the header of an image says. Fields, columns, conversions, `info`, `show` and `predict` ask this table.

Only these formats are opened. Pillow knows some forty and chooses by the first bytes, not by the
file name. For EPS it starts Ghostscript: an "image" in a shard of unknown origin would run as a
program. Others have parsers that are rarely reviewed.
"""

from __future__ import annotations

import io
import re
from functools import lru_cache
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from wdstrain.errors import SampleError


class ImageFormat(NamedTuple):
    """An image format.

    extensions: of files and fields; the first one names an image whose name is unknown.
    first_bytes: regular expression that matches the begin of a file.
    plugins: Pillow's plugins that decode it; the first one encodes it.
    has_quality: the encoder takes a quality, and 8-bit images only.
    """

    extensions: tuple[str, ...]
    first_bytes: bytes
    plugins: tuple[str, ...]
    has_quality: bool = False


# Pillow calls some photos of phones MPO.
JPEG = ImageFormat(("jpg", "jpeg"), rb"\xff\xd8\xff", ("JPEG", "MPO"), has_quality=True)
FORMATS = (
    JPEG,
    ImageFormat(("png",), rb"\x89PNG\r\n\x1a\n", ("PNG",)),
    ImageFormat(("webp",), rb"RIFF....WEBP", ("WEBP",), has_quality=True),
    ImageFormat(("bmp",), rb"BM....\0{4}", ("BMP", "DIB")),
    ImageFormat(("gif",), rb"GIF8", ("GIF",)),
    ImageFormat(("tif", "tiff"), rb"II\*\0|MM\0\*", ("TIFF",)),
    ImageFormat(("ppm", "pgm"), rb"P[1-6]\s[\s\d#]", ("PPM",)),
    # The first box names the brands of a file; MP4 and HEIC begin with such a box too.
    ImageFormat(("avif",), rb"\0\0..ftyp(?:....){0,61}?avi[fs]", ("AVIF",)),
)
SIDES = ("width", "height")  # entries of an image, as if it were a JSON document
MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs

BY_EXTENSION = {extension: row for row in FORMATS for extension in row.extensions}
EXTENSIONS = tuple(BY_EXTENSION)
PLUGINS = tuple(plugin for row in FORMATS for plugin in row.plugins)
_ORIENTATION, _TRANSPOSED = 0x0112, range(5, 9)  # EXIF tag; rows and columns are exchanged
_PNG_TAGS = re.compile(rb"(?i)exif|xmp|orientation")  # in a PNG that may have an orientation
_PATTERNS = [(re.compile(row.first_bytes, re.DOTALL), row) for row in FORMATS]


@lru_cache(maxsize=1024)
def is_image(field: str) -> bool:
    """Return whether a field or a file is an image by the last part of its name."""
    return field.rpartition(".")[2] in BY_EXTENSION


def format_of(data: bytes | memoryview) -> ImageFormat | None:
    """Return the format of an image, by its first bytes; None for other data."""
    stop = len(data)
    if bytes(data[4:8]) == b"ftyp":  # bytes after the first box are no brands
        stop = int.from_bytes(data[:4], "big")
    return next((row for pattern, row in _PATTERNS if pattern.match(data, 0, stop)), None)


def open_picture(data: bytes | memoryview) -> Image.Image:
    """Return an image whose header was read, and no pixels yet.

    Raises any error of Pillow's parsers; UnidentifiedImageError for other formats.
    """
    return Image.open(io.BytesIO(data), formats=_available_formats())


@lru_cache(maxsize=1)
def _available_formats() -> tuple[str, ...]:
    """Return the formats that this release of Pillow supports. Older ones lack AVIF."""
    Image.init()
    return tuple(name for name in PLUGINS if name in Image.OPEN)


class Header(NamedTuple):
    """What the header of an image says. Sizes are (width, height).

    size: of the image as it is shown. stored: as it is stored. orientation: of EXIF, 1 to 8.
    """

    size: tuple[int, int]
    stored: tuple[int, int]
    orientation: int


def header_of(data: bytes | memoryview) -> Header:
    """Return the header of an image. Pixels are not decoded.

    Raises SampleError for a header that cannot be read.
    """
    try:
        with open_picture(data) as image:
            # Pillow decodes a PNG to find EXIF data behind its pixels.
            is_plain = image.format == "PNG" and not _PNG_TAGS.search(data)
            tag = 1 if is_plain else image.getexif().get(_ORIENTATION, 1)
            width, height = image.size
            return Header((height, width) if tag in _TRANSPOSED else image.size, image.size, tag)
    except Exception as error:  # Pillow's plugins raise errors of any type
        is_unknown = isinstance(error, UnidentifiedImageError)  # its text has an address in memory
        reason = "no known format" if is_unknown else error
        raise SampleError(f"the header of its image cannot be read ({reason})") from error
