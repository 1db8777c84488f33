"""Plan of shards: which samples go into which shard, in which order.

The order is that of a seeded hash of each key. Shards are cut by number of samples and bytes. The
plan depends on the catalog and the options alone, so any number of workers, on any machine, gives
the same bytes.

By default another hash of its key decides the split of a sample, so it stays there when others are
added. Samples with equal images share a split. With `stratify` the shares are exact within each
class. With groups, whole groups are assigned so that the splits and their classes come near the
shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np
import numpy.typing as npt

from wdstrain.conversion.catalog import Catalog, Hashes, SampleMeta
from wdstrain.conversion.options import Options, check_splits
from wdstrain.errors import UsageError
from wdstrain.order.rng import bits
from wdstrain.runtime.options import as_bytes
from wdstrain.shards.offsets import Ints
from wdstrain.shards.tar_headers import END


@dataclass(frozen=True)
class PlannedShard:
    """A shard to write. numbers: its samples in the catalog, in order."""

    name: str
    split: str
    numbers: Ints


def chosen(catalog: Catalog, options: Options) -> Ints:
    """Return the numbers of the samples to pack, in order."""
    meta = catalog.meta
    order = np.argsort(meta.rank, kind="stable") if options.shuffle else np.arange(len(meta.rank))
    return np.asarray(order[: options.limit], np.int64)


def plan_shards(catalog: Catalog, options: Options, *, resplit: bool = False) -> list[PlannedShard]:
    """Return the shards of a conversion. resplit: splits of the source may be replaced.

    Raises UsageError for options that do not fit the source, and for a split that gets no sample.
    """
    order, meta = chosen(catalog, options), catalog.meta
    if options.split and any(meta.splits) and not resplit:
        raise UsageError(
            "the source has its own splits already. Leave out split, or convert one of its folders."
        )
    if meta.grouped and not options.split:
        raise UsageError("group_by needs a split. Add split={'train': 0.9, 'val': 0.1}.")
    if options.stratify and not any(meta.strata):
        raise UsageError(
            "there are no classes to stratify by. Name a label of classes, or leave out stratify."
        )
    if options.split:
        names, split = list(options.split), draw_splits(meta, order, options)
    else:
        known = [name or "train" for name in meta.splits]
        names = list(dict.fromkeys(known))
        split = (
            np.array([names.index(name) for name in known], np.int64)[meta.split[order]]
            if known
            else order
        )
    check_splits(names)
    check_prefixes(names)
    members = [order[split == number] for number in range(len(names))]
    for name, mine in zip(names, members, strict=True):
        if not len(mine) and options.split:
            raise UsageError(
                f"the split '{name}' gets none of {len(order)} samples. Give it a larger share, or "
                f"more samples."
            )
    sizes = [catalog.sizes[mine] for mine in members]
    counts = _shards_per_split(sizes, options.num_shards) if options.num_shards else None
    planned = []
    room = max(1, as_bytes(options.max_shard_size) - len(END))
    for number, (name, mine) in enumerate(zip(names, members, strict=True)):
        if counts is not None:
            runs = _equal_runs(mine, sizes[number], counts[number])
        else:
            runs = batches(mine, sizes[number], room, options.max_shard_samples)
        planned += [
            PlannedShard(f"{name}-{place:06d}.tar", name, run) for place, run in enumerate(runs)
        ]
    return planned


def check_prefixes(names: Sequence[str]) -> None:
    """Raise UsageError for splits whose shards cannot be told apart by NAME-*.tar."""
    for name in names:
        longer = [other for other in names if other.startswith(f"{name}-")]
        if longer:
            raise UsageError(
                f"the splits '{name}' and '{longer[0]}' cannot be told apart by {name}-*.tar. "
                f"Rename one of them."
            )


def _shards_per_split(sizes: Sequence[Ints], count: int) -> list[int]:
    """Return the number of shards of each split: its share of the bytes, at least one.

    Raises UsageError if there are not as many samples, or fewer shards than splits.
    """
    room = [len(part) for part in sizes]
    filled = sum(size > 0 for size in room)
    if not filled <= count <= sum(room):
        raise UsageError(
            f"num_shards={count}: must be from {filled}, the number of splits, to {sum(room)}, the "
            f"number of samples."
        )
    total = [int(part.sum()) for part in sizes]
    shards = [min(1, size) for size in room]
    while sum(shards) < count:
        # The next shard goes to the split with the largest shards that can still be divided.
        _, number = max((total[i] / shards[i], -i) for i in range(len(room)) if shards[i] < room[i])
        shards[-number] += 1
    return shards


def _equal_runs(numbers: Ints, sizes: Ints, count: int) -> Iterator[Ints]:
    """Yield `count` runs of samples of about equal bytes, each of at least one sample."""
    stops, first = np.cumsum(sizes), 0
    for number in range(count):
        left = count - number - 1  # runs after this one
        goal = stops[-1] * (number + 1) / count
        stop = int(np.searchsorted(stops, goal, side="left")) + 1 if left else len(numbers)
        stop = min(max(stop, first + 1), len(numbers) - left)
        yield numbers[first:stop]
        first = stop


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


def draw_splits(meta: SampleMeta, order: Ints, options: Options) -> Ints:
    """Return the split of each sample of `order`, as its place in `options.split`: int64."""
    if meta.grouped:
        return _assigned_groups(meta, order, list((options.split or {}).values()))
    edges = np.cumsum(list((options.split or {}).values()))
    if not options.stratify:
        at = meta.side[order] / 2.0**64
        return np.asarray(
            np.minimum(np.searchsorted(edges, at, side="right"), len(edges) - 1), np.int64
        )
    strata = meta.stratum[order]
    counts = np.bincount(strata, minlength=len(meta.strata))
    # A hash of the name breaks ties, so that not always the first classes get one sample more.
    ties = bits(
        np.array([Hashes(options.seed).of(name) for name in meta.strata], np.uint64), "rounding"
    )
    shares = _rounded(
        counts, np.diff(edges, prepend=0.0) / edges[-1], np.argsort(ties, kind="stable")
    )
    split = np.zeros(len(order), np.int64)
    sides = np.lexsort((meta.side[order], strata))  # by class, then by hash
    split[sides] = np.repeat(np.tile(np.arange(len(edges)), len(counts)), shares.ravel())
    return split


def _assigned_groups(meta: SampleMeta, order: Ints, shares: list[float]) -> Ints:
    """Return the split of each sample; samples of one group are in the same split.

    Groups are assigned from the largest to the smallest, groups of equal size by their hash. Each
    goes to the split where it reduces the error most. The error is the sum of
    (samples - share)^2 / share over the splits, for all samples and for each class.
    """
    side, strata = meta.side[order], meta.stratum[order]
    groups, code, sizes = np.unique(side, return_inverse=True, return_counts=True)
    # (group, class) pairs and their sizes; `everything` stands for all samples of a group
    everything = len(meta.strata)
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


def _rounded(counts: Ints, shares: npt.NDArray[np.float64], order: Ints) -> Ints:
    """Return the number of samples of each class in each split: int64[classes, splits].

    Rows add up to `counts`. Each number, and the sum of each column, is its exact share, rounded up
    or down. The largest remainders are rounded up. order: of classes with equal remainders.
    """
    exact = np.round(counts[:, None] * shares, 9)  # 0.1 * 30 is 3, not a little more
    made, remainder = np.floor(exact).astype(np.int64), exact % 1.0
    up = np.zeros(exact.shape, bool)
    most = np.argsort(-remainder, axis=1, kind="stable")
    np.put_along_axis(
        up, most, np.arange(len(shares)) < (counts - made.sum(axis=1))[:, None], axis=1
    )
    sums = np.round(exact.sum(axis=0), 6)
    low, high = np.floor(sums).astype(np.int64), np.ceil(sums).astype(np.int64)
    wanted = low.copy()
    wanted[np.argsort(low - sums, kind="stable")[: int(counts.sum() - low.sum())]] += 1

    def movable(a: int, b: int) -> Ints:
        """Return the classes that can round up in split b instead of a, the best first."""
        rows = order[up[order, a] & ~up[order, b] & (remainder[order, b] > 0)]
        return np.asarray(
            rows[np.argsort(remainder[rows, a] - remainder[rows, b], kind="stable")], np.int64
        )

    def columns() -> Ints:
        return np.asarray(made.sum(axis=0) + up.sum(axis=0), np.int64)

    for a, b in permutations(range(len(shares)), 2):
        excess = columns() - wanted
        rows = movable(a, b)[: max(0, min(int(excess[a]), -int(excess[b])))]
        up[rows, a], up[rows, b] = False, True
    # With three splits or more, a sample may have to move through a split in between.
    while ((now := columns()) < low).any() or (now > high).any():
        starts, ends = (now > high, now < high) if (now > high).any() else (now > low, now < low)
        path = _path(
            np.flatnonzero(starts).tolist(),
            set(np.flatnonzero(ends).tolist()),
            movable,
            len(shares),
        )
        for a, b in pairwise(path):
            row = movable(a, b)[0]
            up[row, a], up[row, b] = False, True
    return made + up


def _path(
    starts: list[int], ends: set[int], movable: Callable[[int, int], Ints], count: int
) -> list[int]:
    """Return the splits on a shortest path from one of `starts` to one of `ends`.

    A path exists, because the exact shares are a solution.
    """
    paths = [[start] for start in starts]
    seen = set(starts)
    for path in paths:  # grows during the loop
        if path[-1] in ends:
            return path
        for number in range(count):
            if number not in seen and len(movable(path[-1], number)):
                seen.add(number)
                paths.append([*path, number])
    raise AssertionError("no rounding meets the shares of the splits")
