"""Long-lived part of a reader: what it reads, with which memory and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wdstrain.memory.arena import Arena
from wdstrain.memory.shared import Memory
from wdstrain.order.plan import Order
from wdstrain.reader.limits import ReadLimits
from wdstrain.reader.read_blocks import GAP, read_bytes
from wdstrain.reader.slot_sink import READ_TOGETHER, SlotSink
from wdstrain.reader.verifier import PackedChecksums
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
    """Index, memory and limits that all runs of a reader share.

    unreadable: by sample id, why it could not be read.
    """

    def __init__(
        self,
        index: Index,
        plans: Callable[[int], Order],
        rank: int,
        options: ReadOptions,
        slot_sink: SlotSink | None,
    ) -> None:
        """Reserve the memory. Raises ShardError for a sample too large for this machine."""
        self.index, self.plans, self.rank, self.slot_sink = index, plans, rank, slot_sink
        self.cache, self.skip_unreadable = options.cache, options.skip_unreadable
        plan, bytes_elsewhere = plans(0), 0 if slot_sink is None else slot_sink.bytes
        self.limits = ReadLimits.of(index, plan, rank, options.ahead)
        self.arena: Arena = self.limits.arena(index, plan, rank, options.in_flight, bytes_elsewhere)
        self.scratch = Memory(GAP)
        self.is_remote = any(is_remote(shard.path) for shard in index.shards)
        self.most_bytes = read_bytes(index) if slot_sink is None else READ_TOGETHER  # of a read
        self.packed: PackedChecksums | None = None
        if len(index.table.member_crc) and slot_sink is None:
            fields = index.field_mask(options.needed_fields)
            self.packed = PackedChecksums(index.table, fields, self.arena.memory)
        self.unreadable: dict[int, str] = {}
