"""Bytes of reads: local ones are read at once, remote ones by a few threads.

Called by `run`. Several range requests are in flight, which hides the latency of a request. A range
request retries by itself (`storage`). A complete read is verified once against the checksums of the
index. Samples that differ are read once more, past any cache.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.memory import Memory, checksums, private_memory
from wdstrain.order.order import Ints
from wdstrain.reader.reads import Read
from wdstrain.runtime.signals import DeferSignals
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.tar import is_sample
from wdstrain.storage.cache import Cache, CachedFile
from wdstrain.storage.local import LocalFile, open_source
from wdstrain.storage.remote import RemoteFile, is_remote

THREADS = 6  # requests in flight: 6 x 4 MB in 100 ms are 240 MB/s
STOP_PATIENCE = 2.0  # seconds that `stop` waits for the threads, in total

_FILES_WITHOUT_RANGES = 4  # shards that one thread has open if a server knows no ranges
_DAMAGED = "its bytes are not those that were packed (crc32), also when they are read again"

File = LocalFile | RemoteFile | CachedFile


@dataclass
class FetchStats:
    """Totals of reading from servers.

    fetched: bytes from the network. cached: bytes from the cache. retries: failed attempts.
    """

    fetched: int = 0
    cached: int = 0
    retries: int = 0


@dataclass
class ReadStats:
    """Totals of a reader since it was made.

    bytes: bytes that were read. reread: samples that were read again, because a checksum differed.
    read_seconds: time of reading. shuffle_seconds: time that the loop waited for samples. fetch: of
    remote reads.
    """

    bytes: int = 0
    reread: int = 0
    read_seconds: float = 0.0
    shuffle_seconds: float = 0.0
    fetch: FetchStats = field(default_factory=FetchStats)


class BadBytes(NamedTuple):
    """Why the bytes of a sample cannot be used. field: that differs; "" for the whole sample."""

    field: str
    reason: str


class Outcome(NamedTuple):
    """Outcome of a read. Samples are named by their position in it.

    bad: samples that cannot be used. error: ends reading before the batch of the sample `failed`.
    """

    bad: dict[int, BadBytes]
    failed: int = 0
    error: WdstrainError | None = None


class Fetcher:
    """Reads shards into blocks of memory, remote ones in threads, which start with the first."""

    def __init__(
        self,
        index: Index,
        memory: Memory,
        needed_fields: set[str] | None,
        cache: Cache | None,
        stats: ReadStats,
        on_done: Callable[[Read, int, Outcome], None],
        *,
        skip_unreadable: bool,
    ) -> None:
        """needed_fields: fields that are verified; None: all. stats: totals, which are updated.

        on_done: called after each read with its block, from any thread. skip_unreadable: go on
        without local samples that cannot be read.
        """
        # `stop` takes the lock itself: a Ctrl-C within a Condition would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._index, self._memory, self._cache = index, memory, cache
        self._needed_fields = needed_fields
        self._stats, self._on_done, self._skip_unreadable = stats, on_done, skip_unreadable
        self._pending: deque[tuple[Read, int]] = deque()
        self._stopping = threading.Event()
        self._tags: dict[str, str] = {}  # path -> version, unless the index keeps it
        self._local, self._files = ShardFiles(), list[ShardFiles]()
        self._only: ShardFiles | None = None  # of the thread that goes on without ranges
        self._threads: list[threading.Thread] = []
        self._stop_deadline = 0.0

    def begin(self, read: Read, block: int, lanes: int) -> None:
        """Read into a block: a local shard at once, a remote one soon.

        lanes: shards that are read in turn. Raises RuntimeError if a thread cannot start.
        """
        if not is_remote(read.shard.path):
            self._local.most = lanes
            self._on_done(read, block, self._read(read, block, self._local))
            return
        while not self._stopping.is_set() and len(self._threads) < THREADS:
            name = f"wdstrain-fetch-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        with self._lock:
            self._pending.append((read, block))
            self._changed.notify()

    def close_local(self) -> None:
        """Close the local shards that are open, in the thread that called `begin`."""
        self._local.close()

    def stop(self) -> None:
        """End all requests. Nothing is written to memory afterwards."""
        with DeferSignals(), self._lock:
            self._stopping.set()
            for files in self._files:
                files.stop()
            self._changed.notify_all()
        self._stop_deadline = self._stop_deadline or time.monotonic() + STOP_PATIENCE
        # A thread that waits for the head of a response ends with it, and writes nothing.
        for thread in self._threads:
            thread.join(max(0.0, self._stop_deadline - time.monotonic()))
        if self._cache is not None:
            self._cache.stop(max(0.0, self._stop_deadline - time.monotonic()))
        self._on_done = _ignore  # it refers to the owner, which refers to this object

    # --- threads ----------------------------------------------------------------------------------

    def _run(self) -> None:
        files = ShardFiles()
        with self._lock:
            self._files.append(files)
        while (job := self._next_job(files)) is not None:
            outcome = self._read(*job, files)
            with self._lock:
                if self._only is None and not files.ranged:
                    self._only, files.most = files, _FILES_WITHOUT_RANGES
                    self._changed.notify_all()
            if not self._stopping.is_set():  # an ended read stays incomplete
                self._on_done(*job, outcome)
            # While this thread waits it must not keep memory: the frames of an error refer to it.
            del job, outcome
        files.close()

    def _next_job(self, files: ShardFiles) -> tuple[Read, int] | None:
        """Wait for a remote read and return it with its block; None if this thread is to end."""

        def is_over() -> bool:  # without range requests, each thread would fetch whole shards
            return self._stopping.is_set() or self._only not in (None, files)

        with self._lock:
            self._changed.wait_for(lambda: self._pending or is_over())
            return None if is_over() else self._pending.popleft()

    # --- one read ---------------------------------------------------------------------------------

    def _read(self, read: Read, block: int, files: ShardFiles) -> Outcome:
        """Read and verify. Errors are returned."""
        try:
            bad = dict[int, BadBytes]()
            try:
                self._fill(read, block, files)
            except WdstrainError as error:
                if is_remote(read.shard.path):
                    return Outcome({}, int(np.argmin(read.batch)), error)
                outcome = self._read_singly(read, block, files)
                if outcome.error is not None:
                    return outcome
                bad = outcome.bad
            self._check_headers(read, block)
            damaged = self._damaged(read, block, set(range(len(read.ids))) - bad.keys())
            if damaged:
                damaged = self._read_again(read, block, damaged)
            bad |= {row: BadBytes(name, _DAMAGED) for row, name in damaged.items()}
            return Outcome(bad)
        except WdstrainError as error:
            return Outcome({}, int(np.argmin(read.batch)), error)
        except BaseException as error:  # the loop raises it
            reason = f"{type(error).__name__}: {error}"
            failure = StorageError(f"{read.shard.shown}: reading failed ({reason}).")
            return Outcome({}, int(np.argmin(read.batch)), failure)

    def _fill(self, read: Read, block: int, files: ShardFiles) -> None:
        """Fill the block of a read."""
        file = files.of(read.shard, self._open)
        target = self._memory.view[block : block + read.nbytes]
        if read.has_gaps:
            target = files.scratch(read.stop - read.start)
        self._read_into(file, target, read.start, read.shard)
        if read.has_gaps:
            self._copy(read, target, block, range(len(read.ids)))

    def _read_into(self, file: File, target: memoryview, offset: int, shard: Shard) -> None:
        if isinstance(file, LocalFile):
            file.read_into(target, offset)
            return
        before = file.retries, file.cached, file.fetched
        try:
            file.read_into(target, offset)
        finally:
            fetched, retries = self._cache.take_counts() if self._cache is not None else (0, 0)
            with self._lock:
                self._stats.fetch.retries += file.retries - before[0] + retries
                self._stats.fetch.cached += file.cached - before[1]
                self._stats.fetch.fetched += file.fetched - before[2] + fetched
        versions = self._versions(shard)
        if file.tag and versions.setdefault(file.path, file.tag) != file.tag:
            raise ShardError(f"{shard.shown} changed while it was read. Start again.")

    def _read_singly(self, read: Read, block: int, files: ShardFiles) -> Outcome:
        """Read the samples one by one, in the order of their batches: the shard is damaged.

        The first sample that fails ends this, unless unreadable samples are skipped.
        """
        bad, start = dict[int, BadBytes](), self._index.offsets.start[read.ids]
        self._stats.fetch.retries += len(read.ids)
        for row in np.argsort(read.batch, kind="stable").tolist():
            try:
                file = files.of(read.shard, self._open)
                self._read_into(file, self._view(read, block, row), int(start[row]), read.shard)
            except WdstrainError as error:
                if not self._skip_unreadable:
                    return Outcome({}, row, error)
                bad[row] = BadBytes("", f"it cannot be read ({str(error).rstrip('.')})")
        return Outcome(bad)

    def _read_again(self, read: Read, block: int, damaged: dict[int, str]) -> dict[int, str]:
        """Read samples whose checksums differ again. Returns those that still differ."""
        shard = read.shard
        self._stats.reread += len(damaged)
        if self._cache is not None:
            self._cache.forget(shard.path, shard.bytes, shard.sha256, shard.tag)
        with suppress(WdstrainError):  # then they stay as bad as they are
            data = private_memory(read.stop - read.start)
            state = self._index.expected_state(shard)
            with open_source(shard.path, shard.bytes, state) as source:
                source.read_into(data, read.start)
            self._copy(read, data, block, damaged)
        return self._damaged(read, block, damaged.keys())

    def _damaged(self, read: Read, block: int, rows: Iterable[int]) -> dict[int, str]:
        """Return those of these samples whose checksums differ, with the first such field."""
        place = block + read.place
        damaged = damaged_samples(self._index, self._needed_fields, self._memory, read.ids, place)
        return {row: name for row, name in damaged.items() if row in rows}

    def _copy(self, read: Read, data: memoryview, block: int, rows: Iterable[int]) -> None:
        """Copy samples to the block. data: the bytes [start, stop) of the read."""
        begin = (self._index.offsets.start[read.ids] - read.start).tolist()
        for row in rows:
            sample = self._view(read, block, row)
            sample[:] = data[begin[row] : begin[row] + len(sample)]

    def _view(self, read: Read, block: int, row: int) -> memoryview:
        """Return the memory of a sample."""
        start = block + int(read.place[row])
        return self._memory.view[start : start + int(read.size[row])]

    def _check_headers(self, read: Read, block: int) -> None:
        """Raise ShardError if the headers of the samples differ from the index.

        Only shards of which nothing else tells whether they were replaced are checked.
        """
        if not self._index.needs_headers(read.shard):
            return
        for row, number in enumerate(read.ids.tolist()):
            start = int(self._index.offsets.start[number])
            key, members = self._index.key(number), self._index.members(number)
            fields = [(name, offset - start, size) for name, offset, size in members]
            if not is_sample(self._view(read, block, row), key, fields):
                raise ShardError(
                    f"{read.shard.shown} was replaced since it was opened: its headers at offset "
                    f"{start} are not those of '{key}'. Start again with the new shard."
                )

    # --- files ------------------------------------------------------------------------------------

    def _open(self, shard: Shard) -> File:
        state = self._index.expected_state(shard)
        if not is_remote(shard.path):
            return LocalFile(shard.path, state or "")
        file = None
        if self._cache is not None:
            file = self._cache.open(
                shard.path, shard.bytes, shard.sha256, shard.tag, self._stopping
            )
        if state is None:
            state = self._versions(shard).get(shard.path)
        return file or RemoteFile(shard.path, shard.bytes, state, self._stopping)

    def _versions(self, shard: Shard) -> dict[str, str]:
        """Return the known versions of shards that nothing else identifies, by path."""
        return self._index.versions if self._index.needs_headers(shard) else self._tags


class ShardFiles:
    """Open shards of one thread. most: of them that stay open, the last used ones.

    ranged: whether all servers answered range requests. Only `stop` may be called by other threads.
    """

    def __init__(self) -> None:
        self.most = 1
        self._files: dict[str, File] = {}
        self._scratch = memoryview(b"")

    @property
    def ranged(self) -> bool:
        return all(isinstance(file, LocalFile) or file.ranged for file in self._files.values())

    def of(self, shard: Shard, open_file: Callable[[Shard], File]) -> File:
        """Return the open file of a shard. open_file: opens it."""
        file = self._files.pop(shard.path, None)
        while len(self._files) >= self.most:
            self._files.pop(next(iter(self._files))).close()
        self._files[shard.path] = file = file or open_file(shard)
        return file

    def scratch(self, size: int) -> memoryview:
        """Return memory that is overwritten by the next call."""
        if len(self._scratch) < size:
            self._scratch = private_memory(size)
        return self._scratch[:size]

    def stop(self) -> None:
        """End a read of another thread."""
        for file in list(self._files.values()):
            if not isinstance(file, LocalFile):
                file.stop()

    def close(self) -> None:
        """Close all files."""
        while self._files:
            self._files.popitem()[1].close()


def _ignore(read: Read, block: int, outcome: Outcome) -> None:
    """Do nothing with a read that ended after `stop`."""


def damaged_samples(
    index: Index, needed_fields: Collection[str] | None, memory: Memory, ids: Ints, place: Ints
) -> dict[int, str]:
    """Return the positions of the samples whose checksums differ, with the first such field.

    needed_fields: those to verify; None: all. place: where each sample begins in the memory,
    int64[n]. Raises ValueError if a field lies beyond the memory, as a hostile index may say.
    """
    if not index.offsets.has_checksums:
        return {}
    members = index.offsets.members_of(ids, needed_fields)
    begin = members.offset + (place - index.offsets.start[ids])[members.row]
    differs = (checksums(memory, begin, members.size) != members.crc) & (members.crc != 0)
    wrong = np.flatnonzero(differs)[::-1].tolist()
    return {int(members.row[i]): index.fields[members.field[i]] for i in wrong}
