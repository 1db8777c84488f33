"""Reads of a lane in the order of its plan: local ones at once, remote ones prefetched.

Several range requests are in flight, also beyond the end of a shard, so that the latency of a
request is hidden. The reader says where the bytes go before they are fetched. They are received
there without a copy, and memory is bounded by how far the reader runs ahead.

A range request retries by itself (`retries`). Its error is raised when its bytes are needed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.memory.scatter import ScatterList, as_scatter_list
from wdstrain.runtime.signals import DeferSignals
from wdstrain.storage.cache import Cache, CachedFile
from wdstrain.storage.local import LocalFile
from wdstrain.storage.remote import RemoteFile, is_remote, range_size

THREADS = 6  # requests in flight: 6 x 4 MB in 100 ms are 240 MB/s
STOP_PATIENCE = 2.0  # seconds that `stop` waits for the threads, in total

_FILES_WITHOUT_RANGES = 4  # shards that one thread has open if a server knows no ranges

File = RemoteFile | CachedFile


class ShardFile(Protocol):
    """A shard as storage sees it.

    bytes: size. sha256: of the whole file, "" if unknown. tag: state or version of the file when it
    was indexed, "" if unknown. name: file name. shown: the path without secrets, for messages.
    """

    @property
    def path(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def sha256(self) -> str: ...
    @property
    def tag(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def shown(self) -> str: ...


@dataclass
class FetchStats:
    """Totals of reading from servers.

    fetched: bytes from the network. cached: bytes from the cache. retries: failed attempts.
    """

    fetched: int = 0
    cached: int = 0
    retries: int = 0


class ReadStopped(WdstrainError):
    """Another thread ended the reading."""

    def __init__(self, message: str = "the reader was stopped") -> None:
        super().__init__(message)


@dataclass(eq=False)
class PendingRead:
    """A read in flight.

    missing: parts that are not there yet. error: the reason why the read fails.
    failed: errors of samples that cannot be read while others can, by their position in the read.
    retries: samples that were read again.
    """

    missing: int = 0
    error: WdstrainError | None = None
    failed: dict[int, WdstrainError] = field(default_factory=dict)
    retries: int = 0


@dataclass(eq=False)
class _RangeRequest:
    """Bytes [start, stop) of a shard, as a part of a read."""

    shard: ShardFile
    start: int
    stop: int
    target: ScatterList
    read: PendingRead


@dataclass
class LaneStream:
    """Starts the reads of a lane, in order. Not shared between threads.

    open_local: opens a local shard. prefetcher: fetches the ranges of remote shards.
    """

    open_local: Callable[[Any], LocalFile]
    prefetcher: RangePrefetcher
    _local: LocalFile | None = None  # the open local shard

    def begin(
        self,
        shard: ShardFile,
        target: ScatterList | Iterable[memoryview],
        offset: int,
    ) -> PendingRead:
        """Start to fill the target with bytes of a shard from offset on."""
        if not is_remote(shard.path):
            return self._read_local(shard, target, offset)
        read, target, requests = PendingRead(), as_scatter_list(target), list[_RangeRequest]()
        most = range_size()
        while target.left:
            # A range begins with a sample: a sample in two ranges would be verified by the decoder
            # instead of on arrival.
            count = min(target.left, most)
            part = target.split_off(count)
            requests.append(_RangeRequest(shard, offset, offset + count, part, read))
            offset += count
        read.missing = len(requests)
        self.prefetcher.add(requests)
        return read

    def close(self) -> None:
        """Close the open local shard. Remote reads in flight continue."""
        if self._local is not None:
            self._local.close()
            self._local = None

    def _read_local(
        self, shard: ShardFile, target: ScatterList | Iterable[memoryview], offset: int
    ) -> PendingRead:
        try:
            if self._local is None or shard.path != self._local.path:
                self.close()
                self._local = self.open_local(shard)
            self._local.read_into(as_scatter_list(target), offset)
        except WdstrainError as error:
            return PendingRead(error=error)
        return PendingRead()


class ShardVersions(Protocol):
    """An index that keeps the versions of shards, as servers give them.

    versions: ETag or modification time by path. needs_headers: whether nothing else tells a shard
    from another of the same size.
    """

    @property
    def versions(self) -> dict[str, str]: ...
    def needs_headers(self, shard: Any) -> bool: ...
    def expected_state(self, shard: Any) -> str | None: ...


class RangePrefetcher:
    """Threads that fetch ranges for the lanes of a reader, in the order in which they were added.

    The threads start with the first range. lock: held while `PendingRead` objects change.
    """

    def __init__(
        self,
        cache: Cache | None,
        stats: FetchStats,
        on_done: Callable[[], None],
        index: ShardVersions | None = None,
    ) -> None:
        """stats: totals, which are updated. on_done: called, from any thread, after each range.

        index: of the shards. It receives versions of shards that nothing else identifies.
        """
        # `stop` takes the lock itself: a Ctrl-C within a Condition would leave it locked.
        self.cache, self.lock = cache, threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._stats, self._on_done, self._index = stats, on_done, index
        self._pending: deque[_RangeRequest] = deque()
        self._stopping = threading.Event()
        self._tags: dict[str, str] = {}  # path -> version, unless the index keeps it
        self._files: dict[int, dict[str, File]] = {}  # thread -> path -> open file
        self._only_thread: int | None = None  # the one that continues if a server has no ranges
        self._threads: list[threading.Thread] = []
        self._stop_deadline = 0.0

    def add(self, requests: list[_RangeRequest]) -> None:
        """Fetch these ranges. Raises RuntimeError if a thread cannot start."""
        with self.lock:
            self._pending += requests
            # Not all: threads without work would take the GIL in vain, one after another.
            self._changed.notify(len(requests))
        while not self._stopping.is_set() and len(self._threads) < THREADS:
            name = f"wdstrain-fetch-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End all requests. Nothing is written to memory afterwards."""
        with DeferSignals(), self.lock:
            self._stopping.set()
            for files in self._files.values():
                for file in files.values():
                    file.stop()
            self._changed.notify_all()
        self._stop_deadline = self._stop_deadline or time.monotonic() + STOP_PATIENCE
        # A thread that waits for the head of a response ends with it, and writes nothing.
        for thread in self._threads:
            thread.join(max(0.0, self._stop_deadline - time.monotonic()))
        if self.cache is not None:
            self.cache.stop(max(0.0, self._stop_deadline - time.monotonic()))

    def _run(self) -> None:
        thread, files = threading.get_ident(), dict[str, File]()
        with self.lock:
            self._files[thread] = files
        while (request := self._next_request(thread)) is not None:
            error = self._try_fetch(request, files, thread)
            with self.lock:
                if self._only_thread is None and not all(file.ranged for file in files.values()):
                    self._only_thread = thread
                    self._changed.notify_all()
                if not self._stopping.is_set():  # an ended read stays incomplete
                    request.read.error = request.read.error or error
                    # Last: the reader looks at it without this lock.
                    request.read.missing -= 1
            # While this thread waits it must not keep memory: the error's frames refer to it.
            del error, request
            self._on_done()
        for file in files.values():
            file.close()

    def _next_request(self, thread: int) -> _RangeRequest | None:
        """Wait for a range and return it; None if this thread is to end."""
        with self.lock:
            self._changed.wait_for(lambda: self._pending or self._is_over(thread))
            return None if self._is_over(thread) else self._pending.popleft()

    def _is_over(self, thread: int) -> bool:
        # Without range requests, each thread would fetch whole shards.
        return self._stopping.is_set() or self._only_thread not in (None, thread)

    def _try_fetch(
        self, request: _RangeRequest, files: dict[str, File], thread: int
    ) -> WdstrainError | None:
        """Fetch a range; return its error."""
        try:
            self._fetch(self._file(files, request.shard, thread), request)
        except WdstrainError as error:
            return error
        except BaseException as error:  # the reader raises it
            reason = f"{type(error).__name__}: {error}"
            return StorageError(f"{request.shard.shown}: reading failed ({reason}).")
        return None

    def _file(self, files: dict[str, File], shard: ShardFile, thread: int) -> File:
        """Return the open file of a shard, and close the files that this thread needs no more."""
        with self.lock:
            file = files.pop(shard.path, None)
            most = _FILES_WITHOUT_RANGES if self._only_thread == thread else 1
            while len(files) >= most:
                files.pop(next(iter(files))).close()
        if file is None:
            file = self._open(shard)
        with self.lock:
            files[shard.path] = file
        return file

    def _open(self, shard: ShardFile) -> File:
        if self.cache is not None:
            file = self.cache.open(shard.path, shard.bytes, shard.sha256, shard.tag, self._stopping)
            if file is not None:
                return file
        tag: str | None = None
        if self._index is not None:
            tag = self._index.expected_state(shard)
        if tag is None:
            tag = self._versions(shard).get(shard.path)
        return RemoteFile(shard.path, shard.bytes, tag, self._stopping)

    def _fetch(self, file: File, request: _RangeRequest) -> None:
        before = file.retries, file.cached, file.fetched
        try:
            data = memoryview(bytearray(request.target.left))
            file.read_into(data, request.start)
            if not self._stopping.is_set():  # the memory of the target may be gone
                request.target.write(data)
        finally:
            fetched, retries = self.cache.take_counts() if self.cache is not None else (0, 0)
            with self.lock:
                self._stats.retries += file.retries - before[0] + retries
                self._stats.cached += file.cached - before[1]
                self._stats.fetched += file.fetched - before[2] + fetched
        versions = self._versions(request.shard)
        if file.tag and versions.setdefault(file.path, file.tag) != file.tag:
            raise ShardError(f"{request.shard.shown} changed while it was read. Start again.")

    def _versions(self, shard: ShardFile) -> dict[str, str]:
        """Return the known versions by path."""
        if self._index is not None and self._index.needs_headers(shard):
            return self._index.versions
        return self._tags
