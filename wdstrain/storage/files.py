"""Small files: read as a whole, and written atomically so that they survive a power failure."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from wdstrain.errors import StorageError
from wdstrain.storage.remote import is_remote, read_remote

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
    fd = os.open(path, flags | os.O_NONBLOCK)
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
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, final)
    sync_folder(os.path.dirname(final) or ".")


def sync_folder(folder: str) -> None:
    """Flush the names of the files in a folder. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
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
        raise StorageError(f"{path} cannot be written: {error.strerror}. {advice}") from error


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
        raise StorageError(f"{path} cannot be written: it is a folder. Name a file.")
    _check_space(os.path.dirname(path) or ".", path, "Name a file in another folder.")


def _check_space(folder: str, path: str, advice: str) -> None:
    """Write and remove a small file. path: named in the error."""
    with disk_errors(path, advice), tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))


def write_whole(path: str, data: bytes) -> None:
    """Write a small file atomically. Raises StorageError."""
    with put_whole(path) as file:
        file.write(data)
