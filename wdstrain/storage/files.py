"""Local files: shards, read by position as remote ones, and small files.

Small files are read as a whole, and written atomically so that they survive a power failure.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from typing import BinaryIO

from wdstrain.errors import ShardError, StorageError
from wdstrain.storage.remote import ALL_BYTES, File, RemoteFile, is_remote, read_remote

_ADVICE = "Free some space, or check the folder."
_PROBE_BYTES = 1 << 16  # of a file that shows whether there is some space


def read_whole(path: str) -> bytes | None:
    """Return a small file, local or remote; None if it does not exist."""
    if is_remote(path):
        return read_remote(path)
    with suppress(FileNotFoundError), open(path, "rb", opener=regular) as file:
        return file.read()
    return None


def regular(path: str, flags: int) -> int:
    """Return the descriptor of a regular file; an `opener` for `open`.

    Raises OSError for a folder, a pipe or a device. Opening or reading a pipe could wait forever.
    """
    fd = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device", path)
    return fd


def user_cache(*names: str) -> str:
    """Return a path in the user's cache folder of this package."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "wdstrain", *names)


def publish(temporary: str, final: str) -> None:
    """Flush a file and rename it to its final name. After a power failure it is whole or missing.

    Raises OSError.
    """
    sync(temporary)
    os.replace(temporary, final)
    sync(os.path.dirname(final) or ".")


def sync(path: str) -> None:
    """Flush a file, or the names of the files in a folder. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def disk_errors(path: str, advice: str = _ADVICE) -> Iterator[None]:
    """Raise StorageError for an OSError in the block. path: what is written; advice: next step."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}.",
            advice,
        ) from error


@contextmanager
def put_whole(path: str, advice: str = _ADVICE) -> Iterator[BinaryIO]:
    """Yield a file to write. It gets its name when it is complete, and none after an error.

    advice: next step in the StorageError of a disk that fails.
    """
    name = f".{os.path.basename(path)}.{uuid.uuid4().hex[:12]}.tmp"
    temporary = os.path.join(os.path.dirname(path), name)
    try:
        with disk_errors(path, advice):
            with open(temporary, "wb") as file:
                yield file
            publish(temporary, path)
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def check_folder_output(folder: str) -> None:
    """Raise StorageError if a folder, which need not exist, cannot be written. Nothing stays of it."""
    existing = os.path.abspath(folder)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    _check_space(existing, folder, "Choose another folder.")


def check_file_output(path: str) -> None:
    """Raise StorageError if a file cannot be written in its folder. Nothing stays of it."""
    if os.path.isdir(path):
        raise StorageError(
            f"{path} cannot be written: it is a folder.",
            "Name a file.",
        )
    _check_space(os.path.dirname(path) or ".", path, "Name a file in another folder.")


def _check_space(folder: str, path: str, advice: str) -> None:
    """Write and remove a small file. path: named in the error."""
    with disk_errors(path, advice), tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))


def write_whole(path: str, data: bytes) -> None:
    """Write a small file atomically. Raises StorageError."""
    with put_whole(path) as file:
        file.write(data)


# --- shards ---------------------------------------------------------------------------------------


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


class LocalFile(FileIO, File):
    """A local shard.

    tag, version: the state of the file when it was opened.
    """

    def __init__(self, path: str, state: str = "") -> None:
        """state: the state that the file must have after each read; "" for any.

        Raises StorageError if the file cannot be opened.
        """
        self.path, self._state = path, state
        try:
            super().__init__(path, opener=regular)
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}.") from error
        status = os.fstat(self.fileno())
        self.size = status.st_size
        self.version = self.tag = state_of(status)
        with suppress(OSError):  # a hint, which some file systems do not know
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read_into(self, target: memoryview, offset: int, *, last: int | None = None) -> None:
        """Fill the target with the bytes from offset on.

        Raises ShardError if the file ends before or has another state, StorageError if it cannot be
        read.
        """
        try:
            count = read_at(self.fileno(), target, offset)
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be read at offset {offset}: {error.strerror}."
            ) from error
        if self._state and not is_state(self._state, os.fstat(self.fileno())):
            raise ShardError(
                f"{self.path} was written to or replaced since it was opened first, so its "
                "samples may differ.",
                "Start again to use the new shard.",
            )
        if count < len(target):
            raise ShardError(
                f"{self.path} ends at offset {offset + count}, {len(target) - count} bytes "
                "before the end that it had when it was indexed or opened.",
                "Copy it again, or accept it as it is: wdstrain index "
                f"{os.path.dirname(self.path) or '.'}",
            )


def open_source(
    path: str,
    size: int | None = None,
    state: str | None = None,
    stopping: threading.Event | None = None,
) -> File:
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
