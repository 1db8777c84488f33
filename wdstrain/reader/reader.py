"""What the runs of one rank share: the memory of samples, options and counts.

The memory is sized for the worst case. The system provides a page when it is first written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wdstrain.errors import ShardError
from wdstrain.memory import Memory
from wdstrain.order.order import Order
from wdstrain.reader.blocks import PAGE
from wdstrain.reader.reads import READ_SAMPLES
from wdstrain.runtime.machine import memory
from wdstrain.shards.index import Index
from wdstrain.storage.cache import Cache


@dataclass
class ReadStats:
    """Counts and seconds of a reader since it was made."""

    bytes: int = 0  # read from storage
    fetched: int = 0  # bytes of these that came from servers
    cached: int = 0  # bytes of these that came from the cache
    retries: int = 0  # repeated requests
    reread: int = 0  # samples that were read again because their checksum was wrong
    read_seconds: float = 0.0  # a read was under way, its verification included
    shuffle_seconds: float = 0.0  # a batch waited until its part of the window was read


class Reader:
    """What the runs of one rank share. It refers to none of them.

    memory: it has the members of batches. stats: totals since the reader was made. most_ahead: bytes
    at which reading ahead pauses, of samples whose read has begun and that the loop has not taken.
    """

    def __init__(
        self,
        index: Index,
        orders: Callable[[int], Order],
        rank: int,
        *,
        ahead: int,
        in_flight: int,
        needed_fields: set[str] | None = None,
        skip_unreadable: bool = False,
        cache: Cache | None = None,
    ) -> None:
        """Reserve the memory.

        orders: returns the order of an epoch. ahead: bytes that are read ahead, beyond the shuffle
        window. in_flight: most batches that are taken and not yet released. needed_fields: fields
        that are verified; None: all; if there are none, nothing is read. skip_unreadable: deliver
        samples that a local file does not give as bad, instead of raising an error. cache: of
        remote shards.
        Raises ShardError for a sample that is too large for this machine.
        """
        self.index, self.orders, self.rank, self.ahead = index, orders, rank, ahead
        self.needed_fields, self.skip_unreadable = needed_fields, skip_unreadable
        self.cache, self.stats = cache, ReadStats()
        order, sizes = orders(0), index.offsets.size
        largest = int(np.max(sizes))
        _check_sample_size(index, int(np.argmax(sizes)), largest)
        epoch, most = (int((sizes * n).sum()) for n in (order.weights, np.ceil(order.weights)))
        # On average a sample leaves half a window after it was read. At the end of an epoch the
        # window empties. The next epoch must be read meanwhile, or the reader would have to fill
        # its window at twice the pace.
        window = int(order.max_delay * epoch / max(1, order.samples)) // 2
        self.most_ahead = window + min(ahead, epoch)
        # Blocks are held whole: that of a sample reaches a read and a window beyond it at both ends.
        samples = 3 * order.max_delay + 2 * order.lanes_per_rank * READ_SAMPLES
        block = largest + PAGE  # a block has whole pages
        held = min(samples * block, 2 * (most + PAGE * order.samples))
        held += (in_flight + 2) * order.batch_size * block
        self.memory = Memory(2 * (self.most_ahead + held))


def _check_sample_size(index: Index, number: int, size: int) -> None:
    """Raise ShardError for a sample that is too large for this machine's memory."""
    if size > (most := memory() // 2):
        shard = index.shard_with(number)
        raise ShardError(
            f"{shard.shown}: '{index.key(number)}' at offset {int(index.offsets.start[number])} "
            f"has {size} bytes, and a sample is held as a whole; the limit is {most}, half of "
            "this machine's memory.",
            "Leave it out, or pack it in parts.",
        )
