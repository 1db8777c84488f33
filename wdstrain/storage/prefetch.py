"""Bytes of a lane in the order of its plan, from disk or from far away.

A local shard is read where it lies, at once. Of shards on a server, what comes next is begun ahead: several ranges at a time,
beyond the ends of shards, so that the time a request takes is not waited for. The reader says where the bytes are for before
they are fetched, so they wait where they will be used, and what it lets a lane run ahead bounds them. What a range is fetched
with heals itself (`http`); what cannot be healed is told when its turn comes. With a cache, what was fetched once is read from
there, and the little of a shard that no plan asked for is fetched too, for the shard to be whole when the epoch ends.

The road not taken: ranges fetched into memory of their own and copied from there when they are asked for. The copies and the
lock they hold cost a third of the speed on a loopback.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.memory.scatter import ScatterList, as_scatter_list
from wdstrain.runtime.signals import DeferSignals
from wdstrain.storage.local import LocalFile, ShardFile
from wdstrain.storage.remote import RemoteFile, is_remote, open_remote
from wdstrain.storage.shard_cache import BLOCK, Cache, CachedFile

RANGE = BLOCK  # bytes of one request, at most
_FETCHERS = 6  # requests in flight: 6 x 4 MB in 100 ms are 240 MB/s
_PARTING = 2.0  # seconds that all of them are given to end
_AT_ONCE = 4  # shards that one thread reads in turn, where a server knows no ranges
_FILLED = 32 << 20  # bytes that are fetched for the cache alone when a lane leaves a shard, at most


@dataclass
class FetchStats:
    """What reading from servers took, in all: bytes that came over the network, bytes that the cache had, tries anew."""

    fetched: int = 0
    cached: int = 0
    retries: int = 0


class ReadStopped(WdstrainError):
    """The reading was ended by another thread."""

    def __init__(self, message: str = "the reader was stopped") -> None:
        super().__init__(message)


@dataclass(eq=False)
class PendingRead:
    """A run of bytes on its way. missing: parts of it that are not there yet; error: why it will not come whole.

    failed: samples of it that cannot be read, by their place in it, where the others can. again: samples that were read once more.
    """

    missing: int = 0
    error: WdstrainError | None = None
    failed: dict[int, WdstrainError] = field(default_factory=dict)
    again: int = 0


@dataclass(eq=False)
class _Range:
    """What one request is for. pieces: where its bytes go; none for what goes into the cache only."""

    shard: ShardFile
    start: int
    stop: int
    pieces: ScatterList | None
    of: PendingRead


@dataclass
class LaneStream:
    """Reads runs of bytes of a lane, which are begun in order. Not shared between threads.

    opened: what opens a local shard. fetchers: who brings those of others.
    """

    opened: Callable[[ShardFile], LocalFile]
    fetchers: RangePrefetcher
    _source: LocalFile | None = None  # the local shard that is open
    _shard: ShardFile | None = None  # the remote shard that is being read with a cache
    _asked: set[int] | None = (
        None  # its blocks that were asked for, if it is read from its beginning
    )
    _fills: PendingRead = field(default_factory=PendingRead)

    @property
    def filling(self) -> bool:
        """Whether something is still on its way into the cache that nobody asked for."""
        return self._fills.missing > 0

    def begin(
        self,
        shard: ShardFile,
        pieces: ScatterList | Sequence[memoryview],
        offset: int,
        *,
        leaving: bool,
    ) -> PendingRead:
        """Fill the pieces with the bytes of a shard from offset on. leaving: the lane reads nothing of it after that."""
        reading = PendingRead()
        if not is_remote(shard.path):
            try:
                if self._source is None or shard.path != self._source.path:
                    self.close()
                    self._source = self.opened(shard)
                self._source.read_into(pieces, offset)
            except WdstrainError as error:
                reading.error = error
            return reading
        todo, ranges = (
            as_scatter_list(pieces),
            list[_Range](),
        )
        while todo.left:
            # with a cache, as its blocks are cut; else a sample in two ranges would have to be compared by who decodes
            count = min(todo.left, RANGE if self.fetchers.cache is None else RANGE - offset % RANGE)
            ranges.append(_Range(shard, offset, offset + count, todo.split_off(count), reading))
            offset += count
        reading.missing = len(ranges)
        if self.fetchers.cache is not None:
            rest = self._rest_of(shard, ranges, leaving)
            with self.fetchers.lock:
                self._fills.missing += len(rest)
            ranges += rest
        self.fetchers.add(ranges)
        return reading

    def close(self) -> None:
        """Leave the local shard that is open. What was begun elsewhere goes on."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _rest_of(self, shard: ShardFile, ranges: list[_Range], leaving: bool) -> list[_Range]:
        """What a shard that was read from its beginning has left when the lane leaves it, unless it is much."""
        if self._shard is not shard:
            self._shard, self._asked = shard, set() if ranges[0].start < RANGE else None
        if self._asked is None:
            return []
        self._asked |= {one.start // RANGE for one in ranges}
        # before they are listed: how large a shard is, an index only claims
        if not leaving or shard.bytes - len(self._asked) * RANGE > _FILLED:
            return []
        left = [at for at in range(0, shard.bytes, RANGE) if at // RANGE not in self._asked]
        found = [_Range(shard, at, min(at + RANGE, shard.bytes), None, self._fills) for at in left]
        self._asked = None
        return found if sum(one.stop - one.start for one in found) <= _FILLED else []


class ShardVersions(Protocol):
    """An index that keeps what servers call its shards (ETag or modification time), by path.

    needs_headers: whether nothing else tells a shard from another of its size.
    """

    @property
    def versions(self) -> dict[str, str]: ...
    def needs_headers(self, shard: ShardFile) -> bool: ...


class RangePrefetcher:
    """Threads that fetch ranges for the lanes of a reader, begun in the order in which they were added; they start with the first.

    cache: of shards on servers. tally: what is read is added to it. told: called, from any thread, when something that was begun
    is there or failed. index: of the shards; what servers call them is noted there where nothing else tells them from others.
    """

    def __init__(
        self,
        cache: Cache | None,
        tally: FetchStats,
        told: Callable[[], None],
        index: ShardVersions | None = None,
    ) -> None:
        # whoever stops this takes the lock itself: an interrupt within a Condition would keep it locked
        self.cache, self.lock = cache, threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._tally, self._told = tally, told
        self._todo: deque[_Range] = deque()
        self._stopping = threading.Event()
        self._tags: dict[str, str] = {}
        self._index = index
        self._files: dict[
            int, dict[str, RemoteFile | CachedFile]
        ] = {}  # by thread and path: what it reads
        self._alone: int | None = None  # the one thread that goes on where a server knows no ranges
        self._threads: list[threading.Thread] = []
        self._parted = 0.0  # until when they are waited for, once they are to end

    def add(self, ranges: list[_Range]) -> None:
        with self.lock:
            self._todo += ranges
            self._changed.notify(
                len(ranges)
            )  # those who find nothing would take Python's lock in vain, one after another
        while not self._stopping.is_set() and len(self._threads) < _FETCHERS:
            thread = threading.Thread(
                target=self._fetch, name=f"wdstrain-fetch-{len(self._threads)}", daemon=True
            )
            thread.start()  # which may fail
            self._threads.append(thread)

    def stop(self) -> None:
        """End what is on its way; no piece is written to after that."""
        with DeferSignals(), self.lock:
            self._stopping.set()
            for files in self._files.values():
                for file in files.values():
                    file.stop()
            self._changed.notify_all()
        self._parted = self._parted or time.monotonic() + _PARTING
        for thread in (
            self._threads
        ):  # one that waits for the first byte of an answer ends with it, and writes nothing
            thread.join(max(0.0, self._parted - time.monotonic()))

    # --- the threads -------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        me, files = threading.get_ident(), dict[str, RemoteFile | CachedFile]()
        with self.lock:
            self._files[me] = files
        while (one := self._take(me)) is not None:
            error = None
            try:
                self._bring(self._file(files, one.shard, me), one)
            except WdstrainError as problem:
                error = problem
            except BaseException as problem:  # handed to the reader, which raises it
                error = StorageError(
                    f"{one.shard.shown}: reading failed ({type(problem).__name__}: {problem})."
                )
            with self.lock:
                if self._alone is None and not all(file.ranged for file in files.values()):
                    self._alone = me
                    self._changed.notify_all()
                if (
                    not self._stopping.is_set()
                ):  # what was broken off is never there, and nobody waits for it
                    one.of.error = one.of.error or error
                    one.of.missing -= 1  # after that: who looks at it holds another lock
            error = None  # its frames refer to it, and to memory that is to go with its last user
            self._told()
        for file in files.values():
            file.close()

    def _file(
        self, files: dict[str, RemoteFile | CachedFile], shard: ShardFile, me: int
    ) -> RemoteFile | CachedFile:
        """The file of a shard that this thread has open; those of others are closed, but for what the lanes read as one."""
        with self.lock:
            file = files.pop(shard.path, None)
            while len(files) >= (_AT_ONCE if self._alone == me else 1):
                files.pop(next(iter(files))).close()
        if file is None:
            file = self.cache.open(shard, self._stopping) if self.cache is not None else None
            tags, by_version = self._versions(shard)
            tag = shard.tag or tags.get(shard.path)
            file = file or open_remote(
                shard.path, shard.bytes, tag, self._stopping, by_version=by_version
            )
        with self.lock:
            files[shard.path] = file
        return file

    def _bring(self, file: RemoteFile | CachedFile, one: _Range) -> None:
        before = file.retries, file.cached, file.fetched
        try:
            if one.pieces is not None:
                file.read_into(one.pieces, one.start, last=None if file.ranged else one.shard.bytes)
            elif isinstance(file, CachedFile):
                file.fill(one.start, one.stop)
        finally:
            with self.lock:
                self._tally.retries += file.retries - before[0]
                self._tally.cached += file.cached - before[1]
                self._tally.fetched += file.fetched - before[2]
        if (
            file.tag is not None
            and self._versions(one.shard)[0].setdefault(file.path, file.tag) != file.tag
        ):
            raise ShardError(f"{one.shard.shown} changed while it was read. Start again.")

    def _versions(self, shard: ShardFile) -> tuple[dict[str, str], bool]:
        """What servers called shards, by path, and whether nothing else tells this one from others: of such it is kept."""
        if self._index is not None and self._index.needs_headers(shard):
            return self._index.versions, True
        return self._tags, False

    def _take(self, me: int) -> _Range | None:
        """The next range to fetch, once there is one; None when all is to end, or another goes on alone."""
        with self.lock:
            self._changed.wait_for(
                lambda: self._todo or self._stopping.is_set() or self._alone not in (None, me)
            )
            if self._stopping.is_set() or self._alone not in (None, me):
                return None  # where a server knows no ranges, each would bring the whole object
            return self._todo.popleft()
