"""Lock of a staging directory, so that one process at a time writes into an output folder."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from wdstrain.errors import UsageError

LOCK_NAME = "owner"  # the locked file in the directory

_TIMEOUT = 2.0  # seconds: workers of a killed conversion hold its lock a moment longer
_POLL = 0.02  # seconds


class FolderLock:
    """The lock of one directory. It ends with the process."""

    def __init__(self, folder: str) -> None:
        self._folder, self._fd = folder, -1

    @property
    def is_held(self) -> bool:
        return self._fd >= 0

    def acquire(self, out: str, *, create: bool) -> None:
        """Lock the directory. Raises UsageError, which names `out`, if another process holds it.

        create: create the directory if it is missing; otherwise nothing is locked if it disappears.
        """
        end, path = time.monotonic() + _TIMEOUT, os.path.join(self._folder, LOCK_NAME)
        while not self.is_held:
            if create:
                os.makedirs(self._folder, exist_ok=True)
            elif not os.path.exists(self._folder):
                return
            with suppress(FileNotFoundError):  # the directory was removed just now
                fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
                try:
                    # The file may have been deleted after it was opened.
                    if _try_lock(fd) and os.path.samestat(os.fstat(fd), os.stat(path)):
                        self._fd = fd
                finally:
                    if not self.is_held:
                        os.close(fd)
            if not self.is_held:
                if time.monotonic() > end:
                    raise UsageError(
                        f"another conversion is writing into {out}. Wait for it, or choose another "
                        f"folder."
                    )
                time.sleep(_POLL)

    def release(self) -> None:
        """Delete the locked file and unlock it. The next process creates its own."""
        if self.is_held:
            with suppress(OSError):
                os.unlink(os.path.join(self._folder, LOCK_NAME))
            os.close(self._fd)
            self._fd = -1


def _try_lock(fd: int) -> bool:
    """Lock a file; return False if another process holds the lock. True where locks do not exist."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
