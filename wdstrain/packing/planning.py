"""Which samples go into which shard, in which order: decided on integers, before a shard is written.

Order is that of a seeded hash of each key, splits are drawn by another, boundaries are cut by count and bytes. It depends on
the catalog and the options alone, so any number of jobs, on any machine, gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np
import numpy.typing as npt

from wdstrain.errors import UsageError
from wdstrain.order.rng import bits
from wdstrain.packing.catalog import Catalog, Hashes, Marks
from wdstrain.packing.options import Options, check_splits
from wdstrain.shards.offsets import Ints
from wdstrain.shards.tar import END


@dataclass(frozen=True)
class Piece:
    """A shard to be written: its name, its split, the numbers of its samples in order."""

    name: str
    split: str
    numbers: Ints


def chosen(catalog: Catalog, options: Options) -> Ints:
    """Numbers of the samples that are packed, in the order of the whole."""
    marks = catalog.marks
    order = np.argsort(marks.rank, kind="stable") if options.shuffle else np.arange(len(marks.rank))
    return np.asarray(order[: options.limit], np.int64)


def plan_shards(catalog: Catalog, options: Options, *, resplit: bool = False) -> list[Piece]:
    """The shards of a conversion. `resplit`: splits of the source may be drawn anew.

    Raises UsageError where the source has splits and others are asked for, and for a split that gets no sample.
    """
    order, marks = chosen(catalog, options), catalog.marks
    if options.split and any(marks.splits) and not resplit:
        raise UsageError(
            "the source has its own splits already. Leave --split away, or convert one of its folders."
        )
    if options.stratify and marks.grouped:
        raise UsageError(
            "groups come to one side of a split, so shares cannot be exact within classes. Leave --stratify away."
        )
    if marks.grouped and not options.split:
        raise UsageError(
            "a group says how a split is drawn, and none is asked for. Add --split train=0.9,val=0.1"
        )
    if options.stratify and not any(marks.strata):
        raise UsageError(
            "there are no classes to stratify by. Name a label of classes, or leave --stratify away."
        )
    if options.split:
        names, split = list(options.split), _drawn(marks, order, options)
    else:
        known = [name or "train" for name in marks.splits]
        names = list(dict.fromkeys(known))
        split = (
            np.array([names.index(name) for name in known], np.int64)[marks.split[order]]
            if known
            else order
        )
    check_splits(names)
    for name in names:
        longer = [other for other in names if other.startswith(f"{name}-")]
        if longer:
            raise UsageError(
                f"the splits '{name}' and '{longer[0]}' cannot be told apart by {name}-*.tar. Rename one of them."
            )
    pieces = []
    room = max(1, options.shard_bytes - len(END))
    for number, name in enumerate(names):
        mine = order[split == number]
        if not len(mine) and options.split:
            raise UsageError(
                f"the split '{name}' gets none of {len(order)} samples. Give it a larger share, or more samples."
            )
        for place, numbers in enumerate(
            batches(mine, catalog.sizes[mine], room, options.shard_samples)
        ):
            pieces.append(Piece(f"{name}-{place:06d}.tar", name, numbers))
    return pieces


def _drawn(marks: Marks, order: Ints, options: Options) -> Ints:
    """The split of each sample in the order, as its place in the split's names. int64[len(order)]"""
    edges = np.cumsum(list((options.split or {}).values()))
    if not options.stratify:
        # by where the hash falls: a sample stays in its split when others are added
        at = marks.side[order] / 2.0**64
        return np.asarray(
            np.minimum(np.searchsorted(edges, at, side="right"), len(edges) - 1), np.int64
        )
    strata = marks.stratum[order]
    counts = np.bincount(strata, minlength=len(marks.strata))
    # ties are broken by a hash of the name, so that it is not always the first classes that have one more
    ties = bits(
        np.array([Hashes(options.seed).of(name) for name in marks.strata], np.uint64), "rounding"
    )
    shares = _rounded(
        counts, np.diff(edges, prepend=0.0) / edges[-1], np.argsort(ties, kind="stable")
    )
    found = np.zeros(len(order), np.int64)
    sides = np.lexsort(
        (marks.side[order], strata)
    )  # class by class, each in the order of its hashes
    found[sides] = np.repeat(np.tile(np.arange(len(edges)), len(counts)), shares.ravel())
    return found


def _rounded(counts: Ints, shares: npt.NDArray[np.float64], order: Ints) -> Ints:
    """Samples of each class in each split: int64[classes, splits].

    Rows add up to `counts`. Each number, and the sum of each column, is its exact share rounded up or down. What has the
    largest remainder is rounded up; order: of the classes, where remainders are equal.
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
        """Classes that can round up in split b instead of a, the best first."""
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
    while ((now := columns()) < low).any() or (
        now > high
    ).any():  # of three splits or more, rarely: by way of others
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
    """Splits on a shortest path from one of `starts` to one of `ends`. One exists, since the exact shares are a solution."""
    paths = [[start] for start in starts]
    seen = set(starts)
    for path in paths:  # grows while it is gone through
        if path[-1] in ends:
            return path
        for number in range(count):
            if number not in seen and len(movable(path[-1], number)):
                seen.add(number)
                paths.append([*path, number])
    raise AssertionError("no rounding meets the shares of the splits")


def batches(numbers: Ints, sizes: Ints, most: int, count: int | None = None) -> Iterator[Ints]:
    """Runs of samples of at most `most` bytes together, or of one that is larger, and of at most `count` samples."""
    stops = np.cumsum(sizes)
    first = 0
    while first < len(numbers):
        filled = int(stops[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(stops, filled + most, side="right")))
        stop = min(stop, first + (count or stop))
        yield numbers[first:stop]
        first = stop
