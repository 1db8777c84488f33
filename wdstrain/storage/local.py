"""Local shards, read by position into memory of the caller. Remote files have the same methods."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from wdstrain.errors import ShardError, StorageError
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
        """state: the state that the file must have, also after each read; "" for any.

        Raises ShardError for another state, StorageError if the file cannot be opened.
        """
        self.path, self._state = path, state
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._fd = os.open(path, flags)
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}.") from error
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):  # opening or reading a pipe could wait forever
            self.close()
            raise StorageError(f"{path} is a folder, a pipe or a device. Name a tar file.")
        self.size = status.st_size
        self.version = self.tag = state_of(status)
        try:
            self._check_state()
        except ShardError:
            self.close()
            raise
        with suppress(OSError):  # a hint, which some file systems do not know
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length), fewer only at the end of the file.

        Raises StorageError if the file cannot be read.
        """
        data = bytearray(max(0, min(length, self.size - offset)))
        return bytes(data[: self._read_at(memoryview(data), offset)])

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill the target with the bytes from offset on.

        Raises ShardError if the file ends before or has another state, StorageError if it cannot be
        read.
        """
        count = self._read_at(target, offset)
        if count < len(target):
            raise ShardError(
                f"{self.path} ends at offset {offset + count}, {len(target) - count} bytes before "
                f"the index says; it changed since it was indexed. Copy it again, or accept it as it is: "
                f"wdstrain index {os.path.dirname(self.path) or '.'}"
            )
        self._check_state()

    def close(self) -> None:
        """Close the file. Raises OSError, as a network file system may."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1  # closed even if close() fails
            os.close(fd)

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_state(self) -> None:
        if self._state and not is_state(self._state, os.fstat(self._fd)):
            raise ShardError(
                f"{self.path} was written to or replaced since it was opened first, so its samples "
                f"may differ. Start again to use the new shard."
            )

    def _read_at(self, view: memoryview, offset: int) -> int:
        try:
            return read_at(self._fd, view, offset)
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be read at offset {offset}: {error.strerror}."
            ) from error


Source = LocalFile | RemoteFile


def open_source(path: str, size: int | None = None, state: str | None = None) -> Source:
    """Return a shard to read from, local or remote.

    size: as the index says; it saves a request for the size. state: state or version that the
    shard must have; "" for any; None for that of the first read.
    """
    if is_remote(path):
        return RemoteFile(path, size, state, first_bytes=ALL_BYTES)
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
