"""Read a shard once, forward, in large blocks, and hash it meanwhile.

Reading and hashing release the GIL, so shards are checked in parallel threads. Files are not
mapped: a file that is truncated meanwhile would kill the process.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator

from isal.isal_zlib import crc32

from wdstrain.errors import ShardError, StorageError
from wdstrain.storage.local import LocalFile, Source
from wdstrain.storage.remote import ALL_BYTES, RemoteFile, is_remote, shown_path

_BLOCK = 4 << 20  # bytes of one read
_BEHIND = 2 << 20  # bytes that are kept behind what is asked for
_WHOLE = 16 << 20  # bytes of the largest member that is held whole to be hashed


def checksums(parts: Iterable[bytes | memoryview], length: int) -> tuple[int, int]:
    """Return the crc32 of a member, and a 64-bit hash that is valid within this process.

    The crc32 detects damage, but not duplicates: 16 of its bits are equal for most PNG files.
    """
    if length <= _WHOLE:
        data = b"".join(parts)
        return crc32(data), hash(data)
    crc, hashed = 0, hashlib.blake2b(digest_size=8)
    for part in parts:
        crc = crc32(part, crc)
        hashed.update(part)
    return crc, int.from_bytes(hashed.digest(), "little", signed=True)


class ForwardReader:
    """Reads a shard from its first byte to its last.

    stopping: set by another thread to end it. tick: called with the number of bytes read.
    Raises StorageError if the shard cannot be read.
    """

    def __init__(self, path: str, stopping: threading.Event, tick: Callable[[int], None]) -> None:
        self.shown = shown_path(path)
        self._source: Source = (
            RemoteFile(path, tag="", stopping=stopping, first_bytes=ALL_BYTES)
            if is_remote(path)
            else LocalFile(path)
        )
        self._stopping, self._tick = stopping, tick
        self.size = self._source.size
        self._hash = hashlib.sha256()
        self._base, self._held = 0, memoryview(b"")  # the bytes from base on that are held

    def read(self, offset: int, length: int) -> memoryview:
        """Return bytes, fewer only at the end. offset: at most 2 MiB before the last call's."""
        end = self._base + len(self._held)
        while end < min(offset + length, self.size):
            data = self._read(end, min(_BLOCK, self.size - end))
            self._hash.update(data)
            self._tick(len(data))
            kept = self._held[max(0, offset - _BEHIND - self._base) :]
            self._base, self._held = end - len(kept), memoryview(bytes(kept) + data)
            end += len(data)
        at = offset - self._base
        assert at >= 0
        return self._held[at : at + length]

    def parts(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield the bytes of a member in blocks."""
        stop = offset + length
        for start in range(offset, stop, _BLOCK):
            yield self.read(start, min(_BLOCK, stop - start))

    def checksums(self, offset: int, length: int) -> tuple[int, int]:
        """Return crc32 and hash of a member; see `checksums`."""
        return checksums(self.parts(offset, length), length)

    def reread_crc32(self, offset: int, length: int) -> int:
        """Return the crc32 of bytes that were passed; they are read again."""
        crc, stop = 0, offset + length
        while offset < stop:
            part = self._read(offset, min(stop - offset, _BLOCK))
            crc, offset = crc32(part, crc), offset + len(part)
        return crc

    def finish(self) -> str:
        """Read to the end and return the sha256 of the shard."""
        self.read(self.size, 0)
        return self._hash.hexdigest()

    def interrupt(self) -> None:
        """End a read in another thread."""
        if not isinstance(self._source, LocalFile):
            self._source.stop()

    def _read(self, offset: int, length: int) -> bytes:
        if self._stopping.is_set():
            raise StorageError(f"{self.shown}: reading was stopped.")
        data = self._source.read(offset, length)
        if not data:
            raise ShardError(
                f"{self.shown} ends at offset {offset}: it was cut while it was read. Run this "
                "again."
            )
        return data

    def __enter__(self) -> ForwardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()
