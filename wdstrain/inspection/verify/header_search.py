"""Find the next tar header after damaged bytes.

A header may begin at any byte, because a shard may have lost bytes in its middle. It is recognized
by the ustar magic and its checksum. A tar inside a member is taken for the shard's own headers. Old
tars without the magic (V7) cannot be searched.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wdstrain.errors import ShardError
from wdstrain.shards.tar import Read
from wdstrain.shards.tar_headers import BLOCK, EXTENSIONS, size_in

_SEARCHED = 1 << 20  # bytes that are searched at a time
_KINDS = frozenset(
    b"0\x007" + EXTENSIONS
)  # of headers that a search stops at: regular files, and extensions before them


class Search:
    """Finds headers, one block of bytes at a time."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self._size = read, size
        self._base = self._stop = 0  # headers that begin in [base, stop) are known
        self._places: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def after(self, offset: int) -> int | None:
        """Return the first offset >= `offset` where a header begins; None if there is none."""
        while offset + BLOCK <= self._size:
            if not self._base <= offset < self._stop:
                data = self._read(offset, min(self._size - offset, _SEARCHED + BLOCK))
                self._base, self._stop = offset, offset + len(data) - BLOCK + 1
                self._places = offset + _headers_in(data)
            at = int(np.searchsorted(self._places, offset))
            if at < len(self._places):
                return int(self._places[at])
            offset = self._stop
        return None


def holds_header(data: bytes | memoryview) -> bool:
    """Return whether a field contains a tar header: then bytes before it are missing."""
    return len(_headers_in(data)) > 0


def _headers_in(data: bytes | memoryview) -> npt.NDArray[np.int64]:
    """Return the offsets of headers in some bytes, ascending. int64[...]"""
    nothing = np.zeros(0, np.int64)
    view = np.frombuffer(data, np.uint8)
    if len(view) < BLOCK or bytes(data).find(b"ustar", 257) < 0:
        return nothing
    last = len(view) - BLOCK + 1
    hits = view[257 : 257 + last] == ord("u")
    for place, letter in enumerate(b"star", 258):
        hits &= view[place : place + last] == letter
    places = np.flatnonzero(hits)
    sums = np.zeros(len(view) + 1, np.uint32)  # of the bytes before each place
    np.cumsum(view, dtype=np.uint32, out=sums[1:])
    total = (
        sums[places + BLOCK] - sums[places] - (sums[places + 156] - sums[places + 148])
    ).astype(np.int64) + 8 * ord(" ")
    stored: npt.NDArray[np.int64] = np.zeros(len(places), np.int64)
    for place in range(148, 156):
        digit = view[places + place].astype(np.int64) - ord("0")
        stored = np.where((digit >= 0) & (digit < 8), 8 * stored + digit, stored)
    sound = [
        place
        for place in places[stored == total].tolist()
        if _is_header(bytes(data[place : place + BLOCK]))
    ]
    return np.array(sound, np.int64)


def _is_header(block: bytes) -> bool:
    try:
        size_in(block, "", 0)
    except ShardError:
        return False
    return block[156] in _KINDS
