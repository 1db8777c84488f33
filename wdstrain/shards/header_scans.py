"""Indexes of shards that have none, made from tar headers once and stored.

A scan is stored in a hidden folder beside the shards, or in the user's cache folder if that cannot
be written. It is used as long as the state of a shard (times and inode, or ETag) does not change.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import islice

import numpy as np

from wdstrain.errors import ShardError, StorageError, UsageError, WdstrainError
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.index_io import load, save_index
from wdstrain.shards.offsets import Offsets
from wdstrain.shards.tar import SkippedMembers, other_kind, samples
from wdstrain.storage.addresses import INDEX_NAME, beside
from wdstrain.storage.files import user_cache
from wdstrain.storage.local import LocalFile, Source, is_state
from wdstrain.storage.remote import ALL_BYTES, RemoteFile, is_remote, name_of, shown_path

_THREADS = 16  # remote shards that are examined at the same time
_HIDDEN = ".wdstrain"  # folder beside shards without an index, for the result of a scan
_PAUSE = 20.0  # seconds of a scan between two lines about its progress, which is stored then

_log = logging.getLogger("wdstrain")

Note = Callable[[str], None]  # receives a line for the log


def recall_or_scan(
    paths: Sequence[str], note: Note | None, failed: list[WdstrainError] | None = None
) -> Index:
    """Return the index of shards of one folder that no index lists: recalled or scanned.

    note: receives lines about the scan. failed: a list that receives the errors of bad shards,
    which are then left out; None: the first error is raised.
    """
    folder, known, begun = beside(paths[0], ""), recall(paths), time.perf_counter()
    fresh = [path for path in paths if name_of(path) not in known.shard_numbers]
    if not fresh:
        return known
    parts, told = list[Index](), begun
    for part in _scanned(fresh, failed):
        parts.append(part)
        now = time.perf_counter()
        if now - told > _PAUSE:
            _remember(_joined([known, *parts]), folder)
            told, left = now, (now - begun) * (len(fresh) / len(parts) - 1)
            (note or _log.info)(
                f"{shown_path(fresh[0])}: {len(parts)} of {len(fresh)} shards without an index are "
                f"scanned, about {left:.0f} s to go. An index beside them saves this: wdstrain index"
            )
    index = _joined([known, *parts])
    if parts:
        place, scanned = _remember(index, folder), _joined(parts)
        remembered = f"remembered in {place}"
        if place is None:
            remembered = "not remembered: neither the folder nor the cache can be written"
        seconds = max(time.perf_counter() - begun, 1e-9)
        (note or _log.info)(
            f"no index beside {scanned.shards[0].shown}: scanned the headers of {len(scanned)} "
            f"samples in {seconds:.2f} s ({len(scanned) / seconds:.0f}/s); "
            f"{remembered}{_passed_over(scanned)}"
        )
    return _picked(index, paths)


def recall(paths: Sequence[str]) -> Index:
    """Return the index of the shards among `paths` that an earlier scan stored, in their order.

    paths: shards of one folder. Raises UsageError for a shard that was not finished.
    """
    for path in paths:
        if path.endswith(".tmp"):
            raise UsageError(f"{path} is a shard that was not finished. Run the conversion again.")
    folder, missing, parts = beside(paths[0], ""), set(map(name_of, paths)), [scan([])]
    for place in _places(folder):
        with suppress(ShardError, OSError):
            index = load(os.path.join(place, INDEX_NAME), base=folder)
            index = index.pick(i for i, s in enumerate(index.shards) if s.name in missing)
            states = dict(index.info.get("states") or {})
            shards = [replace(s, tag=str(states.get(s.name) or "")) for s in index.shards]
            with ThreadPoolExecutor(_THREADS) as threads:
                unchanged = list(threads.map(is_unchanged, shards))
            parts.append(replace(index, shards=tuple(shards)).pick(np.flatnonzero(unchanged)))
            missing -= set(parts[-1].shard_numbers)
        if not missing:
            break
    return _picked(_joined(parts), paths)


def scan(paths: Iterable[str], failed: list[WdstrainError] | None = None) -> Index:
    """Return an index made from the headers of tar shards, without checksums and labels.

    failed: see `recall_or_scan`.
    """
    return _joined(list(_scanned(list(paths), failed)))


def scan_shard(
    path: str, stopping: threading.Event | None = None, *, most: int | None = None
) -> Index:
    """Return the index of one shard, or of its first samples, made from its headers.

    stopping: set to end reading. most: number of samples; None: all.
    """
    skipped = SkippedMembers()
    file: Source = (
        RemoteFile(path, stopping=stopping, first_bytes=ALL_BYTES)
        if is_remote(path)
        else LocalFile(path)
    )
    with file as source:
        rows = list(islice(samples(source.read, source.size, shown_path(path), skipped), most))
        shard = Shard(path, len(rows), source.size, tag=source.version or "")
    return Index((shard,), Offsets.of(rows), info={"ignored": skipped.reasons})


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


def _scanned(paths: list[str], failed: list[WdstrainError] | None) -> Iterator[Index]:
    """Yield the index of each shard in order, several remote shards at a time."""
    stopping = threading.Event()

    def scanned(path: str) -> Index | WdstrainError:
        try:
            return scan_shard(path, stopping)
        except WdstrainError as error:
            return error

    with ThreadPoolExecutor(_THREADS if any(map(is_remote, paths)) else 1) as threads:
        try:
            for part in threads.map(scanned, paths):
                if isinstance(part, Index):
                    yield part
                elif failed is None:
                    raise part
                else:
                    failed.append(part)
        finally:
            stopping.set()


def _joined(parts: Sequence[Index]) -> Index:
    """Return scanned indexes as one, with the sum of their skipped members."""
    index = join([part for part in parts if part.shards] or [Index((), Offsets.of([]))])
    if "made" in index.info:  # recalled
        return index
    ignored = Counter[str]()
    for part in parts:
        ignored.update(part.info.get("ignored", {}))
    info = {"made": "scanned from headers"} | ({"ignored": dict(ignored)} if ignored else {})
    return replace(index, info=info)


def _picked(index: Index, paths: Iterable[str]) -> Index:
    """Return the index of the shards at these paths, as far as it has them, in their order."""
    numbers = index.shard_numbers
    return index.pick(numbers[name] for name in map(name_of, paths) if name in numbers)


def _passed_over(index: Index) -> str:
    """Return a sentence about members that a scan skipped, without directories; "" if none."""
    ignored, is_directory = index.info.get("ignored", {}), other_kind(b"5", "")
    counts = [f"{n} times {reason}" for reason, n in ignored.items() if reason != is_directory]
    return f". Passed over, no part of any sample: {', '.join(counts)}" if counts else ""


def _places(folder: str) -> Iterator[str]:
    """Yield the folders where a scan of `folder` may be stored, the best first."""
    if not is_remote(folder):
        yield os.path.join(folder, _HIDDEN)
        folder = os.path.abspath(folder)
    name = blake2b(folder.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
    yield user_cache("indexes", name)


def _remember(index: Index, folder: str) -> str | None:
    """Store the result of a scan of `folder`; return where, or None if no place can be written."""
    states = {shard.name: shard.tag or None for shard in index.shards}
    for place in _places(folder):
        with suppress(OSError, StorageError):
            os.makedirs(place, exist_ok=True)
            save_index(replace(index, info={**index.info, "states": states}), place)
            return place
    return None
