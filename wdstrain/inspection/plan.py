"""`wt.plan_epoch`: what an epoch of a `Loader` will do, computed from the index without a read.

The reads are those of the reader, the order is that of the plan. Memory and shuffle quality of a
large epoch are computed for some steps in its middle. Quality is compared with a random order: how
even batches are in their classes, and in the places of their samples on disk. Places reveal what
classes do not, such as frames of one video. A batch is the global batch of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from wdstrain.errors import UsageError
from wdstrain.inspection.labels import known_labels
from wdstrain.inspection.options import PlanOptions
from wdstrain.loader.loader import Loader
from wdstrain.order.order import Tail
from wdstrain.order.plan import Plan
from wdstrain.reader.reads import lane_reads
from wdstrain.report.printing import counted
from wdstrain.report.terminal import duration_text
from wdstrain.runtime.options import format_size, takes
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import open_shards
from wdstrain.storage.remote import is_remote, range_size

_MAX_MEASURED = 1 << 19  # samples of the steps for which memory and quality are computed
_NEIGHBORS = 16  # samples that follow each other on disk and count as one place
_GOOD_EFFECT = 1.1  # batches are as even as random ones that are a tenth smaller
_MAX_CHANCE = 0.9  # of a design effect that chance excuses


@dataclass(frozen=True)
class RankShare:
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
            f"{self.samples} samples, {format_size(self.bytes)} of {counted(self.shards, 'shard')}, "
            f"{counted(self.reads, 'read')}, {counted(self.seeks, 'seek')}; holds at most "
            f"{format_size(self.held_bytes_most)}"
        )


@dataclass(frozen=True)
class Mixing:
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


@dataclass(frozen=True)
class EpochPreview:
    """Preview of an epoch. Prints as names and values; `as_dict()` is JSON-able.

    exactly_once: every sample that is not left out is read once. hours: at `rate` samples per
    second on each rank. requests, cost: of all ranks; cost is None without prices. steps_measured:
    steps for which memory and quality were computed. quality: by "classes" if there is a label, and
    by "neighbors" on disk, if the shards were not packed in random order. label: whose classes were
    measured.
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
    left_out: int
    exactly_once: bool
    rate: float
    hours: float
    requests: int
    cost: float | None
    steps_measured: int
    ranks: tuple[RankShare, ...]
    quality: dict[str, Mixing]
    label: str | None

    @property
    def is_good(self) -> bool:
        return all(mixing.is_good for mixing in self.quality.values())

    @property
    def verdict(self) -> str:
        """Whether the order is well shuffled, and what would mix it."""
        if self.is_good:
            return "Well shuffled."
        bad = "; ".join(mixing.text for mixing in self.quality.values() if not mixing.is_good)
        do = "Raise --shuffle-buffer" if self.shuffle else "Remove --no-shuffle"
        pack = "pack the samples in random order: wdstrain convert tars URLS OUT"
        return f"Not well shuffled: {bad}. {do}, or {pack}"

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.rows())

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        values = asdict(self)
        quality = {"classes": None, "neighbors": None, **values["quality"]}
        return {**values, "quality": quality, "is_good": self.is_good, "verdict": self.verdict}

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs of everything."""
        size, read = format_size(self.bytes), format_size(sum(rank.bytes for rank in self.ranks))
        once = "every sample that is not left out" if self.exactly_once else "NO: a bug"
        busiest = max(self.ranks, key=lambda rank: rank.bytes)
        measured = {
            name: f"{one.text}; good: at most {one.limit:.2f}" for name, one in self.quality.items()
        }
        absent = (
            "not measured: there is no label with a column. Run: wdstrain index DIR --columns NAME"
        )
        total, buffer = (
            self.batch_size * self.world_size,
            f"buffer of {self.shuffle_buffer} samples",
        )
        rows = {
            "samples": f"{self.samples} in {counted(self.shards, 'shard')}, {size}",
            "epoch": f"{self.epoch}: {self.steps} steps on {counted(self.world_size, 'rank')}",
            "batch": f"{self.batch_size} per rank, {total} in all, {counted(self.lanes, 'lane')}",
            "shuffle": f"{buffer if self.shuffle else 'none'}, seed {self.seed}",
            "left out": f"{self.left_out} of {self.samples} samples (tail: {self.tail})",
            "exactly once": once,
            "read": read + f" in {self.requests} requests" * (self.requests > 0),
            "time": f"{duration_text(self.hours * 3600)} at {self.rate:g} samples/s on each rank",
            "cost": "" if self.cost is None else f"{self.cost:.4g} per epoch",
            f"rank {busiest.rank}" + ", reads most" * (len(self.ranks) > 1): str(busiest),
            "classes": absent,
            **measured,
            "verdict": self.verdict,
        }
        return [(name, text) for name, text in rows.items() if text]


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
    count = max(1, min(plan.steps, _MAX_MEASURED // plan.global_batch))
    first = (plan.steps - count) // 2
    lanes = [_places(plan, lane, first, first + count) for lane in range(plan.lane_count)]
    held = np.array([_held(index, places, first, first + count) for places in lanes])
    by_rank = held.reshape(plan.world_size, plan.lanes_per_rank, count).sum(axis=1)
    ranks, ids = zip(
        *(_rank(index, plan, rank, of) for rank, of in enumerate(by_rank)), strict=True
    )
    every = np.concatenate(ids)
    requests, size = sum(rank.requests for rank in ranks), sum(rank.bytes for rank in ranks)
    prices = options.price or (0.0, 0.0)
    return EpochPreview(
        samples=len(index),
        shards=len(index.shards),
        bytes=sum(shard.bytes for shard in index.shards),
        batch_size=options.batch_size,
        world_size=options.world_size,
        lanes=plan.lane_count,
        shuffle=options.shuffle,
        shuffle_buffer=plan.window,
        seed=options.seed,
        epoch=options.epoch,
        tail=options.tail,
        steps=plan.steps,
        left_out=plan.left_out,
        exactly_once=len(np.unique(every)) == len(every) == plan.samples - plan.left_out,
        rate=options.rate,
        hours=plan.steps * options.batch_size / options.rate / 3600,
        requests=requests,
        cost=prices[0] * size / 1e9 + prices[1] * requests / 1000 if options.price else None,
        steps_measured=count,
        ranks=ranks,
        quality=_quality(index, plan, classes, np.concatenate(lanes, axis=1), first, count),
        label=label,
    )


def _rank(index: Index, plan: Plan, rank: int, held: Ints) -> tuple[RankShare, Ints]:
    """Return the share of a rank, and the samples that it reads. held: bytes, int64[steps]"""
    rows, ids, samples = list[tuple[int, ...]](), [np.zeros(0, np.int64)], 0
    for lane, number in enumerate(plan.lanes_of(rank)):
        own = plan.lane_samples(number)  # an empty lane pads with a sample of another one
        samples += own
        for read in lane_reads(index, plan, rank, lane):
            shard = int(index.shard_of(read.ids[:1])[0])
            rows.append((lane, shard, read.start, read.stop))
            ids += [np.unique(read.ids)] * (own > 0)
    lanes, shards, start, stop = np.array(rows, np.int64).T
    is_next = (np.diff(lanes) == 0) & (np.diff(shards) == 0) & (start[1:] == stop[:-1])
    is_far = any(is_remote(listed.path) for listed in index.shards)
    share = RankShare(
        rank=rank,
        samples=samples,
        padding=plan.steps * plan.batch_size - samples if plan.tail == "pad" else 0,
        bytes=int((stop - start).sum()),
        shards=len(np.unique(shards)),
        reads=len(rows),
        seeks=len(rows) - int(is_next.sum()),
        requests=int((-(-(stop - start) // range_size())).sum()) if is_far else 0,
        held_bytes_most=int(held.max()),
    )
    return share, np.concatenate(ids)


# --- memory and quality ---------------------------------------------------------------------------


def _places(plan: Plan, lane: int, first: int, stop: int) -> Ints:
    """Return the places of a lane that the steps [first, stop) may need. int64[3, places]

    Rows: sample, step that delivers it, last step that needs it.
    """
    begin, end = plan.cuts(lane, np.array([first, stop])).tolist()
    count = max(1, plan.lane_samples(lane))  # an empty lane pads with one sample
    low, high = max(0, min(begin, count) - plan.window + 1), min(count, end + plan.window - 1)
    ids, step, _ = plan.reading(*divmod(lane, plan.lanes_per_rank), low, max(1, high))
    # padding repeats a sample: its entries follow each other
    edges = np.flatnonzero(np.diff(ids, prepend=-1, append=-1))
    return np.stack([ids[edges[:-1]], step[edges[:-1]], step[edges[1:] - 1]])


def _held(index: Index, places: Ints, first: int, stop: int) -> Ints:
    """Return the bytes that a lane holds when the batch of a step is requested.

    int64[stop - first]. A sample is held from when it is read until its batch is requested.
    """
    count, (ids, step, due) = stop - first, places
    sizes = index.offsets.size[ids]
    # a lane is read as far as the furthest place of all steps until then
    read: Ints = np.zeros(count + 1, np.int64)
    np.maximum.at(read, np.clip(step - first, 0, count), np.cumsum(sizes))
    gone = np.bincount(np.clip(due + 1 - first, 0, count), sizes, count + 1)
    return np.maximum.accumulate(read[:count]) - gone[:count].cumsum().astype(np.int64)


def _quality(
    index: Index, plan: Plan, classes: Ints | None, places: Ints, first: int, count: int
) -> dict[str, Mixing]:
    """Return how well the steps [first, first + count) are mixed, by "classes" and "neighbors".

    classes: of each sample, -1: unknown; None: there are none.
    """
    inside = (places[1] >= first) & (places[1] < first + count)
    ids, step = places[:2, inside]
    number = np.arange(len(index))
    begins = (number - index.first[index.shard_of(number)]) % _NEIGHBORS == 0
    codes = {"classes": classes, "neighbors": np.cumsum(begins) - 1}
    packing = index.info.get("options")
    if plan.shuffle and isinstance(packing, dict) and packing.get("shuffle") is True:
        codes["neighbors"] = None  # the shards were packed in random order
    words = {"classes": "in their classes", "neighbors": "in places on disk"}
    measured = {
        name: _mixing(plan, of, ids, step, words[name])
        for name, of in codes.items()
        if of is not None
    }
    return {name: mixing for name, mixing in measured.items() if mixing is not None}


def _mixing(plan: Plan, codes: Ints, ids: Ints, step: Ints, words: str) -> Mixing | None:
    """Return the spread of codes over batches; None if there are not two of them.

    P is the probability that two samples of a batch have one code, P0 that of two samples of the
    set. rho = (P - P0) / (1 - P0) is the intraclass correlation, 1 + (batch size - 1) * rho the
    design effect (Kish).
    """
    counts = np.bincount(codes[codes >= 0]).astype(np.float64)
    counts = counts[counts > 0]
    known, width = codes[ids] >= 0, int(codes.max(initial=0)) + 1
    cells, number = np.unique(step[known] * width + codes[ids[known]], return_counts=True)
    of_batch = np.bincount(cells // width, weights=number)
    pairs, total = float((of_batch * (of_batch - 1)).sum()), float(counts.sum())
    if len(counts) < 2 or not pairs:
        return None
    ideal = float((counts * (counts - 1)).sum()) / (total * (total - 1))
    rho = (float((number * (number - 1.0)).sum()) / pairs - ideal) / max(1 - ideal, 1e-12)
    effect, size = 1 + (plan.global_batch - 1) * rho, plan.global_batch
    # two standard deviations in a random order
    chance = 2 * math.sqrt(2 / (int((of_batch > 1).sum()) * (len(counts) - 1)))
    text = f"batches of {size} are as uneven {words} as random ones of {size / max(1, effect):.0f}"
    limit = _GOOD_EFFECT + min(chance, _MAX_CHANCE)
    return Mixing(effect, limit, f"{text} (design effect {effect:.2f})")


def _class_codes(index: Index, name: str | None) -> tuple[str | None, Ints | None]:
    """Return (label, class of each sample or -1); (None, None) without one that has a column."""
    labels = known_labels(index, name)
    places = [label.place for label in labels if label.is_class]
    if name is not None and not places:
        raise UsageError(f"label {name!r} has the kind {labels[0].kind}: must be class.")
    columns = [column for column in index.columns if column.place in places]
    if len(columns) != 1:
        return None, None
    values = (
        columns[0].values if columns[0].kind == "class" else columns[0].values.dictionary_encode()
    )
    return columns[0].name, np.asarray(pc.fill_null(values.indices, -1)).astype(np.int64)
