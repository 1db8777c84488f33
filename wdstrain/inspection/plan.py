"""`wt.plan_epoch`: what an epoch of a `Loader` will do, computed from the index without a read.

The reads are those of the reader, the order is that of the plan. Quality is compared with a random
order: how even batches are in their classes, and in the places of their samples on disk. Places
reveal what classes do not, such as frames of one video. A batch is the global batch of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from wdstrain.inspection.options import PlanOptions
from wdstrain.inspection.result import Result, rows_of
from wdstrain.inspection.values import known_labels
from wdstrain.loader.loader import Loader
from wdstrain.order.buckets import Buckets
from wdstrain.order.order import Order
from wdstrain.reader.reads import lane_reads
from wdstrain.report.printing import counted, printable
from wdstrain.runtime.options import format_size, takes
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.shards.resolve import open_shards
from wdstrain.shards.selection import group_codes
from wdstrain.storage.remote import is_remote, range_size

_GIVEN = (
    *("batch_size", "world_size", "lanes", "shuffle_buffer", "shuffle", "seed", "tail"),
    *("buckets", "budget", "pixels"),
)
_NEIGHBORS = 16  # samples that follow each other on disk and count as one place
_GOOD_EFFECT = 1.1  # batches are as even as random ones that are a tenth smaller
_MAX_CHANCE = 0.9  # of a design effect that chance excuses


@dataclass(frozen=True, repr=False)
class EpochPreview(Result):
    """Preview of an epoch. Prints as names and values; `as_dict()` is JSON-able.

    settings: those of the loader, the number of the epoch, and the rate. exactly_once: every sample
    that is not left out is read once. hours: at `rate` samples per second on each rank. requests:
    of all ranks to servers, without a cache; 0 for local shards. cost: of bytes and requests, None
    without prices. label: whose classes were measured.

    ranks: a row for each. padding: rows that repeat samples. seeks: reads that open a shard, or do
    not start where the last one ended; the lanes of a rank take turns, so with several of them a
    disk seeks with nearly every read. held_bytes_most: read and not delivered, when a batch is
    requested. The reader reads some MB ahead, which comes on top.

    buckets: a row for each, with the samples of its batches on all ranks; () without buckets.

    quality: by "classes", None without a label that has a column, and by "neighbors" on disk, None
    if the shards were packed in random order; both None with buckets. Each has a text and a value,
    the design effect, which is 1 in a random order and good up to its limit. It is the variance of
    the shares in batches / that of a random order. The batch size means that a batch has one class,
    or lies in one place on disk.
    """

    settings: dict[str, Any]
    samples: int
    shards: int
    bytes: int
    steps: int
    left_out: int
    exactly_once: bool
    hours: float
    requests: int
    cost: float | None
    ranks: tuple[dict[str, int], ...]
    buckets: tuple[dict[str, Any], ...]
    label: str | None
    quality: dict[str, dict[str, Any] | None]
    is_good: bool
    verdict: str

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values as text."""
        chosen, lanes = self.settings, counted(self.settings["lanes"], "lane")
        size, world = chosen["batch_size"], chosen["world_size"]
        requests = f" in {counted(self.requests, 'request')}" if self.requests else ""
        shuffle = f"buffer of {counted(chosen['shuffle_buffer'], 'sample')}, seed {chosen['seed']}"
        busiest = max(self.ranks, key=lambda rank: rank["bytes"])
        title = f"rank {busiest['rank']}" + (", reads most" if world > 1 else "")
        seconds = timedelta(seconds=round(self.hours * 3600))
        named = {
            "samples": f"{self.samples} in {counted(self.shards, 'shard')}, {format_size(self.bytes)}",
            "epoch": f"{chosen['epoch']}: {counted(self.steps, 'step')} on {counted(world, 'rank')}",
            "batch": f"{'at most ' * bool(self.buckets)}{size} per rank, {size * world} in all, "
            f"{lanes}",
            "shuffle": shuffle if chosen["shuffle"] else "none",
            "left out": f"{self.left_out} of {counted(self.samples, 'sample')} "
            f"(tail: {chosen['tail']})",
            **{
                printable(
                    row["bucket"]
                ): f"{counted(row['steps'], 'step')} of {row['batch']} on all ranks, "
                f"{row['left_out']} of {counted(row['samples'], 'sample')} left out"
                for row in self.buckets
            },
            "exactly once": "every sample that is not left out" if self.exactly_once else "NO",
            "read": f"{format_size(sum(rank['bytes'] for rank in self.ranks))}{requests}",
            "time": f"{seconds} at {chosen['rate']:g} samples/s on each rank",
            "cost": None if self.cost is None else f"{self.cost:.4g} per epoch",
            title: f"{counted(busiest['samples'], 'sample')}, {format_size(busiest['bytes'])} of "
            f"{counted(busiest['shards'], 'shard')} in {counted(busiest['reads'], 'read')} with "
            f"{counted(busiest['seeks'], 'seek')}; holds at most {format_size(busiest['held_bytes_most'])}",
            **{name: mixing and mixing["text"] for name, mixing in self.quality.items()},
            "verdict": self.verdict,
        }
        return rows_of(named)


@takes(PlanOptions)
def plan_epoch(options: PlanOptions) -> EpochPreview:
    """Return a preview of an epoch of a `Loader` with these options, on all of its ranks.

    Classes are those of the first label that has a column. Raises what `Loader` raises.
    """
    index = open_shards(options.urls)
    index = index if options.where is None else index.where(options.where)
    given = {name: getattr(options, name) for name in _GIVEN}
    plan = Loader(index, rank=0, **given).plan(options.epoch)
    shares = [_share(index, plan, rank) for rank in range(plan.world_size)]
    ranks, places = tuple(rank for rank, _ in shares), np.hstack([own for _, own in shares])
    of_labels = {label.place for label in known_labels(index) if label.is_class}
    label = next((column.name for column in index.columns if column.place in of_labels), None)
    requests, size = sum(r["requests"] for r in ranks), sum(r["bytes"] for r in ranks)
    cost = np.dot(options.price or (0, 0), (size / 1e9, requests / 1000))
    packing = index.info.get("options")
    is_random = plan.shuffle and isinstance(packing, dict) and packing.get("shuffle") is True
    classes = None if label is None else group_codes(index, label)
    neighbors = None if is_random else np.arange(len(index)) // _NEIGHBORS
    quality = {
        "classes": _mixing(plan, classes, places, "in their classes"),
        "neighbors": _mixing(plan, neighbors, places, "in places on disk"),
    }
    bad = [m["text"] for m in quality.values() if m is not None and m["value"] > m["limit"]]
    read = len(np.unique(places[0]))
    is_once = plan.tail == "pad" or read == places.shape[1]  # an empty lane repeats another's
    buckets = _bucket_rows(plan) if isinstance(plan, Buckets) else ()
    return EpochPreview(
        settings={
            **given,
            "lanes": plan.lane_count,
            "shuffle_buffer": plan.window,
            "epoch": options.epoch,
            "rate": options.rate,
        },
        samples=len(index),
        shards=len(index.shards),
        bytes=sum(shard.bytes for shard in index.shards),
        steps=plan.steps,
        left_out=plan.left_out,
        exactly_once=is_once and read == plan.samples - plan.left_out,
        hours=plan.rows_before(0, plan.steps) / options.rate / 3600,
        requests=requests,
        cost=None if options.price is None else float(cost),
        ranks=ranks,
        buckets=buckets,
        label=label,
        quality=quality,
        is_good=not bad,
        verdict="How evenly buckets are mixed is not measured."
        if buckets
        else _verdict(bad, options.shuffle, label is not None),
    )


def _verdict(bad: list[str], shuffle: bool, has_classes: bool) -> str:
    """Return whether the order is well shuffled, and what would mix it."""
    hint = "" if has_classes else " For classes, run: wdstrain index DIR --columns NAME"
    if not bad:
        return f"Well shuffled.{hint}"
    do = "Raise --shuffle-buffer" if shuffle else "Remove --no-shuffle"
    pack = "pack the samples in random order: wdstrain convert tars URLS OUT"
    return f"Not well shuffled: {'; '.join(bad)}. {do}, or {pack}.{hint}"


def _bucket_rows(plan: Buckets) -> tuple[dict[str, Any], ...]:
    """Return what an epoch delivers of each bucket."""
    batch, totals, steps = plan.per_lane * plan.lane_count, plan.totals, plan.bucket_steps
    columns = {
        "batch": batch,
        "samples": totals,
        "steps": steps,
        "left_out": totals - steps * batch,
    }
    return tuple(
        {"bucket": bucket, **{name: int(values[number]) for name, values in columns.items()}}
        for number, bucket in enumerate(plan.names)
    )


def _share(index: Index, plan: Order, rank: int) -> tuple[dict[str, int], Ints]:
    """Return the row of a rank, and its samples with the steps that deliver them. int64[2, n]"""
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
        places.append(np.stack([ids, step]))
    lanes, shards, start, stop = np.array(reads, np.int64).T
    is_next = (np.diff(lanes) == 0) & (np.diff(shards) == 0) & (start[1:] == stop[:-1])
    is_far = any(is_remote(listed.path) for listed in index.shards)
    own = np.hstack(places)
    share = {
        "rank": rank,
        "samples": own.shape[1],
        "padding": plan.steps * plan.batch_size - own.shape[1] if plan.tail == "pad" else 0,
        "bytes": int((stop - start).sum()),
        "shards": len(np.unique(shards)),
        "reads": len(reads),
        "seeks": len(reads) - int(is_next.sum()),
        "requests": int((-(-(stop - start) // range_size())).sum()) if is_far else 0,
        "held_bytes_most": int(held.max()),
    }
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


def _mixing(plan: Order, codes: Ints | None, places: Ints, words: str) -> dict[str, Any] | None:
    """Return the spread of codes over batches; None with buckets, and without two codes.

    codes: of each sample. places: samples and their steps. words: where it is uneven. P is the
    probability that two samples of a batch have one code, P0 that of two samples of the set.
    rho = (P - P0) / (1 - P0) is the intraclass correlation, 1 + (batch size - 1) * rho the design
    effect (Kish).
    """
    if codes is None or isinstance(plan, Buckets):
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
    return {"value": effect, "limit": limit, "text": f"{text} (design effect {effect:.2f})"}
