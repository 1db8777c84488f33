"""Blocks of consecutive places of a lane, planned at once for many reads.

Planning each read on its own would cost more than the read: a read has at most a few hundred
samples. A block covers at least a shuffle window, and a read is a slice of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.order.order import Order
from wdstrain.order.plan import Plan
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.storage.block_map import range_size
from wdstrain.storage.remote import is_remote

READ_SAMPLES = 4096  # most samples in one read
GAP = 1 << 20  # bytes; a gap up to this size between two samples is read and discarded
READ_TOGETHER = 32 << 20  # most bytes of one read of arrays that go straight into batches
_LOCAL = 16 << 20  # most bytes of one read of local shards


def read_bytes(index: Index) -> int:
    """Return the most bytes of one read. A single larger sample is still read as a whole."""
    # Several remote reads are in flight.
    return range_size() if any(is_remote(shard.path) for shard in index.shards) else _LOCAL


def read_breaks(index: Index, ids: Ints) -> npt.NDArray[np.bool_]:
    """Return after which of these samples a new read must begin. ids: int64[n]; bool[n - 1]

    A read goes forward in one shard, and through small gaps.
    """
    gaps = index.offsets.start[ids[1:]] - index.offsets.stop[ids[:-1]]
    return np.asarray((np.diff(index.shard_of(ids)) != 0) | (gaps < 0) | (gaps > GAP))


class ReadBlock(NamedTuple):
    """The n places of a lane from `start` on.

    due: step that delivers each place; for a place that several steps need, the last of them.
    ids: sample ids. shards: numbers of their shards. starts, stops: extent of each sample in its
    shard. All int64[n]. end: number of places of the lane. breaks: ascending places after which a
    new read must begin; the last place of the block is one.
    batch_rows: row of each sample in its batch, int64[n]; None if arrays are not read straight into
    batches.
    """

    start: int
    end: int
    due: Ints
    ids: Ints
    shards: Ints
    starts: Ints
    stops: Ints
    breaks: Ints
    batch_rows: Ints | None

    @classmethod
    def of(
        cls, index: Index, plan: Order, rank: int, lane: int, start: int, *, with_rows: bool
    ) -> ReadBlock:
        """Return the block from place `start` on. with_rows: for reads straight into batches.

        It has more places than one read takes, or all the rest of the lane.
        """
        end = plan.lane_places(lane)
        stop = min(start + max(plan.window, 4 * READ_SAMPLES), end)
        ids = plan.ids(lane, np.arange(start, stop))
        batch_rows = None
        if with_rows:
            assert isinstance(plan, Plan)
            batch_rows = _rows_in_batch(plan, rank, lane, start, stop)
        return cls(
            start,
            end,
            due=plan.due(lane, start, stop),
            ids=ids,
            shards=index.shard_of(ids),
            starts=index.offsets.start[ids],
            stops=index.offsets.stop[ids],
            breaks=start + np.append(np.flatnonzero(read_breaks(index, ids)), stop - start - 1),
            batch_rows=batch_rows,
        )

    def covers_read(self, place: int) -> bool:
        """Return whether the block has all places of a read from `place` on, and the next one."""
        return min(place + READ_SAMPLES + 1, self.end) <= self.start + len(self.ids)

    def due_from(self, place: int) -> Ints:
        """Return `due` of the places that one read from `place` on may cover."""
        return self.due[place - self.start : place - self.start + READ_SAMPLES]

    def places_of_read(self, place: int, skipped: int, most_bytes: int) -> int:
        """Return how many places the read from `place` on covers.

        skipped: places without a sample that is needed, at its beginning.
        """
        first = place - self.start + skipped
        last = place - self.start + READ_SAMPLES
        after_break = int(self.breaks[np.searchsorted(self.breaks, place + skipped)]) + 1
        stop = min(last, after_break - self.start)
        limit = self.starts[first] + most_bytes
        return skipped + max(1, int(np.searchsorted(self.stops[first:stop], limit, side="right")))

    def leaves_shard(self, place: int) -> bool:
        """Return whether `place` is the end of the lane, or in another shard than the one before."""
        row = place - self.start
        return place == self.end or bool(self.shards[row] != self.shards[row - 1])


def _rows_in_batch(plan: Plan, rank: int, lane: int, start: int, stop: int) -> Ints:
    """Return the rows of the places [start, stop) of a lane in their batches. int64[stop - start].

    Only for plans without padding.
    """
    position, share = plan.positions(lane, start, stop), plan.samples_per_step_per_lane
    lanes = plan.lanes_of(rank)
    rows = position % share + lanes.index(lane) * share
    short = range(max(0, plan.steps - 2), plan.steps) if plan.tail == "keep" else range(0)
    for step in short:  # lanes may give these steps different numbers of samples
        first, end = plan.span(lane, step)
        inside = (position >= first) & (position < end)
        if inside.any():
            spans = [plan.span(other, step) for other in lanes[: lanes.index(lane)]]
            rows[inside] = position[inside] - first + sum(end - begin for begin, end in spans)
    return rows
