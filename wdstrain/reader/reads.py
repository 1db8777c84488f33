"""The list of reads: from the order of epochs to bytes of shards. Pure; nothing is read here.

Called by `run`. The reads of all lanes of a rank are one list, in which the reads of one lane go
forward. They are merged by the first batch that needs them. Epochs follow each other in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise
from typing import Any

import numpy as np

from wdstrain.order.order import Ints, Order, Places
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.offsets import Members
from wdstrain.storage.remote import is_remote, range_size

READ_SAMPLES = 4096  # most samples in one read
GAP = 1 << 20  # bytes; a gap up to this size between two samples is read and discarded
LOCAL_BYTES = 16 << 20  # most bytes of one read of local shards


@dataclass(frozen=True, eq=False)
class Read:
    """Bytes [start, stop) of a shard, with n samples in their order in the shard.

    ids: sample ids. batch, row: where each sample is delivered; batches count from the first that
    is read. place: where each sample begins in the block of memory of the read. size: bytes of each
    sample. int64[n] each. nbytes: of the block, which leaves out the gaps between samples.
    first_batch: the first batch that needs this read or a later one of the lane.
    """

    shard: Shard
    start: int
    stop: int
    ids: Ints
    batch: Ints
    row: Ints
    place: Ints
    size: Ints
    nbytes: int
    first_batch: int

    @property
    def has_gaps(self) -> bool:
        """Whether bytes between its samples are discarded."""
        return self.nbytes < self.stop - self.start


def sample_members(index: Index, ids: Ints, needed_fields: Collection[str] | None) -> Members:
    """Return the members of samples; an offset counts from the beginning of its sample.

    needed_fields: fields of the members; None: all.
    """
    members = index.offsets.members_of(ids, needed_fields)
    return members._replace(offset=members.offset - index.offsets.start[ids][members.row])


def of_rows(members: Members, start: int, stop: int) -> Members:
    """Return the members of the samples [start, stop) of these."""
    first = members.first[start : stop + 1]
    own = slice(int(first[0]), int(first[-1]))
    columns: tuple[Any, ...] = tuple(column[own] for column in members)
    return Members(first - first[0], columns[1] - start, *columns[2:])


def epochs(
    orders: Callable[[int], Order], epoch: int, step: int, until: int | None
) -> Iterator[tuple[Order, int, int]]:
    """Yield (order, first step, number of batches before its step 0) from (epoch, step) on.

    orders: returns the order of an epoch. until: the first epoch that is left out; None: no end.
    """
    before = -step
    while epoch != until:
        order = orders(epoch)
        yield order, step, before
        before, epoch, step = before + order.steps, epoch + 1, 0


def reads(
    index: Index,
    orders: Callable[[int], Order],
    rank: int,
    epoch: int,
    step: int,
    until: int | None,
) -> Iterator[Read]:
    """Yield the reads of a rank from (epoch, step) up to epoch `until`; see `epochs`."""
    for order, first_step, before in epochs(orders, epoch, step, until):
        lanes = (
            lane_reads(index, order, rank, lane, first_step, before)
            for lane in range(order.lanes_per_rank)
        )
        yield from merge(*lanes, key=lambda read: read.first_batch)


def lane_reads(
    index: Index, order: Order, rank: int, lane: int, step: int = 0, before: int = 0
) -> Iterator[Read]:
    """Yield the reads of a lane from a step on. before: number of batches before the epoch."""
    # Planning costs up to three windows of places for any number of them.
    count = max(order.window, 4 * READ_SAMPLES)
    place = order.first_place(rank, lane, step)
    while len((places := order.reading(rank, lane, place, place + count)).ids):
        place += count
        wanted = places.step >= step  # others were delivered before
        ids, steps, rows = (column[wanted] for column in places)
        yield from _cut(index, Places(ids, steps + before, rows), order.batch_size)


def _cut(index: Index, places: Places, batch_size: int) -> Iterator[Read]:
    """Yield the reads of samples in the order of reading; `step` of the places is the batch.

    A read goes forward in one shard, and through small gaps. Those of servers grow with the bytes of
    the batches before the first that needs them.
    """
    ids = places.ids
    start, extent, shard = index.offsets.start[ids], index.offsets.size[ids], index.shard_of(ids)
    stop, batch_bytes = start + extent, batch_size * int(extent.sum()) / max(1, len(ids))
    gap = start[1:] - stop[:-1]
    # Later reads of the lane may be needed earlier, and they wait for this one.
    needed = np.minimum.accumulate(places.step[::-1])[::-1]
    is_repeated = ids[1:] == ids[:-1]  # it shares the bytes of the entry before
    new = (np.diff(shard) != 0) | (gap > GAP) | ((gap < 0) & ~is_repeated)
    size = extent * np.append(True, ~is_repeated)[: len(ids)]
    for first, last in pairwise([0, *(np.flatnonzero(new) + 1).tolist(), len(ids)]):
        while first < last:
            end = min(last, first + READ_SAMPLES)
            is_far = is_remote(index.shards[shard[first]].path)
            most = range_size(needed[first] * batch_bytes) if is_far else LOCAL_BYTES
            fits = np.searchsorted(stop[first:end], start[first] + most, side="right")
            end = first + max(1, int(fits))
            own, sizes = slice(first, end), size[first:end].copy()
            sizes[0] = extent[first]
            ends = sizes.cumsum()
            yield Read(
                shard=index.shards[shard[first]],
                start=int(start[first]),
                stop=int(stop[end - 1]),
                ids=ids[own],
                batch=places.step[own],
                row=places.row[own],
                place=ends - extent[own],
                size=extent[own],
                nbytes=int(ends[-1]),
                first_batch=int(needed[first]),
            )
            first = end
