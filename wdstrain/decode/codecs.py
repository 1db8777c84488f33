"""Encoded images to pixels, for every supported format.

JPEGs are decoded by simplejpeg (libjpeg-turbo, without the GIL). Pillow decodes other formats, and
each JPEG that simplejpeg refuses or warns about. Pillow decides whether such an image is intact.
torchvision is not used: its PNG decoder crashes (SIGSEGV) on some damaged files.

Alpha is dropped, as in torchvision's ImageFolder. 16-bit grayscale keeps the high byte. The first
frame of an animation is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError

from wdstrain.decode.image_formats import MAX_PIXELS, open_picture
from wdstrain.decode.pixels import Pixels, jpeg_orientation, upright
from wdstrain.errors import SampleError

# limit for pixels x scans of a JPEG: an image of MAX_PIXELS may have 24 scans
_MAX_SCANNED_PIXELS = 1 << 32
_MIN_SCAN_BYTES = 10
# marker of a JPEG segment with a length, or the end marker
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd8\x01])", re.DOTALL)
_STRIP_PIXELS = 1 << 18  # pixels that are converted at a time


def decode_image(data: bytes | memoryview) -> Pixels:
    """Return the pixels of an encoded image, upright by its EXIF orientation.

    uint8[height, width, 3], RGB. Raises SampleError for an image that is damaged or truncated, for
    other data, and for images that would take too much memory or time.
    """
    if is_jpeg(data) and (orientation := jpeg_orientation(data)):
        pixels = _decode_jpeg(data, orientation)
        if pixels is not None:
            return pixels
    return _decode_with_pillow(data)


def is_jpeg(data: bytes | memoryview) -> bool:
    """Return whether data starts like a JPEG."""
    return bytes(data[:3]) == b"\xff\xd8\xff"


def has_few_scans(size: int, pixels: int) -> bool:
    """Return whether a JPEG of `size` bytes is too small to have too many scans."""
    return size * pixels <= _MAX_SCANNED_PIXELS * _MIN_SCAN_BYTES


def check_scans(data: bytes | memoryview, pixels: int) -> None:
    """Raise SampleError for a JPEG with too many scans.

    Each scan covers all pixels: a hostile JPEG of 100 KB could take minutes.
    """
    if has_few_scans(len(data), pixels):
        return
    raw = bytes(data)
    if raw.count(b"\xff\xda") * pixels <= _MAX_SCANNED_PIXELS:
        return
    # walk over the segments: the bytes may also occur in a color profile or behind the image
    position, scans = 2, 0
    while (marker := _MARKER.search(raw, position)) is not None and marker[1] != b"\xd9":
        scans += marker[1] == b"\xda"
        length = int.from_bytes(raw[marker.end() : marker.end() + 2], "big")
        position = marker.end() + max(2, length)
    if scans * pixels > _MAX_SCANNED_PIXELS:
        raise SampleError(
            f"{scans} scans of {pixels} pixels would take too long to decode ({len(data)} bytes)"
        )


def _decode_jpeg(data: bytes | memoryview, orientation: int) -> Pixels | None:
    """Decode with simplejpeg; None if it refuses or warns, or if the color space is unusual."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        if colorspace not in ("YCbCr", "RGB", "Gray") or height * width > MAX_PIXELS:
            return None
        check_scans(data, height * width)
        pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB")
        return upright(pixels, orientation)
    except (ValueError, KeyError):  # KeyError: a chroma subsampling unknown to simplejpeg
        return None


def decode_mask(data: bytes | memoryview) -> npt.NDArray[np.integer[Any]]:
    """Return the class numbers of an encoded mask, upright by its EXIF orientation.

    Whole numbers [height, width]: the values of a grayscale image, or the palette positions of an
    image with a palette. Raises SampleError for a damaged image, for JPEGs, and for color images.
    """
    if is_jpeg(data):
        raise SampleError("it is a JPEG, which changes class numbers. Store masks as PNG")
    with _loaded_picture(data) as image:
        if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
            raise SampleError(
                f"it has the color mode {image.mode}: a mask must have one channel of class numbers"
            )
        numbers = np.asarray(image)
        if numbers.dtype == np.bool_:
            return numbers.astype(np.uint8)
        is_png = image.format == "PNG" and image.mode == "L"
        depth = bytes(data[24:25])[0] if is_png else 8
        # Pillow stretches gray values of 2 and 4 bits to 0 to 255
        return numbers // (255 // (2**depth - 1)) if depth in (2, 4) else numbers


def _decode_with_pillow(data: bytes | memoryview) -> Pixels:
    with _loaded_picture(data) as image:
        return _rgb(image)


@contextmanager
def _loaded_picture(data: bytes | memoryview) -> Iterator[Image.Image]:
    """Give an upright image with its pixels. Any error inside becomes a SampleError."""
    try:
        with open_picture(data) as image:
            _check_work(image, data)
            image.load()
            _check_end(image, data)
            ImageOps.exif_transpose(image, in_place=True)
            yield image
    except SampleError:
        raise
    except Exception as error:  # Pillow's plugins raise many types of errors
        is_unknown = isinstance(error, UnidentifiedImageError)
        reason = "no image of a known format" if is_unknown else str(error)
        raise SampleError(f"{reason} ({len(data)} bytes, starting {bytes(data[:8])!r})") from error


def _check_work(image: Image.Image, data: bytes | memoryview) -> None:
    """Raise SampleError for an image that would take too much memory or time."""
    pixels = image.width * image.height
    if pixels > MAX_PIXELS:
        raise SampleError(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS}")
    if image.format in ("JPEG", "MPO"):
        check_scans(data, pixels)
    if image.format == "TIFF":  # every tile is decoded whole
        tags = getattr(image, "tag_v2", {})
        width, height = (tags.get(tag, 0) for tag in (322, 323))
        if width * height > max(4 * pixels, _STRIP_PIXELS):
            raise SampleError(
                f"tiles of {width} x {height} pixels for a picture of "
                f"{image.width} x {image.height}"
            )


def _check_end(image: Image.Image, data: bytes | memoryview) -> None:
    """Raise SampleError for a JPEG whose last scan has no end marker.

    libjpeg fills the missing part with gray if a truncated JPEG is padded with zeros. Compressed
    data cannot contain either marker.
    """
    if image.format != "JPEG":
        return
    raw = bytes(data)
    if raw.rfind(b"\xff\xd9") < raw.rfind(b"\xff\xda"):
        raise SampleError(
            f"it has no end marker: the end of the picture is missing ({len(data)} bytes)"
        )


def _rgb(image: Image.Image) -> Pixels:
    """Return the pixels of a loaded image as RGB.

    Strip by strip: a second copy of a huge image could exhaust memory.
    """
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image
        if rows < image.height:
            strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        if strip.mode.startswith("I"):
            strip = Image.fromarray((np.clip(np.asarray(strip), 0, 65535) >> 8).astype(np.uint8))
        elif strip.mode in ("P", "PA", "LA"):
            strip = strip.convert("RGBA")
        pixels[top : top + rows] = np.asarray(strip.convert("RGB"))
    return pixels
