"""Cache of remote shards on a local disk, filled while they are read.

A shard is cached block by block, so training does not wait for whole shards. All processes of a
machine share the cache (`cache_folder`), and each block is fetched once (`cached_file`).
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from wdstrain.runtime import file_locks
from wdstrain.storage.block_map import PART
from wdstrain.storage.cache_folder import PAUSE, CacheFolder, remove_unused
from wdstrain.storage.cached_file import CachedFile
from wdstrain.storage.local import ShardFile

_REMOVAL_PATIENCE = 1.0  # seconds to wait for other readers of an invalid file


class Cache(CacheFolder):
    """Cache of remote shards in a folder, within a limit of bytes."""

    def open(self, shard: ShardFile, stopping: threading.Event | None = None) -> CachedFile | None:
        """Return a shard to read through the cache; None if it cannot be cached.

        It cannot if its checksum and its version are unknown, if the limit leaves no room, or if
        it is missing and the disk is full or read-only. stopping: set to end reading.
        """
        event = stopping or threading.Event()
        # The size comes from an index, which may be hostile.
        most = self.capacity if self.limit is None else min(self.capacity, self.limit)
        if not (shard.sha256 or shard.tag) or shard.bytes > most:
            return None
        path, end = self.path_of(shard), time.monotonic() + _REMOVAL_PATIENCE
        while not event.is_set():
            try:
                for name, flags in ((path, os.O_RDONLY), (path + PART, os.O_RDWR)):
                    if name != path and not self.writable:
                        return None
                    file = self._open_file(name, flags, shard, event)
                    if file is not None:
                        return file
                if not self.create(path, shard.bytes, event):
                    return None
            except _InUseError:  # removed by its other reader soon, unless that one needs it
                if time.monotonic() > end or event.wait(PAUSE):
                    return None
            except OSError as error:
                self.stop_writing(error)
                return None
        return None

    def _open_file(
        self, name: str, flags: int, shard: ShardFile, stopping: threading.Event
    ) -> CachedFile | None:
        """Return the file of a shard with this name; None if there is none. Removes invalid files.

        Raises _InUseError if an invalid file is in use, OSError.
        """
        path = self.path_of(shard)
        fd = self.open_in_use(name, flags, stopping)
        if fd is None:
            return None
        file = CachedFile(self, shard, fd, path, stopping)
        try:
            if _is_valid(file, name):
                with suppress(OSError):  # a file of another user
                    os.utime(fd)  # for the limit: the time of the last use
                if name != path:
                    file.finish()
                if os.fstat(fd).st_nlink:
                    return file
                file.close()  # it was complete, and its checksum was wrong
                return None
        except BaseException:
            file.close()
            raise
        file.close()
        self._remove_invalid(name, shard, stopping)
        return None

    def _remove_invalid(self, name: str, shard: ShardFile, stopping: threading.Event) -> None:
        """Remove a file, unless another process has made it valid meanwhile."""
        with self.exclusive(stopping), suppress(FileNotFoundError):
            fd = file_locks.open_file(name, os.O_RDWR)
            with CachedFile(self, shard, fd, self.path_of(shard), stopping) as file:
                if not _is_valid(file, name) and not remove_unused(fd, name):
                    raise _InUseError


class _InUseError(Exception):
    """An invalid file is open in another thread or process."""


def _is_valid(file: CachedFile, name: str) -> bool:
    """Return whether a file is what its name says: a whole shard, or a partial one."""
    return file.whole or (file.partial and name.endswith(PART))
