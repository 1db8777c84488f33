"""Shards of a conversion: which samples go into which shard, in which order, and their writers.

The order is that of a seeded hash of each key. Shards are cut by number of samples and bytes. The
plan depends on the catalog and the options alone, so any number of workers, on any machine, gives
the same bytes.

By default another hash of its key decides the split of a sample, so it stays there when others are
added. Samples with equal images share a split. With `stratify`, samples are dealt out class by class
as `Index.split` does it: of all samples and of each class, a split has its share to less than one
sample, or to less than two if there are three splits or more. With groups, whole groups are
assigned so that the splits and their classes come near the shares.

A shard is written under a temporary name, flushed to the disk, then renamed. File bytes are copied
verbatim. The crc32 of each member is computed here, the sha256 of the shard in a second thread.
Beside each shard its part of the index is stored with the identity of its samples, so that `resume`
recognizes the shards that need not be written again.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.conversion.collect import Catalog, bad_sample
from wdstrain.conversion.encode import Recipe
from wdstrain.conversion.listing import BadSample, BadSamples, Part
from wdstrain.conversion.options import Options, check_splits
from wdstrain.conversion.shard_pool import run
from wdstrain.errors import SampleError, ShardError
from wdstrain.runtime.machine import collector_paused
from wdstrain.runtime.options import refuse
from wdstrain.shards.columns import ColumnBuilder
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_io import pack_part, unpack_part
from wdstrain.shards.offsets import Ints, Offsets, Row
from wdstrain.shards.selection import dealt
from wdstrain.shards.tar_headers import BLOCK, END, header
from wdstrain.storage.files import disk_errors, put_whole, sync, write_whole

_PADDING = [bytes(-size % BLOCK) for size in range(BLOCK)]  # by the size modulo a block

_CHUNK = 2 << 20  # bytes collected before they are written and hashed
_PART = ".part"  # ending of the file with a shard's part of the index, until the conversion ends
_FULL = "Free some space or choose another folder, then continue with {resume}."

Samples = Iterable[tuple[str, Sequence[Part]]]  # key and parts
Progress = Callable[[int, int], None]  # receives samples and bytes so far

# --- plan ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedShard:
    """A shard to write. numbers: its samples in the catalog, in order."""

    name: str
    split: str
    numbers: Ints


def chosen(catalog: Catalog, options: Options) -> Ints:
    """Return the numbers of the samples to pack, in order."""
    rank = (
        np.argsort(catalog.rank, kind="stable") if options.shuffle else np.arange(len(catalog.rank))
    )
    return np.asarray(rank[: options.limit], np.int64)


def plan_shards(
    catalog: Catalog, options: Options, *, resplit: bool = False, known: Sequence[str] = ()
) -> list[PlannedShard]:
    """Return the shards of a conversion. resplit: splits of the source may be replaced.

    known: splits of the set that the shards are appended to. Raises UsageError for options that do
    not fit the source, and for a split that gets no sample.
    """
    order = chosen(catalog, options)
    refuse(
        options.split and any(catalog.splits) and not resplit,
        "the source has its own splits already.",
        "Leave out {split}, or convert one of its folders.",
        split=...,
    )
    refuse(
        catalog.grouped and not options.split,
        "{group_by} needs a split.",
        "Add {split}.",
        group_by=...,
        split={"train": 0.9, "val": 0.1},
    )
    refuse(
        options.stratify and not any(catalog.strata),
        "there are no classes to stratify by.",
        "Name a label of classes, or leave out stratify.",
    )
    if options.split:
        names, split = list(options.split), draw_splits(catalog, order, options)
    else:
        own = [name or "train" for name in catalog.splits]
        names = list(dict.fromkeys(own))
        split = np.array([names.index(name) for name in own], np.int64)[catalog.split[order]]
    check_splits(names, known)
    members = {name: order[split == number] for number, name in enumerate(names)}
    for name, mine in members.items():
        refuse(
            options.split and not len(mine),
            f"the split '{name}' gets none of {len(order)} samples.",
            "Give it a larger share, or more samples.",
        )
    sizes = {name: catalog.sizes[mine] for name, mine in members.items() if len(mine)}
    counts = _shards_per_split([*sizes.values()], options.num_shards) if options.num_shards else []
    planned, room = list[PlannedShard](), max(1, int(options.max_shard_size) - len(END))
    for (name, size), count in zip_longest(sizes.items(), counts):
        mine, most = members[name], options.max_shard_samples
        runs = _equal_runs(mine, size, count) if count else batches(mine, size, room, most)
        planned += [PlannedShard(f"{name}-{n:06d}.tar", name, run) for n, run in enumerate(runs)]
    return planned


def _shards_per_split(sizes: Sequence[Ints], count: int) -> list[int]:
    """Return the number of shards of each split: its share of the bytes, at least one.

    Raises UsageError if there are not as many samples, or fewer shards than splits.
    """
    room, total = [len(part) for part in sizes], [int(part.sum()) for part in sizes]
    refuse(
        not len(room) <= count <= sum(room),
        f"{{num_shards}}: must be from {len(room)}, the number of splits, to {sum(room)}, the number "
        "of samples.",
        num_shards=count,
    )
    shards = [1] * len(room)
    while sum(shards) < count:
        # The next shard goes to the split with the largest shards that can still be divided.
        _, number = max((total[i] / shards[i], -i) for i in range(len(room)) if shards[i] < room[i])
        shards[-number] += 1
    return shards


def _equal_runs(numbers: Ints, sizes: Ints, count: int) -> list[Ints]:
    """Return `count` runs of samples of about equal bytes, each of at least one sample."""
    sums, runs = np.cumsum(sizes), np.arange(1, count)
    full = np.searchsorted(sums, sums[-1] * runs / count) + 1
    stops = np.maximum.accumulate(full - runs) + runs
    return np.split(numbers, np.minimum(stops, len(numbers) - count + runs))


def batches(numbers: Ints, sizes: Ints, most: int, count: int | None = None) -> Iterator[Ints]:
    """Yield runs of at most `most` bytes and `count` samples; a larger sample is a run alone."""
    stops = np.cumsum(sizes)
    first = 0
    while first < len(numbers):
        filled = int(stops[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(stops, filled + most, side="right")))
        stop = min(stop, first + (count or stop))
        yield numbers[first:stop]
        first = stop


# --- splits --------------------------------------------------------------------------------------


def draw_splits(catalog: Catalog, order: Ints, options: Options) -> Ints:
    """Return the split of each sample of `order`, as its place in `options.split`: int64."""
    shares = list((options.split or {}).values())
    if catalog.grouped:
        return _assigned_groups(catalog, order, shares)
    if not options.stratify:
        at = catalog.side[order] / 2.0**64
        return np.asarray(np.searchsorted(np.cumsum(shares)[:-1], at, side="right"), np.int64)
    # by class, in the order of their names, then by hash
    names = np.unique(list(catalog.strata), return_inverse=True)[1]
    sides = np.lexsort((catalog.side[order], names[catalog.stratum[order]]))
    split = np.empty(len(order), np.int64)
    split[sides] = dealt(len(order), [share / sum(shares) for share in shares])
    return split


def _assigned_groups(catalog: Catalog, order: Ints, shares: list[float]) -> Ints:
    """Return the split of each sample; samples of one group are in the same split.

    Groups are assigned from the largest to the smallest, groups of equal size by their hash. Each
    goes to the split where it reduces the error most. The error is the sum of
    (samples - share)^2 / share over the splits, for all samples and for each class.
    """
    side, strata = catalog.side[order], catalog.stratum[order]
    groups, code, sizes = np.unique(side, return_inverse=True, return_counts=True)
    # (group, class) pairs and their sizes; `everything` stands for all samples of a group
    everything = len(catalog.strata)
    pairs, counts = np.unique(np.stack([code, strata]), axis=1, return_counts=True)
    firsts = np.searchsorted(pairs[0], np.arange(len(groups) + 1))
    share = np.array(shares)[:, None]
    totals = np.append(np.bincount(strata, minlength=everything), len(order))
    wanted = share * np.maximum(totals, 1)
    has = np.zeros_like(wanted)
    split = np.zeros(len(groups), np.int64)
    for group in np.lexsort((groups, -sizes)).tolist():
        rows = slice(firsts[group], firsts[group + 1])
        classes = np.append(pairs[1][rows], everything)
        amount = np.append(counts[rows], sizes[group])
        goal = wanted[:, classes]
        change = (amount * (2 * (has[:, classes] - goal) + amount) / goal).sum(axis=1)
        split[group] = int(np.argmin(change))
        has[split[group], classes] += amount
    return np.asarray(split[code], np.int64)


# --- one shard ------------------------------------------------------------------------------------


def write_samples(
    path: str,
    split: str,
    samples: Samples,
    advice: str = "Free some space, or choose another folder.",
) -> Index:
    """Write a shard of these samples and return its index.

    Raises StorageError with this advice for a full disk.
    """
    rows, columns, digest = list[Row](), ColumnBuilder(own_names=True), hashlib.sha256()
    with put_whole(path, advice) as file, ThreadPoolExecutor(1) as hasher:
        hashed = hasher.submit(digest.update, b"")
        for chunk in _chunks(samples, rows, columns):
            hashed.result()  # the thread is at most one chunk behind
            hashed = hasher.submit(digest.update, chunk)
            file.write(chunk)
    offsets, end = Offsets.of_samples(rows, columns.finish()), rows[-1][2] if rows else 0
    return Index((Shard(path, len(rows), end + len(END), split, digest.hexdigest()),), offsets)


def _chunks(samples: Samples, rows: list[Row], columns: ColumnBuilder) -> Iterator[bytes]:
    """Yield the bytes of a shard, and add its samples to the rows and columns of its index."""
    chunk, written, stop = list[bytes](), 0, 0
    for key, parts in samples:
        start, members = stop, []
        for field, data in parts:
            size = len(data)
            head, fill = header(f"{key}.{field}", size), _PADDING[size % BLOCK]
            chunk += (head, data, fill)
            stop += len(head)
            members.append((field, stop, size, crc32(data)))
            stop += size + len(fill)
        rows.append((key, start, stop, members))
        columns.add(parts)
        if stop - written >= _CHUNK:
            yield b"".join(chunk)
            chunk, written = [], stop
    yield b"".join([*chunk, END])


# --- planned shards -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """A written shard: its index, the numbers of its samples, and the samples that were skipped.

    is_kept: an earlier run wrote it.
    """

    index: Index
    numbers: Ints
    bad: Sequence[BadSample] = ()
    is_kept: bool = False


def write_shards(
    catalog: Catalog,
    recipe: Recipe,
    folder: str,
    plan: Sequence[PlannedShard],
    options: Options,
    bad: BadSamples,
    report: Progress,
) -> Generator[Packed, None, None]:
    """Yield the shards in order as they are written; with `resume`, existing ones are kept."""
    jobs = min(max(1, len(plan)), options.processes(int(catalog.sizes.sum())))
    samples = size = 0
    write = partial(
        _write_shard,
        folder,
        catalog,
        recipe,
        collect=bad.collect,
        memory=max(1 << 20, int(options.memory) // (8 * jobs)),
        resume=options.resume,
    )
    with closing(run(write, plan, jobs, engine=options.engine)) as results:
        for packed in results:
            samples, size = samples + len(packed.numbers), size + packed.index.shards[0].bytes
            report(samples, size)
            bad.bad += packed.bad
            yield packed


def _write_shard(
    folder: str,
    catalog: Catalog,
    recipe: Recipe,
    shard: PlannedShard,
    *,
    collect: bool,
    memory: int,
    resume: bool,
) -> Packed:
    """Write a shard. collect: skip bad samples; otherwise the first one ends the shard.

    memory: bytes of samples held at a time to put them in order. resume: keep the shard if an
    earlier run wrote it of the same samples.
    """
    path, bad, places = os.path.join(folder, shard.name), BadSamples(collect=collect), array("q")
    # Everything that the bytes of the shard depend on.
    words = f"2 {shard.name} {recipe} {collect}".encode()
    mark = hashlib.blake2b(catalog.identity(shard.numbers) + words, digest_size=16).hexdigest()
    if resume and (part := _kept(path, shard, mark)) is not None:
        return part

    def good() -> Iterator[tuple[str, list[Part]]]:
        for place, (key, parts) in enumerate(catalog.fetch(shard.numbers, memory)):
            try:
                if isinstance(parts, SampleError):
                    raise parts
                packed = recipe.apply(parts)
            except SampleError as error:
                item = catalog.items[int(shard.numbers[place])]
                bad.put(bad_sample(catalog.name, item, str(error), has_files=catalog.has_files))
            else:
                places.append(place)
                yield key, packed

    with disk_errors(path, _FULL), suppress(FileNotFoundError):
        os.unlink(path + _PART)  # it describes the shard that is about to be replaced
        sync(folder)
    with collector_paused():
        index = write_samples(path, shard.split, good(), _FULL)
    extra = {"identity": mark, "places": places.tolist(), "bad": bad.bad}
    write_whole(path + _PART, pack_part(index, extra))
    return Packed(index, shard.numbers[places], bad.bad)


def _kept(path: str, shard: PlannedShard, mark: str) -> Packed | None:
    """Return a shard that an earlier run wrote, if it is complete and of the same samples."""
    with suppress(OSError, ShardError, ValueError, KeyError, TypeError, IndexError, OverflowError):
        with open(path + _PART, "rb") as file:
            index, extra = unpack_part(file.read(), path)
        # A shard that is in the bucket already has no file.
        size = os.stat(path).st_size if os.path.exists(path) else index.shards[0].bytes
        if extra["identity"] == mark and size == index.shards[0].bytes:
            numbers = shard.numbers[np.array(extra["places"], np.int64)]
            return Packed(index, numbers, [BadSample(*row) for row in extra["bad"]], is_kept=True)
    return None  # it is written again
