"""Bytes of a lane in the order of its plan, from disk or from far away.

A local shard is read where it lies. Of shards on a server, the ranges that come next are fetched ahead, several at a time and
beyond the ends of shards, so that the time a request takes is not waited for; they wait in order, in a bounded number of
bytes. What a range is fetched with heals itself (`http`); what cannot be healed is raised when its turn comes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.remote import RemoteFile, is_remote, open_remote, redacted
from wdstrain.storage import Source

RANGE = 4 << 20  # bytes of one request
HELD = 32 << 20  # bytes that are fetched or waited for, at most
_FETCHERS = 6  # requests in flight: 6 x 4 MB in 100 ms are 240 MB/s


class Extent(NamedTuple):
    """A run of bytes of a shard that will be read. size: of the shard."""

    path: str
    size: int
    start: int
    stop: int


@dataclass
class _Range:
    """A part of an extent on its way. data: what came; error: why nothing did."""

    extent: Extent
    start: int
    stop: int
    data: bytearray | None = None
    error: WdstrainError | None = None


class Forward:
    """Reads the extents of a lane, which are asked for in order. Not shared between threads."""

    def __init__(self, extents: Iterator[Extent], opened: Callable[[str, int], Source]) -> None:
        self._opened = opened
        self._source: Source | None = None
        self._path = ""
        self._feed = _Feed(extents)

    def read_into(self, path: str, size: int, pieces: Sequence[memoryview], offset: int) -> None:
        """Fill the pieces with the bytes of a shard from offset on."""
        if is_remote(path):
            self._feed.read_into(path, pieces, offset)
            return
        if self._source is None or path != self._path:
            self._leave()
            self._source, self._path = self._opened(path, size), path
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
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _threads: list[threading.Thread] = field(default_factory=list)
    _waiting: deque[_Range] = field(default_factory=deque)  # in order: being fetched, or there
    _held: int = 0
    _rest: Extent | None = None  # what is left of the extent that is being cut into ranges
    _ended: bool = False
    _stopping: threading.Event = field(default_factory=threading.Event)
    _tags: dict[str, str] = field(default_factory=dict)
    _files: dict[int, RemoteFile] = field(default_factory=dict)  # by thread: what it reads
    _alone: int | None = None  # the one thread that goes on where a server knows no ranges

    def read_into(self, path: str, pieces: Sequence[memoryview], offset: int) -> None:
        self._begin()
        for piece in pieces:
            view = piece
            while view:
                one = self._current(path, offset)
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

    def _current(self, path: str, offset: int) -> _Range:
        """The range that holds this byte, once it is there. Those before it are let go."""
        with self._lock:
            while True:
                self._lock.wait_for(lambda: self._waiting or self._ended or self._stopping.is_set())
                if not self._waiting:
                    raise StorageError(f"{redacted(path)}: byte {offset} was not among those that were to be read.")
                one = self._waiting[0]
                if one.extent.path == path and one.start <= offset < one.stop:
                    break
                self._waiting.popleft()
                self._held -= one.stop - one.start
                self._lock.notify_all()
            self._lock.wait_for(lambda: one.data is not None or one.error is not None or self._stopping.is_set())
        if one.error is not None:
            raise one.error
        if one.data is None:
            raise StorageError(f"{redacted(path)}: reading was stopped.")
        return one

    # --- the threads -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._threads and not self._stopping.is_set():
            for number in range(_FETCHERS):
                thread = threading.Thread(target=self._fetch, name=f"wdstrain-fetch-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _fetch(self) -> None:
        me, file = threading.get_ident(), None
        while (one := self._take(me)) is not None:
            extent, data, error = one.extent, bytearray(one.stop - one.start), None
            if file is None or file.path != extent.path:
                if file is not None:
                    file.close()
                file = open_remote(extent.path, extent.size, self._tags.get(extent.path), self._stopping)
            with self._lock:
                self._files[me] = file
            try:
                file.read_into([memoryview(data)], one.start, last=None if file.ranged else extent.stop)
                if file.tag is not None and self._tags.setdefault(extent.path, file.tag) != file.tag:
                    raise ShardError(f"{redacted(extent.path)} changed while it was read. Start again.")
            except WdstrainError as problem:
                error = problem
            except BaseException as problem:  # handed to the reader, which raises it
                error = StorageError(f"{redacted(extent.path)}: reading failed ({type(problem).__name__}: {problem}).")
            with self._lock:
                if not file.ranged and self._alone is None:
                    self._alone = me
                one.data, one.error = (None, error) if error is not None else (data, None)
                self._lock.notify_all()
        if file is not None:
            file.close()
            with self._lock:
                self._files.pop(me, None)

    def _take(self, me: int) -> _Range | None:
        """The next range to fetch, once there is room for it; None when there is none, or all is to end."""
        with self._lock:
            while not self._stopping.is_set():
                if self._alone not in (None, me):
                    return None  # asking for a range would bring the whole object each time
                if self._rest is None:
                    self._rest = next((extent for extent in self.extents if is_remote(extent.path)), None)
                if self._rest is None:
                    self._ended = True
                    self._lock.notify_all()
                    return None
                extent = self._rest
                stop = min(extent.stop, extent.start + RANGE)
                if self._held and self._held + stop - extent.start > HELD:
                    self._lock.wait()
                    continue
                one = _Range(extent, extent.start, stop)
                self._rest = extent._replace(start=stop) if stop < extent.stop else None
                self._held += stop - extent.start
                self._waiting.append(one)
                self._lock.notify_all()
                return one
            return None
