"""What can be said at once of shards that no index lists: a few of them are looked into, within bounds that do not grow with them.

Of 8 shards, evenly chosen, the first MB is read in one piece, and where that holds few samples, up to 16 places after it where the
next header must be: 3 MB of a shard and 24 MB in all, at most, be they of a terabyte. What the samples found there take tells how
many there are in all. From a server the size of a shard comes with its first bytes; a request of its own (HEAD) is refused by
addresses that are signed for reading. Where no more than 8 shards are wholly walked over within these bounds, nothing is estimated.

The road not taken: walking in the background and telling more and more. Who asks what a set holds wants one answer, and has
`exact` for the rest.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.offsets import Offsets
from wdstrain.shards.tar import END, Sample, Walk, samples
from wdstrain.storage.local import LocalFile, Source
from wdstrain.storage.remote import is_remote, open_remote, redacted

FIRST = 1 << 20  # bytes of the beginning of a shard
LOOKED_INTO = 8  # shards
MORE = 16  # reads after the beginning, of 128 KB each
_WANTED = 50  # samples of a shard, for which more than its beginning is read
_SIZED = 200  # shards of a server whose sizes are asked for, and shards on a disk whose ends are looked at

Asked = TypeVar("Asked")


@dataclass
class Glimpse:
    """The beginning of a shard: its size, its first bytes, and what samples lie in what was looked at."""

    path: str
    size: int = 0
    head: bytes = b""
    tag: str = ""
    found: list[Sample] = field(default_factory=list)
    whole: bool = False  # the walk came to the end
    walk: Walk = field(default_factory=Walk)
    requests: int = 0
    read: int = 0
    error: WdstrainError | None = None


@dataclass
class Seen:
    """What was found: an index of the samples that were looked at, and what it stands for.

    index: all shards that are not known to be damaged, those that were not looked into with no samples. samples: in all,
    estimated unless `exact`; error: of it, as a share, two standard deviations if the rest is like it. counts: samples of each
    shard. heads: first bytes by path.
    """

    index: Index
    samples: int
    exact: bool
    error: float
    counts: list[int]
    heads: dict[str, bytes]
    ignored: dict[str, int]
    looked_into: int
    requests: int
    read: int
    errors: list[WdstrainError]


def look_into(paths: Sequence[str]) -> Seen:
    """Look into some shards that no index lists, at most 8, and tell of all. What is wrong with some is in `errors`."""
    chosen = {paths[i] for i in evenly(len(paths), LOOKED_INTO)}
    asked = {paths[i] for i in evenly(len(paths), _SIZED)} | chosen
    looked = [path for path in paths if path in asked or not is_remote(path)]
    glimpses = _at_once(
        looked, lambda path, stopping: _look(path, path in chosen, path in asked, stopping)
    )
    good = {one.path: one for one in glimpses if one.error is None}
    errors = [one.error for one in glimpses if one.error is not None]
    sizes = [one.size for one in good.values()]
    mean = sum(sizes) / max(1, len(sizes))
    fields: list[str] = []
    shards, tables, counts = [], [Offsets.of([], fields)], []
    within = [one for one in good.values() if one.found or one.whole]
    covered = sum(one.size if one.whole else one.found[-1].stop for one in within)
    density = sum(len(one.found) for one in within) / max(1, covered)  # samples per byte
    for path in (path for path in paths if path in good or path not in looked):
        one = good.get(path, Glimpse(path, round(mean)))
        tables.append(Offsets.of(one.found, fields))
        shards.append(Shard(path, len(one.found), one.size, tag=one.tag))
        counts.append(
            len(one.found) if one.whole else max(len(one.found), round(one.size * density))
        )
    ignored: Counter[str] = Counter()
    for one in within:
        ignored.update(one.walk.ignored)
    return Seen(
        index=Index(tuple(shards), tuple(fields), Offsets.join(tables)),
        samples=sum(counts),
        exact=len(within) == len(shards) and all(one.whole for one in within),
        error=_error(within),
        counts=counts,
        heads={one.path: one.head for one in within},
        ignored=dict(ignored),
        looked_into=len(within),
        requests=sum(one.requests for one in glimpses if is_remote(one.path)),
        read=sum(one.read for one in glimpses),
        errors=errors,
    )


def beginnings(index: Index) -> list[Glimpse]:
    """The first MB of 8 of the shards of an index that lie on servers, a request each."""
    far = [shard for shard in index.shards if is_remote(shard.path) and shard.samples]

    def begin(shard: Shard, stopping: threading.Event) -> Glimpse:
        one = Glimpse(shard.path, shard.bytes, requests=1)
        try:
            with open_remote(shard.path, shard.bytes, shard.tag or None, stopping) as source:
                one.head = _bytes(source, 0, min(FIRST, shard.bytes))
                one.read = len(one.head)
        except WdstrainError as error:
            one.error = error
        return one

    return _at_once([far[i] for i in evenly(len(far), LOOKED_INTO)], begin)


def evenly(count: int, most: int) -> list[int]:
    """At most so many of the numbers below a count, ascending, evenly spread from the first to the last."""
    return (
        np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64)).tolist()
        if count
        else []
    )


# --- parts -----------------------------------------------------------------------------------------------------------


class _EnoughError(Exception):
    """The bounds are reached."""


def _at_once(
    things: Sequence[Asked], ask: Callable[[Asked, threading.Event], Glimpse]
) -> list[Glimpse]:
    """What is asked of each, of eight at a time. When this thread is interrupted it waits for none of them."""
    stopping, todo = threading.Event(), deque(enumerate(things))
    found: SimpleQueue[tuple[int, Glimpse | BaseException]] = SimpleQueue()

    def work() -> None:
        while not stopping.is_set():
            try:
                number, one = todo.popleft()
            except IndexError:
                return
            try:
                found.put((number, ask(one, stopping)))
            except BaseException as error:  # handed to who asked
                found.put((number, error))

    count = min(LOOKED_INTO, len(things))
    threads = [
        threading.Thread(target=work, name=f"wdstrain-look-{i}", daemon=True) for i in range(count)
    ]
    glimpses: dict[int, Glimpse] = {}
    try:
        for thread in threads:
            thread.start()
        while len(glimpses) < len(things):
            number, one = found.get()
            if isinstance(one, BaseException):
                raise one
            glimpses[number] = one
    finally:
        stopping.set()
    for thread in threads:
        thread.join()
    return [glimpses[number] for number in range(len(things))]


def _look(path: str, into: bool, end: bool, stopping: threading.Event) -> Glimpse:
    """A shard's size; what lies at its beginning, if it is looked into; whether its end is one, if that is asked."""
    one, far = Glimpse(path), is_remote(path)
    try:
        if not into and not end:
            one.size = os.stat(path).st_size
            return one
        source = (
            open_remote(path, stopping=stopping, first_bytes=FIRST if into else 1)
            if far
            else LocalFile(path)
        )
        with source:
            one.size, one.requests = source.size, 1
            one.tag = source.version or ""
            if into:
                _walk(source, one)
            if one.whole or (far and not into) or one.size < len(END) or not _ranged(source):
                return one
            one.requests, one.read = one.requests + 1, one.read + len(END)
            if _bytes(source, one.size - len(END), len(END)) != END:
                raise ShardError(
                    f"{_shown(path)} ends at byte {one.size} without the two zero blocks that end a tar: it was cut. Copy or pack "
                    f"it again."
                )
    except WdstrainError as error:
        one.error = error
    except OSError as error:
        one.error = StorageError(f"{path} cannot be read: {error.strerror}.")
    return one


def _walk(source: Source, one: Glimpse) -> None:
    """Find samples from the beginning on, within the bounds."""
    one.head, left = _bytes(source, 0, min(FIRST, one.size)), MORE
    one.read += len(one.head)

    def read(offset: int, length: int) -> bytes:
        nonlocal left
        length = min(length, one.size - offset)
        if offset + length <= len(one.head):
            return one.head[offset : offset + length]
        if not left or not _ranged(source) or len(one.found) >= _WANTED:
            raise _EnoughError
        left, one.requests, one.read = left - 1, one.requests + 1, one.read + length
        return _bytes(source, offset, length)

    try:
        for sample in samples(read, one.size, _shown(one.path), one.walk):
            one.found.append(sample)
        one.whole = True
    except _EnoughError:
        pass


def _bytes(source: Source, offset: int, length: int) -> bytes:
    """These bytes and no more: one request for them alone."""
    data = bytearray(length)
    source.read_into([memoryview(data)], offset)
    return bytes(data)


def _ranged(source: Source) -> bool:
    """Whether a part can be read without what lies before it."""
    return isinstance(source, LocalFile) or source.ranged


def _error(within: list[Glimpse]) -> float:
    """Two standard deviations of the mean bytes of a sample, as a share: of samples, or of shards if these differ more."""
    takes = [
        np.array([sample.stop - sample.start for sample in one.found], float)
        for one in within
        if one.found
    ]
    found = []
    for values in (np.concatenate([*takes, np.zeros(0)]), np.array([one.mean() for one in takes])):
        if len(values) > 1:
            found.append(2 * float(values.std(ddof=1) / values.mean()) / len(values) ** 0.5)
    return min(1.0, max(found)) if found else 1.0


def _shown(path: str) -> str:
    return redacted(path) if is_remote(path) else path
