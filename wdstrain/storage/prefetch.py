"""Reads of a lane in the order of its plan: local ones at once, remote ones prefetched.

Several range requests are in flight, also beyond the end of a shard, so that the latency of a
request is hidden. The reader says where the bytes go before they are fetched. They are received
there without a copy, and memory is bounded by how far the reader runs ahead.

A range request retries by itself (`http`). Its error is raised when its bytes are needed. With a
cache, fetched blocks are stored. The rest of a shard that no plan asked for is fetched too if it is
small, so that the shard is whole at the end of the epoch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.memory.scatter import ScatterList, as_scatter_list
from wdstrain.runtime.signals import DeferSignals
from wdstrain.storage.block_map import range_size
from wdstrain.storage.local import LocalFile, ShardFile
from wdstrain.storage.remote import RemoteFile, is_remote, open_remote
from wdstrain.storage.shard_cache import Cache, CachedFile

THREADS = 6  # requests in flight: 6 x 4 MB in 100 ms are 240 MB/s
STOP_PATIENCE = 2.0  # seconds that `stop` waits for the threads, in total

_FILES_WITHOUT_RANGES = 4  # shards that one thread has open if a server knows no ranges
_LARGEST_REST = 32 << 20  # most bytes of a shard that are fetched for the cache alone

File = RemoteFile | CachedFile


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
    """Bytes [start, stop) of a shard, as a part of a read. target: None for the cache alone."""

    shard: ShardFile
    start: int
    stop: int
    target: ScatterList | None
    read: PendingRead


@dataclass
class LaneStream:
    """Starts the reads of a lane, in order. Not shared between threads.

    open_local: opens a local shard. prefetcher: fetches the ranges of remote shards.
    """

    open_local: Callable[[ShardFile], LocalFile]
    prefetcher: RangePrefetcher
    _local: LocalFile | None = None  # the open local shard
    _remote: ShardFile | None = None  # the remote shard that is read with a cache
    _requested: set[int] | None = None  # its requested blocks; None if it was entered mid-file
    _cache_fill: PendingRead = field(default_factory=PendingRead)

    @property
    def filling(self) -> bool:
        """Whether bytes are in flight that only the cache needs."""
        return self._cache_fill.missing > 0

    def begin(
        self,
        shard: ShardFile,
        target: ScatterList | Iterable[memoryview],
        offset: int,
        *,
        leaving: bool,
    ) -> PendingRead:
        """Start to fill the target with bytes of a shard from offset on.

        leaving: whether this is the lane's last read of the shard.
        """
        if not is_remote(shard.path):
            return self._read_local(shard, target, offset)
        read, target, requests = PendingRead(), as_scatter_list(target), list[_RangeRequest]()
        cached, most = self.prefetcher.cache is not None, range_size()
        while target.left:
            # With a cache, ranges end where blocks end. Without, a range begins with a sample:
            # a sample in two ranges would be verified by the decoder instead of on arrival.
            count = min(target.left, most - offset % most if cached else most)
            part = target.split_off(count)
            requests.append(_RangeRequest(shard, offset, offset + count, part, read))
            offset += count
        read.missing = len(requests)
        if cached:
            rest = self._rest_of(shard, requests, leaving)
            with self.prefetcher.lock:
                self._cache_fill.missing += len(rest)
            requests += rest
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
            self._local.read_into(target, offset)
        except WdstrainError as error:
            return PendingRead(error=error)
        return PendingRead()

    def _rest_of(
        self, shard: ShardFile, requests: list[_RangeRequest], leaving: bool
    ) -> list[_RangeRequest]:
        """Return requests for the blocks that a lane leaves out, unless they are large.

        Only for a shard that the lane read from its beginning.
        """
        block = range_size()
        if self._remote is not shard:
            self._remote, self._requested = shard, set() if requests[0].start < block else None
        if self._requested is None:
            return []
        self._requested |= {request.start // block for request in requests}
        # Before the blocks are listed: the size comes from an index, which may be hostile.
        if not leaving or shard.bytes - len(self._requested) * block > _LARGEST_REST:
            return []
        rest = [
            _RangeRequest(shard, start, min(start + block, shard.bytes), None, self._cache_fill)
            for start in range(0, shard.bytes, block)
            if start // block not in self._requested
        ]
        self._requested = None
        return rest if sum(part.stop - part.start for part in rest) <= _LARGEST_REST else []


class ShardVersions(Protocol):
    """An index that keeps the versions of shards, as servers give them.

    versions: ETag or modification time by path. needs_headers: whether nothing else tells a shard
    from another of the same size.
    """

    @property
    def versions(self) -> dict[str, str]: ...
    def needs_headers(self, shard: ShardFile) -> bool: ...


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
        file = self.cache.open(shard, self._stopping) if self.cache is not None else None
        if file is not None:
            return file
        versions, by_version = self._versions(shard)
        tag = shard.tag or versions.get(shard.path)
        return open_remote(shard.path, shard.bytes, tag, self._stopping, by_version=by_version)

    def _fetch(self, file: File, request: _RangeRequest) -> None:
        before = file.retries, file.cached, file.fetched
        try:
            if request.target is not None:
                last = None if file.ranged else request.shard.bytes
                file.read_into(request.target, request.start, last=last)
            elif isinstance(file, CachedFile):
                file.fill(request.start, request.stop)
        finally:
            with self.lock:
                self._stats.retries += file.retries - before[0]
                self._stats.cached += file.cached - before[1]
                self._stats.fetched += file.fetched - before[2]
        versions = self._versions(request.shard)[0]
        if file.tag is not None and versions.setdefault(file.path, file.tag) != file.tag:
            raise ShardError(f"{request.shard.shown} changed while it was read. Start again.")

    def _versions(self, shard: ShardFile) -> tuple[dict[str, str], bool]:
        """Return the known versions by path, and whether any version must be compared."""
        if self._index is not None and self._index.needs_headers(shard):
            return self._index.versions, True
        return self._tags, False
