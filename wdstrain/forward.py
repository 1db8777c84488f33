"""Bytes of a lane in the order of its plan, from disk or from far away.

A local shard is read where it lies. Of shards on a server, the ranges that come next are fetched ahead, several at a time and
beyond the ends of shards, so that the time a request takes is not waited for; they wait in order, in a bounded number of
bytes. What a range is fetched with heals itself (`http`); what cannot be healed is raised when its turn comes. With a cache,
what was fetched once is read from there, and the little of a shard that no plan asked for is fetched too, for the shard to be
whole when the epoch ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wdstrain.cache import BLOCK, Cache, CachedFile
from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.indexing import Shard
from wdstrain.remote import RemoteFile, is_remote, open_remote
from wdstrain.storage import Source

RANGE = BLOCK  # bytes of one request
HELD = 32 << 20  # bytes that are fetched or waited for, at most
_FETCHERS = 6  # requests in flight: 6 x 4 MB in 100 ms are 240 MB/s


class Extent(NamedTuple):
    """A run of bytes of a shard that will be read."""

    shard: Shard
    start: int
    stop: int


@dataclass
class Tally:
    """What reading from servers took, in all: bytes that came over the network, bytes that the cache had, tries anew."""

    fetched: int = 0
    cached: int = 0
    retries: int = 0


@dataclass(eq=False)
class _Range:
    """A part of an extent on its way. data: what came; error: why nothing did.

    wanted: False for what goes into the cache only. last: the lane ends with it.
    """

    extent: Extent
    start: int
    stop: int
    wanted: bool = True
    last: bool = False
    data: bytearray | None = None
    error: WdstrainError | None = None


class Forward:
    """Reads the extents of a lane, which are asked for in order. Not shared between threads."""

    def __init__(
        self, extents: Iterator[Extent], opened: Callable[[str, int], Source], cache: Cache | None, tally: Tally
    ) -> None:
        """cache: of shards on servers. tally: what is read is added to it."""
        self._opened = opened
        self._source: Source | None = None
        self._path = ""
        self._feed = _Feed(extents, cache, tally)

    def read_into(self, shard: Shard, pieces: Sequence[memoryview], offset: int) -> None:
        """Fill the pieces with the bytes of a shard from offset on."""
        if is_remote(shard.path):
            self._feed.read_into(shard, pieces, offset)
            return
        if self._source is None or shard.path != self._path:
            self._leave()
            self._source, self._path = self._opened(shard.path, shard.bytes), shard.path
        self._source.read_into(list(pieces), offset)

    def stop(self) -> None:
        """End a read that another thread waits in."""
        self._feed.stop()

    def close(self) -> None:
        self._leave()
        self._feed.close()

    def _leave(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None


@dataclass
class _Feed:
    """Ranges of remote extents, fetched ahead by threads that begin with the first read."""

    extents: Iterator[Extent]
    cache: Cache | None
    tally: Tally
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _threads: list[threading.Thread] = field(default_factory=list)
    _waiting: deque[_Range] = field(default_factory=deque)  # in order: being fetched, or there
    _held: int = 0
    _rest: Extent | None = None  # what is left of the extent that is being cut into ranges
    _left: dict[int, Extent] = field(default_factory=dict)  # by block: what no extent of a shard in the cache has asked for
    _fills: deque[_Range] = field(default_factory=deque)  # for the cache alone
    _filling: int = 0  # fills that are not done
    _stopping: threading.Event = field(default_factory=threading.Event)
    _tags: dict[str, str] = field(default_factory=dict)
    _files: dict[int, RemoteFile | CachedFile] = field(default_factory=dict)  # by thread: what it reads
    _alone: int | None = None  # the one thread that goes on where a server knows no ranges

    def read_into(self, shard: Shard, pieces: Sequence[memoryview], offset: int) -> None:
        self._begin()
        for piece in pieces:
            view = piece
            while view:
                one = self._current(shard, offset)
                assert one.data is not None
                part = memoryview(one.data)[offset - one.start : offset - one.start + len(view)]
                view[: len(part)] = part
                view, offset = view[len(part) :], offset + len(part)

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            for file in self._files.values():
                file.stop()
            self._lock.notify_all()

    def close(self) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(timeout=2.0)  # one that waits for the first byte of an answer ends with it, and holds nothing
        self._threads.clear()
        self._waiting.clear()

    def _current(self, shard: Shard, offset: int) -> _Range:
        """The range that holds this byte, once it is there. Those before it are let go."""
        with self._lock:
            while True:
                self._lock.wait_for(lambda: self._waiting or self._rest is None or self._stopping.is_set())
                if not self._waiting:
                    raise StorageError(f"{shard.shown}: byte {offset} was not among those that were to be read.")
                one = self._waiting[0]
                if one.extent.shard.path == shard.path and one.start <= offset < one.stop:
                    break
                self._waiting.popleft()
                self._held -= one.stop - one.start
                self._lock.notify_all()
            self._lock.wait_for(lambda: self._is_there(one) or self._stopping.is_set())
        if one.error is not None:
            raise one.error
        if one.data is None:
            raise StorageError(f"{shard.shown}: reading was stopped.")
        return one

    def _is_there(self, one: _Range) -> bool:
        # whoever has the last byte of a lane may end this process: the cache is complete by then
        return one.error is not None or (one.data is not None and not (one.last and self._filling))

    # --- the threads -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._threads and not self._stopping.is_set():
            self._advance()
            for number in range(_FETCHERS):
                thread = threading.Thread(target=self._fetch, name=f"wdstrain-fetch-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _fetch(self) -> None:
        me, file = threading.get_ident(), None
        while (one := self._take(me)) is not None:
            shard, data, error = one.extent.shard, bytearray(one.stop - one.start if one.wanted else 0), None
            if file is not None and file.path != shard.path:
                file.close()
                file = None
            try:
                file = file or self._open(shard)
                with self._lock:
                    self._files[me] = file
                self._bring(file, one, data)
            except WdstrainError as problem:
                error = problem
            except BaseException as problem:  # handed to the reader, which raises it
                error = StorageError(f"{shard.shown}: reading failed ({type(problem).__name__}: {problem}).")
            with self._lock:
                if file is not None and not file.ranged and self._alone is None:
                    self._alone = me
                one.data, one.error = (None, error) if error is not None else (data, None)
                self._filling -= not one.wanted
                self._lock.notify_all()
        if file is not None:
            file.close()
            with self._lock:
                self._files.pop(me, None)

    def _open(self, shard: Shard) -> RemoteFile | CachedFile:
        found = self.cache.open(shard, self._stopping) if self.cache is not None else None
        return found or open_remote(shard.path, shard.bytes, shard.tag or self._tags.get(shard.path), self._stopping)

    def _bring(self, file: RemoteFile | CachedFile, one: _Range, data: bytearray) -> None:
        before = file.retries, file.cached, file.fetched
        try:
            if one.wanted:
                file.read_into([memoryview(data)], one.start, last=None if file.ranged else one.extent.stop)
            elif isinstance(file, CachedFile):
                file.fill(one.start, one.stop)
        finally:
            with self._lock:
                self.tally.retries += file.retries - before[0]
                self.tally.cached += file.cached - before[1]
                self.tally.fetched += file.fetched - before[2]
        if file.tag is not None and self._tags.setdefault(file.path, file.tag) != file.tag:
            raise ShardError(f"{one.extent.shard.shown} changed while it was read. Start again.")

    def _take(self, me: int) -> _Range | None:
        """The next range to fetch, once there is room for it; None when there is none, or all is to end."""
        with self._lock:
            while not self._stopping.is_set():
                if self._alone not in (None, me):
                    return None  # asking for a range would bring the whole object each time
                if self._fills:
                    return self._fills.popleft()
                extent = self._rest
                if extent is None:
                    self._lock.notify_all()
                    return None
                stop = min(extent.stop, (extent.start // RANGE + 1) * RANGE)  # as the cache's blocks are cut
                if self._held and self._held + stop - extent.start > HELD:
                    self._lock.wait()
                    continue
                one = _Range(extent, extent.start, stop)
                self._left.pop(extent.start // RANGE, None)
                if stop < extent.stop:
                    self._rest = extent._replace(start=stop)
                else:
                    self._advance()
                    one.last = self._rest is None
                self._held += stop - one.start
                self._waiting.append(one)
                self._lock.notify_all()
                return one
            return None

    def _advance(self) -> None:
        """Go on to the next extent. What a shard has left is filled when the lane leaves it, if it began it and it is little."""
        former, self._rest = self._rest, next((one for one in self.extents if is_remote(one.shard.path)), None)
        path = self._rest.shard.path if self._rest is not None else ""
        if self.cache is None or (former is not None and former.shard.path == path):
            return
        left = list(self._left.values())
        if sum(one.stop - one.start for one in left) <= HELD:
            self._fills += (_Range(one, one.start, one.stop, wanted=False) for one in left)
            self._filling += len(left)
        self._left = {}
        if self._rest is not None and self._rest.start < RANGE:
            shard = self._rest.shard
            blocks = range(0, shard.bytes, RANGE)
            self._left = {at // RANGE: Extent(shard, at, min(at + RANGE, shard.bytes)) for at in blocks}
