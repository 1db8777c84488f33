"""Locked files, whose locks the system releases when their process ends.

The locks hold between threads and between processes. A forked child would inherit an open file and
so its lock, and keep it when its parent is killed. It therefore closes the files.
"""

from __future__ import annotations

import fcntl
import os

_locked: set[int] = set()  # descriptors


def lock_file(path: str, *, wait: bool = False) -> int | None:
    """Return the descriptor of a file after locking it; None if another has the lock.

    wait: until the other has released it. The file is created if it is missing. Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        raise
    _locked.add(fd)
    return fd


def unlock_file(fd: int | None) -> None:
    """Release a lock and close its file. Does nothing the second time, and in a forked child."""
    if fd in _locked:
        _locked.discard(fd)
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was just forked may have it open, too
        os.close(fd)


def _close_inherited() -> None:
    for fd in _locked:
        os.close(fd)
    _locked.clear()


os.register_at_fork(after_in_child=_close_inherited)
