"""Local files: scatter reads by position (`preadv`) into memory of the caller, and the choice between local and remote.

One system call spreads a run of a shard over many buffers, so no byte is copied twice. Remote files have the same methods.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from wdstrain.errors import ShardError, StorageError
from wdstrain.memory.scatter import ScatterList, as_scatter_list
from wdstrain.storage.io_pool import IOThreadPool
from wdstrain.storage.remote import RemoteFile, is_remote, open_remote


class ShardFile(Protocol):
    """A shard as storage sees it.

    bytes: its size. sha256: of the whole file, empty if not known. tag: the state in which the index found it, empty if not
    known. name: the file's name. shown: the path without secrets, for messages.
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


def state_of(found: os.stat_result) -> str:
    """The state of a file, as one word: what is written to it or put in its place changes it."""
    return f"{found.st_mtime_ns}:{found.st_ctime_ns}:{found.st_ino}"


def is_state(word: str, found: os.stat_result) -> bool:
    """Whether a file is in this state.

    A new link or other rights change the time of its entry alone, a file system in user space may number its files anew: neither is
    another file. What was moved to its place has both another number and another time, though it was written at the same time.
    """
    now, then = state_of(found).split(":"), word.split(":")
    return now[0] == then[0] and (now[1:2] == then[1:2] or now[2:] == then[2:])


class LocalFile:
    """A shard on a disk, read by position. Not shared between threads.

    state: in which it was found, for those that nothing else would tell to be others; "" asks for none. Raises ShardError, also
    of bytes that were read, where it is in another.
    """

    def __init__(self, path: str, state: str = "") -> None:
        self.path, self._state = path, state
        try:
            self._fd = os.open(
                path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
            )
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}.") from error
        found = os.fstat(self._fd)
        if not stat.S_ISREG(
            found.st_mode
        ):  # of a pipe nobody knows the size, and opening one may wait for ever
            self.close()
            raise StorageError(f"{path} is no file but a folder, a pipe or a device. Name a tar.")
        self.size, self.tag = found.st_size, state_of(found)
        try:
            self._check()
        except ShardError:
            self.close()
            raise
        with suppress(OSError, AttributeError):  # a hint: some systems and file systems know none
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    @property
    def version(self) -> str:
        """The state in which it was found."""
        return self.tag

    def read(self, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length), fewer only at the end of the file. Raises StorageError where the disk gives none."""
        try:
            data = os.pread(self._fd, length, offset)
            while len(data) < length and (
                more := os.pread(self._fd, length - len(data), offset + len(data))
            ):
                data += more  # 2 GB come at a time, fewer over a network
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be read at offset {offset}: {error.strerror}."
            ) from error
        return data

    def read_into(self, pieces: ScatterList | Iterable[memoryview], offset: int) -> None:
        """Fill the pieces, one after another, with the bytes from offset on. Raises ShardError where the file ends first."""
        todo = as_scatter_list(pieces)
        while todo.left:
            try:
                count = todo.read(self._fd, offset)
            except OSError as error:
                raise StorageError(
                    f"{self.path} cannot be read at offset {offset}: {error.strerror}."
                ) from error
            if count == 0:
                raise ShardError(
                    f"{self.path} ends at offset {offset}, {todo.left} bytes before the index says; it changed since it was "
                    f"indexed. Copy it again, or accept it as it is: wdstrain index {os.path.dirname(self.path) or '.'}"
                )
            offset += count
        self._check()

    def fill(
        self, hands: IOThreadPool, pieces: ScatterList, offset: int, done: Callable[[], None]
    ) -> None:
        """The same by hands, which call `done` when as much came as they could read; `read_into` then tells what is missing."""
        hands.fill(self._fd, offset, pieces, done)

    def _check(self) -> None:
        if self._state and not is_state(self._state, os.fstat(self._fd)):
            raise ShardError(
                f"{self.path} was written to or replaced since it was opened first, so its samples may be others. Start again with "
                f"it as it is; shards that wdstrain convert made are told from others by their checksums."
            )

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1  # the system has closed it also where it tells an error
            os.close(fd)

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Source = LocalFile | RemoteFile


def open_source(path: str, size: int | None = None, state: str = "") -> Source:
    """A shard to read from. size: as an index says, which saves asking a server for it. state: in which it has to be; "" asks none."""
    return open_remote(path, size, state or None) if is_remote(path) else LocalFile(path, state)
