"""One forward pass over a shard: whoever walks over it reads headers, and the bytes are hashed as they go by.

So a shard is read once, in large pieces, whatever is wanted of it: its sha256, the crc32 of each member, or a member's
bytes. Reading and hashing leave the interpreter to other threads, which is why shards are checked side by side in threads.
The road not taken is a mapping of the file: a server has none, and a file that is cut meanwhile kills the process.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator

from wdstrain.errors import ShardError, StorageError
from wdstrain.native.checksum import crc32
from wdstrain.storage.local import LocalFile, Source
from wdstrain.storage.remote import is_remote, open_remote, redacted

_PIECE = 4 << 20  # bytes of one read
_BEHIND = 2 << 20  # bytes that are kept behind what is asked for
_WHOLE = 16 << 20  # bytes of the largest member that is held whole to be hashed


def sums(parts: Iterable[bytes | memoryview], length: int) -> tuple[int, int]:
    """The crc32 of a member of `length` bytes, and a 64-bit hash of them that is good within this process.

    A crc32 tells damage; it does not tell two pictures apart: PNGs hold crc32s of their own, and so agree in 16 of its 32 bits.
    """
    if length <= _WHOLE:
        data = b"".join(parts)
        return crc32(data), hash(data)
    crc, hashed = 0, hashlib.blake2b(digest_size=8)
    for part in parts:
        crc = crc32(part, crc)
        hashed.update(part)
    return crc, int.from_bytes(hashed.digest(), "little", signed=True)


class Passage:
    """A shard that is passed from its first byte to its last. `tick` is told of bytes as they come.

    stopping: set by another thread to end it. Raises StorageError where the shard cannot be read.
    """

    def __init__(self, path: str, stopping: threading.Event, tick: Callable[[int], None]) -> None:
        self.shown = redacted(path) if is_remote(path) else path
        self._source: Source = (
            open_remote(path, stopping=stopping) if is_remote(path) else LocalFile(path)
        )
        self._stopping, self._tick = stopping, tick
        self.size = self._source.size
        self._hash = hashlib.sha256()
        self._base, self._held = 0, memoryview(b"")  # the bytes from base on that are held

    def read(self, offset: int, length: int) -> memoryview:
        """Bytes [offset, offset + length), fewer only at the end. `offset` may lie 2 MiB before the last one, not more."""
        if self._base <= offset and (at := offset - self._base) + length <= len(
            self._held
        ):  # as nearly always
            return self._held[at : at + length]
        stop = min(offset + length, self.size)
        while self._base + len(self._held) < stop:
            self._more(max(self._base, offset - _BEHIND), stop)
        assert offset >= self._base
        return self._held[offset - self._base : max(offset, stop) - self._base]

    def parts(self, offset: int, length: int) -> Iterator[memoryview]:
        """A member's bytes as they go by, in pieces; nothing before its end is asked for after that."""
        stop = offset + length
        while offset < stop:
            end = self._base + len(self._held)
            if offset >= end:
                self._more(end, stop)
                continue
            part = self._held[offset - self._base : stop - self._base]
            yield part
            offset += len(part)

    def sums(self, offset: int, length: int) -> tuple[int, int]:
        """The crc32 of a member and a 64-bit hash of its bytes, taken as they go by."""
        at = offset - self._base
        if at + length <= len(self._held):  # as most often
            return sums([self._held[at : at + length]], length)
        return sums(self.parts(offset, length), length)

    def again(self, offset: int, length: int) -> int:
        """The crc32 of bytes that lie behind; they are read once more."""
        found, stop = 0, offset + length
        while offset < stop:
            part = self._read(offset, min(stop - offset, _PIECE))
            found, offset = crc32(part, found), offset + len(part)
        return found

    def finish(self) -> str:
        """The sha256 of the shard, once the rest of it has gone by too."""
        while self._base + len(self._held) < self.size:
            self._more(self._base + len(self._held), self.size)
        return self._hash.hexdigest()

    def interrupt(self) -> None:
        """End a read that another thread is in."""
        if not isinstance(self._source, LocalFile):
            self._source.stop()

    def _more(self, keep: int, stop: int) -> None:
        """Read on, to `stop` at least if that is near, and drop what lies before `keep`."""
        end = self._base + len(self._held)
        keep = min(keep, end)
        data = self._read(end, min(max(_PIECE, min(stop - end, 2 * _PIECE)), self.size - end))
        self._hash.update(data)
        self._tick(len(data))
        kept = self._held[keep - self._base :]
        self._held, self._base = memoryview(bytes(kept) + data if kept else data), keep

    def _read(self, offset: int, length: int) -> bytes:
        if self._stopping.is_set():
            raise StorageError(f"{self.shown}: reading was stopped.")
        data = self._source.read(offset, length)
        if not data:
            raise ShardError(
                f"{self.shown} ends at offset {offset}: it was cut while it was read. Start again."
            )
        return data

    def __enter__(self) -> Passage:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()
