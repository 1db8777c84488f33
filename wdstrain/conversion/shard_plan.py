"""Plan of shards: which samples go into which shard, in which order.

The order is that of a seeded hash of each key. Splits are drawn by another hash. Shards are cut by
number of samples and bytes. The plan depends on the catalog and the options alone, so any number of
workers, on any machine, gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from wdstrain.conversion.catalog import Catalog
from wdstrain.conversion.options import Options, check_splits
from wdstrain.conversion.splits import draw_splits
from wdstrain.errors import UsageError
from wdstrain.runtime.byte_sizes import as_bytes
from wdstrain.shards.offsets import Ints
from wdstrain.shards.tar import END


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
    """Yield runs of at most `most` bytes and `count` samples. A larger sample is a run by itself."""
    stops = np.cumsum(sizes)
    first = 0
    while first < len(numbers):
        filled = int(stops[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(stops, filled + most, side="right")))
        stop = min(stop, first + (count or stop))
        yield numbers[first:stop]
        first = stop
