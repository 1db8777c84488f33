"""What the runs of one rank share: the memory of samples, options and counts; blocks of the memory.

The memory is sized for the worst case. The system provides a page when it is first written, and
blocks are taken from the front. So the resident memory stays near the size of the blocks in use.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wdstrain.errors import ShardError
from wdstrain.memory import Memory
from wdstrain.order.order import Ints, Order
from wdstrain.reader.reads import READ_SAMPLES
from wdstrain.runtime.machine import memory
from wdstrain.shards.index import Index
from wdstrain.storage.cache import Cache

PAGE = 4096


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
        epoch, most = (
            int((sizes * order.weights).sum()),
            # with weights: other epochs may have others
            int(sizes.sum()) if isinstance(order.weights, float) else order.samples * largest,
        )
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


class Blocks:
    """Places in the memory between reading and decoding: each read has one contiguous block.

    A block is freed when the last of its samples is released. The caller must hold a lock during
    each call. held: bytes of the blocks in use.
    """

    def __init__(self, size: int) -> None:
        """size: bytes of the memory."""
        self.held = 0
        self._free = [(0, size)]  # extents, sorted
        self._used: dict[int, list[int]] = {}  # end and samples left, by the start of a block

    def take(self, nbytes: int, samples: int) -> int | None:
        """Return the start of a block for a read of some samples; None if there is no room."""
        size = -(-nbytes // PAGE) * PAGE
        for number, (start, stop) in enumerate(self._free):
            if size <= stop - start:
                self._free[number : number + 1] = [(start + size, stop)] * (start + size < stop)
                self._used[start] = [start + size, samples]
                self.held += size
                return start
        return None

    def release(self, blocks: Ints) -> None:
        """Release samples. blocks: start of the block of each, int64[n]."""
        for start, count in Counter(blocks.tolist()).items():  # faster than numpy for one batch
            used = self._used[start]
            used[1] -= count
            if not used[1]:
                self._free_block(start, used[0])

    def _free_block(self, start: int, stop: int) -> None:
        """Make a block free, and join it with its free neighbors."""
        del self._used[start]
        self.held -= stop - start
        at = bisect(self._free, (start, stop))
        if at < len(self._free) and self._free[at][0] == stop:
            stop = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, stop))
