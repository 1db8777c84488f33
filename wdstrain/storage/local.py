"""Local shards, read by position into memory of the caller.

One system call fills many buffers, so no byte is copied twice. Remote files have the same methods.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from wdstrain.errors import ShardError, StorageError
from wdstrain.memory.scatter import ScatterList, as_scatter_list
from wdstrain.storage.remote import RemoteFile, is_remote, open_remote


class ShardFile(Protocol):
    """A shard as storage sees it.

    bytes: size. sha256: of the whole file, "" if unknown. tag: state or version of the file when it
    was indexed, "" if unknown. name: file name. shown: the path without secrets, for messages.
    """

    @property
    def path(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def sha256(self) -> str: ...
    @property
    def tag(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def shown(self) -> str: ...


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
        self.size, self.tag = status.st_size, state_of(status)
        try:
            self._check_state()
        except ShardError:
            self.close()
            raise
        with suppress(OSError):  # a hint, which some file systems do not know
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    @property
    def version(self) -> str:
        return self.tag

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length), fewer only at the end of the file.

        Raises StorageError if the file cannot be read.
        """
        try:
            data = os.pread(self._fd, length, offset)
            # One call returns at most 2 GB, and fewer over a network file system.
            while len(data) < length and (
                more := os.pread(self._fd, length - len(data), offset + len(data))
            ):
                data += more
        except OSError as error:
            raise self._unreadable(offset, error) from error
        return data

    def read_into(self, target: ScatterList | Iterable[memoryview], offset: int) -> None:
        """Fill the target with the bytes from offset on.

        Raises ShardError if the file ends before or has another state, StorageError if it cannot be
        read.
        """
        target = as_scatter_list(target)
        while target.left:
            try:
                count = target.read(self._fd, offset)
            except OSError as error:
                raise self._unreadable(offset, error) from error
            if count == 0:
                raise ShardError(
                    f"{self.path} ends at offset {offset}, {target.left} bytes before the index "
                    f"says; it changed since it was indexed. Copy it again, or accept it as it is: "
                    f"wdstrain index {os.path.dirname(self.path) or '.'}"
                )
            offset += count
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

    def _unreadable(self, offset: int, error: OSError) -> StorageError:
        return StorageError(f"{self.path} cannot be read at offset {offset}: {error.strerror}.")


Source = LocalFile | RemoteFile


def open_source(path: str, size: int | None = None, state: str = "") -> Source:
    """Return a shard to read from, local or remote.

    size: as the index says; it saves a request for the size. state: state or version that the
    shard must have; "" for any.
    """
    return open_remote(path, size, state or None) if is_remote(path) else LocalFile(path, state)
