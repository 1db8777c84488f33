"""Locks on byte positions of a file, which the system releases when their process ends.

They are Linux's locks of open file descriptions. They hold between threads and between processes.
POSIX locks belong to a process: threads would share them, and closing any descriptor of the file
would release them all.

A forked child inherits open files and so their locks, which would hold until the child ends too.
Files must therefore be opened and closed with the functions of this module.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

available = hasattr(fcntl, "F_OFD_SETLK")

_open_files: set[int] = set()


def open_file(path: str, flags: int, mode: int = 0o666) -> int:
    """Return the descriptor of a file whose positions can be locked. A forked child closes it."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    _open_files.add(fd)
    return fd


def close_file(fd: int) -> None:
    """Release the file's locks and close it. Does nothing in a forked child.

    The locks are released even if a child that was just forked still has the file open.
    """
    if fd in _open_files:
        _open_files.discard(fd)
        try:
            if available:
                _set_lock(fd, fcntl.F_UNLCK, 0, 0)
        finally:
            os.close(fd)


def try_lock(fd: int, position: int, *, shared: bool = False) -> bool:
    """Lock one byte position of a file without waiting. Returns False if another lock conflicts.

    position: may be beyond the end of the file. shared: allow other shared locks on it.
    Raises OSError.
    """
    return _set_lock(fd, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, position)


def unlock(fd: int, position: int) -> None:
    """Release the lock on one byte position. Raises OSError."""
    _set_lock(fd, fcntl.F_UNLCK, position)


def _set_lock(fd: int, kind: int, start: int, size: int = 1) -> bool:
    """Set or release a lock on `size` bytes; size 0: up to the end of the file."""
    request = struct.pack("hhxxxxqqixxxx", kind, 0, start, size, 0)  # struct flock
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _close_inherited() -> None:
    """Close all files in a forked child, so that it does not keep their locks."""
    for fd in _open_files:
        os.close(fd)
    _open_files.clear()


os.register_at_fork(after_in_child=_close_inherited)
