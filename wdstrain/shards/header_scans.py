"""Indexes of shards that have none, made from tar headers once and stored.

A scan is stored in a hidden folder beside the shards, or in the user's cache folder if that cannot
be written. It is used as long as the state of a shard (times and inode, or ETag) does not change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b

from wdstrain.errors import ShardError, StorageError, UsageError, WdstrainError
from wdstrain.shards.index import Index, Shard, join
from wdstrain.shards.index_io import load, save_index, scan
from wdstrain.shards.tar import other_kind
from wdstrain.storage.addresses import (
    INDEX_NAME,
    beside,
)
from wdstrain.storage.files import user_cache
from wdstrain.storage.local import is_state
from wdstrain.storage.remote import RemoteFile, is_remote, name_of

_STATE_THREADS = 8  # shards whose state is requested at the same time
_HIDDEN = ".wdstrain"  # folder beside shards without an index, for the result of a scan

Note = Callable[[str], None]  # receives a line for the log


def recall_or_scan(
    paths: list[str], note: Note | None, failed: list[WdstrainError] | None = None
) -> Index:
    """Return the index of shards of one folder that no index lists: recalled or scanned.

    note: receives a line about the scan. failed: a list that receives the errors of bad shards,
    which are then left out; None: the first error is raised.
    """
    known = recall(paths)
    fresh = [path for path in paths if name_of(path) not in known.shard_numbers]
    if not fresh:
        return known
    begun = time.perf_counter()
    scanned = scan(fresh, failed)
    seconds = time.perf_counter() - begun
    index = join([part for part in (known, scanned) if part.shards] or [known])
    if scanned.shards:
        place = _remember(index, _folder(paths))
        if note:
            stored = "not remembered: neither the folder nor the cache can be written"
            if place:
                stored = f"remembered in {place}"
            rate = len(scanned) / max(seconds, 1e-9)
            note(
                f"no index beside {scanned.shards[0].shown}: scanned the headers of "
                f"{len(scanned)} samples in {seconds:.2f} s ({rate:.0f}/s); "
                f"{stored}{_skipped(scanned)}"
            )
    return index.pick(
        index.shard_numbers[name] for name in map(name_of, paths) if name in index.shard_numbers
    )


def _skipped(index: Index) -> str:
    """Return a sentence about members that a scan skipped, without directories; "" if none."""
    ignored = index.info.get("ignored", {})
    is_directory = other_kind(b"5", "")
    counts = [
        f"{count} times {reason}" for reason, count in ignored.items() if reason != is_directory
    ]
    return f". Passed over, no part of any sample: {', '.join(counts)}" if counts else ""


def recall(paths: list[str]) -> Index:
    """Return the index of the shards among `paths` that an earlier scan stored, in their order.

    paths: shards of one folder. Raises UsageError for a shard that was not finished.
    """
    for path in paths:
        if path.endswith(".tmp"):
            raise UsageError(f"{path} is a shard that was not finished. Run the conversion again.")
    index = _recall(_folder(paths), {name_of(path) for path in paths})
    if index is None:
        return scan([])
    return index.pick(
        index.shard_numbers[name] for name in map(name_of, paths) if name in index.shard_numbers
    )


def _folder(paths: list[str]) -> str:
    return beside(paths[0], "") if is_remote(paths[0]) else os.path.dirname(paths[0])


def _places(folder: str) -> Iterator[str]:
    """Yield the folders where a scan of `folder` may be stored, the best first."""
    if not is_remote(folder):
        yield os.path.join(folder, _HIDDEN)
    name = blake2b(
        (folder if is_remote(folder) else os.path.abspath(folder)).encode(
            "utf-8", "surrogateescape"
        ),
        digest_size=12,
    ).hexdigest()
    yield user_cache("indexes", name)


def _recall(folder: str, wanted: set[str]) -> Index | None:
    """Return the stored index of the wanted shards (names) that have not changed since.

    None if nothing is stored for them.
    """
    for place in _places(folder):
        with suppress(ShardError, OSError):
            index = load(os.path.join(place, INDEX_NAME), base=folder)
            states = index.info.get("states")
            states = states if isinstance(states, dict) else {}
            index = index.pick(i for i, shard in enumerate(index.shards) if shard.name in wanted)
            shards = [
                replace(shard, tag=str(states.get(shard.name) or "")) for shard in index.shards
            ]
            index = replace(index, shards=tuple(shards))
            with ThreadPoolExecutor(_STATE_THREADS) as threads:
                unchanged = list(threads.map(is_unchanged, index.shards))
            same = [i for i, is_same in enumerate(unchanged) if is_same]
            return index.pick(same) if same else None
    return None


def _remember(index: Index, folder: str) -> str | None:
    """Store the result of a scan of `folder`; return where, or None if no place can be written."""
    states = {shard.name: shard.tag or None for shard in index.shards}
    for place in _places(folder):
        with suppress(OSError, StorageError):
            os.makedirs(place, exist_ok=True)
            save_index(replace(index, info={**index.info, "states": states}), place)
            return place
    return None


def is_unchanged(shard: Shard) -> bool:
    """Return whether a shard still has the state it had when it was scanned.

    False also for a missing shard: reading it raises the error.
    """
    if is_remote(shard.path):
        try:
            with RemoteFile(shard.path) as source:
                # Without an ETag it may be any other shard of the same size
                is_same_size = source.size == shard.bytes
                return is_same_size and source.version is not None and source.version == shard.tag
        except StorageError:
            return False
    try:
        status = os.stat(shard.path)
    except OSError:
        return False
    return status.st_size == shard.bytes and is_state(shard.tag, status)
