"""Excerpts of shards: a bounded part of them is read, and the rest is estimated from it.

Of 8 shards without an index, evenly spread over the set, the first MB is read. If it holds few
samples, up to 16 further headers are read: at most 3 MB of a shard, 24 MB in all. The size of a
remote shard comes with its first bytes, because addresses that are signed for GET refuse HEAD.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.inspection.info.contents import Value
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.shards.tar import Sample, SkippedMembers, samples
from wdstrain.shards.tar_headers import END
from wdstrain.storage.local import LocalFile, Source
from wdstrain.storage.remote import RemoteFile, is_remote, redacted, shown_path

_SHARDS = 8  # shards whose beginning is read
_FIRST_BYTES = 1 << 20  # of each of them
_MAX_READS = 16  # further reads of each of them
_ENOUGH = 50  # samples of a shard, from which on nothing further is read
_MAX_SIZED = 200  # remote shards whose size is requested; local shards whose end is checked
_VALUE_BYTES = 64 << 10  # of a value: enough for nearly every image header
_MORE_BYTES = 4 << 20  # of a value if its first bytes are not enough
_CUT_BYTES = 4 << 10  # of a value that is cut off at the end of an excerpt

T = TypeVar("T")
Bools = npt.NDArray[np.bool_]


@dataclass
class Beginning:
    """Beginning of one shard that was read. complete: all of its headers were read."""

    path: str
    size: int = 0
    head: bytes = b""
    tag: str = ""
    found: list[Sample] = field(default_factory=list)
    complete: bool = False
    skipped: SkippedMembers = field(default_factory=SkippedMembers)
    requests: int = 0
    bytes_read: int = 0
    error: WdstrainError | None = None


@dataclass
class Estimate:
    """Estimate of shards without an index, from the beginnings of some of them.

    index: all readable shards, with the samples that were found. samples: of all of them;
    exact: whether that was counted.
    counts: samples of each shard. heads: first bytes by path. looked_into: shards that were read.
    """

    index: Index
    exact: bool
    counts: list[int]
    heads: dict[str, bytes]
    ignored: dict[str, int]
    looked_into: int
    requests: int
    bytes_read: int
    errors: list[WdstrainError]

    @property
    def samples(self) -> int:
        return sum(self.counts)


def estimate(paths: Sequence[str]) -> Estimate:
    """Return an estimate of these shards from the beginnings of at most 8 of them."""
    chosen = {paths[i] for i in evenly(len(paths), _SHARDS)}
    checked = {paths[i] for i in evenly(len(paths), _MAX_SIZED)} | chosen
    sized = [path for path in paths if path in checked or not is_remote(path)]
    beginnings = _in_threads(
        sized,
        lambda path, stopping: _read_beginning(
            path, stopping, reads=path in chosen, checks_end=path in checked
        ),
    )
    good = {beginning.path: beginning for beginning in beginnings if beginning.error is None}
    used = [beginning for beginning in good.values() if beginning.found or beginning.complete]
    mean_size = sum(beginning.size for beginning in good.values()) / max(1, len(good))
    covered = sum(
        beginning.size if beginning.complete else beginning.found[-1].stop for beginning in used
    )
    per_byte = sum(len(beginning.found) for beginning in used) / max(1, covered)
    shards, tables, counts = [], [Offsets.of([])], []
    for path in (path for path in paths if path in good or path not in sized):
        beginning = good.get(path, Beginning(path, round(mean_size)))
        tables.append(Offsets.of(beginning.found))
        shards.append(Shard(path, len(beginning.found), beginning.size, tag=beginning.tag))
        rest = 0 if beginning.complete else round(beginning.size * per_byte)
        counts.append(max(len(beginning.found), rest))
    ignored = Counter[str]()
    for beginning in used:
        ignored.update(beginning.skipped)
    return Estimate(
        index=Index(tuple(shards), Offsets.join(tables)),
        exact=len(used) == len(shards) and all(beginning.complete for beginning in used),
        counts=counts,
        heads={beginning.path: beginning.head for beginning in used},
        ignored=dict(ignored),
        looked_into=len(used),
        requests=sum(beginning.requests for beginning in beginnings if is_remote(beginning.path)),
        bytes_read=sum(beginning.bytes_read for beginning in beginnings),
        errors=[beginning.error for beginning in beginnings if beginning.error is not None],
    )


def remote_heads(index: Index, errors: list[WdstrainError]) -> dict[str, bytes]:
    """Return the first MB of at most 8 remote shards of an index, by path, a request each.

    errors: receives what went wrong.
    """
    remote = [shard for shard in index.shards if is_remote(shard.path) and shard.samples]

    def read(shard: Shard, stopping: threading.Event) -> Beginning:
        beginning = Beginning(shard.path)
        try:
            with RemoteFile(shard.path, shard.bytes, shard.tag or None, stopping) as source:
                beginning.head = _read(source, 0, min(_FIRST_BYTES, shard.bytes))
        except WdstrainError as error:
            beginning.error = error
        return beginning

    beginnings = _in_threads([remote[i] for i in evenly(len(remote), _SHARDS)], read)
    errors += [beginning.error for beginning in beginnings if beginning.error is not None]
    return {beginning.path: beginning.head for beginning in beginnings}


class ValueReader:
    """Reads values of samples: from local files, and of remote shards from their first bytes.

    heads: first bytes of remote shards, by path. errors: what went wrong; values of that shard are
    left out.
    """

    def __init__(self, index: Index, heads: dict[str, bytes]) -> None:
        self._index, self._heads = index, heads
        self.errors: list[WdstrainError] = []

    def ids(self, most: int, *, whole: bool = False, among: Bools | None = None) -> Ints:
        """Return ids of at most `most` samples that can be read, evenly spread, ascending.

        whole: only samples that can be read to their end. among: bool[n], samples to choose from.
        """
        parts = []
        for number, shard in enumerate(self._index.shards):
            first, stop = self._index.first[number : number + 2].tolist()
            if is_remote(shard.path):
                size = len(self._heads.get(shard.path, b""))
                ends = self._index.offsets.stop[first:stop]
                count = int(np.searchsorted(ends, size, side="right"))
                if size and not whole:
                    count = max(count, 1)  # the beginning of a large sample
                stop = min(stop, first + count)
            parts.append(np.arange(first, stop))
        ids = np.concatenate([np.zeros(0, np.int64), *parts])
        ids = ids if among is None else ids[among[ids]]
        return ids[evenly(len(ids), most)]

    def members(self, ids: Ints) -> Iterator[tuple[int, list[tuple[str, Value]]]]:
        """Yield (id, [(field, value)]) of each sample. ids: int64[n], ascending."""
        shards = self._index.shard_of(ids)
        for number in np.unique(shards).tolist():
            with _ShardBytes(self._index.shards[number].path, self._heads, self.errors) as shard:
                for i in ids[shards == number].tolist():
                    values = [
                        (name, shard.value(offset, size))
                        for name, offset, size in self._index.members(i)
                    ]
                    yield i, [(name, value) for name, value in values if value is not None]


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, ascending, evenly spread."""
    places = np.linspace(0, count - 1, min(count, most)).astype(np.int64)
    return np.unique(places).tolist() if count else []


# --- parts ----------------------------------------------------------------------------------------


class _ShardBytes:
    """Bytes of one shard: of its file, or of its first bytes. After an error there are none."""

    def __init__(self, path: str, heads: dict[str, bytes], errors: list[WdstrainError]) -> None:
        self._head = heads.get(path, b"") if is_remote(path) else None
        self._path, self._errors = path, errors
        self._file: LocalFile | None = None

    def __enter__(self) -> _ShardBytes:
        if self._head is None:
            try:
                self._file = LocalFile(self._path)
            except WdstrainError as error:
                self._errors.append(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def value(self, offset: int, size: int) -> Value | None:
        data = self._read(offset, min(size, _VALUE_BYTES))
        if len(data) < min(size, _CUT_BYTES):
            return None
        return Value(size, data, lambda: self._read(offset, min(size, _MORE_BYTES)))

    def _read(self, offset: int, length: int) -> bytes:
        if self._head is not None:
            return self._head[offset : offset + length]
        if self._file is None:
            return b""
        try:
            return self._file.read(offset, length)
        except StorageError as error:
            self._errors.append(error)
            self._file.close()
            self._file = None
            return b""


class _EnoughError(Exception):
    """The limits of an excerpt are reached."""


def _in_threads(
    items: Sequence[T], read: Callable[[T, threading.Event], Beginning]
) -> list[Beginning]:
    """Return the results of `read` for the items, eight at a time.

    The threads are daemons: an interrupt does not wait for a stalled server.
    """
    stopping, todo = threading.Event(), deque(enumerate(items))
    done: SimpleQueue[tuple[int, Beginning | BaseException]] = SimpleQueue()

    def work() -> None:
        while todo and not stopping.is_set():
            try:
                number, item = todo.popleft()
            except IndexError:
                return
            try:
                done.put((number, read(item, stopping)))
            except BaseException as error:  # raised in the calling thread
                done.put((number, error))

    threads = [
        threading.Thread(target=work, name=f"wdstrain-info-{i}", daemon=True)
        for i in range(min(_SHARDS, len(items)))
    ]
    results: dict[int, Beginning] = {}
    try:
        for thread in threads:
            thread.start()
        while len(results) < len(items):
            number, result = done.get()
            if isinstance(result, BaseException):
                raise result
            results[number] = result
    finally:
        stopping.set()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(items))]


def _read_beginning(
    path: str, stopping: threading.Event, *, reads: bool, checks_end: bool
) -> Beginning:
    """Return the size of a shard, and the samples at its beginning if `reads`.

    checks_end: a shard that does not end with zero blocks is an error.
    """
    beginning, remote = Beginning(path), is_remote(path)
    try:
        if not reads and not checks_end:
            beginning.size = os.stat(path).st_size
            return beginning
        first = _FIRST_BYTES if reads else 1
        source = (
            RemoteFile(path, stopping=stopping, first_bytes=first) if remote else LocalFile(path)
        )
        with source:
            beginning.size, beginning.requests, beginning.tag = source.size, 1, source.version or ""
            if reads:
                _walk(source, beginning)
            is_done = beginning.complete or (remote and not reads)
            if is_done or beginning.size < len(END) or not _has_ranges(source):
                return beginning
            beginning.requests += 1
            beginning.bytes_read += len(END)
            if _read(source, beginning.size - len(END), len(END)) != END:
                shown = redacted(path) if remote else path
                raise ShardError(
                    f"{shown} ends at byte {beginning.size} without the two zero blocks that end a "
                    "tar: it was cut. Copy or pack it again."
                )
    except WdstrainError as error:
        beginning.error = error
    except OSError as error:
        beginning.error = StorageError(f"{path} cannot be read: {error.strerror}.")
    return beginning


def _walk(source: Source, beginning: Beginning) -> None:
    """Find the samples at the beginning of a shard, within the limits."""
    beginning.head, reads_left = _read(source, 0, min(_FIRST_BYTES, beginning.size)), _MAX_READS
    beginning.bytes_read += len(beginning.head)

    def read(offset: int, length: int) -> bytes:
        nonlocal reads_left
        length = min(length, beginning.size - offset)
        if offset + length <= len(beginning.head):
            return beginning.head[offset : offset + length]
        if not reads_left or not _has_ranges(source) or len(beginning.found) >= _ENOUGH:
            raise _EnoughError
        reads_left -= 1
        beginning.requests, beginning.bytes_read = (
            beginning.requests + 1,
            beginning.bytes_read + length,
        )
        return _read(source, offset, length)

    shown = shown_path(beginning.path)
    try:
        for sample in samples(read, beginning.size, shown, beginning.skipped):
            beginning.found.append(sample)
        beginning.complete = True
    except _EnoughError:
        pass


def _read(source: Source, offset: int, length: int) -> bytes:
    """Return exactly these bytes, with one request."""
    data = bytearray(length)
    source.read_into(memoryview(data), offset)
    return bytes(data)


def _has_ranges(source: Source) -> bool:
    return isinstance(source, LocalFile) or source.ranged
