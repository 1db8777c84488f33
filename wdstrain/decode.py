"""Encoded images to pixels: the one place that knows image formats.

`decode_image` gives uint8, upright (EXIF orientation applied), or raises SampleError; never a partial image. JPEGs go through
simplejpeg (libjpeg-turbo, no GIL), where libjpeg-turbo 3 is there (`turbo`) only the part that is asked for; everything else and every JPEG they find fault with goes through Pillow, which is slower, decides what is whole,
and does not crash: torchvision's PNG decoder dies with SIGSEGV on a damaged file. Alpha is dropped, as torchvision and
ImageFolder do; 16-bit greys keep their high byte; of an animation the first picture is taken.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError

from wdstrain.errors import SampleError
from wdstrain.turbo import Box, decode_part

Pixels = npt.NDArray[np.uint8]
BoxOf = Callable[[int, int], Box]

MAX_PIXELS = 178_956_970  # Pillow's own bound for an image that is taken for an attack
EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "avif")


def decode_image(
    data: bytes | memoryview, box_of: BoxOf | None = None, out: Pixels | None = None, *, blue_first: bool = False
) -> Pixels:
    """The pixels of an encoded image, or of a part of it. uint8[height, width, 3], RGB, or BGR if asked.

    box_of: (height, width) of the upright image -> (top, left, height, width) of the part; default all of it. out: memory that
    the pixels may lie in, if they have its shape; they need not.
    """
    if bytes(data[:3]) == b"\xff\xd8\xff" and not _has_exif(data):
        found = _jpeg(data, box_of, out, blue_first)
        if found is not None:
            return found
    pixels = _pillow(data)
    if box_of is not None:
        top, left, height, width = box_of(*pixels.shape[:2])
        pixels = pixels[top : top + height, left : left + width]
    return pixels[:, :, ::-1].copy() if blue_first else pixels


def _has_exif(data: bytes | memoryview) -> bool:
    """Whether a JPEG's leading application and comment segments hold EXIF, and so perhaps an orientation."""
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF and (0xE0 <= data[at + 1] <= 0xEF or data[at + 1] == 0xFE):
        if data[at + 1] == 0xE1 and bytes(data[at + 4 : at + 10]) == b"Exif\0\0":
            return True
        at += 2 + (data[at + 2] << 8 | data[at + 3])
    return False


def _jpeg(data: bytes | memoryview, box_of: BoxOf | None, out: Pixels | None, blue_first: bool) -> Pixels | None:
    """None where libjpeg warns of something, or for colours it does not turn into RGB: then Pillow decides."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours not in ("YCbCr", "RGB", "Gray") or height * width > MAX_PIXELS:
            return None
        top, left, high, wide = box = box_of(height, width) if box_of is not None else (0, 0, height, width)
        if (high, wide) != (height, width):
            part = decode_part(data, box, MAX_PIXELS, out, blue_first=blue_first)
            if part is not None:
                return part
        whole = (high, wide) == (height, width)  # a part must not lie in what it will be resized into
        buffer = out if whole and out is not None and out.shape == (height, width, 3) else None
        pixels: Pixels = simplejpeg.decode_jpeg(data, "BGR" if blue_first else "RGB", buffer=buffer)
        return pixels[top : top + high, left : left + wide]
    except ValueError:
        return None


def _pillow(data: bytes | memoryview) -> Pixels:
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.format == "EPS":  # Pillow would have Ghostscript run it
                raise SampleError("it is a PostScript program, and is not run")
            if image.width * image.height > MAX_PIXELS:
                raise SampleError(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS}")
            image.load()
            raw = bytes(data)
            # libjpeg goes on in grey where the rest of a JPEG is zeros; within what is compressed neither marker can occur
            if image.format == "JPEG" and raw.rfind(b"\xff\xd9") < raw.rfind(b"\xff\xda"):
                raise SampleError(f"it has no end marker: the end of the picture is missing ({len(data)} bytes)")
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):
                grey = np.asarray(upright)
                upright = Image.fromarray((np.clip(grey, 0, 65535) >> 8).astype(np.uint8))
            elif upright.mode in ("P", "PA", "LA"):
                upright = upright.convert("RGBA")
            return np.array(upright.convert("RGB"))
    except SampleError:
        raise
    except Exception as error:  # Pillow's plugins raise whatever their parsers meet
        what = "no image of a known format" if isinstance(error, UnidentifiedImageError) else str(error)
        raise SampleError(f"{what} ({len(data)} bytes, starting {bytes(data[:8])!r})") from error
