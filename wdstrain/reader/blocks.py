"""Places in the memory between reading and decoding: each read has one contiguous block.

A block is freed when the last of its samples is released. The memory is sized for the worst case.
The system provides a page when it is first written, and blocks are taken from the front, so the
resident memory stays near what is held. The caller must hold a lock during each call.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter

from wdstrain.order.order import Ints

PAGE = 4096


class Blocks:
    """Blocks of a memory. held: bytes of the blocks in use."""

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
