"""Samples of shards that are read one shard after another, without an index.

These are the stages of `wt.WebDataset` where shards cannot be planned by count: compressed shards,
shards drawn with replacement, damaged shards, and the caller's own splitters.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from wdstrain.errors import ShardError, WdstrainError
from wdstrain.loader.options import open_cache
from wdstrain.loader.shared_epochs import SharedEpochs, worker_share
from wdstrain.loader.tar_stream import members, open_tar, shown
from wdstrain.shards.tar import (
    NO_KEY,
    NOT_A_SAMPLE,
    SkippedMembers,
    is_not_sample,
    other_kind,
    split_name,
)
from wdstrain.storage.remote import is_remote, redacted
from wdstrain.storage.shard_cache import Cache

# Fields with these names are not data: webdataset puts values of its own there.
RESERVED = frozenset({"__key__", "__url__", "__local_path__", "__bad__"})

Handler = Callable[[Exception], Any]  # webdataset's: raises, or returns whether to go on

_log = logging.getLogger("wdstrain")


class LoggedHandler:
    """A handler of webdataset whose decisions are logged, so that no damage is skipped silently.

    Logs the first five errors that it skips, then each whose number is a power of two.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler, self._skipped, self._lost = handler, 0, 0

    def __call__(self, error: Exception, samples: int = 0) -> bool:
        """Return whether to go on. samples: the most samples that the error costs; 0: unknown."""
        go_on = bool(self._handler(error))
        self._skipped += 1
        if self._skipped <= 5 or self._skipped & (self._skipped - 1) == 0:
            _log.warning(
                "%s The handler %s. Errors so far: %d.",
                error if str(error).endswith(".") else f"{error}.",
                "skips this error" if go_on else "ends this pass",
                self._skipped,
            )
        return go_on


def origin_of(path: str) -> dict[str, str]:
    """Return the entries of a sample that say where it comes from, as webdataset names them."""
    if is_remote(path):
        return {"__url__": redacted(path)}
    return {"__url__": path, "__local_path__": path}


class ShardList(IterableDataset[dict[str, str]]):
    """Paths of shards as {"url": path}; every `for` is the next epoch.

    All ranks and worker processes get the same order.
    """

    def __init__(self, paths: list[str], *, shuffle: bool, seed: int) -> None:
        self._paths, self._shuffle, self._seed = paths, shuffle, seed
        self._epochs = SharedEpochs()

    def __len__(self) -> int:
        return len(self._paths)

    def set_epoch(self, number: int) -> None:
        self._epochs.set(number)

    def __iter__(self) -> Iterator[dict[str, str]]:
        epoch, paths = self._epochs.begin(), list(self._paths)
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(paths)
        return iter([{"url": path} for path in paths])


class ShardSplit:
    """Stage that keeps this rank's share of the shards."""

    def __init__(self, ranks: tuple[int, int]) -> None:
        """ranks: (rank, world size)."""
        self._rank, self._world_size = ranks

    def __call__(self, shards: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
        return islice(shards, self._rank, None, self._world_size)


def split_by_worker(shards: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Keep this worker process's share of the shards."""
    worker, workers = worker_share()
    return islice(shards, worker, None, workers)


class ShardSamples:
    """Stage from {"url": path} to samples, read forward with the checks of `tar_stream`."""

    def __init__(
        self,
        handler: LoggedHandler,
        select_files: Callable[[str], bool] | None,
        rename_files: Callable[[str], str] | None,
        cache: Mapping[str, Any],
    ) -> None:
        """cache: options `cache_dir` and `cache_limit` of a `Loader`; empty for no cache."""
        self._handler, self._select, self._rename = handler, select_files, rename_files
        self._cache_options = cache

    def __call__(self, shards: Iterable[dict[str, str]]) -> Iterator[dict[str, Any]]:
        cache = open_cache(**self._cache_options)
        for shard in shards:
            try:
                yield from self._samples(shard["url"], cache)
            except WdstrainError as error:
                if not self._handler(error):
                    return

    def _samples(self, path: str, cache: Cache | None) -> Iterator[dict[str, Any]]:
        """Yield the samples of a shard. After an error the sample before it is incomplete."""
        name, keys, skipped, bad = shown(path), set[str](), SkippedMembers(), 0
        origin = origin_of(path)
        current: dict[str, Any] | None = None
        for key, field, data in self._fields(path, cache, skipped):
            if current is None or current["__key__"] != key:
                if current is not None and not current.get("__bad__"):
                    yield current
                bad += current is not None and bool(current.get("__bad__"))
                if key in keys and not self._handler(_two_places(name, key)):
                    return
                keys.add(key)
                current = {"__key__": key, **origin}
            if field in current:
                if not self._handler(_twice(name, f"{key}.{field}")):
                    return
                continue
            current[field] = data
        if current is not None and not current.get("__bad__"):
            yield current
        bad += current is not None and bool(current.get("__bad__"))
        _log_skipped(name, skipped, bad)

    def _fields(
        self, path: str, cache: Cache | None, skipped: SkippedMembers
    ) -> Iterator[tuple[str, str, bytes]]:
        """Yield (key, field, data) of the members that belong to samples."""
        with open_tar(path, cache) as stream:
            for name, data in members(stream, shown(path), skipped):
                if is_not_sample(name):
                    skipped.add(NOT_A_SAMPLE)
                    continue
                try:
                    name = self._rename(name) if self._rename else name
                    if self._select and not self._select(name):
                        continue
                except Exception as error:  # of the caller's function
                    if not self._handler(error):
                        return
                    continue
                parts = split_name(name)
                if parts is None:
                    skipped.add(NO_KEY)
                    continue
                yield *parts, data


def _two_places(shard: str, key: str) -> ShardError:
    return ShardError(
        f"{shard} holds members of '{key}' in two places; the fields of a sample must be adjacent. "
        f"Repack it from a sorted list."
    )


def _twice(shard: str, name: str) -> ShardError:
    return ShardError(f"{shard} holds two members named '{name}', or a reserved name. Repack it.")


def _log_skipped(shard: str, skipped: SkippedMembers, bad: int) -> None:
    """Log the members and samples of a shard that were left out, without directories."""
    counts = {reason: n for reason, n in skipped.reasons.items() if reason != other_kind(b"5", "")}
    if bad:
        counts['samples with the field "__bad__"'] = bad
    if counts:
        reasons = ", ".join(f"{count} times {reason}" for reason, count in counts.items())
        _log.info("%s: left out, no part of any sample: %s", shard, reasons)
