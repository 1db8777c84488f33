"""Small files: read as a whole, written atomically, and flushed so that they survive a power cut."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from wdstrain.errors import StorageError
from wdstrain.storage.remote import is_remote, read_remote


def read_whole(path: str) -> bytes | None:
    """A small file; None if it is not there."""
    if is_remote(path):
        return read_remote(path)
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read()
    except FileNotFoundError:
        return None


def regular(path: str, flags: int) -> int:
    """Opens a file, for `open`. Raises OSError for what is none: to open or to read a pipe may wait for ever."""
    found = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "it is no file but a folder, a pipe or a device", path)
    return found


def user_cache(*names: str) -> str:
    """A path in this user's cache folder for this package."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "wdstrain", *names)


def publish(temporary: str, final: str) -> None:
    """Make a written and flushed file appear under its final name, whole or not at all, also after a power cut."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, final)
    sync_folder(os.path.dirname(final) or ".")


def sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def put_whole(path: str) -> Iterator[BinaryIO]:
    """A file to write, which has its name when all of it is written and flushed; after an error it is not there."""
    temporary = os.path.join(
        os.path.dirname(path), f".{os.path.basename(path)}.{uuid.uuid4().hex[:12]}.tmp"
    )
    try:
        with open(temporary, "wb") as file:
            yield file
        publish(temporary, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def write_whole(path: str, data: bytes) -> None:
    """Write a small file atomically: temporary name, fsync, rename."""
    with put_whole(path) as file:
        file.write(data)
