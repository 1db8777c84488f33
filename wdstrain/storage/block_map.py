"""Block map of a partial shard: which of its blocks are present.

A partial shard (`.part`) has the length of the shard and ends in a header and one byte per block.
When all blocks are present the map is cut off, and the file is the shard.

The environment variable WDSTRAIN_RANGE_SIZE sets the size of a block, which is also that of a range
request. Partial shards with another size of blocks are fetched again.
"""

from __future__ import annotations

import os
from functools import lru_cache
from hashlib import blake2b

from wdstrain.runtime.options import size_setting

PART = ".part"  # suffix of a partial shard

_MAGIC = b"WDSCACHE"
_RANGE_SIZE = "WDSTRAIN_RANGE_SIZE", 4 << 20


def range_size() -> int:
    """Return the most bytes of a range request; a block is fetched, marked and locked as a whole."""
    return size_setting(*_RANGE_SIZE)


class BlockMap:
    """Block map of an open partial shard. block_size: bytes. count: number of blocks."""

    def __init__(self, fd: int, size: int) -> None:
        """fd: of the partial shard, or of the whole shard, which has no map. size: of the shard."""
        self._fd, self._size, self.block_size = fd, size, range_size()
        self.count = -(-size // self.block_size)
        self._start = size + len(_header())

    def is_valid(self) -> bool:
        """Return whether the file is a partial shard of this size, made since the last boot.

        After a power failure a block could be marked whose bytes were not written.
        """
        return (
            os.fstat(self._fd).st_size == self._start + self.count
            and os.pread(self._fd, len(_header()), self._size) == _header()
        )

    def __contains__(self, number: int) -> bool:
        """Return whether a block is present. In a whole shard all are."""
        return os.pread(self._fd, 1, self._start + number) != b"\0"

    def is_complete(self) -> bool:
        """Return whether all blocks are present."""
        return b"\0" not in os.pread(self._fd, self.count, self._start)

    def add(self, number: int) -> None:
        """Mark a block as present. Its bytes must have been written. Raises OSError."""
        write_at(self._fd, memoryview(b"\1"), self._start + number)

    def span(self, number: int) -> tuple[int, int]:
        """Return the first byte and the end of a block in the shard."""
        start = number * self.block_size
        return start, min(self._size, start + self.block_size)


def create_part(path: str, size: int) -> None:
    """Create a partial shard without any block. size: of the shard. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        empty = _header() + bytes(-(-size // range_size()))
        os.ftruncate(fd, size + len(empty))
        write_at(fd, memoryview(empty), size)
    finally:
        os.close(fd)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of the data at an offset. Raises OSError."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _header() -> bytes:
    return _MAGIC + range_size().to_bytes(8, "little") + boot_id()


@lru_cache(maxsize=1)
def boot_id() -> bytes:
    """Return 16 bytes that differ after each boot of this machine; zeros if it gives none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return blake2b(file.read(), digest_size=16).digest()
    except OSError:
        return bytes(16)
