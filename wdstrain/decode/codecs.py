"""Pixels of encoded images: decoded, turned upright by their EXIF orientation, and resized.

JPEGs are decoded by simplejpeg (libjpeg-turbo, without the GIL). Pillow decodes other formats, and
each JPEG that simplejpeg refuses or warns about. Pillow decides whether such an image is intact.
torchvision is not used: its PNG decoder crashes (SIGSEGV) on some damaged files.

Alpha is dropped, as in torchvision's ImageFolder. 16-bit grayscale keeps the high byte. The first
frame of an animation is decoded.

Only the formats of `formats` are opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError

from wdstrain.decode.transforms import FLIP_DRAW, Augment, Box, Draws, Pixels, region
from wdstrain.errors import SampleError, logger
from wdstrain.native import kernels
from wdstrain.shards.formats import JPEG, MAX_PIXELS, open_picture
from wdstrain.shards.offsets import Ints

# limit for pixels x scans of a JPEG: an image of MAX_PIXELS may have 24 scans
_MAX_SCANNED_PIXELS = 1 << 32
_MIN_SCAN_BYTES = 10
# marker of a JPEG segment with a length, or the end marker
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd8\x01])", re.DOTALL)
IGNORED = 255  # pixels of masks without a class: they count neither in losses nor in metrics
_PGM_MAXIMUM = re.compile(rb"P[25](?:(?:\s|#[^\n]*\n)+(\d+)){3}")  # width, height, maximum
_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262  # tags; photometric 0: 0 is white
_STRIP_PIXELS = 1 << 18  # pixels that are converted at a time
# orientations (1 to 8, as EXIF numbers them) of stored images
BOTTOM_ROW_FIRST, RIGHT_COLUMN_FIRST = (3, 4, 6, 7), (2, 3, 7, 8)
FIRST_TRANSPOSED = 5  # 5 to 8: rows and columns are exchanged
# bytes of decoded regions that wait for resizing; with more they would leave the CPU cache
_SCRATCH_BYTES = 1 << 20


def decode_image(data: bytes | memoryview, least: tuple[int, int] = (0, 0)) -> Pixels:
    """Return the pixels of an encoded image, upright by its EXIF orientation.

    uint8[height, width, 3], RGB. least: a JPEG may be decoded at a smaller scale (of libjpeg) that
    has this stored width and height; (0, 0): no other scale. Raises SampleError for an image that
    is damaged or truncated, for other data, and for images that would take too much memory or time.
    """
    pixels = _decode_jpeg(data, least) if is_jpeg(data) else None
    if pixels is not None:
        return pixels
    with _loaded_picture(data) as image:
        return _rgb(image)


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
    scans = sum(marker == b"\xda" for marker in _jpeg_markers(data))
    if scans * pixels > _MAX_SCANNED_PIXELS:
        raise SampleError(
            f"{scans} scans of {pixels} pixels would take too long to decode ({len(data)} bytes)"
        )


def _jpeg_markers(data: bytes | memoryview) -> Iterator[bytes]:
    """Yield the markers of the segments of a JPEG, up to the end of the image.

    The bytes of a marker may also occur in a color profile or behind the image.
    """
    raw, position = bytes(data), 2
    while (marker := _MARKER.search(raw, position)) is not None:
        yield marker[1]
        if marker[1] == b"\xd9":
            return
        end = marker.end()
        position = end + max(2, int.from_bytes(raw[end : end + 2], "big"))


def _decode_jpeg(data: bytes | memoryview, least: tuple[int, int]) -> Pixels | None:
    """Decode with simplejpeg; None if it refuses or warns, or if the image is unusual."""
    orientation = _jpeg_orientation(data)
    with suppress(ValueError, KeyError):  # KeyError: a chroma subsampling unknown to simplejpeg
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        if orientation and colorspace in ("YCbCr", "RGB", "Gray") and height * width <= MAX_PIXELS:
            check_scans(data, height * width)
            return upright(
                simplejpeg.decode_jpeg(data, "RGB", min_width=least[0], min_height=least[1]),
                orientation,
            )
    return None


def decode_mask(
    data: bytes | memoryview, ignored: int | None = None
) -> npt.NDArray[np.integer[Any]]:
    """Return the class numbers of an encoded mask, upright by its EXIF orientation.

    Whole numbers [height, width]: the values of a grayscale image, or the palette positions of an
    image with a palette. ignored: a number that becomes 255. Raises SampleError for a damaged
    image, for JPEGs, and for color images.
    """
    with _loaded_picture(data) as image:
        if _changes_gray(image, data):
            raise SampleError(
                f"it is a {image.format} whose class numbers are compressed, stretched or "
                "inverted.",
                "Store masks as PNG",
            )
        if image.mode not in ("1", "L", "P") and not image.mode.startswith("I"):
            raise SampleError(
                f"it has the color mode {image.mode}: a mask must have one channel of class numbers"
            )
        numbers = np.asarray(image, np.uint8 if image.mode == "1" else None)
        depth = data[24] if image.format == "PNG" and image.mode == "L" else 8
        # Pillow stretches gray values of 2 and 4 bits to 0 to 255
        numbers = numbers // (255 // (2**depth - 1)) if depth in (2, 4) else numbers
        return numbers if ignored is None else np.where(numbers == ignored, IGNORED, numbers)


def _changes_gray(image: Image.Image, data: bytes | memoryview) -> bool:
    """Return whether Pillow's gray values are others than those that were stored."""
    if image.format == "PPM":
        maximum = _PGM_MAXIMUM.match(bytes(data[:1000]))
        return maximum is None or maximum[1] not in (b"255", b"65535")
    if image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]
        return tags.get(_TIFF_PHOTOMETRIC) == 0 or tags.get(_TIFF_BITS, (8,))[0] in (2, 4)
    return image.format in (*JPEG.plugins, "AVIF", "WEBP")


@contextmanager
def _loaded_picture(data: bytes | memoryview) -> Iterator[Image.Image]:
    """Give an upright image with its pixels. Any error inside becomes a SampleError."""
    try:
        with open_picture(data) as image:
            _check_before_decoding(image, data)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            yield image
    except SampleError:
        raise
    except Exception as error:  # Pillow's plugins raise many types of errors
        reason = (
            "no image of a known format"
            if isinstance(error, UnidentifiedImageError)
            else str(error)
        )
        raise SampleError(f"{reason} ({len(data)} bytes, starting {bytes(data[:8])!r})") from error


def _check_before_decoding(image: Image.Image, data: bytes | memoryview) -> None:
    """Raise SampleError for an image that would take too much memory or time, or that has no end.

    libjpeg fills the missing part with gray if a truncated JPEG is padded with zeros. Compressed
    data cannot contain the end marker.
    """
    pixels = image.width * image.height
    if pixels > MAX_PIXELS:
        raise SampleError(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS}")
    if image.format in JPEG.plugins:
        check_scans(data, pixels)
    if image.format == "JPEG" and b"\xd9" not in _jpeg_markers(data):
        raise SampleError(
            f"it has no end marker: the end of the picture is missing ({len(data)} bytes)"
        )
    if image.format == "TIFF":  # every tile is decoded whole
        width, height = (getattr(image, "tag_v2", {}).get(tag, 0) for tag in (322, 323))
        if width * height > max(4 * pixels, _STRIP_PIXELS):
            raise SampleError(
                f"tiles of {width} x {height} pixels for a picture of "
                f"{image.width} x {image.height}"
            )


def _rgb(image: Image.Image) -> Pixels:
    """Return the pixels of a loaded image as RGB.

    Strip by strip: a second copy of a huge image could exhaust memory.
    """
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        if strip.mode.startswith(("I", "F")) and np.asarray(strip).max() < 1 << 15:
            log_lost_levels(strip.mode)
        if strip.mode.startswith("I"):
            strip = Image.fromarray((np.clip(np.asarray(strip), 0, 65535) >> 8).astype(np.uint8))
        elif strip.mode in ("P", "PA", "LA"):
            strip = strip.convert("RGBA")
        pixels[top : top + rows] = np.asarray(strip.convert("RGB"))
    return pixels


@cache
def log_lost_levels(mode: str) -> None:
    """Log once per process and mode that gray levels are lost."""
    logger.warning(
        "gray images of more than 8 bits (mode %s) keep the upper 8 of 16 bits, and the levels of "
        "an image fill less. Scale them to 16 bits before you pack, or pack arrays (npy).",
        mode,
    )


def _jpeg_orientation(data: bytes | memoryview) -> int:
    """Return the EXIF orientation of a JPEG, 1 to 8; 0 if only Pillow can tell."""
    if kernels.library is None:
        return int(re.search(rb"Exif\0\0|tiff:Orientation", data) is None)
    source = np.frombuffer(data, np.uint8)
    return int(kernels.library.orientation(source.ctypes.data, len(source)))


def stored_box(box: Box, height: int, width: int, orientation: int) -> Box:
    """Return the region of the stored image, of height x width, that holds a region upright."""
    top, left, h, w = box
    if orientation >= FIRST_TRANSPOSED:
        top, left, h, w = left, top, w, h
    top = height - top - h if orientation in BOTTOM_ROW_FIRST else top
    left = width - left - w if orientation in RIGHT_COLUMN_FIRST else left
    return top, left, h, w


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Return stored pixels turned upright: a copy, or `pixels` itself for orientation 1."""
    if orientation == 1:
        return pixels
    down = -1 if orientation in BOTTOM_ROW_FIRST else 1
    pixels = pixels[::down, :: -1 if orientation in RIGHT_COLUMN_FIRST else 1]
    pixels = pixels.transpose(1, 0, 2) if orientation >= FIRST_TRANSPOSED else pixels
    turned = np.empty(pixels.shape, np.uint8)
    kernels.library.copy_pixels(
        turned.ctypes.data, pixels.ctypes.data, *pixels.shape[:2], *pixels.strides[:2]
    )
    return turned


def resize(pixels: Pixels, out: Pixels, mode: str = "bilinear") -> None:
    """Resize an image into `out`, with anti-aliasing. uint8[height, width, channels] each.

    As torchvision does it. Images of the same size are copied. The two must not overlap.
    """
    if pixels.shape == out.shape:
        np.copyto(out, pixels)
        return
    import torch  # with the first image: a command that only names fields starts quickly

    # From a batch of one, permuted after its first stride is set, torch takes and makes images with
    # channels last. Otherwise this takes twice as long.
    source, target = (
        torch.from_numpy(image).unsqueeze(0).permute(0, 3, 1, 2) for image in (pixels, out)
    )
    target.copy_(torch.nn.functional.interpolate(source, out.shape[:2], mode=mode, antialias=True))


# --- batches of JPEGs -----------------------------------------------------------------------------
# Image by image, each call of C would release the GIL and wait for it. Threads that decode small
# images would spend more time on that than on decoding. For damaged images, other color spaces,
# unclear EXIF orientations and huge images, `decode_image` decides.


def decode_jpegs(
    rows: Ints,
    address: Ints,
    size: Ints,
    out: Pixels,
    augment: Augment,
    draws: Draws,
) -> set[int]:
    """Decode n rows of a batch into `out`. Returns the rows that are done.

    The other rows are not plain JPEGs, or damaged. All rows are left if the compiled library or
    libjpeg-turbo 3 is missing.

    address, size: of the bytes of each image in the memory of this process, int64[n] each.
    out: uint8[b, height, width, 3]. draws: float64[b, DRAWS].
    """
    library, turbo = kernels.library, kernels.libjpeg_turbo()
    if library is None or turbo is None or not out.flags.c_contiguous:
        return set()
    plain = _plain_images(turbo, address, size, out.shape[1:3], augment, draws[rows])
    image, box, orientation = plain[:, 0], plain[:, 1:5].astype(np.int32), plain[:, 5]
    row = rows[image]
    mirrored = (draws[row, FLIP_DRAW] < 0.5) & augment.flip
    to, done = out.ctypes.data + row * out.strides[0], set[int]()
    inputs = (address[image], size[image], box, orientation != 1, mirrored, to)
    for i, pixels in _decode_regions(turbo, inputs, out.shape[1:3]):
        target = out[row[i]]
        if pixels.size:
            _finish(upright(pixels, int(orientation[i])), target, bool(mirrored[i]))
        augment.apply_policy(target, draws[row[i]])
        done.add(int(row[i]))
    return done


def _plain_images(
    turbo: Any, address: Ints, size: Ints, shape: tuple[int, ...], augment: Augment, draws: Draws
) -> Ints:
    """Return the plain JPEGs of these n images, and the region to decode of each.

    int64[k, 6]: number of the image; top, left, height and width in the stored image; orientation.
    shape: height and width of the final images. draws: float64[n, DRAWS].
    """
    heads, plain = np.zeros((len(size), 3), np.int32), []
    kernels.library.read_headers(
        turbo, len(size), address.ctypes.data, size.ctypes.data, heads.ctypes.data
    )
    for number, (nbytes, head) in enumerate(zip(size.tolist(), heads.tolist(), strict=True)):
        height, width, orientation = head
        pixels = height * width
        if height > 0 and width > 0 and pixels <= MAX_PIXELS and has_few_scans(nbytes, pixels):
            upright_shape = (width, height) if orientation >= FIRST_TRANSPOSED else (height, width)
            box = region(*upright_shape, shape, augment, draws[number])
            plain.append((number, *stored_box(box, height, width, orientation), orientation))
    return np.array(plain, np.int64).reshape(-1, 6)


def _decode_regions(
    turbo: Any, inputs: tuple[npt.NDArray[Any], ...], size: tuple[int, ...]
) -> Iterator[tuple[int, Pixels]]:
    """Yield the number of each decoded image, and its region as stored. Failed images are left out.

    The pixels are valid until the next image is asked for; none: they are in `out`, complete.
    inputs: arrays of the six arguments of `decode_regions` in kernels.c that have a value for each
    image. size: height and width of the final images.
    """
    count, first, boxes = len(inputs[0]), 0, inputs[2].tolist()
    decoded, scratch = np.zeros((count, 5), np.int64), np.empty(_SCRATCH_BYTES, np.uint8)
    while first < count:
        addresses = [array[first:].ctypes.data for array in (*inputs, decoded)]
        stop = first + kernels.library.decode_regions(
            turbo,
            count - first,
            *addresses[:-1],
            *size,
            scratch.ctypes.data,
            len(scratch),
            addresses[-1],
        )
        for i in range(first, stop):
            start, top, left, height, width = decoded[i].tolist()
            if height >= 0:
                pixels = scratch[start : start + height * width * 3].reshape(height, width, 3)
                y, x, h, w = boxes[i]
                yield i, pixels[y - top : y - top + h, x - left : x - left + w]
        first = stop


def _finish(pixels: Pixels, out: Pixels, mirrored: bool) -> None:
    """Resize a region into `out`. A mirrored region is BGR, and becomes RGB in mirror image.

    Reversing the bytes of a row does both, in two thirds of the time of reversing its pixels.
    """
    resized = np.empty(out.shape, np.uint8) if mirrored else out
    resize(pixels, resized)
    if mirrored:
        height, width, _ = out.shape
        kernels.library.reverse_rows(out.ctypes.data, resized.ctypes.data, height, width * 3)
