"""Indexes of shards that have none, made from tar headers once and stored.

The scan of a shard is stored in the user's cache folder, and used as long as the state of the shard
(times and inode, or ETag) does not change.
One process of a machine scans a set; the others, such as ranks, wait for its result.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from multiprocessing.pool import ThreadPool

from wdstrain.errors import StorageError, UsageError, WdstrainError
from wdstrain.runtime.file_locks import lock_file, unlock_file
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.index_io import pack_part, unpack_part
from wdstrain.shards.offsets import Offsets
from wdstrain.shards.tar import Sample, SkippedMembers, samples, skipped_text
from wdstrain.storage.addresses import beside
from wdstrain.storage.files import is_state, open_source, read_whole, user_cache, write_whole
from wdstrain.storage.remote import RemoteFile, is_remote, name_of, shown_path

_THREADS = 16  # remote shards that are examined at the same time
_PAUSE = 20.0  # seconds of a scan between two lines about its progress
_ADVICE = "An index beside them saves this: wdstrain index"

_log = logging.getLogger("wdstrain")

Note = Callable[[str], None]  # receives a line for the log


def recall_or_scan(
    paths: Sequence[str], note: Note | None = None, failed: list[WdstrainError] | None = None
) -> Index:
    """Return the index of shards of one folder that no index lists: recalled or scanned.

    note: receives lines about the scan. failed: a list that receives the errors of bad shards,
    which are then left out; None: the first error is raised.
    """
    known, log = recall(paths), note or _log.info
    if len(known) < len(paths):
        with _only_scan_of(beside(paths[0], ""), log):
            known = recall(paths)  # another process may have scanned them meanwhile
            fresh = [path for path in paths if path not in known]
            known |= _scanned_and_stored(fresh, failed, log)
    return _joined([known[path] for path in paths if path in known])


def recall(paths: Sequence[str]) -> dict[str, Index]:
    """Return the indexes of the shards among `paths` that an earlier scan stored.

    Raises UsageError for a shard that was not finished.
    """
    for path in paths:
        if path.endswith(".tmp"):
            raise UsageError(f"{path} is a shard that was not finished. Run the conversion again.")
    with _threads(_THREADS) as threads:
        known = dict(zip(paths, threads.map(_recalled, paths), strict=True))
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
        rows = list(islice(samples(source.read, source.size, shown_path(path), skipped), most))
        return index_of(path, rows, source.size, source.version, skipped)


def index_of(
    path: str, rows: list[Sample], size: int, tag: str | None, skipped: SkippedMembers
) -> Index:
    """Return the index of a shard of `size` bytes whose headers were read. tag: its state."""
    shard = Shard(path, len(rows), size, tag=tag or "")
    return Index((shard,), Offsets.of(rows), info={"ignored": dict(skipped)})


def picked(index: Index, paths: Iterable[str]) -> Index:
    """Return the index of the shards at these paths, as far as it has them, in their order."""
    numbers = index.shard_numbers
    return index.pick(numbers[name] for name in map(name_of, paths) if name in numbers)


def is_unchanged(shard: Shard) -> bool:
    """Return whether a shard still has the state it had when it was scanned.

    False also for a missing shard: reading it raises the error. A remote shard without an ETag may
    be any other of the same size.
    """
    try:
        if is_remote(shard.path):
            with RemoteFile(shard.path) as source:
                return source.size == shard.bytes and (source.version or "?") == shard.tag
        status = os.stat(shard.path)
        return status.st_size == shard.bytes and is_state(shard.tag, status)
    except (OSError, StorageError):
        return False


# --- parts ----------------------------------------------------------------------------------------


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
            last, left = now, (now - begun) * (len(paths) / len(known) - 1)
            log(
                f"{shown_path(paths[0])}: {len(known)} of {len(paths)} shards without an index "
                f"are scanned, about {left:.0f} s to go. {_ADVICE}"
            )
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


def _scanned(paths: list[str], failed: list[WdstrainError] | None) -> Iterator[Index]:
    """Yield the index of each shard in order, several remote shards at a time."""
    stopping = threading.Event()
    with _threads(_THREADS if any(map(is_remote, paths)) else 1) as threads:
        scans = threads.imap(partial(scan_shard, stopping=stopping), paths)
        try:
            for _ in paths:
                try:
                    yield next(scans)
                except WdstrainError as error:
                    if failed is None:
                        raise
                    failed.append(error)
        finally:
            stopping.set()


def _joined(parts: Sequence[Index]) -> Index:
    """Return scanned indexes as one, with the sum of their skipped members."""
    index = join([part for part in parts if part.shards] or [Index((), Offsets.of([]))])
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
