"""Encoded images to pixels: the one place that knows image formats.

`decode_image` gives uint8, upright (EXIF orientation applied as Pillow does), or raises SampleError; never a partial image. JPEGs go through
simplejpeg (libjpeg-turbo, no GIL), where libjpeg-turbo 3 is there (`turbo`) only the part that is asked for; everything else and every JPEG they find fault with goes through Pillow, which is slower, decides what is whole,
and does not crash: torchvision's PNG decoder dies with SIGSEGV on a damaged file. Alpha is dropped, as torchvision and
ImageFolder do; 16-bit greys keep their high byte; of an animation the first picture is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError

from wdstrain.decode.image_formats import MAX_PIXELS, open_picture
from wdstrain.decode.jpeg_region import Box, decode_part
from wdstrain.errors import SampleError
from wdstrain.native import kernels

Pixels = npt.NDArray[np.uint8]
BoxOf = Callable[[int, int], Box]

_WORK = 1 << 32  # pixels times scans of a JPEG: one as large as is allowed may have 24
_SCAN = 10  # bytes of a scan, at least
_MARKER = re.compile(
    rb"\xff([^\x00\xff\xd0-\xd8\x01])", re.DOTALL
)  # of a segment of a JPEG, or of its end
_STRIP = 1 << 18  # pixels that leave Pillow at a time
_UPSIDE_DOWN, _REVERSED = (
    (3, 4, 6, 7),
    (2, 3, 7, 8),
)  # orientations whose rows, and columns, are stored the last first


def decode_image(
    data: bytes | memoryview,
    box_of: BoxOf | None = None,
    out: Pixels | None = None,
    *,
    blue_first: bool = False,
) -> Pixels:
    """The pixels of an encoded image, or of a part of it. uint8[height, width, 3], RGB, or BGR if asked.

    box_of: (height, width) of the upright image -> (top, left, height, width) of the part; default all of it. out: memory that
    the pixels may lie in, if they have its shape; they need not.
    """
    if bytes(data[:3]) == b"\xff\xd8\xff" and (orientation := _orientation(data)):
        found = _jpeg(data, orientation, box_of, out, blue_first)
        if found is not None:
            return found
    pixels = _pillow(data)
    if box_of is not None:
        top, left, height, width = box_of(*pixels.shape[:2])
        pixels = pixels[top : top + height, left : left + width]
    return pixels[:, :, ::-1].copy() if blue_first else pixels


def is_little_work(size: int, pixels: int) -> bool:
    """Whether a JPEG of so many bytes cannot have scans enough to take long."""
    return size * pixels <= _WORK * _SCAN


def check_scans(data: bytes | memoryview, pixels: int) -> None:
    """Raise SampleError for a JPEG of so many scans, each over all of its pixels, that 100 KB of it would take minutes."""
    if (
        is_little_work(len(data), pixels)
        or (raw := bytes(data)).count(b"\xff\xda") * pixels <= _WORK
    ):
        return
    at, scans = (
        2,
        0,
    )  # what looks like the begin of one may be of a profile, or of a film behind the picture
    while (found := _MARKER.search(raw, at)) is not None and found[1] != b"\xd9":
        scans += found[1] == b"\xda"
        at = found.end() + max(2, int.from_bytes(raw[found.end() : found.end() + 2], "big"))
    if scans * pixels > _WORK:
        raise SampleError(
            f"{scans} scans of {pixels} pixels: more work than a picture is ({len(data)} bytes)"
        )


def _check_tiles(image: Image.Image) -> None:
    """Raise SampleError for a TIFF whose tiles are larger than it: each is decoded as a whole."""
    tags = getattr(image, "tag_v2", {})
    wide, high = (tags.get(tag, 0) for tag in (322, 323))
    if wide * high > max(4 * image.width * image.height, _STRIP):
        raise SampleError(
            f"tiles of {wide} x {high} pixels for a picture of {image.width} x {image.height}"
        )


def _orientation(data: bytes | memoryview) -> int:
    """How the picture of a JPEG lies: 1 to 8 as EXIF has it; 0 where only Pillow can tell."""
    if kernels.library is None:
        raw = bytes(data)
        return 0 if b"Exif\0\0" in raw or b"tiff:Orientation" in raw else 1
    source = np.frombuffer(data, np.uint8)
    return int(kernels.library.orientation(source.ctypes.data, len(source)))


def stored_box(box: Box, height: int, width: int, orientation: int) -> Box:
    """Where a part of the upright picture lies in the picture as it is stored, of height x width."""
    top, left, h, w = box
    if orientation >= 5:
        top, left, h, w = left, top, w, h
    top = height - top - h if orientation in _UPSIDE_DOWN else top
    left = width - left - w if orientation in _REVERSED else left
    return top, left, h, w


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """The pixels of a picture, or a part of one, turned as its orientation says: these if it is 1, else a copy."""
    if orientation == 1:
        return pixels
    pixels = pixels[::-1] if orientation in _UPSIDE_DOWN else pixels
    pixels = pixels[:, ::-1] if orientation in _REVERSED else pixels
    pixels = pixels.transpose(1, 0, 2) if orientation >= 5 else pixels
    if kernels.library is None:
        return np.ascontiguousarray(pixels)
    turned = np.empty(pixels.shape, np.uint8)
    kernels.library.copy_pixels(
        turned.ctypes.data, pixels.ctypes.data, *pixels.shape[:2], *pixels.strides[:2]
    )
    return turned


def _jpeg(
    data: bytes | memoryview,
    orientation: int,
    box_of: BoxOf | None,
    out: Pixels | None,
    blue_first: bool,
) -> Pixels | None:
    """None where libjpeg warns of something, or for colours it does not turn into RGB: then Pillow decides."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours not in ("YCbCr", "RGB", "Gray") or height * width > MAX_PIXELS:
            return None
        check_scans(data, height * width)
        box = 0, 0, height, width
        if box_of is not None:
            box = stored_box(
                box_of(*((width, height) if orientation >= 5 else (height, width))),
                height,
                width,
                orientation,
            )
        if orientation != 1:
            out = None  # what is turned lies in a copy
        top, left, high, wide = box
        if (high, wide) != (height, width):
            part = decode_part(data, box, MAX_PIXELS, out, blue_first=blue_first)
            if part is not None:
                return upright(part, orientation)
        whole = (high, wide) == (
            height,
            width,
        )  # a part must not lie in what it will be resized into
        buffer = out if whole and out is not None and out.shape == (height, width, 3) else None
        pixels: Pixels = simplejpeg.decode_jpeg(data, "BGR" if blue_first else "RGB", buffer=buffer)
        return upright(pixels[top : top + high, left : left + wide], orientation)
    except (
        ValueError,
        KeyError,
    ):  # the second of a way to sample colours that simplejpeg does not know
        return None


def _pillow(data: bytes | memoryview) -> Pixels:
    try:
        with open_picture(data) as image:
            if image.width * image.height > MAX_PIXELS:
                raise SampleError(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS}")
            if image.format in ("JPEG", "MPO"):
                check_scans(data, image.width * image.height)
            if image.format == "TIFF":
                _check_tiles(image)
            image.load()
            # libjpeg goes on in grey where the rest of a JPEG is zeros; within what is compressed neither marker can occur
            if image.format == "JPEG" and (raw := bytes(data)).rfind(b"\xff\xd9") < raw.rfind(
                b"\xff\xda"
            ):
                raise SampleError(
                    f"it has no end marker: the end of the picture is missing ({len(data)} bytes)"
                )
            ImageOps.exif_transpose(image, in_place=True)
            return _rgb(image)
    except SampleError:
        raise
    except Exception as error:  # Pillow's plugins raise whatever their parsers meet
        what = (
            "no image of a known format"
            if isinstance(error, UnidentifiedImageError)
            else str(error)
        )
        raise SampleError(f"{what} ({len(data)} bytes, starting {bytes(data[:8])!r})") from error


def _rgb(image: Image.Image) -> Pixels:
    """The pixels of a loaded image, some rows at a time: of a picture that is meant to fill memory there is no second copy."""
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(1, _STRIP // image.width)
    for top in range(0, image.height, rows):
        strip = (
            image
            if rows >= image.height
            else image.crop((0, top, image.width, min(top + rows, image.height)))
        )
        if strip.mode.startswith("I"):
            strip = Image.fromarray((np.clip(np.asarray(strip), 0, 65535) >> 8).astype(np.uint8))
        elif strip.mode in ("P", "PA", "LA"):
            strip = strip.convert("RGBA")
        pixels[top : top + rows] = np.asarray(strip.convert("RGB"))
    return pixels
