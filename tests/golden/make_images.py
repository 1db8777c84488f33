"""Write the encoded images of `images/`, once: other versions of Pillow write other bytes.

    python -m tests.golden.make_images

An image is 22 x 14 pixels. PNGs that Pillow does not write are encoded here.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.golden.tiny_images import chunk

FOLDER = Path(__file__).parent / "images"
WIDTH, HEIGHT = 22, 14
Pixels = npt.NDArray[np.uint8]

# (first column, first row, step of columns, step of rows) of each pass of an interlaced PNG
ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2)]
ADAM7 += [(0, 1, 1, 2)]


def color() -> Pixels:
    """Return RGB pixels: gradients, with a white corner at the top left."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    planes = [columns * 11, rows * 17, (rows + columns) * 5 + 40]
    pixels = np.stack(planes, axis=-1).astype(np.uint8)
    pixels[:4, :6] = 255
    return pixels


def gray(levels: int = 256) -> npt.NDArray[np.int64]:
    """Return values below `levels`: a gradient."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    return np.asarray((rows * 3 + columns * 5) * levels // 256 + (rows // 4) % levels) % levels


def by_pillow(mode: str = "RGB", kind: str = "JPEG", **options: Any) -> bytes:
    """Return the image in a mode of Pillow, encoded by it."""
    image = Image.fromarray(color())
    if mode == "I;16":
        image = Image.fromarray((gray(65536)).astype(np.uint16))
    elif mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(gray().astype(np.uint8)))
        image = image.convert(mode)
    elif mode == "P":
        image = image.quantize(16)
    else:
        image = image.convert(mode)
    return saved(image, kind, **options)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def rotated_by_exif(orientation: int, kind: str = "JPEG", **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return by_pillow("RGB", kind, exif=exif.tobytes(), **options)


def rotated_by_xmp() -> bytes:
    xmp = (
        '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF '
        'xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description '
        'xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="8"/></rdf:RDF></x:xmpmeta>'
    )
    return by_pillow(xmp=xmp.encode(), quality=90)


def several_frames(kind: str, **options: Any) -> bytes:
    first, second = Image.fromarray(color()), Image.fromarray(255 - color())
    return saved(first, kind, save_all=True, append_images=[second], **options)


def png(
    values: npt.NDArray[Any],
    depth: int,
    kind: int,
    *,
    before: tuple[tuple[bytes, bytes], ...] = (),
    interlaced: bool = False,
) -> bytes:
    """Return a PNG of [height, width, channels]. kind: its color type. before: chunks before IDAT."""
    passes = ADAM7 if interlaced else [(0, 0, 1, 1)]
    data = b"".join(
        b"\0" + packed(row, depth)
        for column, line, columns, rows in passes
        for row in values[line::rows, column::columns]
    )
    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, kind, 0, 0, int(interlaced))
    chunks = [(b"IHDR", head), *before, (b"IDAT", zlib.compress(data, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, content) for name, content in chunks)


def packed(row: npt.NDArray[Any], depth: int) -> bytes:
    """Return the values of a row with `depth` bits each."""
    if depth == 16:
        return row.astype(">u2").tobytes()
    bits = np.unpackbits(row.astype(np.uint8).reshape(-1, 1), axis=1)[:, 8 - depth :]
    return np.packbits(bits.reshape(-1)).tobytes()


def gray_png(depth: int, **options: Any) -> bytes:
    return png(gray(2**depth)[:, :, None], depth, 0, **options)


def palette_png(depth: int, transparent: bytes = b"") -> bytes:
    palette = bytes((37 * n + 80 * c) % 256 for n in range(2**depth) for c in range(3))
    before = [(b"PLTE", palette)] + ([(b"tRNS", transparent)] if transparent else [])
    return png(gray(2**depth)[:, :, None], depth, 3, before=tuple(before))


def bitmap_rle() -> bytes:
    """Return a BMP with 256 colors and run-length encoding, whose lowest row comes first."""
    rows = b""
    for row in gray(16)[::-1]:
        for value in row:
            rows += bytes([1, int(value)])
        rows += b"\0\0"
    rows += b"\0\1"
    palette = b"".join(bytes([n, 16 * n % 256, 255 - n, 0]) for n in range(256))
    offset = 14 + 40 + len(palette)
    head = struct.pack("<IiiHHIIiiII", 40, WIDTH, HEIGHT, 1, 8, 1, len(rows), 2835, 2835, 256, 0)
    return struct.pack("<2sIHHI", b"BM", offset + len(rows), 0, 0, offset) + head + palette + rows


def pnm(kind: str, values: npt.NDArray[Any], most: int) -> bytes:
    """Return a plain (P2, P3) or raw (P5, P6) image with a comment in its head."""
    head = f"{kind}\n# golden\n{WIDTH} {HEIGHT}\n{most}\n".encode()
    if kind in ("P2", "P3"):
        return head + "\n".join(map(str, values.ravel())).encode() + b"\n"
    return head + values.astype(">u2" if most > 255 else np.uint8).tobytes()


IMAGES: dict[str, Callable[[], bytes]] = {
    "jpeg-444.jpg": lambda: by_pillow(quality=92, subsampling=0),
    "jpeg-422.jpg": lambda: by_pillow(quality=85, subsampling=1),
    "jpeg-420.jpg": lambda: by_pillow(quality=75, subsampling=2),
    "jpeg-420-restarts.jpg": lambda: by_pillow(quality=75, restart_marker_rows=1),
    "jpeg-progressive.jpg": lambda: by_pillow(quality=80, progressive=True),
    "jpeg-gray.jpg": lambda: by_pillow("L", quality=80),
    "jpeg-rgb.jpg": lambda: by_pillow(quality=90, keep_rgb=True),
    "jpeg-cmyk.jpg": lambda: by_pillow("CMYK", quality=90),
    **{
        f"jpeg-orientation-{number}.jpg": partial(rotated_by_exif, number, quality=70)
        for number in range(2, 9)
    },
    "jpeg-orientation-xmp.jpg": rotated_by_xmp,
    "jpeg-mpo.jpg": lambda: several_frames("MPO"),
    "png-rgb.png": lambda: by_pillow("RGB", "PNG"),
    "png-rgba.png": lambda: by_pillow("RGBA", "PNG"),
    "png-gray-alpha.png": lambda: by_pillow("LA", "PNG"),
    "png-rgb-16-bits.png": lambda: png(color().astype(np.int64) * 257 - 100 * (color() > 9), 16, 2),
    "png-rgb-interlaced.png": lambda: png(color(), 8, 2, interlaced=True),
    "png-rgb-transparent-color.png": lambda: png(
        color(), 8, 2, before=((b"tRNS", b"\0\xff\0\xff\0\xff"),)
    ),
    "png-orientation-6.png": lambda: rotated_by_exif(6, "PNG"),
    "png-gray-1-bit.png": lambda: gray_png(1),
    "png-gray-2-bits.png": lambda: gray_png(2),
    "png-gray-4-bits-interlaced.png": lambda: gray_png(4, interlaced=True),
    "png-gray-8-bits.png": lambda: gray_png(8),
    "png-gray-16-bits.png": lambda: gray_png(16),
    "png-palette-1-bit.png": lambda: palette_png(1),
    "png-palette-4-bits.png": lambda: palette_png(4),
    "png-palette-8-bits-transparent.png": lambda: palette_png(8, b"\0\x80"),
    "gif-palette.gif": lambda: by_pillow("P", "GIF"),
    "gif-animated.gif": lambda: several_frames("GIF"),
    "bmp-24-bits.bmp": lambda: by_pillow("RGB", "BMP"),
    "bmp-1-bit.bmp": lambda: by_pillow("1", "BMP"),
    "bmp-palette.bmp": lambda: by_pillow("P", "BMP"),
    "bmp-palette-rle.bmp": bitmap_rle,
    "tiff-plain.tif": lambda: by_pillow("RGB", "TIFF"),
    "tiff-lzw.tiff": lambda: by_pillow("RGB", "TIFF", compression="tiff_lzw"),
    "tiff-deflate.tif": lambda: by_pillow("RGBA", "TIFF", compression="tiff_adobe_deflate"),
    "tiff-gray-16-bits.tif": lambda: by_pillow("I;16", "TIFF"),
    "tiff-bilevel-fax.tif": lambda: by_pillow("1", "TIFF", compression="group4"),
    "ppm-raw.ppm": lambda: pnm("P6", color(), 255),
    "ppm-plain.ppm": lambda: pnm("P3", color() // 17, 15),
    "pgm-raw.pgm": lambda: pnm("P5", gray(), 255),
    "pgm-16-bits.pgm": lambda: pnm("P5", gray(65536), 65535),
    "webp-lossless.webp": lambda: by_pillow("RGB", "WEBP", lossless=True),
    "webp-lossless-alpha.webp": lambda: by_pillow("RGBA", "WEBP", lossless=True, exact=True),
    "webp-lossy.webp": lambda: by_pillow("RGB", "WEBP", quality=80),
    "webp-animated.webp": lambda: several_frames("WEBP", lossless=True),
    "avif-lossy.avif": lambda: by_pillow("RGB", "AVIF", quality=70),
    "avif-444.avif": lambda: by_pillow("RGB", "AVIF", quality=95, subsampling="4:4:4"),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, encode in IMAGES.items():
        (FOLDER / name).write_bytes(encode())
    sizes = [path.stat().st_size for path in FOLDER.iterdir()]
    print(f"{len(sizes)} images, {sum(sizes)} bytes, the largest {max(sizes)}")


if __name__ == "__main__":
    main()
