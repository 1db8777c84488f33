"""What a rank reads in an epoch, and what it holds in memory, computed with the reader's own rules.

The reader only executes the plan, so the results are exact. A sample is held from when it is read
until its batch is requested. What the reader reads ahead, some MB, comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wdstrain.order.plan import Plan
from wdstrain.reader.read_blocks import READ_SAMPLES, read_breaks, read_bytes
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.storage.block_map import range_size
from wdstrain.storage.remote import is_remote

_CHUNK = 1 << 18  # samples whose reads are found at a time


class Reads(NamedTuple):
    """Reads of a lane, in order. int64[reads] each.

    ids: first sample; samples: their number; shard: its number; start, stop: bytes of the shard;
    used: bytes that belong to samples.
    """

    ids: Ints
    samples: Ints
    shard: Ints
    start: Ints
    stop: Ints
    used: Ints

    @property
    def opens(self) -> Ints:
        """Numbers of the reads that open a shard."""
        return np.flatnonzero(np.diff(self.shard, prepend=-1))

    @property
    def seeks(self) -> int:
        """Number of reads that open a shard, or do not start where the last one ended."""
        jumps = (np.diff(self.shard) == 0) & (self.start[1:] != self.stop[:-1])
        return len(self.opens) + int(jumps.sum())


class LanePlaces(NamedTuple):
    """Places of a lane, from place `low` on. int64[places] each.

    ids: sample; position: in the order of delivery; step: that delivers it; due: last step that
    needs it.
    """

    low: int
    ids: Ints
    position: Ints
    step: Ints
    due: Ints


class Held(NamedTuple):
    """What is held when the batch of a step is requested, that batch included. int64[steps] each."""

    samples: Ints
    bytes: Ints


@dataclass(frozen=True)
class RankShare:
    """What one rank does in an epoch.

    padding: rows that repeat samples. bytes: are read; unused_bytes: of them belong to no sample.
    opened_in_the_middle: shards whose beginning another lane reads, or the epoch leaves out. seeks:
    reads that open a shard, or do not start where the last one ended; the lanes of a rank take
    turns, so with several of them a disk seeks with nearly every read. requests: to servers, without
    a cache; 0 for local shards. first_batch_bytes: are read before the first batch is complete.
    held: read and not delivered, when a batch is requested.
    """

    rank: int
    steps: int
    samples: int
    padding: int
    bytes: int
    unused_bytes: int
    shards: int
    opened_in_the_middle: int
    reads: int
    seeks: int
    requests: int
    first_batch_bytes: int
    held_samples_mean: float
    held_samples_most: int
    held_bytes_mean: float
    held_bytes_most: int


def reads_of(index: Index, plan: Plan, lane: int) -> Reads:
    """Return the reads of a lane in an epoch."""
    places, table, most = plan.lane_places(lane), index.offsets, read_bytes(index)
    begun, parts = 0, []
    while begun < places:
        stop = min(begun + _CHUNK, places)
        ids = plan.ids(lane, np.arange(begun, stop))
        starts, stops, shard = table.start[ids], table.stop[ids], index.shard_of(ids)
        # runs are samples that one read could take if it were long enough
        breaks = read_breaks(index, ids)
        run = np.concatenate([[0], np.cumsum(breaks)])
        first, last = (
            np.flatnonzero(np.diff(run, prepend=-1)),
            np.flatnonzero(np.diff(run, append=run[-1] + 1)),
        )
        # as if the runs lay one after another, each too far from the last for one read
        lengths = stops[last] - starts[first] + most + 1
        shift = (np.cumsum(lengths) - lengths - starts[first])[run]
        after = np.searchsorted(stops + shift, starts + shift + most, side="right")
        here = np.arange(len(ids))
        nexts = np.clip(after, here + 1, here + READ_SAMPLES).tolist()
        at, begins = 0, list[int]()
        while at < len(ids) and not (nexts[at] >= len(ids) and stop < places and begins):
            begins.append(at)  # a read that may go on behind the chunk begins the next one
            at = nexts[at]
        heads, ends = np.array(begins), np.array([*begins[1:], at])
        used = np.add.reduceat((stops - starts)[:at], heads)
        parts.append((ids[heads], ends - heads, shard[heads], starts[heads], stops[ends - 1], used))
        begun += at
    if not parts:
        return Reads(*(np.zeros(0, np.int64) for _ in Reads._fields))
    return Reads(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def places_in(plan: Plan, lane: int, first: int, stop: int) -> LanePlaces:
    """Return the places of a lane that the steps [first, stop) may need."""
    count, last = plan.lane_samples(lane), plan.span(lane, plan.steps - 1)[0]
    low = max(0, min(plan.span(lane, first)[0], count) - plan.window + 1)
    high = min(count, plan.span(lane, stop - 1)[1] + plan.window - 1)
    if low >= high:
        none = np.zeros(0, np.int64)
        return LanePlaces(low, none, none, none, none)
    position = plan.positions(lane, low, high)
    step = np.minimum(position // plan.samples_per_step_per_lane, plan.steps - 1)
    step[position >= last] = plan.steps - 1
    due = step if plan.tail == "drop" else plan.due(lane, low, high)
    return LanePlaces(low, plan.ids(lane, np.arange(low, high)), position, step, due)


def held_in(
    index: Index, plan: Plan, lane: int, first: int, stop: int, known: LanePlaces | None = None
) -> Held:
    """Return what a lane holds at each of the steps [first, stop). known: `places_in` of them."""
    count, table = plan.lane_samples(lane), index.offsets
    if count == 0:  # nothing, or the one sample that an empty lane pads with
        ids = plan.ids(lane, np.arange(plan.lane_places(lane)))
        size = int((table.stop[ids] - table.start[ids]).sum())
        return Held(np.full(stop - first, len(ids)), np.full(stop - first, size))
    known = known or places_in(plan, lane, first, stop)
    total = np.concatenate([[0], np.cumsum(table.stop[known.ids] - table.start[known.ids])])
    # a lane is read as far as the furthest place of all steps until then: int64[steps]
    read: Ints = np.zeros(stop - first, np.int64)
    mine = known.step < stop
    np.maximum.at(read, np.maximum(known.step[mine] - first, 0), np.flatnonzero(mine) + 1)
    read = np.maximum.accumulate(read)
    gone = known.due < stop - 1
    after = np.maximum(known.due[gone] - first + 1, 0)
    sizes = np.diff(total)[gone]
    left = np.cumsum(np.bincount(after, minlength=stop - first))
    left_bytes = np.cumsum(np.bincount(after, weights=sizes, minlength=stop - first)).astype(
        np.int64
    )
    return Held(read - left, total[read] - left_bytes)


def share_of(index: Index, plan: Plan, rank: int, reads: list[Reads], held: Held) -> RankShare:
    """Return what a rank does. reads: of each lane; held: of all of them, at the computed steps."""
    lanes = plan.lanes_of(rank)
    size, used = (
        sum(int(part.sum()) for part in parts)
        for parts in zip(*((r.stop - r.start, r.used) for r in reads), strict=True)
    )
    samples = sum(plan.lane_samples(lane) for lane in lanes)
    far = any(is_remote(shard.path) for shard in index.shards)
    opened = [(one.shard[one.opens], one.ids[one.opens]) for one in reads]
    return RankShare(
        rank=rank,
        steps=plan.steps,
        samples=samples,
        padding=plan.steps * plan.batch_size - samples if plan.tail == "pad" else 0,
        bytes=size,
        unused_bytes=size - used,
        shards=len(np.unique(np.concatenate([shard for shard, _ in opened]))),
        opened_in_the_middle=sum(int((ids != index.first[shard]).sum()) for shard, ids in opened),
        reads=sum(len(one.ids) for one in reads),
        seeks=sum(one.seeks for one in reads),
        requests=sum(int((-(-(one.stop - one.start) // range_size())).sum()) for one in reads)
        if far
        else 0,
        first_batch_bytes=sum(int(held_in(index, plan, lane, 0, 1).bytes[0]) for lane in lanes),
        held_samples_mean=float(held.samples.mean()),
        held_samples_most=int(held.samples.max()),
        held_bytes_mean=float(held.bytes.mean()),
        held_bytes_most=int(held.bytes.max()),
    )
