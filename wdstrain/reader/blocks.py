"""Blocks of consecutive steps, and of consecutive places of a lane, each planned at once.

Planning one step or one read takes some twenty numpy calls on short arrays, and the calls cost more
than their work. A `StepBlock` has about a thousand samples in order of delivery, and a batch is a
slice of it. A `ReadBlock` covers at least a shuffle window in order of reading, and a read is a
slice of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.order.order import Order
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.storage.remote import is_remote, range_size

READ_SAMPLES = 4096  # most samples in one read
GAP = 1 << 20  # bytes; a gap up to this size between two samples is read and discarded
_LOCAL = 16 << 20  # most bytes of one read of local shards
_STEP_SAMPLES = 1024  # approximate size of a block of steps


class LaneSteps(NamedTuple):
    """Samples of one lane in k steps.

    places: int64[n], in order of delivery. firsts: k + 1 positions in `places`, where each step
    begins and the last ends. needed: for each step, the number of places of the lane that must have
    been read.
    """

    places: Ints
    firsts: list[int]
    needed: list[int]


@dataclass(frozen=True, eq=False)
class StepBlock:
    """Steps [first, first + k) of an epoch on one rank, with n samples ordered by step and lane.

    ids: int64[n]. draws: int64[n], see `Plan.draws`; `ids` itself if they are equal.
    firsts: k + 1 positions in `ids`, where each step begins and the last ends. valid: bool[n], False
    for padding. lanes: in the order in which a step takes from them.
    """

    epoch: int
    first: int
    ids: Ints
    draws: Ints
    firsts: list[int]
    valid: npt.NDArray[np.bool_]
    lanes: list[LaneSteps]

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.firsts) - 1


def step_blocks(plan: Order, rank: int, step: int = 0) -> Iterator[StepBlock]:
    """Yield the steps of an epoch from `step` on, in blocks. rank: whose lanes to take."""
    lanes = plan.lanes_of(rank)
    steps_per_block = max(1, _STEP_SAMPLES // (plan.global_batch // plan.lane_count * len(lanes)))
    for first in range(step, plan.steps, steps_per_block):
        yield _step_block(plan, lanes, first, min(first + steps_per_block, plan.steps))


def _step_block(plan: Order, lanes: Sequence[int], first: int, stop: int) -> StepBlock:
    """Return the block of the steps [first, stop)."""
    lane_steps, ids, draws = list[LaneSteps](), list[Ints](), list[Ints]()
    valid, steps = list[npt.NDArray[np.bool_]](), list[Ints]()
    for lane in lanes:
        spans = [plan.span(lane, step) for step in range(first, stop)]  # contiguous
        begin, end = spans[0][0], spans[-1][1]
        places = plan.order(lane, begin, end)
        firsts = [0, *(span_end - begin for _, span_end in spans)]
        highest = [0, *(np.maximum.accumulate(places) + 1).tolist()]
        lane_steps.append(LaneSteps(places, firsts, [highest[count] for count in firsts[1:]]))
        ids.append(plan.ids(lane, places))
        draws.append(plan.draws(lane, places, ids[-1]))
        valid.append(np.arange(begin, end) < plan.lane_samples(lane))
        steps.append(np.repeat(np.arange(len(spans)), np.diff(firsts)))
    sizes = [
        sum(end - begin for begin, end in spans_of_step)
        for spans_of_step in zip(*(pairwise(lane.firsts) for lane in lane_steps), strict=True)
    ]
    by_step = np.argsort(np.concatenate(steps), kind="stable")
    are_ids = all(own is lane_ids for own, lane_ids in zip(draws, ids, strict=True))
    ordered = np.concatenate(ids)[by_step]
    return StepBlock(
        plan.epoch,
        first,
        ordered,
        ordered if are_ids else np.concatenate(draws)[by_step],
        [0, *accumulate(sizes)],
        np.concatenate(valid)[by_step] if plan.tail != "drop" else np.ones(sum(sizes), bool),
        lane_steps,
    )


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
    """

    start: int
    end: int
    due: Ints
    ids: Ints
    shards: Ints
    starts: Ints
    stops: Ints
    breaks: Ints

    @classmethod
    def of(cls, index: Index, plan: Order, lane: int, start: int) -> ReadBlock:
        """Return the block from place `start` on.

        It has more places than one read takes, or all the rest of the lane.
        """
        end = plan.lane_places(lane)
        stop = min(start + max(plan.window, 4 * READ_SAMPLES), end)
        ids = plan.ids(lane, np.arange(start, stop))
        return cls(
            start,
            end,
            due=plan.due(lane, start, stop),
            ids=ids,
            shards=index.shard_of(ids),
            starts=index.offsets.start[ids],
            stops=index.offsets.stop[ids],
            breaks=start + np.append(np.flatnonzero(read_breaks(index, ids)), stop - start - 1),
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
