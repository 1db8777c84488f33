"""Encoded images that are the same bytes with every version of every library."""

from __future__ import annotations

import zlib


def png(number: int, width: int = 6, height: int = 5, *, gray: bool = False) -> bytes:
    """Return a PNG whose pixels depend on a number: RGB, or gray class numbers 0 to 3.

    Its data are not compressed, because the output of zlib differs between its versions.
    """
    channels = 1 if gray else 3
    rows = b""
    for y in range(height):
        values = [
            (number + x + y) % 4 if gray else (17 * number + 5 * x + 3 * y + 90 * channel) % 256
            for x in range(width)
            for channel in range(channels)
        ]
        rows += b"\0" + bytes(values)
    head = (
        width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0 if gray else 2, 0, 0, 0])
    )
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", stored(rows))
        + chunk(b"IEND", b"")
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def stored(data: bytes) -> bytes:
    """Return a zlib stream of one block that is not compressed. data: below 64 KB."""
    size = len(data)
    block = b"\x01" + size.to_bytes(2, "little") + (size ^ 0xFFFF).to_bytes(2, "little") + data
    return b"\x78\x01" + block + zlib.adler32(data).to_bytes(4, "big")
