"""Locks on places of a file, which end with whoever holds them, however that ends.

Linux's locks of open file descriptions: they hold between threads and between processes, and one that is killed leaves none
behind. The older kind of POSIX belongs to a process, so threads would not see each other's, and closing any descriptor of
the file would drop them all.
"""

from __future__ import annotations

import errno
import fcntl
import struct

available = hasattr(fcntl, "F_OFD_SETLK")


def try_lock(fd: int, place: int, *, shared: bool = False) -> bool:
    """Lock one place of a file, which may lie beyond its end. False if somebody else's lock is in the way."""
    return _set(fd, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, place)


def unlock(fd: int, place: int) -> None:
    _set(fd, fcntl.F_UNLCK, place)


def _set(fd: int, kind: int, place: int) -> bool:
    request = struct.pack("hhxxxxqqixxxx", kind, 0, place, 1, 0)  # struct flock: from the file's start, one byte
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
