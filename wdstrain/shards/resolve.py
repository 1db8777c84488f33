"""Addresses to an index: read it beside the shards, recall it, or make it from tar headers.

An index beside the shards is used after the sizes of the shards were compared. Shards without an
index are scanned header by header once. The scan of a shard is stored in the user's cache folder, and
used as long as the state of the shard (times and inode, or ETag) does not change. One process of a
machine scans a set; the others, such as ranks, wait for its result.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from hashlib import blake2b
from itertools import chain, groupby, islice
from multiprocessing import TimeoutError as NotReady
from multiprocessing.pool import IMapIterator, ThreadPool
from typing import TypeVar

from wdstrain.errors import ShardError, StorageError, UsageError, WdstrainError, logger
from wdstrain.runtime.file_locks import lock_file, unlock_file
from wdstrain.shards.index import Index, Shard, expected_state, join
from wdstrain.shards.index_io import check_sizes, find_index, load, pack_part, unpack_part
from wdstrain.shards.offsets import Offsets, Row
from wdstrain.shards.tar import Sample, SkippedMembers, samples, skipped_text
from wdstrain.storage.addresses import (
    INDEX_NAME,
    Urls,
    addresses_of,
    beside,
    check_no_change,
    expand,
    is_json,
    tars_of,
)
from wdstrain.storage.files import is_state, open_source, read_whole, user_cache, write_whole
from wdstrain.storage.remote import RemoteFile, is_remote, name_of, shown_path

_THREADS = 16  # remote shards that are examined at the same time
_PAUSE = 20.0  # seconds of a scan between two lines about its progress
_POLL = 0.5  # seconds of each wait for a thread
_ADVICE = "An index beside them saves this: wdstrain index"


Result = TypeVar("Result")
Note = Callable[[str], None]  # receives a line for the log
Place = tuple[str, Index | None]  # the path of a shard, and the index that lists it


def open_index(urls: Urls | Index, *, note: Note | None = None) -> Index:
    """Return the index of the shards at `urls`; an index as it is.

    note: receives a line about each scan of headers. Raises UsageError for addresses without shards,
    ShardError for shards that are cut, damaged, unfinished or different from their index.
    """
    return _opened(urls, note)[0]


def open_shards(
    urls: Urls | Index,
    split: str | None = None,
    *,
    unless: Collection[str] = (),
    may_be_short: bool = False,
) -> Index:
    """Return the index of shards of one split; an index as it is.

    split: name of the split. None: no single address may have several, which keeps validation data
    out of training. A brace pattern such as {train,extra}-*.tar counts as several addresses.
    unless: a set with all of these splits is returned as it is. may_be_short: shards may have fewer
    bytes than their index says. Logs a warning if shards without an index are scanned. Raises
    UsageError, with a shard of each split, and as `open_index` does.
    """
    index, meant = _opened(urls, logger.warning, may_be_short=may_be_short)
    if split is not None:
        numbers = [i for i, shard in enumerate(index.shards) if shard.split == split]
        if not numbers:
            names = ", ".join(filter(None, index.splits)) or "none"
            raise UsageError(
                f"the splits of these shards are {names}.",
                option="split",
                value=split,
            )
        return index.pick(numbers)
    if unless and set(unless) <= set(index.splits):
        return index
    by_path = {shard.path: shard for shard in index.shards}
    for address, places in meant.items():
        shards = [by_path[path] for path, _ in reversed(places)]
        first = {shard.split or "no split": shard.shown for shard in shards}  # of each split
        if len(first) > 1:
            raise UsageError(
                f"{shown_path(address)} holds several splits: {', '.join(reversed(first))}.",
                f"Name one by its shards, such as {', '.join(reversed(first.values()))}: with * "
                "in a folder, with braces on a server, or by the option split of a loader.",
            )
    return index


def groups_of(paths: Iterable[str]) -> Iterator[tuple[list[str], Index | None]]:
    """Yield (paths, index) of consecutive shards of one folder at the paths of tars and index files.

    index: of these shards, from the file that lists them; None: none does. Their sizes are not
    compared with the index. Raises ShardError for an index that is damaged, and for an unfinished
    folder.
    """
    index_at = cache(find_index)  # each file is read once
    return _grouped(place for path in paths for place in places_at(path, index_at))


def _grouped(places: Iterable[Place]) -> Iterator[tuple[list[str], Index | None]]:
    """Yield (paths, index) of consecutive shards of one folder; see `groups_of`."""
    for _, run in groupby(places, key=lambda place: (beside(place[0], ""), id(place[1]))):
        (*paths,), (index, *_) = zip(*run, strict=True)
        yield paths, None if index is None else picked(index, paths)


def join_once(parts: Sequence[Index]) -> Index:
    """Return indexes as one. Raises UsageError for a shard that is named twice."""
    index = join(parts)
    named: dict[str, Shard] = {}  # by real path
    for shard in index.shards:
        path = shard.path if is_remote(shard.path) else os.path.realpath(shard.path)
        if path in named:
            raise UsageError(
                f"{shard.shown} is named twice (also as {named[path].shown}), so its samples "
                "would come twice.",
                "Name each shard once.",
            )
        named[path] = shard
    return index


def is_newer(shard: Shard) -> bool:
    """Return whether a local shard was changed or moved after the index beside it was written."""
    with suppress(OSError):  # also of a server
        status, index = os.stat(shard.path), os.stat(beside(shard.path, INDEX_NAME))
        return max(status.st_mtime_ns, status.st_ctime_ns) >= index.st_mtime_ns
    return False


def places_at(path: str, index_at: Callable[[str], Index | None]) -> list[Place]:
    """Return the shards that a tar or an index file means.

    Raises ShardError for a remote index that is missing, and for one that is damaged.
    """
    index = index_at(path if is_json(path) else beside(path, INDEX_NAME))
    if not is_json(path):
        number = None if index is None else index.shard_numbers.get(name_of(path))
        if index is not None and number is not None:
            return [(index.shards[number].path, index)]  # however the address spells it
        if index is not None:
            check_no_change(path)
        return [(path, None)]
    if index is not None:
        return [(shard.path, index) for shard in index.shards]
    if is_remote(path):
        load(path)  # raises the error
    # Another tool's list without offsets: use the shards beside it.
    return [place for tar in tars_of(os.path.dirname(path)) for place in places_at(tar, index_at)]


def _opened(
    urls: Urls | Index, note: Note | None, *, may_be_short: bool = False
) -> tuple[Index, dict[str, list[Place]]]:
    """Return the index of shards, and those that each address means."""
    if isinstance(urls, Index):
        return urls, {}
    index_at, addresses = cache(find_index), addresses_of(urls)  # each file is read once
    meant = {
        address: [place for path in expand(address) for place in places_at(path, index_at)]
        for address in addresses
    }
    parts = [
        recall_or_scan(paths, note) if index is None else _checked(index, note, may_be_short)
        for paths, index in _grouped(chain(*map(meant.__getitem__, addresses)))
    ]
    return join_once(parts), meant


def _checked(index: Index, note: Note | None, may_be_short: bool) -> Index:
    """Return an index with the current states of its shards.

    Shards that are newer than their index and have no checksums are scanned. The result is stored, so
    a shard is scanned once. may_be_short: see `open_shards`; a shard that is cut is not scanned.
    Raises ShardError for a shard that differs from its index.
    """
    index = check_sizes(index, may_be_short=may_be_short)
    newer = [
        shard.path
        for shard in index.shards
        if expected_state(index, shard)
        and is_newer(shard)
        and os.path.getsize(shard.path) == shard.bytes
    ]
    failed: list[WdstrainError] | None = [] if may_be_short else None
    scanned = recall_or_scan(newer, note, failed) if newer else index.pick([])
    for shard in scanned.shards:
        listed, actual = picked(index, [shard.path]), picked(scanned, [shard.path])
        if listed.offsets.differences(actual.offsets):
            raise ShardError(
                f"{shard.path} holds other samples than its index says: it was replaced after it "
                "was indexed.",
                f"Accept it as it is: wdstrain index {os.path.dirname(shard.path) or '.'}",
            )
    return index


# --- scans of headers ------------------------------------------------------------------------------


def recall_or_scan(
    paths: Sequence[str], note: Note | None = None, failed: list[WdstrainError] | None = None
) -> Index:
    """Return the index of shards of one folder that no index lists: recalled or scanned.

    note: receives lines about the scan. failed: a list that receives the errors of bad shards,
    which are then left out; None: the first error is raised.
    """
    known, log = recall(paths), note or logger.info
    if len(known) < len(paths):
        with _only_scan_of(beside(paths[0], ""), log):
            known = recall(paths)  # another process may have scanned them meanwhile
            fresh = [path for path in paths if path not in known]
            known |= _scanned_and_stored(fresh, failed, log)
    return _joined([known[path] for path in paths if path in known])


def recall(paths: Sequence[str]) -> dict[str, Index]:
    """Return the indexes of the shards among `paths` that an earlier scan stored."""
    with _threads(min(_THREADS, len(paths) or 1)) as threads:
        results = threads.imap(_recalled, paths)
        known = {path: _next(results) for path in paths}
    return {path: index for path, index in known.items() if index is not None}


def remember(index: Index) -> bool:
    """Store the index of one shard for later calls of `recall`. Returns False if that fails."""
    (shard,) = index.shards
    place = place_of(shard.path)
    with suppress(OSError, WdstrainError):
        os.makedirs(os.path.dirname(place), exist_ok=True)
        write_whole(place, pack_part(index, {"state": shard.tag}))
        return True
    return False


def place_of(path: str) -> str:
    """Return the path of the file where the scan of a shard is stored."""
    place = path if is_remote(path) else os.path.abspath(path)
    digest = blake2b(place.encode("utf-8", "surrogateescape"), digest_size=12)
    return user_cache("scans", f"{digest.hexdigest()}.arrow")


def scan(paths: Iterable[str]) -> Index:
    """Return an index made from the headers of tar shards, without checksums and labels."""
    return _joined(list(_scanned(list(paths), None)))


def scan_shard(
    path: str, stopping: threading.Event | None = None, *, most: int | None = None
) -> Index:
    """Return the index of one shard, or of its first samples, made from its headers.

    stopping: set to end reading. most: number of samples; None: all.
    """
    skipped = SkippedMembers()
    with open_source(path, stopping=stopping) as source:
        rows = islice(samples(source.bytes_at, source.size, shown_path(path), skipped), most)
        return index_of(path, rows, source.size, source.version, skipped)


def index_of(
    path: str, rows: Iterable[Sample], size: int, tag: str | None, skipped: SkippedMembers
) -> Index:
    """Return the index of a shard of `size` bytes whose headers were read. tag: its state."""
    offsets = Offsets.of_samples(map(_row, rows))
    shard = Shard(path, len(offsets), size, tag=tag or "")
    return Index((shard,), offsets, info={"ignored": dict(skipped)})


def _row(sample: Sample) -> Row:
    """Return where a sample lies in its shard."""
    (key, fields), members = sample, [*sample[1].values()]
    extents = [(name, member.offset, member.size, 0) for name, member in fields.items()]
    return key, members[0].start, members[-1].stop, extents


def picked(index: Index, paths: Iterable[str]) -> Index:
    """Return the index of the shards at these paths, as far as it has them, in their order."""
    numbers = index.shard_numbers
    return index.pick(numbers[name] for name in map(name_of, paths) if name in numbers)


def is_unchanged(shard: Shard) -> bool:
    """Return whether a shard still has the state it had when it was scanned.

    False also for a missing shard: reading it raises the error. A remote shard without an ETag may
    be any other of the same size.
    """
    with suppress(OSError, StorageError):
        if is_remote(shard.path):
            with RemoteFile(shard.path) as source:
                return source.size == shard.bytes and (source.version or "?") == shard.tag
        status = os.stat(shard.path)
        return status.st_size == shard.bytes and is_state(shard.tag, status)
    return False


def _recalled(path: str) -> Index | None:
    """Return the index of a shard that was stored; None if there is none for its current state."""
    with suppress(WdstrainError, OSError):
        index, extra = unpack_part(read_whole(place_of(path)) or b"", path)
        shard = replace(index.shards[0], path=path, tag=str(extra["state"]))
        return replace(index, shards=(shard,)) if is_unchanged(shard) else None
    return None


def _scanned_and_stored(
    paths: list[str], failed: list[WdstrainError] | None, log: Note
) -> dict[str, Index]:
    """Return the indexes of shards from their headers. Each is stored, so a scan can continue."""
    known, is_stored, begun = dict[str, Index](), True, time.perf_counter()
    last = begun
    for part in _scanned(paths, failed):
        known[part.shards[0].path] = part
        is_stored, now = remember(part), time.perf_counter()
        if now - last > _PAUSE:
            last, done = now, f"{len(known)} of {len(paths)} shards without an index are scanned"
            log(f"{shown_path(paths[0])}: {done} after {now - begun:.0f} s. {_ADVICE}")
    if known:
        scanned, seconds = _joined([*known.values()]), max(time.perf_counter() - begun, 1e-9)
        skipped = skipped_text(scanned.info.get("ignored", {}))
        log(
            f"no index beside {scanned.shards[0].shown}: scanned the headers of {len(scanned)} "
            f"samples in {seconds:.2f} s ({len(scanned) / seconds:.0f}/s)"
            + (", which are remembered" if is_stored else "; the cache cannot be written")
            + (f". Passed over, no part of any sample: {skipped}" if skipped else "")
            + f". {_ADVICE}"
        )
    return known


@contextmanager
def _threads(count: int) -> Iterator[ThreadPool]:
    """Yield threads that have ended afterwards, so that no worker process is forked beside them.

    After an error or an interrupt nobody waits for them, as for one that a silent server holds up.
    """
    with ThreadPool(count) as threads:
        yield threads
        threads.close()
        threads.join()


def _next(results: IMapIterator[Result]) -> Result:
    """Return the next result of threads.

    Python can miss a Ctrl-C that comes just before an endless wait, so each wait has an end.
    """
    while True:
        with suppress(NotReady):
            return results.next(_POLL)


def _scanned(paths: list[str], failed: list[WdstrainError] | None) -> Iterator[Index]:
    """Yield the index of each shard in order, several remote shards at a time."""
    stopping = threading.Event()
    with _threads(_THREADS if any(map(is_remote, paths)) else 1) as threads:
        scans = threads.imap(partial(scan_shard, stopping=stopping), paths)
        try:
            for _ in paths:
                try:
                    yield _next(scans)
                except WdstrainError as error:
                    if failed is None:
                        raise
                    failed.append(error)
        finally:
            stopping.set()


def _joined(parts: Sequence[Index]) -> Index:
    """Return scanned indexes as one, with the sum of their skipped members."""
    index = join([part for part in parts if part.shards] or [Index()])
    ignored = sum((Counter(part.info.get("ignored")) for part in parts), Counter[str]())
    info = {"made": "scanned from headers"} | ({"ignored": dict(ignored)} if ignored else {})
    return replace(index, info=info)


@contextmanager
def _only_scan_of(folder: str, log: Note) -> Iterator[None]:
    """Wait until no other process scans `folder`, and keep others out meanwhile.

    The system releases the lock of a process that dies.
    """
    lock, path = None, f"{place_of(folder)}.lock"
    with suppress(OSError):  # without a cache folder, each process scans
        os.makedirs(os.path.dirname(path), exist_ok=True)
        lock = lock_file(path)
        if lock is None:
            log(f"waiting for the scan of {shown_path(folder)} by another process. {_ADVICE}")
            lock = lock_file(path, wait=True)
    try:
        yield
    finally:
        unlock_file(lock)
