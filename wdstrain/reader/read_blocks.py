"""What comes next in a lane, looked at many places at a time.

A read takes a few dozen samples or a few hundred, and to ask the plan and the index for each read anew cost the reader more than the
read. So a whole window of places is asked for at once, and a read is a slice of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wdstrain.order.plan import Order
from wdstrain.reader.slot_scatter import SlotScatter
from wdstrain.reader.slot_sink import SlotSink
from wdstrain.shards.index import Index, Ints
from wdstrain.storage.remote import is_remote

READ_SAMPLES = 4096  # samples in one read, at most
GAP = 4 << 20  # bytes that nobody wants and that are read over
_NEAR, _FAR = 16 << 20, 4 << 20  # bytes of one read, at most. Of a server, several are under way


def read_bytes(index: Index) -> int:
    """Most bytes of one read, but for a sample that has more."""
    return _FAR if any(is_remote(shard.path) for shard in index.shards) else _NEAR


class ReadBlock(NamedTuple):
    """Places of a lane from `start` on: the steps that need them (the last), sample ids, where those begin and end in their shards.
    int64[n] each.

    end: places of the lane. apart: places after which the next lies elsewhere, in order; the last of these among them.
    spread: where they go, of samples whose arrays land.
    """

    start: int
    end: int
    due: Ints
    ids: Ints
    starts: Ints
    stops: Ints
    apart: Ints
    spread: SlotScatter | None

    @classmethod
    def of(
        cls,
        index: Index,
        plan: Order,
        rank: int,
        lane: int,
        start: int,
        landing: SlotSink | None,
    ) -> ReadBlock:
        """More places from this one on than one read takes, or all of the rest."""
        end = plan.lane_places(lane)
        stop = min(start + max(plan.window, 4 * READ_SAMPLES), end)
        ids = plan.ids(lane, np.arange(start, stop))
        starts, stops = index.table.start[ids], index.table.stop[ids]
        apart = (np.diff(ids) != 1) | (np.diff(index.shard_of(ids)) != 0) | (starts[1:] - stops[:-1] > GAP)
        due = plan.due(lane, start, stop)
        apart = start + np.append(np.flatnonzero(apart), stop - start - 1)
        spread = None if landing is None else landing.spread(plan, rank, lane, start, ids)
        return cls(start, end, due, ids, starts, stops, apart, spread)

    def enough(self, place: int) -> bool:
        """Whether what one read takes from this place on is among them, and what follows."""
        return min(place + READ_SAMPLES + 1, self.end) <= self.start + len(self.ids)

    def at(self, place: int) -> tuple[Ints, Ints, Ints, Ints]:
        """What is known of the places from this one on that one read may take."""
        rows = slice(place - self.start, place - self.start + READ_SAMPLES)
        return self.due[rows], self.ids[rows], self.starts[rows], self.stops[rows]

    def id(self, place: int) -> int:
        return int(self.ids[place - self.start])

    def apart_after(self, place: int) -> int:
        """The next place, or this one, after which reading does not go on."""
        return int(self.apart[np.searchsorted(self.apart, place)])
