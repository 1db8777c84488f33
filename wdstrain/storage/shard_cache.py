"""Cache of remote shards on a local disk, filled while they are read.

A shard is cached block by block, so training does not wait for whole shards. All processes of a
machine share the cache (`cache_folder`). Missing blocks are fetched from the server by the first
reader that needs them. It holds a lock on the block meanwhile, so other threads and processes wait
and read the block then. A killed process holds no lock, and it has marked no block that is not
written.

When all blocks are present, the shard is compared with its sha256, flushed, cut to its length and
given its final name. A file with a final name is therefore a whole, plain tar.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum, auto

from wdstrain.errors import StorageError
from wdstrain.memory.scatter import ScatterList, as_scatter_list
from wdstrain.memory.shared import private_memory
from wdstrain.runtime import file_locks
from wdstrain.runtime.file_locks import try_lock, unlock
from wdstrain.storage.block_map import PART, BlockMap, write_at
from wdstrain.storage.cache_folder import IN_USE, PAUSE, CacheFolder, remove_unused
from wdstrain.storage.local import ShardFile
from wdstrain.storage.remote import RemoteFile, open_remote

_REMOVAL_PATIENCE = 1.0  # seconds to wait for other readers of an invalid file
_FINISHING, _BLOCKS = IN_USE + 1, 1 << 61  # lock positions; the latter plus a block's number
_PATIENCE = 300.0  # seconds to wait for a block of another process, before it is fetched twice

_log = logging.getLogger("wdstrain")


class _State(Enum):
    """State of a block for a reader that needs it."""

    PRESENT = auto()  # in the cache
    CLAIMED = auto()  # missing; this reader has the lock, and fetches and stores it
    ELSEWHERE = auto()  # missing; another reader fetches it
    UNCACHED = auto()  # missing; this reader fetches it and does not store it


class CachedFile:
    """A cached shard. Only `stop` may be called by other threads.

    cached: bytes that were read from the cache.
    ranged, tag, retries, fetched: as of a remote file; those of the server if it was asked.
    """

    def __init__(
        self,
        folder: CacheFolder,
        shard: ShardFile,
        fd: int,
        final_path: str,
        stopping: threading.Event,
    ) -> None:
        """fd: of the open file, which this object closes. final_path: of the whole shard."""
        self.path, self.size, self.cached = shard.path, shard.bytes, 0
        self._folder, self._shard, self._stopping = folder, shard, stopping
        self._fd, self._final_path = fd, final_path
        self._map = BlockMap(fd, shard.bytes)
        self._remote: RemoteFile | None = None
        self._buffer: memoryview | None = None  # a fetched block, until it is stored

    @property
    def whole(self) -> bool:
        """Whether the file has the length of the shard."""
        return os.fstat(self._fd).st_size == self.size

    @property
    def partial(self) -> bool:
        """Whether the file is a partial shard with a valid block map."""
        return self._map.is_valid()

    @property
    def ranged(self) -> bool:
        return self._remote is None or self._remote.ranged

    @property
    def tag(self) -> str | None:
        return self._remote.tag if self._remote is not None else None

    @property
    def retries(self) -> int:
        return self._remote.retries if self._remote is not None else 0

    @property
    def fetched(self) -> int:
        return self._remote.fetched if self._remote is not None else 0

    def has_block(self, number: int) -> bool:
        return number in self._map

    def read_into(
        self, target: ScatterList | Iterable[memoryview], offset: int, *, last: int | None = None
    ) -> None:
        """Fill the target with the bytes from offset on. last: ignored.

        Raises the errors of the server's file.
        """
        target, waiting = as_scatter_list(target), []
        block_size = self._map.block_size
        while target.left:
            count = min(target.left, block_size - offset % block_size)
            part = target.split_off(count)
            if not self._read_block(part, offset, wait=False):
                waiting.append((part, offset))
            offset += count
        for part, start in waiting:  # other readers fetched these meanwhile
            self._read_block(part, start, wait=True)

    def fill(self, start: int, stop: int) -> None:
        """Fetch the missing blocks of bytes [start, stop) into the cache."""
        block_size = self._map.block_size
        for number in range(start // block_size, -(-stop // block_size)):
            if not self.has_block(number) and self._folder.writable:
                discarded = as_scatter_list([memoryview(bytearray(1))])
                self._read_block(discarded, number * block_size, wait=True)

    def finish(self) -> None:
        """Give the shard its final name if all of it is present. Raises OSError."""
        if self.whole:
            if os.path.exists(self._final_path):
                return
        elif not self._map.is_complete():
            return
        if not try_lock(self._fd, _FINISHING):
            return  # another reader does it
        try:
            if self._shard.sha256 and self._digest() != self._shard.sha256:
                self._folder.forget(self._shard)
                _log.warning(
                    "%s: the fetched bytes differ from the index (sha256). "
                    "The shard is not kept in the cache.",
                    self._shard.shown,
                )
                return
            if not self.whole:
                # Flush the bytes before the file gets the length of a whole shard.
                os.fsync(self._fd)
                os.ftruncate(self._fd, self.size)
            os.fsync(self._fd)
            self._folder.publish(self._fd, self._final_path, self._stopping)
        finally:
            unlock(self._fd, _FINISHING)

    def stop(self) -> None:
        """End a read that another thread is in."""
        self._stopping.set()
        remote = self._remote
        if remote is not None:
            remote.stop()

    def close(self) -> None:
        """Close the file; the cache may remove it then."""
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        self._buffer = None
        if self._fd >= 0:
            file_locks.close_file(self._fd)
            self._fd = -1

    def __enter__(self) -> CachedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_block(self, target: ScatterList, offset: int, *, wait: bool) -> bool:
        """Fill the target with bytes of one block, and fetch the block if it is missing.

        Returns False if another reader fetches the block and `wait` is False.
        """
        number = offset // self._map.block_size
        state = self._claim(number, wait=wait)
        if state is _State.ELSEWHERE:
            return False
        if state is _State.PRESENT:
            self.cached += target.left
            self._read_stored(target, offset)
        elif state is _State.CLAIMED:
            try:
                self._fetch_block(number, target, offset)
            finally:
                unlock(self._fd, _BLOCKS + number)
        else:
            self._read_remote(target, offset)
        return True

    def _claim(self, number: int, *, wait: bool) -> _State:
        """Lock a block if it is missing. wait: whether to wait while another reader fetches it."""
        begun = time.monotonic()
        while not self.has_block(number):
            if not self._folder.writable or time.monotonic() - begun > _PATIENCE:
                return _State.UNCACHED
            if try_lock(self._fd, _BLOCKS + number):
                if not self.has_block(number):
                    return _State.CLAIMED
                unlock(self._fd, _BLOCKS + number)
            elif not wait:
                return _State.ELSEWHERE
            elif self._stopping.wait(PAUSE):
                raise StorageError(f"{self._shard.shown}: reading was stopped.")
        return _State.PRESENT

    def _fetch_block(self, number: int, target: ScatterList, offset: int) -> None:
        """Fetch and store a locked block, and fill the target with its bytes from offset on."""
        start, stop = self._map.span(number)
        # Not into the target: its runs for unneeded bytes may overlap, so it cannot be stored.
        if self._buffer is None:
            self._buffer = private_memory(self._map.block_size)
        block = self._buffer[: stop - start]
        self._read_remote(as_scatter_list([block]), start)
        try:
            write_at(self._fd, block, start)
            self._map.add(number)
            self.finish()
        except OSError as error:
            self._folder.stop_writing(error)
        target.write(block[offset - start : offset - start + target.left])

    def _read_remote(self, target: ScatterList, offset: int) -> None:
        if self._remote is None:
            tag = self._shard.tag or None
            self._remote = open_remote(self.path, self.size, tag, self._stopping)
        # Without range requests the server sends the whole object anyway.
        last = None if self._remote.ranged else self.size
        self._remote.read_into(target, offset, last=last)

    def _digest(self) -> str:
        """Return the sha256 of the whole shard."""
        digest, buffer = hashlib.sha256(), private_memory(self._map.block_size)
        for offset in range(0, self.size, len(buffer)):
            chunk = buffer[: min(len(buffer), self.size - offset)]
            self._read_stored(as_scatter_list([chunk]), offset)
            digest.update(chunk)
        return digest.hexdigest()

    def _read_stored(self, target: ScatterList, offset: int) -> None:
        while target.left:
            count = target.read(self._fd, offset)
            if not count:
                raise StorageError(f"{self._final_path} was cut while it was read. Remove it.")
            offset += count


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
