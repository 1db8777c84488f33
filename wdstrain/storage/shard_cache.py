"""Shards of a server, kept on a disk of this machine while they stream to training.

A shard is filled block by block, by whoever needs a block first, in a file that is as long as the shard and ends in a map of
the blocks that are there. Whoever fetches a block holds a lock on it, so that threads and processes of a machine that want
the same one wait for it and read it; a process that is killed holds no lock any more and has marked nothing that is not
there. When all blocks are there the shard is compared with its sha256, flushed, cut to its length and given its final name:
what has that name is whole, a plain tar.

All of it lies in a folder of its own within the one that is named, which holds a CACHEDIR.TAG from its beginning: what a user keeps
beside that folder is never looked at, whatever its name, and a folder that somebody else filled is refused.

Roads not taken: fetching whole shards before they are read (the first batch would wait for a shard), a lock for each shard
(of two ranks that share one, the second would wait for all of it), a database of what is there (it would have to be repaired
after each kill; the folder itself cannot be wrong).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import blake2b

from wdstrain.errors import StorageError, UsageError
from wdstrain.memory.scatter import ScatterList, as_scatter_list
from wdstrain.memory.shared import private_memory
from wdstrain.runtime import file_locks
from wdstrain.runtime.file_locks import available, try_lock, unlock
from wdstrain.storage.files import sync_folder, write_whole
from wdstrain.storage.local import ShardFile
from wdstrain.storage.remote import RemoteFile, open_remote

BLOCK = 4 << 20  # bytes that are fetched, marked and locked as one
PART = ".part"  # of the name of a shard that is not whole yet
FOLDER = "wdstrain-cache"  # within the folder that is named
_TAG = "CACHEDIR.TAG"  # programs that back up or clean folders know it
_TAGGED = b"Signature: 8a477f597d28d172789f06886806bc55\n# Shards of servers, kept by wdstrain. They are fetched again when needed.\n"
_OURS = re.compile(
    rf"-[0-9a-f]{{16}}\.tar({re.escape(PART)})?$"
)  # how the names end that `place_of` gives
_PATIENCE = (
    300.0  # seconds for another process to fetch a block, before it is fetched a second time
)
_LOOKED_AT = 1.0  # seconds for others to have looked at what is not sound
_PAUSE = 0.01  # seconds between two looks at a lock
_MAGIC = b"WDSCACHE"
_IN_USE, _FINISHING, _BLOCKS = (
    1 << 60,
    (1 << 60) + 1,
    1 << 61,
)  # places that are locked: beyond the end of any file

_log = logging.getLogger("wdstrain")


class Cache:
    """A folder of shards within a limit of bytes, shared by all processes of a machine that name it: FOLDER in `folder`.

    limit: of the bytes of all shards in it, None for no limit; those not used for longest go first, and none that is being
    read. Raises UsageError for a folder that cannot be made, or that holds what no cache wrote.
    """

    def __init__(self, folder: str, limit: int | None = None) -> None:
        if not available:
            raise UsageError(
                "a cache needs Linux (locks of open files). Leave cache_dir away, or copy the shards to a disk."
            )
        if limit is not None and limit < 1:
            raise UsageError(
                f"cache_limit={limit} is below 1. Leave it away for a cache without a limit."
            )
        self.folder, self.limit = os.path.join(os.path.abspath(folder), FOLDER), limit
        self.full = False  # nothing more can be written; what is there is still read
        self._warning = threading.Lock()
        try:
            os.makedirs(folder, exist_ok=True)
            self._disk = shutil.disk_usage(
                folder
            ).total  # an index may claim that a shard has any size
        except OSError as error:
            raise UsageError(
                f"cache_dir={folder} cannot be made: {error.strerror}. Name another folder."
            ) from None
        try:
            self._make()
        except OSError as error:
            self.give_up(error)
        except StorageError as error:
            self.give_up(OSError(str(error)))

    def open(self, shard: ShardFile, stopping: threading.Event | None = None) -> CachedFile | None:
        """A shard to read through the cache, or None where it cannot be kept: it is then read from its server alone.

        That is a shard of which neither a checksum nor a server's tag is known, one for which there is no room, and any that
        is not there yet when the disk is full or cannot be written.
        """
        event = stopping or threading.Event()
        most = min(self._disk, self._disk if self.limit is None else self.limit)
        if not (shard.sha256 or shard.tag) or shard.bytes > most:
            return None
        final, end = self.place_of(shard), time.monotonic() + _LOOKED_AT
        while not event.is_set():
            try:
                for path, flags in ((final, os.O_RDONLY), (final + PART, os.O_RDWR)):
                    if self.full and path != final:
                        return None
                    file = self._found(path, flags, shard, final, event)
                    if file is not None:
                        return file
                if not self._begin(final, shard.bytes, event):
                    return None
            except _InUseError:  # another looks at what is not sound, and it is gone when he did; or it is what another reads
                if time.monotonic() > end or event.wait(_PAUSE):
                    return None
            except OSError as error:
                self.give_up(error)
                return None
        return None

    def _found(
        self, path: str, flags: int, shard: ShardFile, final: str, stopping: threading.Event
    ) -> CachedFile | None:
        """What lies under this name, if it is what it should be; what is not is taken out. None: there is nothing."""
        fd = self._opened(path, flags, stopping)
        if fd is None:
            return None
        file = CachedFile(self, shard, fd, final, stopping)
        try:
            if self._is_sound(file, path):
                with suppress(OSError):  # of another user
                    os.utime(fd)  # used now; a part is as old as its last block
                if path != final:
                    file.finish()
                if os.fstat(fd).st_nlink:
                    return file
                file.close()  # it was all there, and not what its index says
                return None
        except BaseException:
            file.close()
            raise
        file.close()
        with self._alone(stopping), suppress(FileNotFoundError):
            fd = file_locks.open_file(path, os.O_RDWR)
            with CachedFile(
                self, shard, fd, final, stopping
            ) as again:  # it may have been just being made
                if not self._is_sound(again, path) and not _removed(fd, path):
                    raise _InUseError
        return None

    def _is_sound(self, file: CachedFile, path: str) -> bool:
        """Whether a file is what its name says: a shard, or, as a part, one that is being filled."""
        return file.whole or (file.sound and path.endswith(PART))

    def place_of(self, shard: ShardFile) -> str:
        """The path that a whole shard has in the cache: the same for one content, wherever it comes from.

        Without a checksum it is that of the whole address: what follows a ? may tell shards apart.
        """
        content = [shard.sha256] if shard.sha256 else [shard.path, shard.tag, str(shard.bytes)]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", shard.name.removesuffix(".tar"))[:80]
        return os.path.join(
            self.folder, f"{name}-{blake2b(repr(content).encode(), digest_size=8).hexdigest()}.tar"
        )

    def forget(self, shard: ShardFile) -> None:
        """Take a shard out whose bytes turned out wrong. Whoever reads it now goes on with what he has open."""
        for path in (self.place_of(shard), self.place_of(shard) + PART):
            with suppress(OSError):
                os.unlink(path)

    def publish(self, fd: int, final: str, stopping: threading.Event) -> None:
        """Give a whole shard its name, if it is still the one that lies there as a part."""
        with (
            self._alone(stopping),
            suppress(FileNotFoundError),
        ):  # finished by another, or taken out
            found, mine = os.stat(final + PART), os.fstat(fd)
            if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                os.replace(final + PART, final)
                sync_folder(self.folder)

    def give_up(self, error: OSError) -> None:
        """Write nothing more, and say so once."""
        self.full = True
        if self._warning.acquire(blocking=False):  # for good
            _log.warning(
                "%s cannot be written: %s. Shards that are not in this cache are streamed without it from here on.",
                self.folder,
                error.strerror or error,
            )

    # --- parts -------------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        """Make the folder, and mark it as ours before anything lies in it."""
        os.makedirs(self.folder, exist_ok=True)
        tag = os.path.join(self.folder, _TAG)
        others = [name for name in os.listdir(self.folder) if not name.startswith(".")]
        if os.path.exists(
            tag
        ):  # after the list: another process may have made it meanwhile, and filled it
            return
        if others:
            raise UsageError(
                f"{self.folder} holds {others[0]}, which no cache wrote. Move it, or name another cache_dir."
            )
        write_whole(tag, _TAGGED)

    def _opened(self, path: str, flags: int, stopping: threading.Event) -> int | None:
        """A file that is marked as in use, None if it is not there."""
        while True:
            try:
                fd = file_locks.open_file(path, flags)
            except FileNotFoundError:
                return None
            while not try_lock(fd, _IN_USE, shared=True) and not stopping.wait(_PAUSE):
                pass  # somebody is about to take it out
            if os.fstat(fd).st_nlink or stopping.is_set():
                return fd
            file_locks.close_file(fd)

    def _begin(self, final: str, size: int, stopping: threading.Event) -> bool:
        """Make the file in which a shard will be filled. False where there is no room for it."""
        with self._alone(stopping):
            if os.path.exists(final) or os.path.exists(final + PART):
                return True
            if not self._room(size):
                return False
            fd = os.open(final + PART, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                map_ = _head() + bytes(-(-size // BLOCK))
                os.ftruncate(fd, size + len(map_))
                _write(fd, memoryview(map_), size)
            finally:
                os.close(fd)
        return True

    def _room(self, size: int) -> bool:
        """Make room for a shard; parts count as what they will be."""
        if self.limit is None:
            return True
        found = []
        for entry in os.scandir(self.folder):
            if _OURS.search(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    found.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        total = sum(one[1] for one in found)
        for _, bytes_, path in sorted(found):
            if total + size <= self.limit:
                break
            if _take_out(path):
                total -= bytes_
        return total + size <= self.limit

    @contextmanager
    def _alone(self, stopping: threading.Event) -> Iterator[None]:
        """Nobody else adds a shard meanwhile."""
        fd = file_locks.open_file(os.path.join(self.folder, ".lock"), os.O_RDWR | os.O_CREAT)
        try:
            while not try_lock(fd, 0):
                if stopping.wait(_PAUSE):
                    raise StorageError(f"{self.folder}: reading was stopped.")
            yield
        finally:
            file_locks.close_file(fd)


class CachedFile:
    """A shard of a server, read by position through its copy in the cache. Not shared between threads.

    cached: bytes that the cache had. The other figures are those of what is read from the server, if anything is.
    """

    def __init__(
        self, cache: Cache, shard: ShardFile, fd: int, final: str, stopping: threading.Event
    ) -> None:
        self.path, self.size = shard.path, shard.bytes
        self.cached = 0
        self._cache, self._shard, self._fd, self._final, self._stopping = (
            cache,
            shard,
            fd,
            final,
            stopping,
        )
        self._remote: RemoteFile | None = None
        self._block: memoryview | None = None  # what is fetched, before it is kept and given away
        self._map = shard.bytes + len(_head())  # where the blocks' marks begin
        self._blocks = -(-shard.bytes // BLOCK)

    @property
    def whole(self) -> bool:
        return os.fstat(self._fd).st_size == self.size

    @property
    def sound(self) -> bool:
        """Whether this is a part of such a shard, begun since the machine was started."""
        return (
            os.fstat(self._fd).st_size == self._map + self._blocks
            and os.pread(self._fd, len(_head()), self.size) == _head()
        )

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

    def read_into(
        self, pieces: ScatterList | Iterable[memoryview], offset: int, *, last: int | None = None
    ) -> None:
        """Fill the pieces, one after another, with the bytes from offset on. Raises as the server's file does."""
        todo, waited = as_scatter_list(pieces), []
        while todo.left:
            count = min(todo.left, BLOCK - offset % BLOCK)
            block = todo.split_off(count)
            if not self._read_block(block, offset, wait=False):
                waited.append((block, offset))
            offset += count
        for block, start in waited:  # others fetch these; meanwhile the rest was fetched
            self._read_block(block, start, wait=True)

    def fill(self, start: int, stop: int) -> None:
        """Have these bytes in the cache."""
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            if not self._there(number) and not self._cache.full:
                self._read_block(
                    as_scatter_list([memoryview(bytearray(1))]), number * BLOCK, wait=True
                )

    def finish(self) -> None:
        """Give the shard its final name if all of it is there."""
        if self.whole:
            if os.path.exists(self._final):
                return
        elif b"\0" in os.pread(self._fd, self._blocks, self._map):
            return
        if not try_lock(self._fd, _FINISHING):
            return  # another does it
        try:
            if self._shard.sha256 and self._digest() != self._shard.sha256:
                self._cache.forget(self._shard)
                _log.warning(
                    "%s: what came is not what its index says (sha256). It is not kept in the cache.",
                    self._shard.shown,
                )
                return
            if not self.whole:
                os.fsync(
                    self._fd
                )  # before it has the length of a whole shard, also after a power cut
                os.ftruncate(self._fd, self.size)
            os.fsync(self._fd)
            self._cache.publish(self._fd, self._final, self._stopping)
        finally:
            unlock(self._fd, _FINISHING)

    def stop(self) -> None:
        """End a read that another thread is in."""
        self._stopping.set()
        remote = self._remote
        if remote is not None:
            remote.stop()

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        self._block = None
        if self._fd >= 0:
            file_locks.close_file(self._fd)
            self._fd = -1

    def __enter__(self) -> CachedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- parts -------------------------------------------------------------------------------------------------------

    def _there(self, number: int) -> bool:
        return (
            os.pread(self._fd, 1, self._map + number) != b"\0"
        )  # a whole shard has no map: nothing is read

    def _read_block(self, target: ScatterList, offset: int, *, wait: bool) -> bool:
        """Fill target with bytes of one block; fetch the block if it is not there. False if another does and is not waited for."""
        number, size = offset // BLOCK, target.left
        start, stop = number * BLOCK, min(self.size, number * BLOCK + BLOCK)
        kept = self._claim(number, wait)
        if kept is None:
            if not self._there(number):
                return False
            _read(self._fd, target, offset, self._final)
            self.cached += size
            return True
        if self._remote is None:
            self._remote = open_remote(
                self.path, self.size, self._shard.tag or None, self._stopping
            )
        last = None if self._remote.ranged else self.size
        if not kept:
            self._remote.read_into(target, offset, last=last)
            return True
        try:
            # memory of its own: of the target, parts that nobody wants may lie in one place
            if self._block is None:
                self._block = private_memory(BLOCK)
            block = self._block[: stop - start]
            self._remote.read_into([block], start, last=last)
            self._keep(number, block)
        finally:
            unlock(self._fd, _BLOCKS + number)
        target.write(block[offset - start : offset - start + size])
        return True

    def _claim(self, number: int, wait: bool) -> bool | None:
        """True: this one fetches the block, and keeps it; False: fetches it alone; None: it is there, or another's."""
        begun = time.monotonic()
        while not self._there(number):
            if self._cache.full or time.monotonic() - begun > _PATIENCE:
                return False
            if try_lock(self._fd, _BLOCKS + number):
                if not self._there(number):
                    return True
                unlock(self._fd, _BLOCKS + number)
            elif not wait:
                return None
            elif self._stopping.wait(_PAUSE):
                raise StorageError(f"{self._shard.shown}: reading was stopped.")
        return None

    def _keep(self, number: int, block: memoryview) -> None:
        try:
            _write(self._fd, block, number * BLOCK)
            _write(self._fd, memoryview(b"\1"), self._map + number)
            self.finish()
        except OSError as error:
            self._cache.give_up(error)

    def _digest(self) -> str:
        found, offset, buffer = hashlib.sha256(), 0, private_memory(BLOCK)
        while offset < self.size:
            piece = buffer[: min(BLOCK, self.size - offset)]
            _read(self._fd, as_scatter_list([piece]), offset, self._final)
            found.update(piece)
            offset += len(piece)
        return found.hexdigest()


class _InUseError(Exception):
    """What is in the way is being read."""


def _take_out(path: str) -> bool:
    """Remove a shard if nobody reads it and it is ours to remove."""
    try:
        fd = file_locks.open_file(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return _removed(fd, path)
    except OSError:
        return False
    finally:
        file_locks.close_file(fd)


def _removed(fd: int, path: str) -> bool:
    """Remove a file that is open, unless somebody else has marked it as in use."""
    if not try_lock(fd, _IN_USE):
        return False
    os.unlink(path)
    return True


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _read(fd: int, todo: ScatterList, offset: int, path: str) -> None:
    while todo.left:
        count = todo.read(fd, offset)
        if not count:
            raise StorageError(f"{path} was cut while it was read. Remove it.")
        offset += count


def _head() -> bytes:
    """What a map of blocks begins with: marks of another time than since this machine was started are not believed."""
    return _MAGIC + BLOCK.to_bytes(8, "little") + _boot()


@lru_cache(maxsize=1)
def _boot() -> bytes:
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return blake2b(file.read(), digest_size=16).digest()
    except OSError:
        return bytes(16)
