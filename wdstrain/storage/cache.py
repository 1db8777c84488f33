"""Cache of remote shards on a local disk, within a limit of bytes, shared by all processes.

A shard is fetched once, forward, by a thread of the first process that opens it, into a file with
the suffix `.part`. Readers take the bytes that have arrived from there, and others from the server.
When all bytes are there, they are compared with the sha256 of the index and flushed, and the file
gets its final name. A file with a final name is therefore a whole, plain tar.

The thread holds an exclusive `flock` on the file, and readers of a whole shard hold a shared one,
so neither is removed. The system releases the locks of a killed process. The next one that needs
the shard goes on where the file ends.

The cache owns a subfolder of the folder that the user names. A CACHEDIR.TAG marks it before it
holds anything. Files beside it are never touched, and a subfolder with other content is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b

from wdstrain.errors import StorageError, UsageError, WdstrainError
from wdstrain.storage.files import sync_folder, write_whole
from wdstrain.storage.local import read_at
from wdstrain.storage.remote import RemoteFile, name_of, range_size, shown_path
from wdstrain.storage.retries import silence_limit

FOLDER = "wdstrain-cache"  # in the folder that the user names
PART = ".part"  # suffix of a shard that is being fetched

_TAG = "CACHEDIR.TAG"  # programs that back up or clean folders know it
_TAG_CONTENT = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# Shards of servers, kept by wdstrain. They are fetched again when needed.\n"
)
# Names of cached shards. That of a part says how many bytes the shard will have.
_CACHED_NAME = re.compile(rf"-[0-9a-f]{{16}}\.tar(\.([0-9]+){re.escape(PART)})?$")
_DOWNLOADS = 8  # shards that are fetched at the same time; others are read without the cache
_NEAR = 64 << 20  # bytes; what a download reaches later is read from the server
_PAUSE = 0.005  # seconds between two looks at a growing file or a lock

_log = logging.getLogger("wdstrain")
_unwritable: set[str] = set()  # folders of which the log says that they cannot be written


class CachedFile(RemoteFile):
    """A shard in the cache, whole or growing. Only `stop` may be called by other threads.

    cached: bytes that were in the cache when the file was opened. The bytes that the file lacks
    come from the server.
    """

    def __init__(self, fd: int, path: str, size: int, tag: str, stopping: threading.Event) -> None:
        """fd: of the open file, which this object closes."""
        super().__init__(path, size, tag, stopping)
        self.cached = 0
        self._fd, self._present = fd, os.fstat(fd).st_size

    def read_into(self, target: memoryview, offset: int, *, last: int | None = None) -> None:
        """Fill the target with the bytes from offset on. Raises the errors of a remote file."""
        stop = offset + len(target)
        if not self._wait_for(stop):
            super().read_into(target, offset, last=last)
            return
        if read_at(self._fd, target, offset) < len(target):
            raise StorageError(f"{self._shown}: its file in the cache was cut while it was read.")
        if stop <= self._present:
            self.cached += len(target)

    def close(self) -> None:
        """Close the file; the cache may remove it then."""
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _wait_for(self, stop: int) -> bool:
        """Return whether the file has the bytes up to `stop`, or gets them soon."""
        while (status := os.fstat(self._fd)).st_size < stop:
            is_silent = time.time() - status.st_mtime > silence_limit()
            if is_silent or stop > min(self.size, status.st_size + _NEAR):
                return False
            if _try_lock(self._fd, fcntl.LOCK_SH):  # nobody fetches it, or it was just completed
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                return os.fstat(self._fd).st_size >= stop
            if self._stopping.wait(_PAUSE):
                return False
        return True


class Cache:
    """Cache of remote shards in a folder.

    path: of the subfolder. limit: most bytes of all shards, None for no limit. writable: False once
    a write failed; cached shards are still read.
    """

    def __init__(self, folder: str, limit: int | None = None) -> None:
        """folder: the user's folder; it is made if it is missing.

        Raises UsageError if it cannot be made or the subfolder holds other files.
        """
        if limit is not None and limit < 1:
            raise UsageError(
                f"cache_limit={limit}: must be >= 1. Omit it for a cache without a limit."
            )
        self.path, self.writable = os.path.join(os.path.abspath(folder), FOLDER), True
        self._lock, self._downloads = threading.Lock(), dict[threading.Thread, RemoteFile]()
        self._counts = 0, 0
        try:
            os.makedirs(folder, exist_ok=True)
            capacity = shutil.disk_usage(folder).total
        except OSError as error:
            raise UsageError(
                f"cache_dir={folder} cannot be made: {error.strerror}. Name another folder."
            ) from None
        self.limit, self._largest = limit, min(capacity, limit or capacity)
        try:
            self._create()
        except (OSError, StorageError) as error:
            self._stop_writing(error)

    def place(self, path: str, size: int, sha256: str = "", tag: str = "") -> str:
        """Return the path of a whole cached shard. Equal content has one path for all addresses.

        Without a checksum it depends on the whole address, whose query may tell shards apart.
        """
        content = [sha256] if sha256 else [path, tag, str(size)]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", name_of(path).removesuffix(".tar"))[:80]
        digest = blake2b(repr(content).encode(), digest_size=8).hexdigest()
        return os.path.join(self.path, f"{name}-{digest}.tar")

    def open(
        self,
        path: str,
        size: int,
        sha256: str = "",
        tag: str = "",
        stopping: threading.Event | None = None,
    ) -> CachedFile | None:
        """Return a shard to read through the cache; None if it is to be read without.

        So are a shard whose checksum and version are unknown, one for which the limit leaves no
        room, and a missing one if the disk is full or read-only. stopping: set to end reading.
        """
        # The size comes from an index, which may be hostile.
        if not (sha256 or tag) or size > self._largest:
            return None
        place = self.place(path, size, sha256, tag)
        try:
            fd = self._open_whole(place, size)
            if fd is None and self.writable:
                self._begin_download(place, RemoteFile(path, size, tag), sha256)
                with suppress(FileNotFoundError):
                    fd = os.open(_part(place, size), os.O_RDONLY)
            if fd is None:  # perhaps completed meanwhile
                fd = self._open_whole(place, size)
        except OSError as error:
            self._stop_writing(error)
            fd = None
        if fd is None:
            return None
        # Without a version ("") the checksum decides.
        return CachedFile(fd, path, size, tag, stopping or threading.Event())

    def forget(self, path: str, size: int, sha256: str = "", tag: str = "") -> None:
        """Remove a shard whose bytes are wrong. Its readers keep the file that they have open."""
        place = self.place(path, size, sha256, tag)
        for name in (place, _part(place, size)):
            with suppress(OSError):
                os.unlink(name)

    def take_counts(self) -> tuple[int, int]:
        """Return the bytes that downloads fetched since the last call, and their failed attempts."""
        with self._lock:
            counts, self._counts = self._counts, (0, 0)
        return counts

    def stop(self, patience: float) -> None:
        """End the downloads, and complete those that have all bytes. patience: most seconds."""
        end, downloads = time.monotonic() + patience, list(self._downloads.items())
        for _, remote in downloads:
            remote.stop()
        for thread, _ in downloads:
            thread.join(max(0.0, end - time.monotonic()))

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

    def _open_whole(self, place: str, size: int) -> int | None:
        """Return the descriptor of a whole shard; None if it is missing. Raises OSError."""
        with suppress(FileNotFoundError), _opened(place, os.O_RDONLY) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise IsADirectoryError(0, f"{place} is no file")
            if status.st_size == size:
                with suppress(OSError):  # no locks here, or a file of another user
                    _try_lock(fd, fcntl.LOCK_SH)
                    os.utime(fd)  # for the limit: the time of the last use
                return os.dup(fd)
            os.unlink(place)
        return None

    def _begin_download(self, place: str, remote: RemoteFile, sha256: str) -> None:
        """Start to fetch a shard, unless another thread does or may not. Raises OSError."""
        part = _part(place, remote.size)
        if len(self._downloads) >= _DOWNLOADS:
            return
        with _opened(part, os.O_RDWR | os.O_CREAT) as opened:
            if not _try_lock(opened, fcntl.LOCK_EX):
                return
            if os.path.exists(place) or not self._has_room():
                with suppress(FileNotFoundError):  # another download was just completed
                    os.unlink(part)
                return
            if not sha256 or os.fstat(opened).st_size > remote.size:
                os.ftruncate(opened, 0)  # nothing would show that its bytes are wrong
            os.utime(opened)  # readers wait while this time is recent
            fd = os.dup(opened)
        thread = threading.Thread(
            target=self._download,
            args=(fd, place, remote, sha256),
            name="wdstrain-cache",
            daemon=True,
        )
        self._downloads[thread] = remote
        thread.start()

    def _download(self, fd: int, place: str, remote: RemoteFile, sha256: str) -> None:
        """Complete a locked part and give it its final name."""
        part, digest = _part(place, remote.size), hashlib.sha256()
        try:
            for chunk in self._chunks(fd, remote):
                digest.update(chunk)
            if sha256 and digest.hexdigest() != sha256:
                os.unlink(part)
                _log.warning(
                    "%s: the fetched bytes differ from the index (sha256). "
                    "The shard is not kept in the cache.",
                    shown_path(remote.path),
                )
                return
            os.fsync(fd)
            # After `forget` the name may belong to the file of another download.
            if os.path.samestat(os.stat(part), os.fstat(fd)):
                os.replace(part, place)
                sync_folder(self.path)
        except (WdstrainError, FileNotFoundError):
            pass  # the readers get the same error from the server, or the shard was forgotten
        except OSError as error:
            with suppress(OSError):
                os.unlink(part)
            self._stop_writing(error)
        finally:
            # A child that was forked meanwhile has the file open, too.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
            remote.close()
            self._downloads.pop(threading.current_thread(), None)

    def _chunks(self, fd: int, remote: RemoteFile) -> Iterator[memoryview]:
        """Yield the bytes of a shard. What its file lacks is fetched and written."""
        buffer, offset = memoryview(bytearray(2 * min(range_size(), 1 << 20))), 0
        while offset < remote.size:
            # The last chunk is not small: a loop that ends after the last sample has it all.
            rest = remote.size - offset
            chunk = buffer[: rest if rest <= len(buffer) else len(buffer) // 2]
            count = read_at(fd, chunk, offset)
            if count < len(chunk):
                self._fetch(remote, chunk[count:], offset + count)
                _write_at(fd, chunk[count:], offset + count)
            yield chunk
            offset += len(chunk)

    def _fetch(self, remote: RemoteFile, chunk: memoryview, offset: int) -> None:
        before = remote.retries
        try:
            remote.read_into(chunk, offset, last=remote.size)
        finally:
            with self._lock:
                fetched, retries = self._counts
                self._counts = fetched + len(chunk), retries + remote.retries - before

    def _has_room(self) -> bool:
        """Remove the least recently used shards above the limit. Returns whether it holds then."""
        if self.limit is None:
            return True
        cached = []  # (time of the last use, bytes, path)
        for entry in os.scandir(self.path):
            match = _CACHED_NAME.search(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    length = int(match[2]) if match[1] else status.st_size
                    cached.append((status.st_mtime_ns, length, entry.path))
        total = sum(length for _, length, _ in cached)
        for _, length, path in sorted(cached):
            if total > self.limit and _remove_unused(path):
                total -= length
        return total <= self.limit

    def _stop_writing(self, error: Exception) -> None:
        """Write nothing more, because of this error, and log it once."""
        self.writable = False
        if self.path not in _unwritable:
            _unwritable.add(self.path)
            _log.warning(
                "%s cannot be written: %s. Shards that are not cached yet are streamed without the "
                "cache.",
                self.path,
                getattr(error, "strerror", None) or error,
            )


def _part(place: str, size: int) -> str:
    return f"{place}.{size}{PART}"


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    """Yield the descriptor of a file. Raises OSError."""
    fd = os.open(path, flags | os.O_NOFOLLOW, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def _try_lock(fd: int, kind: int) -> bool:
    """Lock a file without waiting. Returns False if another lock conflicts. Raises OSError."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of the data at an offset. Raises OSError."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _remove_unused(path: str) -> bool:
    """Remove a file, unless it is in use or belongs to another user."""
    try:
        with _opened(path, os.O_RDONLY) as fd:
            if not _try_lock(fd, fcntl.LOCK_EX):
                return False
            os.unlink(path)
            return True
    except OSError:
        return False
