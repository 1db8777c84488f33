"""Locks on places of a file, which end with whoever holds them, however that ends.

Linux's locks of open file descriptions: they hold between threads and between processes, and one that is killed leaves none
behind. The older kind of POSIX belongs to a process, so threads would not see each other's, and closing any descriptor of
the file would drop them all.

A forked child has the open files of its parent, and so the locks on them: they would hold until the child ends, too. So whoever
locks opens and closes the file here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

available = hasattr(fcntl, "F_OFD_SETLK")

_open: set[int] = set()


def opened(path: str, flags: int, mode: int = 0o666) -> int:
    """A file opened to lock places of it. A forked child closes it as it begins."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    _open.add(fd)
    return fd


def close(fd: int) -> None:
    """Close such a file, and end its locks, also where a process that was just forked has the file still. In a child it is closed."""
    if fd in _open:
        _open.discard(fd)
        try:
            if available:
                _set(fd, fcntl.F_UNLCK, 0, 0)
        finally:
            os.close(fd)


def _close_all() -> None:
    for fd in _open:
        os.close(fd)
    _open.clear()


os.register_at_fork(after_in_child=_close_all)


def try_lock(fd: int, place: int, *, shared: bool = False) -> bool:
    """Lock one place of a file, which may lie beyond its end. False if somebody else's lock is in the way."""
    return _set(fd, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, place)


def unlock(fd: int, place: int) -> None:
    _set(fd, fcntl.F_UNLCK, place)


def _set(fd: int, kind: int, place: int, size: int = 1) -> bool:
    request = struct.pack(
        "hhxxxxqqixxxx", kind, 0, place, size, 0
    )  # struct flock: from the file's start; of size 0, to its end
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
