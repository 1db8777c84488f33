"""`wt.plan_epoch`: what an epoch of a `Loader` will do, computed from the index without a read.

The reads are those of the reader, the order is that of the plan. Memory and shuffle quality of a
large epoch are computed for some steps in its middle. Quality is compared with a perfectly random
order: neighbors on disk that share a batch, and classes in batches. Neighbors reveal what classes
do not, such as frames of one video. A batch is the global batch of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
_NEAREST = 16  # nearest samples on disk: half of them before a sample, half after it
_GOOD_NEIGHBORS = 0.1  # by so many more than ideal of the nearest samples may share a batch
_GOOD_EFFECT = 1.1  # batches are as even as ideal ones that are a tenth smaller
_MAX_CHANCE = 0.9  # of a design effect that chance excuses
_MAX_RANKS = 16  # that are listed one by one


@dataclass(frozen=True)
class RankShare:
    """Reads and memory of one rank in an epoch.

    padding: rows that repeat samples. bytes: are read. opened_in_the_middle: shards whose beginning
    another lane reads, or the epoch leaves out. seeks: reads that open a shard, or do not start
    where the last one ended; the lanes of a rank take turns, so with several of them a disk seeks
    with nearly every read. requests: to servers, without a cache; 0 for local shards.
    first_batch_bytes: are read before the first batch is complete. held: read and not delivered,
    when a batch is requested. The reader reads some MB ahead, which comes on top.
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
    held_bytes_mean: float
    held_bytes_most: int

    def __str__(self) -> str:
        requests, seeks = counted(self.requests, "request"), counted(self.seeks, "seek")
        moves = requests if self.requests else seeks
        cut = f" ({self.opened_in_the_middle} cut)" * (self.opened_in_the_middle > 0)
        first, mean, most = map(
            format_size, (self.first_batch_bytes, self.held_bytes_mean, self.held_bytes_most)
        )
        return (
            f"{self.samples} samples, {format_size(self.bytes)} of {counted(self.shards, 'shard')}"
            f"{cut}, {counted(self.reads, 'read')}, {moves}; first batch after {first}, holds {mean}, at most {most}"
        )


@dataclass(frozen=True)
class Mixing:
    """One measure of shuffle quality, in words too. ideal: in a random order; limit: still good."""

    value: float
    ideal: float
    limit: float
    text: str

    @property
    def is_good(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True)
class BufferQuality:
    """Quality of a shuffle buffer, and its memory on a rank, on average.

    shuffle: False for the order on disk. neighbors: how many of the 16 nearest samples on disk are
    in a sample's batch. classes: design effect, that is variance of the class shares of batches /
    that of a random order; the batch size means that every batch has one class. None: cannot be
    measured.
    """

    buffer: int
    shuffle: bool
    held_bytes: float
    neighbors: Mixing | None
    classes: Mixing | None

    @property
    def mixings(self) -> dict[str, Mixing]:
        """What was measured, by name."""
        both = {"neighbors": self.neighbors, "design effect": self.classes}
        return {name: mixing for name, mixing in both.items() if mixing is not None}

    @property
    def is_good(self) -> bool:
        return all(mixing.is_good for mixing in self.mixings.values())


@dataclass(frozen=True)
class EpochPreview:
    """Preview of an epoch. Prints as names and values; `as_dict()` is JSON-able.

    exactly_once: every sample that is not left out is read once. hours: at `rate` samples per
    second on each rank. requests, cost: of all ranks; cost is None without prices. steps_measured:
    steps for which memory and quality were computed. smallest_good: a buffer that mixes well, if
    the chosen one does not. was_shuffled: the conversion shuffled the shards. label: whose classes
    were measured; why_no_classes: why none were.
    """

    samples: int
    shards: int
    bytes: int
    is_remote: bool
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
    quality: BufferQuality
    smallest_good: BufferQuality | None
    was_shuffled: bool
    label: str | None
    why_no_classes: str

    @property
    def is_good(self) -> bool:
        return self.quality.is_good

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.rows())

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        return {**asdict(self), "is_good": self.is_good, "verdict": self.verdict}

    def rows(self) -> list[tuple[str, str]]:
        """Return (name, value) pairs of everything."""
        total, size = self.batch_size * self.world_size, sum(rank.bytes for rank in self.ranks)
        time = duration_text(self.hours * 3600)
        order = f"buffer of {self.shuffle_buffer} samples" if self.shuffle else "none"
        requests = f" in {self.requests} requests" * (self.requests > 0)
        cost = [] if self.cost is None else [("cost", f"{self.cost:.4g} per epoch")]
        once = "every sample that is not left out" if self.exactly_once else "NO: a bug"
        quality = [
            (name, f"{one.text} (ideal: {one.ideal:.3g}, good: at most {one.limit:.3g})")
            for name, one in self.quality.mixings.items()
        ]
        if self.quality.classes is None:
            quality.append(("classes", f"not measured: {self.why_no_classes}"))
        return [
            (
                "samples",
                f"{self.samples} in {counted(self.shards, 'shard')}, {format_size(self.bytes)}",
            ),
            (
                "epoch",
                f"{self.epoch}: {self.steps} steps on each of {counted(self.world_size, 'rank')}",
            ),
            ("measured", f"{self.steps_measured} of {self.steps} steps"),
            (
                "batch",
                f"{self.batch_size} per rank, {total} in all, from {counted(self.lanes, 'lane')}",
            ),
            ("shuffle", f"{order}, seed {self.seed}"),
            ("left out", f"{self.left_out} of {self.samples} samples (tail: {self.tail})"),
            ("exactly once", once),
            ("read", f"{format_size(size)}{requests}"),
            ("time", f"{time} at {self.rate:g} samples/s on each rank"),
            *cost,
            *self._rank_rows(),
            *quality,
            ("verdict", self.verdict),
        ]

    def _rank_rows(self) -> list[tuple[str, str]]:
        """Return a row for each rank; of many, of those that read least and most."""
        if len(self.ranks) <= _MAX_RANKS:
            return [(f"rank {rank.rank}", str(rank)) for rank in self.ranks]
        ordered = sorted(self.ranks, key=lambda rank: rank.bytes)
        extremes = {"least": ordered[0], "most": ordered[-1]}
        return [(f"{name} (rank {rank.rank})", str(rank)) for name, rank in extremes.items()]

    @property
    def verdict(self) -> str:
        """A few sentences: whether the order is well shuffled, and what would be."""
        now, good = self.quality, self.smallest_good
        if now.is_good:
            basis = "" if now.classes else " by neighbors alone (no classes were measured)"
            return f"Well shuffled{basis}."
        bad = {name: one.text for name, one in now.mixings.items() if not one.is_good}
        sentences = [f"Not well shuffled: {'; '.join(bad.values())}."]
        if self.was_shuffled and now.shuffle and "design effect" not in bad:
            sentences.append(
                "The shards were packed in random order, so neighbors have nothing in common, and "
                "this does little harm."
            )
        if good is not None:
            held = f"{good.buffer} samples ({format_size(good.held_bytes)} held on a rank)"
            do = f"--shuffle-buffer {good.buffer}" if now.shuffle else "remove --no-shuffle"
            sentences.append(f"A buffer of {held} is enough: {do}.")
        if "design effect" in bad:
            none = "" if good is not None else ", and no buffer that was tried mixes them well"
            sentences.append(
                f"Samples of a class lie together on disk{none}. Pack them in random order: "
                "wdstrain convert tars URLS OUT"
            )
        return " ".join(sentences)


@takes(PlanOptions)
def plan_epoch(options: PlanOptions) -> EpochPreview:
    """Return a preview of an epoch of a `Loader` with these options, on all of its ranks.

    Classes come from the column of the index. Raises what `Loader` raises, and UsageError for a
    label that does not exist or has no classes.
    """
    index = open_shards(options.urls)
    index = index if options.where is None else index.where(options.where)
    label, codes, why = _class_codes(index, options.label)
    given = ("batch_size", "world_size", "lanes", "shuffle_buffer", "shuffle", "seed", "tail")
    loader = Loader(index, rank=0, **{name: getattr(options, name) for name in given})
    plan = loader.plan(options.epoch)
    assert isinstance(plan, Plan)
    count = max(1, min(plan.steps, _MAX_MEASURED // plan.global_batch))
    first = (plan.steps - count) // 2
    steps = (first, first + count)
    quality, held = _measured(index, plan, codes, steps)
    reads = [
        [_reads(index, plan, rank, lane) for lane in range(plan.lanes_per_rank)]
        for rank in range(plan.world_size)
    ]
    held = held.reshape(plan.world_size, plan.lanes_per_rank, count).sum(axis=1)
    ranks = tuple(
        _rank_share(index, plan, rank, np.concatenate(reads[rank], axis=1), held[rank])
        for rank in range(plan.world_size)
    )
    requests, packing = sum(rank.requests for rank in ranks), index.info.get("options")
    prices = np.array(options.price or (0, 0))
    amounts = np.array([sum(rank.bytes for rank in ranks) / 1e9, requests / 1000])
    return EpochPreview(
        samples=len(index),
        shards=len(index.shards),
        bytes=sum(shard.bytes for shard in index.shards),
        is_remote=_is_remote(index),
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
        exactly_once=_is_once(plan, reads),
        rate=options.rate,
        hours=plan.steps * options.batch_size / options.rate / 3600,
        requests=requests,
        cost=float(prices @ amounts) if options.price else None,
        steps_measured=count,
        ranks=ranks,
        quality=quality,
        smallest_good=None if quality.is_good else _smallest_good(index, plan, codes, steps),
        was_shuffled=isinstance(packing, dict) and packing.get("shuffle") is True,
        label=label,
        why_no_classes=why or "too few samples",
    )


# --- reads ----------------------------------------------------------------------------------------


def _is_remote(index: Index) -> bool:
    return any(is_remote(shard.path) for shard in index.shards)


def _reads(index: Index, plan: Plan, rank: int, lane: int) -> Ints:
    """Return the reads of a lane of a rank, in order. int64[7, reads]

    Rows: first sample, samples, bytes, shard; 1 if it opens a shard, seeks, opens in the middle.
    """
    rows = [
        (read.ids[0], len(np.unique(read.ids)), read.start, read.stop)
        for read in lane_reads(index, plan, rank, lane)
    ]
    ids, samples, start, stop = np.array(rows, np.int64).reshape(-1, 4).T
    shard = index.shard_of(ids)
    opens = np.diff(shard, prepend=-1) != 0
    seeks = opens | (start != np.append(-1, stop)[: len(start)])
    cut = opens & (ids != index.first[shard])
    return np.stack([ids, samples, stop - start, shard, opens, seeks, cut])


def _is_once(plan: Plan, reads: Sequence[Sequence[Ints]]) -> bool:
    """Return whether the lanes read different samples, and all that are not left out."""
    lanes = [lane for of_rank in reads for lane in of_rank]
    filled = [lane for number, lane in enumerate(lanes) if plan.lane_samples(number)]
    first, count = np.concatenate(filled, axis=1)[:2]
    order = np.argsort(first)
    is_apart = (first[order][1:] >= (first + count)[order][:-1]).all()
    return bool(is_apart) and int(count.sum()) == plan.samples - plan.left_out


def _rank_share(index: Index, plan: Plan, rank: int, reads: Ints, held: Ints) -> RankShare:
    """Return the share of a rank. reads: of its lanes, see `_reads`; held: int64[steps]"""
    lanes, (_, _, sizes, shard, _, seeks, cut) = plan.lanes_of(rank), reads
    samples = sum(plan.lane_samples(lane) for lane in lanes)
    firsts = [_held(index, _places(plan, lane, 0, 1), 0, 1)[0] for lane in lanes]
    return RankShare(
        rank=rank,
        steps=plan.steps,
        samples=samples,
        padding=plan.steps * plan.batch_size - samples if plan.tail == "pad" else 0,
        bytes=int(sizes.sum()),
        shards=len(np.unique(shard)),
        opened_in_the_middle=int(cut.sum()),
        reads=len(sizes),
        seeks=int(seeks.sum()),
        requests=int((-(-sizes // range_size())).sum()) if _is_remote(index) else 0,
        first_batch_bytes=int(sum(firsts)),
        held_bytes_mean=float(held.mean()),
        held_bytes_most=int(held.max()),
    )


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


def _measured(
    index: Index, plan: Plan, codes: Ints | None, steps: tuple[int, int]
) -> tuple[BufferQuality, Ints]:
    """Return the quality of a plan's shuffle, and the bytes that each lane holds: int64[lanes, steps].

    codes: class of each sample, -1: unknown; None: no classes.
    """
    lanes = [_places(plan, lane, *steps) for lane in range(plan.lane_count)]
    held = np.array([_held(index, places, *steps) for places in lanes])
    size = float(held.mean()) * plan.lanes_per_rank
    ids, step, _ = np.concatenate(lanes, axis=1)
    classes = None if codes is None else _class_mix(plan, codes, ids, step, steps)
    near = _neighbors(plan, index, ids, step)
    return BufferQuality(plan.window, plan.shuffle, size, near, classes), held


def _smallest_good(
    index: Index, plan: Plan, codes: Ints | None, steps: tuple[int, int]
) -> BufferQuality | None:
    """Return the smallest buffer that mixes well, of powers of two up to twice a lane."""
    most = min(2 * plan.lane_samples(0), _MAX_MEASURED // plan.lane_count)
    powers = range((plan.samples_per_step_per_lane - 1).bit_length(), most.bit_length())
    for buffer in (*(1 << power for power in powers), most):
        other = replace(plan, window=buffer, shuffle=True, _blocks={})
        quality, _ = _measured(index, other, codes, steps)
        if quality.is_good:
            return quality
    return None


def _neighbors(plan: Plan, index: Index, ids: Ints, step: Ints) -> Mixing | None:
    """Return the mixing of neighbors; None if no shard has two samples. ids, step: int64[n]"""
    order = np.argsort(ids, kind="stable")
    ids, step = ids[order], step[order]
    shard, shares = index.shard_of(ids), list[float]()
    for i in range(1, min(_NEAREST // 2, len(ids) - 1) + 1):
        near = (ids[i:] - ids[:-i] == i) & (shard[i:] == shard[:-i])
        if near.any():
            shares.append(float((step[i:] == step[:-i])[near].mean()))
    if not shares:
        return None
    kept, size = plan.samples - plan.left_out, plan.global_batch
    rest = kept - (plan.steps - 1) * size  # samples of the last batch
    ideal = ((plan.steps - 1) * size * (size - 1) + rest * (rest - 1)) / max(1, kept * (kept - 1))
    ideal, value = 2 * len(shares) * ideal, 2 * sum(shares)
    text = f"{value:.3g} of the {_NEAREST} nearest samples on disk share a batch"
    # in small sets, twice the ideal is good
    return Mixing(value, ideal, ideal + max(_GOOD_NEIGHBORS, ideal), text)


def _class_mix(
    plan: Plan, codes: Ints, ids: Ints, step: Ints, steps: tuple[int, int]
) -> Mixing | None:
    """Return the spread of classes over batches; None if there are not two classes.

    P is the probability that two samples of a batch have one class, P0 that of two samples of the
    set. rho = (P - P0) / (1 - P0) is the intraclass correlation, 1 + (batch size - 1) * rho the
    design effect (Kish).
    """
    counts = np.bincount(codes[codes >= 0])
    counts = counts[counts > 0]
    inside = (step >= steps[0]) & (step < steps[1]) & (codes[ids] >= 0)
    width = int(codes.max(initial=0)) + 1
    cells, number = np.unique(step[inside] * width + codes[ids[inside]], return_counts=True)
    known = np.bincount(cells // width, weights=number)  # samples of each batch
    pairs = float((known * (known - 1)).sum())
    if len(counts) < 2 or not pairs:
        return None
    total = float(counts.sum())
    ideal = float((counts * (counts - 1.0)).sum()) / (total * (total - 1))
    rho = (float((number * (number - 1.0)).sum()) / pairs - ideal) / max(1 - ideal, 1e-12)
    effect, size = 1 + (plan.global_batch - 1) * rho, plan.global_batch
    # two standard deviations in a random order
    chance = 2 * math.sqrt(2 / (int((known > 1).sum()) * (len(counts) - 1)))
    even = size / max(1.0, effect)
    text = f"batches of {size} are as uneven in their classes as random ones of {even:.0f}"
    limit = _GOOD_EFFECT + min(chance, _MAX_CHANCE)
    return Mixing(effect, 1.0, limit, f"{text} (design effect {effect:.2f})")


def _class_codes(index: Index, name: str | None) -> tuple[str | None, Ints | None, str]:
    """Return (label, class of each sample or -1, "") or (label or None, None, why)."""
    labels = known_labels(index, name)
    with_classes = [label for label in labels if label.is_class]
    if name is not None and not with_classes:
        raise UsageError(f"label {name!r} has the kind {labels[0].kind}: must be class.")
    if not with_classes:
        return None, None, "there is no label with classes"
    if len(with_classes) > 1:
        names = ", ".join(label.name for label in with_classes)
        return None, None, f"there are several labels. Choose one (label): {names}"
    label = with_classes[0]
    column = next((known for known in index.columns if known.place == label.place), None)
    if column is None:
        advice = f"wdstrain index DIR --columns {label.stored_as}"
        return label.name, None, f"the index has no column of them. Run: {advice}"
    values = column.values if column.kind == "class" else column.values.dictionary_encode()
    return label.name, np.asarray(pc.fill_null(values.indices, -1)).astype(np.int64), ""
