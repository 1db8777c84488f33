"""Slab allocator for sample bytes between reading and decoding.

The plan says at which step a sample is decoded. Samples are placed in slabs by that step: a bucket
is a group of consecutive steps with its own slabs. `release` frees all slabs of a bucket at once,
so nothing is counted or freed per sample.

Samples that are decoded much later share wider buckets, because a narrow bucket would take a whole
slab for a few bytes. Each level of buckets is 16 times as wide as the one before. A sample in a
wide bucket is held at most about half as long again as it waits.

The memory is sized once for the worst case. The system provides a page when it is first written.
Slabs that were freed last are used first, so the resident memory stays near what a window needs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wdstrain.errors import WdstrainError
from wdstrain.memory.shared import Memory

Ints = npt.NDArray[np.int64]

_ALIGN = 64  # bytes of a cache line
_WIDENING = 16  # width of a bucket divided by the width on the level below
_SLAB = 1 << 20  # most bytes of a slab, unless samples are larger


class Arena:
    """Slabs of shared memory. Not thread-safe: its owner must hold a lock."""

    def __init__(self, *, live: int, largest: int, near: int, farthest: int) -> None:
        """live: most bytes that are placed and not released at one time.

        largest: most bytes of one sample. near: samples of this many next buckets do not share
        wider buckets. farthest: most buckets from the next to be released to the last in use.
        Raises WdstrainError if the system does not provide the memory.
        """
        self._near, levels = near, 1
        while near * _WIDENING ** (levels - 1) <= farthest:
            levels += 1
        buckets = (near + 1) * levels
        # a slab holds at least four of the largest samples, so at most a quarter of it stays empty
        self._slab = max(_round(min(_SLAB, live // (2 * buckets))), 4 * _round(largest))
        count = live * 4 // (3 * self._slab) + 2 * buckets + 2
        self.memory = Memory(count * self._slab)
        self._count = count
        self.reset()

    def reset(self) -> None:
        """Free all slabs."""
        self._free = list(range(self._count - 1, -1, -1))
        # by (width, bucket): next offset and end of the slab that is being filled
        self._open: dict[tuple[int, int], list[int]] = {}
        self._used: dict[tuple[int, int], list[int]] = {}  # slabs by (width, bucket)
        self._released = 0  # number of released buckets of width 1

    @property
    def held(self) -> int:
        """Bytes of the slabs that are in use."""
        return (self._count - len(self._free)) * self._slab

    def place(self, buckets: Ints, sizes: Ints) -> Ints:
        """Reserve memory for samples. Returns their offsets in the arena, int64[n].

        buckets: the bucket of each sample, counted from the last `reset`, int64[n].
        sizes: bytes of each sample, int64[n].
        A sample's bytes stay valid until its bucket is released.
        Raises WdstrainError if no slab is free.
        """
        offsets, rounded_sizes = list[int](), (-(-sizes // _ALIGN) * _ALIGN).tolist()
        released, near = self._released, self._near
        for number, size in zip(buckets.tolist(), rounded_sizes, strict=True):
            width = 1
            while number - released >= near * width:
                width *= _WIDENING
            bucket = width, number // width
            slab = self._open.get(bucket)
            if slab is None or slab[0] + size > slab[1]:
                slab = self._open[bucket] = self._new_slab(bucket)
            offsets.append(slab[0])
            slab[0] += size
        return np.array(offsets, np.int64)

    def release(self) -> None:
        """Free the memory of all samples in the next bucket."""
        self._released, width = self._released + 1, 1
        while self._released % width == 0:
            bucket = width, self._released // width - 1
            self._open.pop(bucket, None)
            self._free.extend(reversed(self._used.pop(bucket, [])))
            width *= _WIDENING

    def _new_slab(self, bucket: tuple[int, int]) -> list[int]:
        """Take a free slab for a bucket. Returns its first offset and its end."""
        if not self._free:
            raise WdstrainError(
                f"the reader holds {self.held} bytes, which is its limit. Lower shuffle_buffer."
            )
        slab = self._free.pop()
        self._used.setdefault(bucket, []).append(slab)
        return [slab * self._slab, (slab + 1) * self._slab]


def _round(size: int) -> int:
    """Return `size` rounded up to a multiple of the alignment."""
    return -(-size // _ALIGN) * _ALIGN
