"""Cache of remote shards on a local disk, within a limit of bytes, shared by all processes.

A shard is fetched once, forward, by a thread of the first process that opens it, into a file with
the suffix `.part`. Readers take the bytes that have arrived from there, and others from the server.
When all bytes are there, they are compared with the sha256 of the index and flushed, and the file
gets its final name. A file with a final name is therefore a whole, plain tar.

The thread holds an exclusive `flock` on the file, and readers of a whole shard hold a shared one,
so neither is removed. The system releases the locks of a killed process. The next one that needs
the shard goes on where the file ends.

The cache owns a subfolder of the folder that the user names. Files beside it, and those in it with
other names, are never touched.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from io import FileIO

from wdstrain.errors import ShardError, StorageError, UsageError, WdstrainError, logger
from wdstrain.storage.files import publish, read_at, regular
from wdstrain.storage.remote import RemoteFile, name_of, range_size, shown_path
from wdstrain.storage.retries import silence_limit

FOLDER = "wdstrain-cache"  # in the folder that the user names
PART = ".part"  # suffix of a shard that is being fetched

# Names of cached shards. That of a part says how many bytes the shard will have.
_CACHED_NAME = re.compile(rf"-[0-9a-f]{{16}}\.tar(?:\.([0-9]+){re.escape(PART)})?$")
_DOWNLOADS = 8  # shards that are fetched at the same time; others are read without the cache
_NEAR = 64 << 20  # bytes; what a download reaches later is read from the server
_PAUSE = 0.005  # seconds between two looks at a growing file or a lock

_unwritable: set[str] = set()  # folders of which the log says that they cannot be written


class CachedFile(RemoteFile):
    """A shard in the cache, whole or growing. The bytes that it lacks come from the server.

    cached: bytes that were in the cache when the file was opened.
    """

    def __init__(
        self, file: FileIO, place: str, remote: RemoteFile, stopping: threading.Event | None
    ) -> None:
        """file: in the cache; this object closes it. place: path of the whole file. remote: the
        shard at its server."""
        self._file, self._present = file, os.fstat(file.fileno()).st_size
        super().__init__(remote.path, remote.size, remote.tag, stopping)
        self.cached_path = place

    def read_into(self, target: memoryview, offset: int, *, last: int | None = None) -> None:
        """Fill the target with the bytes from offset on. Raises the errors of a remote file."""
        stop = offset + len(target)
        if not self._wait_for(stop):
            super().read_into(target, offset, last=last)
            return
        if read_at(self._file.fileno(), target, offset) < len(target):
            raise StorageError(f"{self._shown}: its file in the cache was cut while it was read.")
        self.cached += len(target) * (stop <= self._present)

    def close(self) -> None:
        """Close the file; the cache may remove it then."""
        super().close()
        self._file.close()

    def _wait_for(self, stop: int) -> bool:
        """Return whether the file has the bytes up to `stop`, or gets them soon."""
        fd = self._file.fileno()
        while (status := os.fstat(fd)).st_size < stop:
            is_silent = time.time() - status.st_mtime > silence_limit()
            if is_silent or stop > min(self.size, status.st_size + _NEAR):
                return False
            if _try_lock(fd, fcntl.LOCK_SH):  # nobody fetches it, or it was just completed
                fcntl.flock(fd, fcntl.LOCK_UN)
                return os.fstat(fd).st_size >= stop
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

        Raises UsageError if it cannot be made.
        """
        self.path, self.writable = os.path.join(os.path.abspath(folder), FOLDER), True
        self.limit, self._counts = limit, Counter[str]()
        self._lock, self._downloads = threading.Lock(), dict[threading.Thread, RemoteFile]()
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            if not os.path.isdir(folder):
                raise UsageError(
                    f"{{cache_dir}} cannot be made: {error}.",
                    "Name another folder.",
                    {"cache_dir": folder},
                ) from None
            self._stop_writing(error)

    def place(self, path: str, size: int, sha256: str = "", tag: str = "") -> str:
        """Return the path of a whole cached shard. Equal content has one path for all addresses.

        Without a checksum it depends on the whole address, whose query may tell shards apart. "" for
        a shard that is not kept: its checksum and version are unknown, or it exceeds the limit.
        """
        if not (sha256 or tag) or size > (self.limit or size):
            return ""
        content = [sha256] if sha256 else [path, tag, str(size)]
        name = re.sub(r"[^A-Za-z0-9._-]", "_", name_of(path).removesuffix(".tar"))[:80]
        digest = hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()
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
        place, file = self.place(path, size, sha256, tag), None
        if not place:
            return None
        remote = RemoteFile(path, size, tag)  # without a version ("") the checksum decides
        try:
            file = self._open_whole(place, size)
            if file is None and self.writable:
                self._begin_download(place, remote, sha256)
                with suppress(FileNotFoundError):
                    file = FileIO(_part(place, size), opener=regular)
                # Perhaps it was completed meanwhile, and this is the part of a thread that is late.
                if (whole := self._open_whole(place, size)) is not None:
                    if file is not None:
                        file.close()
                    file = whole
        except OSError as error:
            self._stop_writing(error)
        return None if file is None else CachedFile(file, place, remote, stopping)

    def forget(self, path: str, size: int, sha256: str = "", tag: str = "") -> None:
        """Remove a shard whose bytes are wrong. Its readers keep the file that they have open."""
        place = self.place(path, size, sha256, tag)
        for name in (place, _part(place, size)) if place else ():
            with suppress(OSError):
                os.unlink(name)

    def take_counts(self) -> Counter[str]:
        """Return what downloads fetched since the last call, and their failed attempts."""
        with self._lock:
            counts, self._counts = self._counts, Counter[str]()
        return counts

    def stop(self, patience: float = 2.0) -> None:
        """End the downloads, and complete those that have all bytes. patience: most seconds."""
        end, downloads = time.monotonic() + patience, list(self._downloads.items())
        for _, remote in downloads:
            remote.stop()
        for thread, _ in downloads:
            thread.join(max(0.0, end - time.monotonic()))

    def _open_whole(self, place: str, size: int) -> FileIO | None:
        """Return a whole shard to read; None if it is missing. Raises OSError."""
        with suppress(FileNotFoundError):
            file = FileIO(place, opener=regular)
            with suppress(OSError):  # no locks here, or a file of another user
                _try_lock(file.fileno(), fcntl.LOCK_SH)
                os.utime(file.fileno())  # for the limit: the time of the last use
            if os.fstat(file.fileno()).st_size == size:
                return file
            file.close()
            os.unlink(place)
        return None

    def _begin_download(self, place: str, remote: RemoteFile, sha256: str) -> None:
        """Start to fetch a shard, unless another thread does or may not. Raises OSError."""
        part = _part(place, remote.size)
        if len(self._downloads) >= _DOWNLOADS:
            return
        with ExitStack() as stack:
            file = stack.enter_context(FileIO(part, "ab+", opener=regular))
            if not _try_lock(file.fileno(), fcntl.LOCK_EX):
                return
            if os.path.exists(place) or not self._has_room():
                with suppress(FileNotFoundError):  # another download was just completed
                    os.unlink(part)
                return
            if not sha256 or os.fstat(file.fileno()).st_size > remote.size:
                file.truncate(0)  # nothing would show that its bytes are wrong
            os.utime(file.fileno())  # readers wait while this time is recent
            stack.pop_all()
        thread = threading.Thread(
            target=self._download,
            args=(file, place, remote, sha256),
            name="wdstrain-cache",
            daemon=True,
        )
        self._downloads[thread] = remote
        thread.start()

    def _download(self, file: FileIO, place: str, remote: RemoteFile, sha256: str) -> None:
        """Complete a locked part and give it its final name."""
        part, size = _part(place, remote.size), remote.size
        buffer = memoryview(bytearray(2 * min(range_size(), 1 << 20)))
        try:
            while (rest := size - os.fstat(file.fileno()).st_size) > 0:
                # The last chunk is not small: a loop that ends after the last sample has it all.
                chunk = buffer[: rest if rest <= len(buffer) else len(buffer) // 2]
                failed = remote.retries
                remote.read_into(chunk, size - rest, last=size)
                with self._lock:  # before a reader finds the bytes
                    self._counts.update(fetched=len(chunk), retries=remote.retries - failed)
                file.write(chunk)  # perhaps less on a full disk: the next write fails
            if sha256 and _sha256(file) != sha256:
                os.unlink(part)
                logger.warning(
                    "%s: the fetched bytes differ from the index (sha256). "
                    "The shard is not kept in the cache.",
                    shown_path(remote.path),
                )
            # After `forget` the name may belong to the file of another download.
            elif os.path.samestat(os.stat(part), os.fstat(file.fileno())):
                publish(part, place)
        except ShardError:  # the shard is not that of the index; its readers get the same error
            os.unlink(part)
        except (WdstrainError, FileNotFoundError):
            pass  # the readers get the same error from the server, or the shard was forgotten
        except OSError as error:
            with suppress(OSError):
                os.unlink(part)
            self._stop_writing(error)
        finally:
            # A child that was forked meanwhile has the file open, too.
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()
            remote.close()
            self._downloads.pop(threading.current_thread(), None)

    def _has_room(self) -> bool:
        """Remove the least recently used shards above the limit. Returns whether it holds then."""
        if self.limit is None:
            return True
        cached = []  # (time of the last use, bytes, path)
        for entry in os.scandir(self.path):
            match = _CACHED_NAME.search(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                used, length = time.time_ns(), int(match[1] or 0)
                with suppress(FileNotFoundError):  # a part that was just completed keeps its bytes
                    status = entry.stat()
                    used, length = status.st_mtime_ns, length or status.st_size
                cached.append((used, length, entry.path))
        total = sum(length for _, length, _ in cached)
        for _, length, path in sorted(cached):
            if total <= self.limit:
                break
            with suppress(OSError), open(path, "rb") as file:  # it may belong to another user
                if _try_lock(file.fileno(), fcntl.LOCK_EX):  # not in use
                    os.unlink(path)
                    total -= length
        return total <= self.limit

    def _stop_writing(self, error: OSError) -> None:
        """Write nothing more, because of this error, and log it once."""
        self.writable = False
        if self.path not in _unwritable:
            _unwritable.add(self.path)
            logger.warning(
                "%s cannot be written: %s. Shards that are not cached yet are streamed without the "
                "cache.",
                self.path,
                error.strerror or error,
            )


def _sha256(file: FileIO) -> str:
    """Return the sha256 of a whole file."""
    file.seek(0)
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _part(place: str, size: int) -> str:
    return f"{place}.{size}{PART}"


def _try_lock(fd: int, kind: int) -> bool:
    """Lock a file without waiting. Returns False if another lock conflicts. Raises OSError."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
