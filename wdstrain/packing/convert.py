"""Items to a folder of shards and their index.

The plan comes first: order by a seeded hash of the key, split by another, shard boundaries by count and bytes. It depends
on the list alone, so any number of jobs gives the same bytes. Shards and index are written on a stage, a hidden folder in
the output, and put in place together when all is whole: a conversion that fails or is killed leaves what was there before,
and nothing half-made is ever where a reader looks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from wdstrain import bits, children
from wdstrain.errors import SourceError, StorageError, UsageError, WdstrainError
from wdstrain.index_files import BIN_NAME, read_document, save_index
from wdstrain.indexing import Index, join
from wdstrain.memory import Memory
from wdstrain.packing.listing import Item, Listing, file_size
from wdstrain.packing.shard import item_size, write_shard
from wdstrain.storage import INDEX_NAME, SWAPPING, UNFINISHED, sync_folder, write_whole

_LOOK = 0.2  # seconds between looks at what worker processes have written
_NAMES = "names.json"  # on the stage: what the exchange removes and brings

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

    name: str
    split: str
    items: list[Item]


def convert(listing: Listing, out: str, options: Options, progress: Progress | None = None) -> Index:
    """Pack what is listed into `out`. Returns the index that was written.

    Raises UsageError if `out` is in use and overwriting was not asked for; SourceError and StorageError for input and
    output that fail. Then what was written is gone again, and what was there before is there still.
    """
    if listing.root is not None and _lies_in(out, listing.root):
        raise UsageError(f"{out} lies in {listing.root}, which is being converted. Put the shards into another folder.")
    pieces = list(_pieces(listing, options))
    made = _occupy(out, options.overwrite)
    stage = os.path.join(out, UNFINISHED)
    try:
        parts = list(_written(pieces, stage, options.jobs, progress))
        total, samples = sum(len(piece.items) for piece in pieces), sum(map(len, parts))
        if samples != total:
            raise SourceError(f"{total} samples were listed and {samples} written.")
        info = {"source": listing.source, "seed": options.seed, "shuffle": options.shuffle, "ignored": listing.ignored}
        index = replace(join(parts), labels=listing.labels, info=info)
        save_index(index, stage)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        if made:
            with suppress(OSError):
                os.rmdir(out)
        raise
    _put_in_place(out, [piece.name for piece in pieces])
    return replace(index, shards=tuple(replace(shard, path=os.path.join(out, shard.name)) for shard in index.shards))


# --- the plan --------------------------------------------------------------------------------------------------------


def _pieces(listing: Listing, options: Options) -> Iterator[_Piece]:
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
            yield _Piece(f"{split}-{number:06d}.tar", split, group)


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


def _lies_in(path: str, folder: str) -> bool:
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return real == root or real.startswith(os.path.join(root, ""))


def _occupy(out: str, overwrite: bool) -> bool:
    """Make an empty stage in the folder. True if the folder was made now."""
    made = not os.path.exists(out)
    try:
        os.makedirs(out, exist_ok=True)
        present = [name for name in os.listdir(out) if name != UNFINISHED]
        unfinished = SWAPPING in present or len(present) < len(os.listdir(out))
        if (present or unfinished) and not overwrite:
            state = "an unfinished conversion" if unfinished else f"{len(present)} files"
            raise UsageError(f"{out} holds {state}. Choose an empty folder, or add --overwrite to replace its shards.")
        shutil.rmtree(os.path.join(out, UNFINISHED), ignore_errors=True)
        os.mkdir(os.path.join(out, UNFINISHED))
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{out} is a file, or lies in one. Name a folder for the shards.") from None
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}. Choose another folder.") from error
    return made


def _put_in_place(out: str, names: list[str]) -> None:
    """Replace the set in the folder by the one on the stage. While this goes on, readers refuse the folder.

    Only what the former index lists is removed, or what an exchange that was cut short was about to remove or bring.
    """
    stage, swapping, listed = (os.path.join(out, name) for name in (UNFINISHED, SWAPPING, INDEX_NAME))
    former: list[str] = []
    with suppress(WdstrainError):
        former += [row["url"] for row in read_document(listed)["shardlist"]] if os.path.exists(listed) else []
    with suppress(OSError, ValueError), open(os.path.join(swapping, _NAMES), encoding="utf-8") as file:
        former += json.load(file)
    try:
        write_whole(os.path.join(stage, _NAMES), json.dumps([*former, *names]).encode())
        shutil.rmtree(swapping, ignore_errors=True)
        os.rename(stage, swapping)
        for name in [INDEX_NAME, *former, BIN_NAME]:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(out, os.path.basename(name)))
        for name in [*names, BIN_NAME, INDEX_NAME]:
            os.replace(os.path.join(swapping, name), os.path.join(out, name))
        shutil.rmtree(swapping)
        sync_folder(out)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}. Run this again with --overwrite.") from error


def _written(pieces: list[_Piece], stage: str, jobs: int, progress: Progress | None) -> Iterator[Index]:
    """The index of each shard as it is written, in order."""
    total = sum(len(piece.items) for piece in pieces)
    board = Memory(16 * len(pieces))  # samples and bytes of each shard so far, written by whoever packs it
    sums = np.frombuffer(board.view, np.int64).reshape(-1, 2)

    def show() -> None:
        if progress:
            progress(int(sums[:, 0].sum()), total, int(sums[:, 1].sum()))

    if jobs == 1 or len(pieces) == 1:
        for number, piece in enumerate(pieces):

            def tick(samples: int, size: int, number: int = number) -> None:
                sums[number] = samples, size
                show()

            yield write_shard(os.path.join(stage, piece.name), piece.items, piece.split, tick)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(min(jobs, len(pieces)), context, _begin_worker, (board,))
    waiting: deque[Future[Index]] = deque()  # few, so that an interruption has little to wait for
    try:
        for number, piece in enumerate(pieces):
            waiting.append(pool.submit(_write, os.path.join(stage, piece.name), piece.items, piece.split, number))
            if len(waiting) > 2 * jobs:
                yield _awaited(waiting.popleft(), show)
        while waiting:
            yield _awaited(waiting.popleft(), show)
    except BrokenProcessPool as error:
        raise WdstrainError("a process that wrote shards was killed, perhaps for its memory. Use a smaller --jobs.") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _awaited(future: Future[Index], show: Callable[[], None]) -> Index:
    while not future.done():
        futures.wait([future], timeout=_LOOK)
        show()
    return future.result()


_board: Memory | None = None  # in a worker: the parent's board


def _write(path: str, items: list[Item], split: str, number: int) -> Index:
    assert _board is not None
    mine = np.frombuffer(_board.view, np.int64)[2 * number : 2 * number + 2]

    def tick(samples: int, size: int) -> None:
        mine[:] = samples, size

    return write_shard(path, items, split, tick)


def _begin_worker(board: Memory) -> None:
    global _board
    _board = board
    children.begin()
