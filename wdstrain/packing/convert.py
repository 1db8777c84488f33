"""Items to a folder of shards and their index.

The plan comes first: order by a seeded hash of the key, split by another, shard boundaries by count and bytes. It depends
on the list alone, so any number of jobs gives the same bytes. While shards are written a marker lies in the folder and
readers refuse it; the index is written last and the marker goes. What fails is taken back, so that nothing half-made looks
whole.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from wdstrain import bits
from wdstrain.errors import SourceError, StorageError, UsageError
from wdstrain.index_files import BIN_NAME, save_index
from wdstrain.indexing import Index, join
from wdstrain.packing.listing import Item, Listing, file_size
from wdstrain.packing.shard import item_size, write_shard
from wdstrain.storage import INDEX_NAME, UNFINISHED, sync_folder, write_whole

Progress = Callable[[int, int, int], None]  # samples written, samples in all, bytes written


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a conversion packs. `split`: share of the samples by split name, drawn by a seeded hash of each key."""

    shard_samples: int | None = None
    shard_bytes: int = 256_000_000
    seed: int = 0
    shuffle: bool = True
    split: dict[str, float] | None = None
    jobs: int = 1
    overwrite: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("shard_samples", "shard_bytes", "jobs", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value} is below 1.")
        shares = (self.split or {"train": 1.0}).values()
        if min(shares) <= 0 or not np.isclose(sum(shares), 1.0):
            raise UsageError(f"split={self.split}: shares are above 0 and add up to 1. Write for example train=0.9,val=0.1")


@dataclass(frozen=True)
class _Piece:
    """A shard to be written."""

    path: str
    split: str
    items: list[Item]


def convert(listing: Listing, out: str, options: Options, progress: Progress | None = None) -> Index:
    """Pack what is listed into `out`. Returns the index that was written.

    Raises UsageError if `out` is in use and overwriting was not asked for; SourceError and StorageError for input and
    output that fail. Then what was written is gone again.
    """
    pieces = list(_pieces(listing, out, options))
    made = _occupy(out, pieces, options.overwrite)
    total, samples, written = sum(len(piece.items) for piece in pieces), 0, 0
    parts = []
    try:
        for part in _written(pieces, options.jobs):
            parts.append(part)
            samples, written = samples + len(part), written + part.shards[0].bytes
            if progress:
                progress(samples, total, written)
        if samples != total:
            raise SourceError(f"{total} samples were listed and {samples} written.")
        info = {"source": listing.source, "seed": options.seed, "shuffle": options.shuffle, "ignored": listing.ignored}
        index = replace(join(parts), labels=listing.labels, info=info)
        save_index(index, out)
        os.unlink(os.path.join(out, UNFINISHED))
    except BaseException:
        _take_back(out, pieces, made)
        raise
    sync_folder(out)
    return index


# --- the plan --------------------------------------------------------------------------------------------------------


def _pieces(listing: Listing, out: str, options: Options) -> Iterator[_Piece]:
    items = listing.items
    if options.split and any(item.split for item in items):
        raise UsageError("the source has its own splits already. Leave --split away, or convert one of its folders.")
    if options.split:
        items = [item._replace(split=_split(item.key, options)) for item in items]
    if options.shuffle:
        items = sorted(items, key=lambda item: (bits.key("pack", options.seed, item.split, item.key), item.key))
    items = items[: options.limit]
    wanted = list(options.split or dict.fromkeys(item.split or "train" for item in items))
    for split in wanted:
        mine = [item for item in items if (item.split or "train") == split]
        if not mine:
            raise UsageError(f"the split '{split}' gets none of {len(items)} samples. Give it a larger share, or more samples.")
        for number, group in enumerate(_groups(mine, options)):
            yield _Piece(os.path.join(out, f"{split}-{number:06d}.tar"), split, group)


def _split(key: str, options: Options) -> str:
    """By where the hash of the key falls: a sample stays in its split when others are added."""
    at, names = bits.key("split", options.seed, key) / 2**64, list(options.split or {})
    edges = np.cumsum(list((options.split or {}).values()))
    return names[min(int(np.searchsorted(edges, at, side="right")), len(names) - 1)]


def _groups(items: list[Item], options: Options) -> Iterator[list[Item]]:
    group: list[Item] = []
    filled = 0
    for item in items:
        sizes = [len(part) if isinstance(part, bytes) else file_size(part, f"'{item.key}'") for _, part in item.parts]
        size = item_size(item, sizes)
        if group and (filled + size > options.shard_bytes or len(group) == options.shard_samples):
            yield group
            group, filled = [], 0
        group.append(item)
        filled += size
    if group:
        yield group


# --- the folder ------------------------------------------------------------------------------------------------------


def _occupy(out: str, pieces: list[_Piece], overwrite: bool) -> bool:
    """Make the folder ours: marked as unfinished, without what an earlier conversion left. True if it was made now."""
    made = not os.path.exists(out)
    try:
        os.makedirs(out, exist_ok=True)
        present = os.listdir(out)
        if present and not overwrite:
            state = "an unfinished conversion" if UNFINISHED in present else f"{len(present)} files"
            raise UsageError(f"{out} holds {state}. Choose an empty folder, or add --overwrite to replace its shards.")
        write_whole(os.path.join(out, UNFINISHED), json.dumps([os.path.basename(p.path) for p in pieces]).encode())
        for name in [INDEX_NAME, *_former(out), BIN_NAME]:  # the index first: without it the rest claims nothing
            if name in present:
                os.unlink(os.path.join(out, name))
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{out} is a file. Name a folder for the shards.") from None
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}. Choose another folder.") from error
    return made


def _former(out: str) -> list[str]:
    """Shards that an earlier conversion wrote: <split>-000000.tar and its temporary files."""
    found = []
    for name in os.listdir(out):
        split, _, rest = name.lstrip(".").rpartition("-")
        if split and rest[:6].isdigit() and rest[6:] in (".tar", ".tar.tmp"):
            found.append(name)
    return found


def _take_back(out: str, pieces: list[_Piece], made: bool) -> None:
    for path in [os.path.join(out, INDEX_NAME), *(piece.path for piece in pieces), os.path.join(out, BIN_NAME)]:
        with suppress(OSError):
            os.unlink(path)
    with suppress(OSError):
        os.unlink(os.path.join(out, UNFINISHED))
        if made:
            os.rmdir(out)


def _written(pieces: list[_Piece], jobs: int) -> Iterator[Index]:
    """The index of each shard as it is written, in order."""
    if jobs == 1 or len(pieces) == 1:
        for piece in pieces:
            yield write_shard(piece.path, piece.items, piece.split)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(min(jobs, len(pieces)), context, _leave_interrupts)
    waiting: deque[Future[Index]] = deque()  # few, so that an interruption has little to wait for
    try:
        for piece in pieces:
            waiting.append(pool.submit(write_shard, piece.path, piece.items, piece.split))
            if len(waiting) > 2 * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _leave_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal; only the parent answers it, by cancelling what has not begun."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
