"""Anonymous memory shared with worker processes.

A memfd, not a name in /dev/shm: nothing is left behind by a crash, and a container's 64 MB /dev/shm is no limit. Its
pages are taken from the system only when they are first written, so a generous size costs nothing. It travels to a
worker by fork or, under spawn and forkserver, as a duplicated descriptor.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any

from wdstrain.errors import WdstrainError

_POPULATE_READ = 22  # MADV_POPULATE_READ, which Python does not name


class Memory:
    """`size` bytes that parent and workers see alike. `map` and `view` are writable; the memory lives as long as either.

    address: where it begins in this process.
    """

    def __init__(self, size: int) -> None:
        try:
            fd = _anonymous(size)
            try:
                self._adopt(fd, size)
            except BaseException:
                os.close(fd)
                raise
        except (OSError, OverflowError, ValueError) as error:
            raise WdstrainError(
                f"{size} bytes of memory cannot be set aside ({error}). Lower shuffle_buffer or batch_size."
            ) from None

    def _adopt(self, fd: int, size: int) -> None:
        self._fd, self.size = fd, size
        self.map = mmap.mmap(fd, size)
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self._touched: set[int] = set()
        weakref.finalize(self, os.close, fd)

    def touch(self, start: int, size: int) -> None:
        """This process is about to write to these bytes: map their pages at once, which takes a quarter of the time of one by one."""
        if size and start not in self._touched and sys.platform == "linux":
            self._touched.add(start)
            with suppress(OSError):  # Linux before 5.14, or larger pages: they are mapped one by one
                self.map.madvise(_POPULATE_READ, start, size)

    def __reduce__(self) -> tuple[Callable[..., Memory], tuple[Any, int]]:
        return _attach, (DupFd(self._fd), self.size)


def own(size: int) -> memoryview:
    """Zeros that only this process sees, for some megabytes that live for a while; the system has them back with their last user.

    A thread that takes such from malloc and frees them makes it keep as much for that thread for good, also for the next one.
    """
    return memoryview(
        mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if sys.platform != "win32" else bytearray(size)
    )


def _attach(handle: Any, size: int) -> Memory:
    memory = Memory.__new__(Memory)
    memory._adopt(handle.detach(), size)
    return memory


def _anonymous(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("wdstrain", os.MFD_CLOEXEC)
    else:  # not Linux: a file that has no name any more
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.truncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd
