"""Reads and memory of a rank in an epoch, and quality of its shuffle.

Reads are planned with the reader's own functions, and the order is that of the plan. Shuffle
quality is compared with a perfectly random order: neighbors on disk that share a batch, and classes
in batches. Neighbors reveal what classes do not, such as frames of one video. A batch is the global
batch of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wdstrain.order.plan import Plan
from wdstrain.reader.reads import lane_reads
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.storage.remote import is_remote, range_size

NEAREST = 16  # nearest samples on disk: half of them before a sample, half after it
_GOOD_NEIGHBORS = 0.1  # by so many more than ideal of the nearest samples may share a batch
_GOOD_EFFECT = 1.1  # batches are as even as ideal ones that are a tenth smaller
_MAX_CHANCE = 0.9  # of a design effect that chance excuses


# --- reads ----------------------------------------------------------------------------------------


class Reads(NamedTuple):
    """Reads of a lane, in order. int64[reads] each.

    ids: first sample; samples: their number; shard: its number; start, stop: bytes of the shard.
    """

    ids: Ints
    samples: Ints
    shard: Ints
    start: Ints
    stop: Ints


def reads_of(index: Index, plan: Plan, rank: int, lane: int) -> Reads:
    """Return the reads of a lane in an epoch. lane: number among the lanes of the rank."""
    rows = [
        (read.ids[0], len(np.unique(read.ids)), read.start, read.stop)
        for read in lane_reads(index, plan, rank, lane)
    ]
    ids, samples, start, stop = np.array(rows, np.int64).reshape(-1, 4).T
    return Reads(ids, samples, index.shard_of(ids), start, stop)


@dataclass(frozen=True)
class RankShare:
    """Reads and memory of one rank in an epoch.

    padding: rows that repeat samples. bytes: are read. opened_in_the_middle: shards whose beginning
    another lane reads, or the epoch leaves out. seeks: reads that open a shard, or do not start
    where the last one ended; the lanes of a rank take turns, so with several of them a disk seeks
    with nearly every read. requests: to servers, without a cache; 0 for local shards.
    first_batch_bytes: are read before the first batch is complete. held: read and not delivered,
    when a batch is requested.
    """

    rank: int
    steps: int
    samples: int
    padding: int
    bytes: int
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


def rank_share(
    index: Index, plan: Plan, rank: int, lanes: Sequence[Reads], steps: tuple[int, int]
) -> RankShare:
    """Return the share of a rank. lanes: reads of each of its lanes. steps: measured steps."""
    samples = sum(plan.lane_samples(lane) for lane in plan.lanes_of(rank))
    held = np.sum([held_in(index, plan, lane, *steps) for lane in plan.lanes_of(rank)], axis=0)
    first = sum(int(held_in(index, plan, lane, 0, 1).bytes[0]) for lane in plan.lanes_of(rank))
    opens = [np.diff(reads.shard, prepend=-1) != 0 for reads in lanes]
    jumps = [reads.start != np.append(-1, reads.stop[:-1]) for reads in lanes]
    sizes = np.concatenate([reads.stop - reads.start for reads in lanes])
    far = any(is_remote(shard.path) for shard in index.shards)
    return RankShare(
        rank=rank,
        steps=plan.steps,
        samples=samples,
        padding=plan.steps * plan.batch_size - samples if plan.tail == "pad" else 0,
        bytes=int(sizes.sum()),
        shards=len(np.unique(np.concatenate([reads.shard for reads in lanes]))),
        opened_in_the_middle=sum(
            int((reads.ids[new] != index.first[reads.shard[new]]).sum())
            for reads, new in zip(lanes, opens, strict=True)
        ),
        reads=len(sizes),
        seeks=sum(int((new | jump).sum()) for new, jump in zip(opens, jumps, strict=True)),
        requests=int((-(-sizes // range_size())).sum()) if far else 0,
        first_batch_bytes=first,
        held_samples_mean=float(held[0].mean()),
        held_samples_most=int(held[0].max()),
        held_bytes_mean=float(held[1].mean()),
        held_bytes_most=int(held[1].max()),
    )


# --- memory ---------------------------------------------------------------------------------------


class LanePlaces(NamedTuple):
    """Places of a lane. int64[places] each.

    ids: sample; step: that delivers it; due: last step that needs it.
    """

    ids: Ints
    step: Ints
    due: Ints


class Held(NamedTuple):
    """Samples and bytes in memory when the batch of a step is requested: int64[steps] each."""

    samples: Ints
    bytes: Ints


def places_in(plan: Plan, lane: int, first: int, stop: int) -> LanePlaces:
    """Return the places of a lane that the steps [first, stop) may need."""
    begin, end = plan.cuts(lane, np.array([first, stop])).tolist()
    count, own = plan.lane_samples(lane), divmod(lane, plan.lanes_per_rank)
    low, high = max(0, min(begin, count) - plan.window + 1), min(count, end + plan.window - 1)
    ids, step, _ = plan.reading(*own, low, high)
    # padding repeats a sample: its entries follow each other
    edges = np.flatnonzero(np.diff(ids, prepend=-1, append=-1))
    return LanePlaces(ids[edges[:-1]], step[edges[:-1]], step[edges[1:] - 1])


def held_in(
    index: Index, plan: Plan, lane: int, first: int, stop: int, known: LanePlaces | None = None
) -> Held:
    """Return the samples that a lane holds at the steps [first, stop). known: their `places_in`.

    A sample is held from when it is read until its batch is requested. The reader frees memory read
    by read, and reads some MB ahead, which comes on top.
    """
    count, table = plan.lane_samples(lane), index.offsets
    if count == 0:  # nothing, or the one sample that an empty lane pads with
        ids = np.unique(plan.reading(*divmod(lane, plan.lanes_per_rank), 0, 1).ids)
        size = int((table.size[ids]).sum())
        return Held(np.full(stop - first, len(ids)), np.full(stop - first, size))
    known = known or places_in(plan, lane, first, stop)
    total = np.concatenate([[0], np.cumsum(table.size[known.ids])])
    # a lane is read as far as the furthest place of all steps until then: int64[steps]
    read: Ints = np.zeros(stop - first, np.int64)
    mine = known.step < stop
    np.maximum.at(read, np.maximum(known.step[mine] - first, 0), np.flatnonzero(mine) + 1)
    read = np.maximum.accumulate(read)
    gone = known.due < stop - 1
    after = np.maximum(known.due[gone] - first + 1, 0)
    left = np.cumsum(np.bincount(after, minlength=stop - first))
    sizes = np.bincount(after, weights=np.diff(total)[gone], minlength=stop - first)
    return Held(read - left, total[read] - np.cumsum(sizes).astype(np.int64))


# --- shuffle quality ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Neighbors:
    """Number of the 16 nearest samples on disk in a sample's batch. ideal: in a random order."""

    nearest: float
    nearest_ideal: float

    @property
    def limit(self) -> float:
        """The largest good value of `nearest`; in small sets twice the ideal."""
        return self.nearest_ideal + max(_GOOD_NEIGHBORS, self.nearest_ideal)


@dataclass(frozen=True)
class ClassMix:
    """Spread of classes over batches.

    design_effect: variance of the class shares of batches / that of a random order. 1 is ideal; the
    batch size means that every batch has one class. chance: two standard deviations of it in a
    random order.
    """

    design_effect: float
    chance: float

    @property
    def limit(self) -> float:
        """The largest good value of `design_effect`."""
        return _GOOD_EFFECT + min(self.chance, _MAX_CHANCE)


@dataclass(frozen=True)
class BufferQuality:
    """Quality of a shuffle buffer, and its memory on a rank, on average.

    shuffle: False for the order on disk. neighbors, classes: None if they cannot be measured.
    """

    buffer: int
    shuffle: bool
    held_samples: float
    held_bytes: float
    neighbors: Neighbors | None
    classes: ClassMix | None

    @property
    def separates_neighbors(self) -> bool:
        """Whether neighbors on disk are rarely in one batch."""
        return self.neighbors is None or self.neighbors.nearest <= self.neighbors.limit

    @property
    def mixes_classes(self) -> bool:
        """Whether batches are nearly as even in their classes as those of a random order."""
        return self.classes is None or self.classes.design_effect <= self.classes.limit

    @property
    def is_good(self) -> bool:
        return self.separates_neighbors and self.mixes_classes


def buffer_quality(
    index: Index, plan: Plan, codes: Ints | None, steps: tuple[int, int]
) -> BufferQuality:
    """Return the quality of the shuffle of a plan.

    codes: class of each sample, -1: unknown; None: no classes.
    """
    lanes = [places_in(plan, lane, *steps) for lane in range(plan.lane_count)]
    held = [held_in(index, plan, lane, *steps, places) for lane, places in enumerate(lanes)]
    ids, step = (
        np.concatenate([getattr(lane, name) for lane in lanes]) for name in ("ids", "step")
    )
    per_rank = plan.lane_count / plan.world_size
    return BufferQuality(
        buffer=plan.window,
        shuffle=plan.shuffle,
        held_samples=per_rank * float(np.mean([lane.samples for lane in held])),
        held_bytes=per_rank * float(np.mean([lane.bytes for lane in held])),
        neighbors=_neighbors(plan, index, ids, step),
        classes=None if codes is None else _class_mix(plan, codes, ids, step, steps),
    )


def _neighbors(plan: Plan, index: Index, ids: Ints, step: Ints) -> Neighbors | None:
    """Return the mixing of neighbors; None if no shard has two samples. ids, step: int64[n]"""
    order = np.argsort(ids, kind="stable")
    ids, step = ids[order], step[order]
    shard, shares = index.shard_of(ids), list[float]()
    for i in range(1, min(NEAREST // 2, len(ids) - 1) + 1):
        near = (ids[i:] - ids[:-i] == i) & (shard[i:] == shard[:-i])
        if near.any():
            shares.append(float((step[i:] == step[:-i])[near].mean()))
    if not shares:
        return None
    kept, size = plan.samples - plan.left_out, plan.global_batch
    rest = kept - (plan.steps - 1) * size  # samples of the last batch
    ideal = ((plan.steps - 1) * size * (size - 1) + rest * (rest - 1)) / max(1, kept * (kept - 1))
    return Neighbors(2 * sum(shares), 2 * len(shares) * ideal)


def _class_mix(
    plan: Plan, codes: Ints, ids: Ints, step: Ints, steps: tuple[int, int]
) -> ClassMix | None:
    """Return the spread of classes over batches; None if there are not two classes.

    P is the probability that two samples of a batch have one class, P0 that of two samples of the
    set. rho = (P - P0) / (1 - P0) is the intraclass correlation, 1 + (batch size - 1) * rho the
    design effect (Kish).
    """
    counts = np.bincount(codes[codes >= 0])
    counts = counts[counts > 0]
    inside = (step >= steps[0]) & (step < steps[1]) & (codes[ids] >= 0)
    if not inside.any() or len(counts) < 2:
        return None
    width = int(codes.max()) + 1
    cells, number = np.unique(step[inside] * width + codes[ids[inside]], return_counts=True)
    known = np.bincount(cells // width, weights=number)  # samples of each batch
    pairs = float((known * (known - 1)).sum())
    if not pairs:
        return None
    total = float(counts.sum())
    ideal = float((counts * (counts - 1.0)).sum()) / (total * (total - 1))
    rho = (float((number * (number - 1.0)).sum()) / pairs - ideal) / max(1 - ideal, 1e-12)
    batches = int((known > 1).sum())
    return ClassMix(
        design_effect=1 + (plan.global_batch - 1) * rho,
        chance=2 * math.sqrt(2 / (batches * (len(counts) - 1))),
    )
