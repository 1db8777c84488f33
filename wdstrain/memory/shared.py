"""Anonymous memory shared with worker processes.

A memfd, not a name in /dev/shm: nothing is left behind by a crash, and a container's 64 MB /dev/shm is no limit. Its
pages are taken from the system only when they are first written, so a generous size costs nothing. It travels to a
worker by fork or, under spawn and forkserver, as a duplicated descriptor.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process or thread is in here meanwhile. A process that is killed is in here no more."""
        with _turns[os.getpid()]:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def share(self) -> None:
        """In a forked worker process: have all of it in common with the parent, also what was a `Snapshot` at the fork."""
        if _system is not None:
            _system.mmap(self.address, self.size, _READ_WRITE, mmap.MAP_SHARED | _FIXED, self._fd, 0)

    def __reduce__(self) -> tuple[Callable[..., Memory], tuple[Any, int]]:
        return _attach, (DupFd(self._fd), self.size)


class Snapshot:
    """Bytes of a memory as they are now, which a forked child has in their place, as its own. Only on Linux; else there are none."""

    def __init__(self, memory: Memory, start: int, size: int) -> None:
        """Raises MemoryError."""
        before = start % mmap.PAGESIZE
        self._address, self._size = memory.address + start - before, -(-(size + before) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._copy: int | None = None
        if _system is not None:
            copy = _system.mmap(None, self._size, _READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            if copy == _FAILED:
                raise MemoryError
            ctypes.memmove(copy, self._address, self._size)
            self._copy = copy

    def put(self) -> None:
        """In the child: put it there."""
        if _system is not None and self._copy is not None:
            _system.mremap(self._copy, self._size, self._size, _MOVE, self._address)

    def drop(self) -> None:
        """In the parent: it is not needed any more."""
        if _system is not None and self._copy is not None:
            _system.munmap(self._copy, self._size)


def _linux() -> Any:
    """What maps memory at a given place."""
    if sys.platform != "linux":
        return None
    system = ctypes.CDLL(None)
    number, place = ctypes.c_size_t, ctypes.c_void_p
    system.mmap.argtypes, system.mmap.restype = (place, number, *[ctypes.c_int] * 3, ctypes.c_long), place
    system.mremap.argtypes, system.mremap.restype = (place, number, number, ctypes.c_int, place), place
    system.munmap.argtypes = (place, number)
    return system


_READ_WRITE, _FIXED, _MOVE = 3, 0x10, 3  # PROT_READ | PROT_WRITE, MAP_FIXED, MREMAP_MAYMOVE | MREMAP_FIXED
_FAILED = (1 << 8 * ctypes.sizeof(ctypes.c_void_p)) - 1
_system = _linux()


class _Turns(dict[int, threading.Lock]):
    """By process: a lock for its threads. A forked child may have inherited that of its parent locked."""

    def __missing__(self, process: int) -> threading.Lock:
        return self.setdefault(process, threading.Lock())


_turns = _Turns()


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
