"""What one rank reads in an epoch, and what waits in memory meanwhile: the reader's own rules, followed on integers.

Everything here is exact, because the reader only executes the plan: the same samples go into the same reads, at the same
offsets. A test compares it with what a real reader does. The road not taken is to estimate seeks and memory from means (shards
per rank, half a window): it is as long to write and wrong at every edge, of shards, of lanes and of the epoch.

Samples wait from when they are read until their batch is asked for; reading is taken to go as far as the next batch needs.
What the reader runs ahead of that, some megabytes, comes on top. Arrays that are read straight into their batch wait there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wdstrain.order.plan import Plan
from wdstrain.reader.read_blocks import READ_SAMPLES, read_breaks, read_bytes
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.storage.prefetch import RANGE
from wdstrain.storage.remote import is_remote

_CHUNK = 1 << 18  # samples whose reads are found at a time


class Reads(NamedTuple):
    """Reads of a lane, in order. ids: the first sample of each; samples: how many; shard: its number; start, stop: where in it;
    used: bytes that belong to samples. int64[reads] each."""

    ids: Ints
    samples: Ints
    shard: Ints
    start: Ints
    stop: Ints
    used: Ints

    @property
    def opens(self) -> Ints:
        """The reads that open a shard."""
        return np.flatnonzero(np.diff(self.shard, prepend=-1))

    @property
    def seeks(self) -> int:
        """Reads that do not go on where the last one of their shard ended, or open a shard."""
        jumps = (np.diff(self.shard) == 0) & (self.start[1:] != self.stop[:-1])
        return len(self.opens) + int(jumps.sum())


class Seen(NamedTuple):
    """Places of a lane from `low` on: the sample of each, its delivery position, the step that delivers it, the last that needs
    it. int64[places] each."""

    low: int
    ids: Ints
    position: Ints
    step: Ints
    due: Ints


class Waiting(NamedTuple):
    """What is read and not delivered when the batch of a step is asked for, that batch included. int64[steps] each."""

    samples: Ints
    bytes: Ints


@dataclass(frozen=True)
class RankShare:
    """What one rank does in an epoch.

    samples are delivered as themselves, padding repeats some. bytes are read; unused_bytes of them belong to no sample. A shard is
    opened in the middle where another lane has its beginning, or the epoch leaves it out. seeks: reads that open a shard or do not
    go on where the last one of it ended; a rank's lanes take turns, so with several of them a disk moves with nearly every one of
    the reads. requests: what servers are asked, without a cache; 0 on a disk. first_batch_bytes are read before the first batch is
    whole. held: read and not delivered, when a batch is asked for.
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
    """The reads of a lane in this epoch."""
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


def seen(plan: Plan, lane: int, first: int, stop: int) -> Seen:
    """The places of a lane that the steps [first, stop) may have to do with."""
    count, last = plan.lane_samples(lane), plan.span(lane, plan.steps - 1)[0]
    low = max(0, min(plan.span(lane, first)[0], count) - plan.window + 1)
    high = min(count, plan.span(lane, stop - 1)[1] + plan.window - 1)
    if low >= high:
        none = np.zeros(0, np.int64)
        return Seen(low, none, none, none, none)
    position = plan.positions(lane, low, high)
    step = np.minimum(position // plan.samples_per_step_per_lane, plan.steps - 1)
    step[position >= last] = plan.steps - 1
    due = step if plan.tail == "drop" else plan.due(lane, low, high)
    return Seen(low, plan.ids(lane, np.arange(low, high)), position, step, due)


def waiting(
    index: Index, plan: Plan, lane: int, first: int, stop: int, known: Seen | None = None
) -> Waiting:
    """What of a lane waits at each of the steps [first, stop). known: `seen` of these steps, if the caller has it."""
    count, table = plan.lane_samples(lane), index.offsets
    if count == 0:  # nothing, or the one sample that an empty lane pads with
        ids = plan.ids(lane, np.arange(plan.lane_places(lane)))
        size = int((table.stop[ids] - table.start[ids]).sum())
        return Waiting(np.full(stop - first, len(ids)), np.full(stop - first, size))
    known = known or seen(plan, lane, first, stop)
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
    return Waiting(read - left, total[read] - left_bytes)


def share_of(index: Index, plan: Plan, rank: int, reads: list[Reads], held: Waiting) -> RankShare:
    """What a rank does. reads: of its lanes; held: what waits of all of them, at the steps that were looked at."""
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
        requests=sum(int((-(-(one.stop - one.start) // RANGE)).sum()) for one in reads)
        if far
        else 0,
        first_batch_bytes=sum(int(waiting(index, plan, lane, 0, 1).bytes[0]) for lane in lanes),
        held_samples_mean=float(held.samples.mean()),
        held_samples_most=int(held.samples.max()),
        held_bytes_mean=float(held.bytes.mean()),
        held_bytes_most=int(held.bytes.max()),
    )
