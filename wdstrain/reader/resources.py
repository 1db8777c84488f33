"""Options, limits and memory of a reader, which all its runs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wdstrain.decode.batch_slots import Slots
from wdstrain.errors import ShardError
from wdstrain.memory.arena import Arena
from wdstrain.memory.shared import Memory
from wdstrain.order.order import Order
from wdstrain.reader.blocks import GAP, READ_SAMPLES, read_bytes
from wdstrain.runtime.machine import memory
from wdstrain.shards.index import Index
from wdstrain.storage.cache import Cache
from wdstrain.storage.remote import is_remote

_BUCKETS = 16  # groups of batches in which the memory of one window is released


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of a reader.

    ahead: bytes that are read ahead, beyond half a shuffle window.
    in_flight: most batches that are collected and not yet released.
    needed_fields: fields that are verified while they are read; None: all.
    skip_unreadable: deliver samples that a local file does not give as unreadable, instead of
    raising an error. cache: of remote shards.
    """

    ahead: int
    in_flight: int
    needed_fields: set[str] | None = None
    skip_unreadable: bool = False
    cache: Cache | None = None


class ReadResources:
    """Index, limits and memory of a reader.

    plans: returns the plan of an epoch; all plans must have the same sizes. most_bytes: of one
    read. is_remote: whether any shard is: reads then go on while the reader's thread starts others.
    scratch: memory for bytes that are discarded.
    """

    def __init__(
        self,
        index: Index,
        plans: Callable[[int], Order],
        rank: int,
        options: ReadOptions,
        slots: Slots,
    ) -> None:
        """Reserve the memory. Raises ShardError for a sample too large for this machine."""
        self.index, self.plans, self.rank, self.options = index, plans, rank, options
        self.slots = slots
        plan = plans(0)
        self.limits = ReadLimits.of(index, plan, rank, options.ahead)
        self.arena = self.limits.arena(index, plan, rank, options.in_flight)
        self.scratch = Memory(GAP)
        self.is_remote = any(is_remote(shard.path) for shard in index.shards)
        self.most_bytes = read_bytes(index)


@dataclass(frozen=True)
class ReadLimits:
    """Limits of each lane.

    held: samples that are started and not yet requested when reading pauses. resume_below: samples
    at which it goes on. ring: places whose offsets are kept. bucket: consecutive batches whose
    memory is released together.
    """

    held: int
    resume_below: int
    ring: int
    bucket: int

    @classmethod
    def of(cls, index: Index, plan: Order, rank: int, ahead_bytes: int) -> ReadLimits:
        """Return the limits for a plan. ahead_bytes: bytes that are read beyond half a window."""
        window, ahead = _reach(index, plan, rank, ahead_bytes)
        # On average a sample leaves half a window after its place, so half a window is held. At the
        # end of an epoch it empties. The next epoch must be read meanwhile, or the reader would
        # have to fill its window at twice the pace.
        held = window // 2 + ahead
        per_step = plan.samples_per_step_per_lane
        return cls(
            held=held,
            # Resume only when several reads fit. Single requests would wait for the server one
            # after another, and the loop would switch to the reader's thread for each.
            resume_below=held - ahead // 4,
            ring=window + ahead + 2 * READ_SAMPLES + per_step,
            bucket=max(1, (window + ahead) // (per_step * _BUCKETS)),
        )

    def arena(self, index: Index, plan: Order, rank: int, in_flight: int) -> Arena:
        """Return an arena that is large enough for the samples held within these limits.

        in_flight: most batches that are collected and not yet released.
        Raises ShardError for a sample that is too large for this machine's memory.
        """
        extents = index.offsets.size
        largest, total = int(np.max(extents)), int(np.sum(extents))
        _check_sample_size(index, int(np.argmax(extents)), largest)
        lanes, per_step = plan.lanes_of(rank), plan.samples_per_step_per_lane
        # The window of a lane that gives few samples per step spans many steps.
        least = max(1, min(plan.lane_samples(lane) for lane in lanes))
        farthest_batch = int(plan.steps * min(2.0, self.ring / least)) + in_flight + 2
        held_bytes = min(self.ring * len(lanes) * largest, 2 * total) * 3 // 2
        return Arena(
            live=held_bytes + (in_flight + 1) * per_step * len(lanes) * largest,
            largest=largest,
            near=2 * _BUCKETS + in_flight // self.bucket + 4,
            farthest=farthest_batch // self.bucket + 1,
        )


def _reach(index: Index, plan: Order, rank: int, ahead: int) -> tuple[int, int]:
    """Return (samples of a lane's window, samples of a lane in its share of `ahead` bytes)."""
    longest = max(plan.lane_places(lane) for lane in plan.lanes_of(rank))
    mean = max(1, int(index.offsets.size.sum()) // max(1, plan.samples))
    share = ahead // mean // len(plan.lanes_of(rank))
    return min(plan.window, longest), max(1, min(share, longest))


def _check_sample_size(index: Index, number: int, size: int) -> None:
    """Raise ShardError for a sample that is too large for this machine's memory."""
    if size > (most := memory() // 2):
        shard = index.shard_with(number)
        raise ShardError(
            f"{shard.shown}: '{index.key(number)}' at offset {int(index.offsets.start[number])} has "
            f"{size} bytes, and a sample is held as a whole; the limit is {most}, half of this "
            f"machine's memory. Leave it out, or pack it in parts."
        )
