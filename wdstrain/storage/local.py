"""Local shards, read by position into memory of the caller. Remote files have the same methods."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from io import FileIO

from wdstrain.errors import ShardError, StorageError
from wdstrain.storage.files import regular
from wdstrain.storage.remote import ALL_BYTES, RemoteFile, is_remote


def state_of(status: os.stat_result) -> str:
    """Return the state of a file. Writing to the file or replacing it changes the state."""
    return f"{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"


def is_state(state: str, status: os.stat_result) -> bool:
    """Return whether a file still has a state.

    Either the time of its entry or its number may differ. A new link or new permissions change the
    entry, and a file system in user space may renumber its files. A replaced file differs in both.
    """
    now, then = state_of(status).split(":"), state.split(":")
    return now[0] == then[0] and (now[1:2] == then[1:2] or now[2:] == then[2:])


class LocalFile:
    """A local shard, read by position. Not shared between threads.

    tag, version: the state of the file when it was opened.
    """

    def __init__(self, path: str, state: str = "") -> None:
        """state: the state that the file must have after each read; "" for any.

        Raises StorageError if the file cannot be opened.
        """
        self.path, self._state = path, state
        try:
            self._file = FileIO(path, opener=regular)
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}.") from error
        status = os.fstat(self._file.fileno())
        self.size = status.st_size
        self.version = self.tag = state_of(status)
        with suppress(OSError):  # a hint, which some file systems do not know
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length), fewer only at the end of the file."""
        data = bytearray(max(0, min(length, self.size - offset)))
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_into(self, target: memoryview, offset: int, *, last: int | None = None) -> None:
        """Fill the target with the bytes from offset on. last: see `RemoteFile`.

        Raises ShardError if the file ends before or has another state, StorageError if it cannot be
        read.
        """
        try:
            count = read_at(self._file.fileno(), target, offset)
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be read at offset {offset}: {error.strerror}."
            ) from error
        if self._state and not is_state(self._state, os.fstat(self._file.fileno())):
            raise ShardError(
                f"{self.path} was written to or replaced since it was opened first, so its samples "
                f"may differ. Start again to use the new shard."
            )
        if count < len(target):
            raise ShardError(
                f"{self.path} ends at offset {offset + count}, {len(target) - count} bytes before "
                f"the end that it had when it was indexed or opened. Copy it again, or accept it as "
                f"it is: wdstrain index {os.path.dirname(self.path) or '.'}"
            )

    def close(self) -> None:
        """Close the file. Raises OSError, as a network file system may."""
        self._file.close()

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Source = LocalFile | RemoteFile


def open_source(
    path: str,
    size: int | None = None,
    state: str | None = None,
    stopping: threading.Event | None = None,
) -> Source:
    """Return a shard to read from, local or remote.

    size: as the index says; it saves a request for the size. state: state or version that the
    shard must have; "" for any; None for that of the first read. stopping: set to end reading.
    """
    if is_remote(path):
        return RemoteFile(path, size, state, stopping, first_bytes=ALL_BYTES)
    return LocalFile(path, state or "")


def read_at(fd: int, view: memoryview, offset: int) -> int:
    """Fill a view from an offset of a file on.

    Returns the number of bytes, which are fewer only at the end of the file. Raises OSError.
    """
    count = more = os.preadv(fd, [view], offset)
    # One call reads at most 2 GB, and fewer over a network file system.
    while more and count < len(view):
        more = os.preadv(fd, [view[count:]], offset + count)
        count += more
    return count
