"""Blocks of consecutive places of a lane, planned at once for many reads.

Planning each read on its own would cost more than the read: a read has at most a few hundred
samples. A block covers at least a shuffle window, and a read is a slice of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.order.plan import Order
from wdstrain.reader.slot_scatter import SlotScatter
from wdstrain.reader.slot_sink import SlotSink
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.storage.remote import is_remote

READ_SAMPLES = 4096  # most samples in one read
GAP = 1 << 20  # bytes; a gap up to this size between two samples is read and discarded
_LOCAL, _REMOTE = 16 << 20, 4 << 20  # most bytes of one read; several remote reads are in flight


def read_bytes(index: Index) -> int:
    """Return the most bytes of one read. A single larger sample is still read as a whole."""
    return _REMOTE if any(is_remote(shard.path) for shard in index.shards) else _LOCAL


def read_breaks(index: Index, ids: Ints) -> npt.NDArray[np.bool_]:
    """Return after which of these samples a new read must begin. ids: int64[n]; bool[n - 1]

    A read goes forward in one shard, and through small gaps.
    """
    gaps = index.offsets.start[ids[1:]] - index.offsets.stop[ids[:-1]]
    return np.asarray((np.diff(index.shard_of(ids)) != 0) | (gaps < 0) | (gaps > GAP))


class ReadBlock(NamedTuple):
    """The n places of a lane from `start` on.

    due: step that delivers each place; for a place that several steps need, the last of them.
    ids: sample ids. starts, stops: extent of each sample in its shard. All int64[n].
    end: number of places of the lane. breaks: ascending places after which a new read must begin;
    the last place of the block is one. scatter: destinations of the samples' bytes, if arrays are
    read straight into batches.
    """

    start: int
    end: int
    due: Ints
    ids: Ints
    starts: Ints
    stops: Ints
    breaks: Ints
    scatter: SlotScatter | None

    @classmethod
    def of(
        cls,
        index: Index,
        plan: Order,
        rank: int,
        lane: int,
        start: int,
        sink: SlotSink | None,
    ) -> ReadBlock:
        """Return the block from place `start` on.

        It has more places than one read takes, or all the rest of the lane.
        """
        end = plan.lane_places(lane)
        stop = min(start + max(plan.window, 4 * READ_SAMPLES), end)
        ids = plan.ids(lane, np.arange(start, stop))
        starts, stops = index.offsets.start[ids], index.offsets.stop[ids]
        is_break = read_breaks(index, ids)
        due = plan.due(lane, start, stop)
        breaks = start + np.append(np.flatnonzero(is_break), stop - start - 1)
        scatter = None if sink is None else sink.scatter(plan, rank, lane, start, ids)
        return cls(start, end, due, ids, starts, stops, breaks, scatter)

    def covers_read(self, place: int) -> bool:
        """Return whether the block has all places of a read from `place` on, and the next one."""
        return min(place + READ_SAMPLES + 1, self.end) <= self.start + len(self.ids)

    def read_rows(self, place: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Return (due, ids, starts, stops) of the places that one read from `place` on may take."""
        rows = slice(place - self.start, place - self.start + READ_SAMPLES)
        return self.due[rows], self.ids[rows], self.starts[rows], self.stops[rows]

    def id(self, place: int) -> int:
        """Return the sample id of a place."""
        return int(self.ids[place - self.start])

    def next_break(self, place: int) -> int:
        """Return the first place >= `place` after which a new read must begin."""
        return int(self.breaks[np.searchsorted(self.breaks, place)])
