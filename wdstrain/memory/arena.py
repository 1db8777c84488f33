"""Where bytes wait between being read and being decoded.

The plan knows, when a sample is read, at which step it will leave. So samples are laid down in slabs by the time they
leave (a bucket of steps) and not by the time they came: a bucket's slabs become free together, all at once, when its
last step is decoded. No free lists of odd sizes, no compaction, no counting per sample; and what is held is the window's
undelivered half, not the whole window as in a ring of shard bytes.

How long a sample waits differs: one of a source that gives a sample in a hundred steps is read long before it leaves, and so are
small samples of which thousands come in one read. A bucket of its own for each such time would take a slab for a few bytes. So what
leaves late shares wider buckets, each level sixteen times as wide as the one before: it stays at most half as long again.

The memory is sized once for the worst case; only what is written is ever taken from the system, and slabs freed last are
used first, so what is taken stays what a window really needs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wdstrain.errors import WdstrainError
from wdstrain.memory.shared import Memory

Ints = npt.NDArray[np.int64]

_ALIGN = 64  # a cache line
_WIDER = 16  # times as wide is a bucket of the next level
_SLAB = 1 << 20  # bytes of a slab; less where little waits, that slabs partly filled do not outweigh it


class Arena:
    """Slabs of shared memory. Not thread-safe: the reader that owns it holds a lock."""

    def __init__(self, *, live: int, largest: int, near: int, farthest: int) -> None:
        """`live`: most bytes that wait at one time; `largest`: of one sample; `near`: buckets ahead that are not shared;
        `farthest`: buckets between what leaves last and what leaves next, at most."""
        self._near, levels = near, 1
        while near * _WIDER ** (levels - 1) <= farthest:
            levels += 1
        buckets = (near + 1) * levels
        # a slab of four of the largest loses at most a quarter to the end that nothing fits into
        self._slab = max(_round(min(_SLAB, live // (2 * buckets))), 4 * _round(largest))
        count = live * 4 // (3 * self._slab) + 2 * buckets + 2
        self.memory = Memory(count * self._slab)
        self._count = count
        self.reset()

    def reset(self) -> None:
        """Forget everything that was placed."""
        self._free = list(range(self._count - 1, -1, -1))
        self._open: dict[tuple[int, int], list[int]] = {}  # (width, bucket) -> [next offset, end] in its slab being filled
        self._taken: dict[tuple[int, int], list[int]] = {}  # (width, bucket) -> its slabs
        self._released = 0  # buckets

    @property
    def held(self) -> int:
        """Bytes of the slabs in use."""
        return (self._count - len(self._free)) * self._slab

    def place(self, buckets: Ints, sizes: Ints) -> Ints:
        """Where samples are put: offsets of `sizes` bytes that stay until their bucket is released. int64[n] each."""
        offsets, rounded = list[int](), (-(-sizes // _ALIGN) * _ALIGN).tolist()
        released, near = self._released, self._near
        # on arrays it takes longer for a few hundred, and no less for more
        for number, size in zip(buckets.tolist(), rounded, strict=True):
            width = 1
            while number - released >= near * width:
                width *= _WIDER
            bucket = width, number // width
            place = self._open.get(bucket)
            if place is None or place[0] + size > place[1]:
                place = self._open[bucket] = self._new_slab(bucket)
            offsets.append(place[0])
            place[0] += size
        return np.array(offsets, np.int64)

    def _new_slab(self, bucket: tuple[int, int]) -> list[int]:
        if not self._free:
            raise WdstrainError(f"the reader holds {self.held} bytes, all that was set aside. Lower shuffle_buffer.")
        slab = self._free.pop()
        self._taken.setdefault(bucket, []).append(slab)
        return [slab * self._slab, (slab + 1) * self._slab]

    def release(self) -> None:
        """Everything placed in the next bucket is no longer needed."""
        self._released, width = self._released + 1, 1
        while self._released % width == 0:
            bucket = width, self._released // width - 1
            self._open.pop(bucket, None)
            self._free.extend(reversed(self._taken.pop(bucket, [])))
            width *= _WIDER


def _round(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
