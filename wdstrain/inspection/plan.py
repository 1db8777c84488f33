"""`wt.plan_epoch`: what an epoch of a `Loader` will do, computed from the index without a read.

The reads are those of the reader, the order is that of the plan. Quality is compared with a random
order: how even batches are in their classes, and in the places of their samples on disk. Places
reveal what classes do not, such as frames of one video. A batch is the global batch of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from wdstrain.errors import UsageError
from wdstrain.inspection.labels import known_labels
from wdstrain.inspection.options import PlanOptions
from wdstrain.inspection.result import Result, Size, rows_of
from wdstrain.loader.loader import Loader
from wdstrain.order.order import Tail
from wdstrain.order.plan import Plan
from wdstrain.reader.reads import lane_reads
from wdstrain.report.printing import counted
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import open_shards
from wdstrain.shards.selection import group_codes
from wdstrain.storage.remote import is_remote, range_size

_NEIGHBORS = 16  # samples that follow each other on disk and count as one place
_GOOD_EFFECT = 1.1  # batches are as even as random ones that are a tenth smaller
_MAX_CHANCE = 0.9  # of a design effect that chance excuses


@dataclass(frozen=True, repr=False)
class RankShare(Result):
    """Reads and memory of one rank in an epoch.

    padding: rows that repeat samples. seeks: reads that open a shard, or do not start where the last
    one ended; the lanes of a rank take turns, so with several of them a disk seeks with nearly every
    read. requests: to servers, without a cache; 0 for local shards. held_bytes_most: read and not
    delivered, when a batch is requested. The reader reads some MB ahead, which comes on top.
    """

    rank: int
    samples: int
    padding: int
    bytes: int
    shards: int
    reads: int
    seeks: int
    requests: int
    held_bytes_most: int

    def __str__(self) -> str:
        return (
            f"{counted(self.samples, 'sample')}, {self.bytes} of "
            f"{counted(self.shards, 'shard')} in {counted(self.reads, 'read')} with "
            f"{counted(self.seeks, 'seek')}; holds at most {self.held_bytes_most}"
        )


@dataclass(frozen=True, repr=False)
class Mixing(Result):
    """One measure of shuffle quality, in words too: a design effect, which is 1 in a random order.

    It is the variance of the shares in batches / that of a random order. The batch size means that
    a batch has one class, or lies in one place on disk. limit: still good.
    """

    value: float
    limit: float
    text: str

    @property
    def is_good(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True, repr=False)
class EpochPreview(Result):
    """Preview of an epoch. Prints as names and values; `as_dict()` is JSON-able.

    exactly_once: every sample that is not left out is read once. hours: at `rate` samples per
    second on each rank. requests, cost: of all ranks; cost is None without prices. quality: by
    "classes", None without a label that has a column, and by "neighbors" on disk, None if the shards
    were packed in random order. steps_measured: their number. label: whose classes were measured.
    """

    samples: int
    shards: int
    bytes: int
    batch_size: int
    world_size: int
    lanes: int
    shuffle: bool
    shuffle_buffer: int
    seed: int
    epoch: int
    tail: Tail
    steps: int
    steps_measured: int
    left_out: int
    exactly_once: bool
    rate: float
    hours: float
    requests: int
    cost: float | None
    ranks: tuple[RankShare, ...]
    label: str | None
    quality: dict[str, Mixing | None]
    is_good: bool
    verdict: str

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values as text."""
        busiest = max(self.ranks, key=lambda rank: rank.bytes)
        requests = f" in {counted(self.requests, 'request')}" if self.requests else ""
        seconds = timedelta(seconds=round(self.hours * 3600))
        named = {
            "samples": f"{self.samples} in {counted(self.shards, 'shard')}, {self.bytes}",
            "epoch": f"{self.epoch}: {counted(self.steps, 'step')} on "
            f"{counted(self.world_size, 'rank')}",
            "batch": f"{self.batch_size} per rank, {self.batch_size * self.world_size} in all, "
            f"{counted(self.lanes, 'lane')}",
            "shuffle": f"buffer of {self.shuffle_buffer} samples, seed {self.seed}"
            if self.shuffle
            else "none",
            "left out": f"{self.left_out} of {counted(self.samples, 'sample')} (tail: {self.tail})",
            "exactly once": "every sample that is not left out" if self.exactly_once else "NO",
            "read": f"{Size(sum(rank.bytes for rank in self.ranks))}{requests}",
            "time": f"{seconds} at {self.rate:g} samples/s on each rank",
            "cost": None if self.cost is None else f"{self.cost:.4g} per epoch",
            f"rank {busiest.rank}" + ", reads most" * (self.world_size > 1): busiest,
            **{name: mixing and mixing.text for name, mixing in self.quality.items()},
            "verdict": self.verdict,
        }
        return rows_of(named)


@takes(PlanOptions)
def plan_epoch(options: PlanOptions) -> EpochPreview:
    """Return a preview of an epoch of a `Loader` with these options, on all of its ranks.

    Classes come from the column of the index. Raises what `Loader` raises, and UsageError for a
    label that does not exist or has no classes.
    """
    index = open_shards(options.urls)
    index = index if options.where is None else index.where(options.where)
    label, classes = _class_codes(index, options.label)
    given = ("batch_size", "world_size", "lanes", "shuffle_buffer", "shuffle", "seed", "tail")
    loader = Loader(index, rank=0, **{name: getattr(options, name) for name in given})
    plan = loader.plan(options.epoch)
    assert isinstance(plan, Plan)
    shares = [_share(index, plan, rank) for rank in range(plan.world_size)]
    ranks, places = tuple(rank for rank, _ in shares), np.hstack([own for _, own in shares])
    requests = sum(rank.requests for rank in ranks)
    per_gigabyte, per_thousand = options.price or (0.0, 0.0)
    cost = per_gigabyte * sum(r.bytes for r in ranks) / 1e9 + per_thousand * requests / 1000
    packing = index.info.get("options")
    is_random = plan.shuffle and isinstance(packing, dict) and packing.get("shuffle") is True
    neighbors = None if is_random else np.arange(len(index)) // _NEIGHBORS
    quality = {
        "classes": _mixing(plan, classes, places, "in their classes"),
        "neighbors": _mixing(plan, neighbors, places, "in places on disk"),
    }
    bad = [mixing for mixing in quality.values() if mixing and not mixing.is_good]
    return EpochPreview(
        samples=len(index),
        shards=len(index.shards),
        bytes=Size(sum(shard.bytes for shard in index.shards)),
        batch_size=options.batch_size,
        world_size=options.world_size,
        lanes=plan.lane_count,
        shuffle=options.shuffle,
        shuffle_buffer=plan.window,
        seed=options.seed,
        epoch=options.epoch,
        tail=options.tail,
        steps=plan.steps,
        steps_measured=plan.steps,
        left_out=plan.left_out,
        exactly_once=len(np.unique(places[0])) == len(places[0]) == plan.samples - plan.left_out,
        rate=options.rate,
        hours=plan.steps * options.batch_size / options.rate / 3600,
        requests=requests,
        cost=cost if options.price else None,
        ranks=ranks,
        label=label,
        quality=quality,
        is_good=not bad,
        verdict=_verdict(bad, options.shuffle, classes is not None),
    )


def _verdict(bad: list[Mixing], shuffle: bool, has_classes: bool) -> str:
    """Return whether the order is well shuffled, and what would mix it."""
    hint = "" if has_classes else " For classes, run: wdstrain index DIR --columns NAME"
    if not bad:
        return f"Well shuffled.{hint}"
    do = "Raise --shuffle-buffer" if shuffle else "Remove --no-shuffle"
    pack = "pack the samples in random order: wdstrain convert tars URLS OUT"
    return f"Not well shuffled: {'; '.join(mixing.text for mixing in bad)}. {do}, or {pack}.{hint}"


def _share(index: Index, plan: Plan, rank: int) -> tuple[RankShare, Ints]:
    """Return the share of a rank, and its samples with the steps that deliver them. int64[2, n]"""
    reads, places, held = list[tuple[int, int, int, int]](), [], np.zeros(plan.steps, np.int64)
    for lane in range(plan.lanes_per_rank):
        mine = list(lane_reads(index, plan, rank, lane))
        reads += [(lane, int(index.shard_of(r.ids[:1])[0]), r.start, r.stop) for r in mine]
        ids, step = (np.concatenate([getattr(r, name) for r in mine]) for name in ("ids", "batch"))
        # padding repeats a sample: its entries follow each other
        edges = np.flatnonzero(np.diff(ids, prepend=-1, append=-1))
        due = step[edges[1:] - 1]
        ids, step = ids[edges[:-1]], step[edges[:-1]]
        held += _held(index.offsets.size[ids], step, due, plan.steps)
        if plan.lane_samples(plan.lanes_of(rank)[lane]):  # an empty lane pads with another's sample
            places.append(np.stack([ids, step]))
    lanes, shards, start, stop = np.array(reads, np.int64).T
    is_next = (np.diff(lanes) == 0) & (np.diff(shards) == 0) & (start[1:] == stop[:-1])
    is_far = any(is_remote(listed.path) for listed in index.shards)
    own = np.hstack([np.zeros((2, 0), np.int64), *places])
    share = RankShare(
        rank=rank,
        samples=own.shape[1],
        padding=plan.steps * plan.batch_size - own.shape[1] if plan.tail == "pad" else 0,
        bytes=Size((stop - start).sum()),
        shards=len(np.unique(shards)),
        reads=len(reads),
        seeks=len(reads) - int(is_next.sum()),
        requests=int((-(-(stop - start) // range_size())).sum()) if is_far else 0,
        held_bytes_most=Size(held.max()),
    )
    return share, own


def _held(sizes: Ints, step: Ints, due: Ints, steps: int) -> Ints:
    """Return the bytes that a lane holds when the batch of a step is requested. int64[steps]

    A sample is held from when it is read until its batch is requested. sizes: of samples in the
    order of reading. step, due: the first and the last step that needs each.
    """
    # a lane is read as far as the furthest place of all steps until then
    read: Ints = np.zeros(steps, np.int64)
    np.maximum.at(read, step, np.cumsum(sizes))
    gone = np.bincount(due + 1, sizes, steps + 1)[:steps].cumsum()
    return np.maximum.accumulate(read) - gone.astype(np.int64)


# --- quality --------------------------------------------------------------------------------------


def _mixing(plan: Plan, codes: Ints | None, places: Ints, words: str) -> Mixing | None:
    """Return the spread of codes over batches; None if there are none, or not two of them.

    codes: of each sample. places: samples and their steps. P is the probability that two samples of
    a batch have one code, P0 that of two samples of the set. rho = (P - P0) / (1 - P0) is the
    intraclass correlation, 1 + (batch size - 1) * rho the design effect (Kish).
    """
    if codes is None:
        return None
    counts, (ids, step), size = np.bincount(codes).astype(np.float64), places, plan.global_batch
    cells, number = np.unique(step * len(counts) + codes[ids], return_counts=True)
    of_batch = np.bincount(cells // len(counts), weights=number)
    pairs, total = float((of_batch * (of_batch - 1)).sum()), len(codes)
    if len(counts) < 2 or not pairs:
        return None
    ideal = float((counts * (counts - 1)).sum()) / (total * (total - 1))
    rho = (float((number * (number - 1.0)).sum()) / pairs - ideal) / max(1 - ideal, 1e-12)
    effect = 1 + (size - 1) * rho
    # two standard deviations in a random order
    chance = 2 * math.sqrt(2 / (int((of_batch > 1).sum()) * (len(counts) - 1)))
    text = f"batches of {size} are as uneven {words} as random ones of {size / max(1, effect):.0f}"
    limit = _GOOD_EFFECT + min(chance, _MAX_CHANCE)
    return Mixing(effect, limit, f"{text} (design effect {effect:.2f})")


def _class_codes(index: Index, name: str | None) -> tuple[str | None, Ints | None]:
    """Return (label, number of each sample's class); (None, None) without one with a column."""
    labels = known_labels(index, name)
    places = [label.place for label in labels if label.is_class]
    if name is not None and not places:
        raise UsageError(f"label {name!r} has the kind {labels[0].kind}: must be class.")
    columns = [column for column in index.columns if column.place in places]
    if len(columns) != 1:
        return None, None
    return columns[0].name, group_codes(index, columns[0].name)
