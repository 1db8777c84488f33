"""Long-lived part of a reader: what it reads, with which memory and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wdstrain.memory.arena import Arena
from wdstrain.order.plan import Order
from wdstrain.reader.arena_sink import ArenaSink
from wdstrain.reader.limits import ReadLimits
from wdstrain.reader.sink import Sink
from wdstrain.reader.slot_sink import SlotSink
from wdstrain.shards.index import Index
from wdstrain.storage.remote import is_remote
from wdstrain.storage.shard_cache import Cache


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of a reader.

    ahead: bytes that are read ahead, beyond half a shuffle window.
    in_flight: most batches that are collected and not yet released.
    needed_fields: fields that are verified while they are read; None: all. With a slot sink, the
    sink verifies its arrays and the decoder all other fields.
    skip_unreadable: deliver samples that a local file does not give as unreadable, instead of
    raising an error. cache: of remote shards.
    """

    ahead: int
    in_flight: int
    needed_fields: set[str] | None = None
    skip_unreadable: bool = False
    cache: Cache | None = None


class ReadResources:
    """Index, memory, limits and sink that all runs of a reader share."""

    def __init__(
        self,
        index: Index,
        plans: Callable[[int], Order],
        rank: int,
        options: ReadOptions,
        slot_sink: SlotSink | None,
    ) -> None:
        """Reserve the memory. Raises ShardError for a sample too large for this machine."""
        self.index, self.plans, self.rank, self.cache = index, plans, rank, options.cache
        self.sink: Sink = slot_sink or ArenaSink(
            index,
            index.field_mask(options.needed_fields),
            skip_unreadable=options.skip_unreadable,
        )
        plan = plans(0)
        self.limits = ReadLimits.of(index, plan, rank, options.ahead)
        self.arena: Arena = self.limits.arena(
            index, plan, rank, options.in_flight, self.sink.bytes_elsewhere
        )
        self.is_remote = any(is_remote(shard.path) for shard in index.shards)
