"""Folder of cached shards within a limit of bytes, shared by the processes of a machine.

The cache owns a subfolder of the folder that the user names. A CACHEDIR.TAG marks it before it
holds anything. Files beside it are never touched, and a subfolder with other content is refused.

A file is open under a shared lock as long as it is read. Only a file without such a lock is
removed. The system releases the locks of a killed process.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b

from wdstrain.errors import StorageError, UsageError
from wdstrain.runtime import file_locks
from wdstrain.runtime.file_locks import available, try_lock
from wdstrain.storage.block_map import PART, create_part
from wdstrain.storage.files import sync_folder, write_whole
from wdstrain.storage.local import ShardFile

FOLDER = "wdstrain-cache"  # in the folder that the user names
IN_USE = 1 << 60  # position of the lock of an open file: beyond the end of any file
PAUSE = 0.01  # seconds between two attempts to lock

_TAG = "CACHEDIR.TAG"  # programs that back up or clean folders know it
_TAG_CONTENT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# Shards of servers, kept by wdstrain. They are fetched again when needed.\n"
)
_CACHED_NAME = re.compile(rf"-[0-9a-f]{{16}}\.tar({re.escape(PART)})?$")  # names by `path_of`

_log = logging.getLogger("wdstrain")


class CacheFolder:
    """Folder of cached shards.

    path: of the subfolder. limit: most bytes of all shards, None for no limit. capacity: bytes of
    the disk. writable: False once a write failed; cached shards are still read.
    """

    def __init__(self, folder: str, limit: int | None = None) -> None:
        """folder: the user's folder; it is made if it is missing.

        Raises UsageError if it cannot be made or the subfolder holds other files.
        """
        if not available:
            raise UsageError(
                "a cache needs Linux (locks of open files). Omit cache_dir, or copy the shards to "
                "a disk."
            )
        if limit is not None and limit < 1:
            raise UsageError(
                f"cache_limit={limit}: must be >= 1. Omit it for a cache without a limit."
            )
        self.path, self.limit = os.path.join(os.path.abspath(folder), FOLDER), limit
        self.writable, self._lock = True, threading.Lock()
        try:
            os.makedirs(folder, exist_ok=True)
            self.capacity = shutil.disk_usage(folder).total
        except OSError as error:
            raise UsageError(
                f"cache_dir={folder} cannot be made: {error.strerror}. Name another folder."
            ) from None
        try:
            self._create()
        except (OSError, StorageError) as error:
            self.stop_writing(error)

    def path_of(self, shard: ShardFile) -> str:
        """Return the path of a whole shard. Equal content has the same path at all addresses.

        Without a checksum it depends on the whole address, whose query may tell shards apart.
        """
        content = [shard.sha256] if shard.sha256 else [shard.path, shard.tag, str(shard.bytes)]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", shard.name.removesuffix(".tar"))[:80]
        digest = blake2b(repr(content).encode(), digest_size=8).hexdigest()
        return os.path.join(self.path, f"{name}-{digest}.tar")

    def forget(self, shard: ShardFile) -> None:
        """Remove a shard whose bytes are wrong. Its readers keep the file that they have open."""
        for path in (self.path_of(shard), self.path_of(shard) + PART):
            with suppress(OSError):
                os.unlink(path)

    def create(self, path: str, size: int, stopping: threading.Event) -> bool:
        """Create the partial shard of `path` unless the shard exists in some form.

        Returns False if the limit leaves no room for it. Raises OSError.
        """
        with self.exclusive(stopping):
            if os.path.exists(path) or os.path.exists(path + PART):
                return True
            if not self._make_room(size):
                return False
            create_part(path + PART, size)
        return True

    def publish(self, fd: int, path: str, stopping: threading.Event) -> None:
        """Give a whole shard its final name, unless its name `.part` belongs to another file now."""
        with self.exclusive(stopping), suppress(FileNotFoundError):
            named, own = os.stat(path + PART), os.fstat(fd)
            if (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino):
                os.replace(path + PART, path)
                sync_folder(self.path)

    def open_in_use(self, path: str, flags: int, stopping: threading.Event) -> int | None:
        """Open a file and mark it as in use. Returns its descriptor; None if it is missing."""
        while True:
            try:
                fd = file_locks.open_file(path, flags)
            except FileNotFoundError:
                return None
            # Another process may be about to remove the file.
            while not try_lock(fd, IN_USE, shared=True) and not stopping.wait(PAUSE):
                pass
            if os.fstat(fd).st_nlink or stopping.is_set():
                return fd
            file_locks.close_file(fd)

    @contextmanager
    def exclusive(self, stopping: threading.Event) -> Iterator[None]:
        """Let no other process add or publish a shard in this context.

        Raises StorageError if `stopping` is set while it waits.
        """
        fd = file_locks.open_file(os.path.join(self.path, ".lock"), os.O_RDWR | os.O_CREAT)
        try:
            while not try_lock(fd, 0):
                if stopping.wait(PAUSE):
                    raise StorageError(f"{self.path}: reading was stopped.")
            yield
        finally:
            file_locks.close_file(fd)

    def stop_writing(self, error: Exception) -> None:
        """Write nothing more, because of this error, and log it once."""
        with self._lock:
            was_writable, self.writable = self.writable, False
        if was_writable:
            _log.warning(
                "%s cannot be written: %s. Shards that are not cached yet are streamed without the "
                "cache.",
                self.path,
                getattr(error, "strerror", None) or error,
            )

    def _create(self) -> None:
        os.makedirs(self.path, exist_ok=True)
        tag = os.path.join(self.path, _TAG)
        # List before looking for the tag: another process may mark and fill the folder meanwhile.
        others = [name for name in os.listdir(self.path) if not name.startswith(".")]
        if os.path.exists(tag):
            return
        if others:
            raise UsageError(
                f"{self.path} holds {others[0]}, which no cache wrote. Move it, or name another "
                f"cache_dir."
            )
        write_whole(tag, _TAG_CONTENT)

    def _make_room(self, size: int) -> bool:
        """Remove the least recently used shards until a shard fits. Returns whether it fits."""
        if self.limit is None:
            return True
        cached = []  # (time of the last use, bytes, path); a partial shard has its full length
        for entry in os.scandir(self.path):
            if _CACHED_NAME.search(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    cached.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        total = sum(length for _, length, _ in cached)
        for _, length, path in sorted(cached):
            if total + size <= self.limit:
                break
            if _remove(path):
                total -= length
        return total + size <= self.limit


def remove_unused(fd: int, path: str) -> bool:
    """Remove an open file, unless it is in use elsewhere. Raises OSError."""
    if not try_lock(fd, IN_USE):
        return False
    os.unlink(path)
    return True


def _remove(path: str) -> bool:
    """Remove a file, unless it is in use or belongs to another user."""
    try:
        fd = file_locks.open_file(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return remove_unused(fd, path)
    except OSError:
        return False
    finally:
        file_locks.close_file(fd)
