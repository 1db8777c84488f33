"""Many runs of memory at once: filled from a file, and compared by checksum.

A batch has a run for each sample or more, and piece by piece each costs a view, a call, and Python's own lock, given away and waited
for once more; with several threads that is half of what reading arrays takes. Here one call in C is for all of them (`kernels.c`), given
as integers, and it holds no lock; what it reads it compares while the processor has it at hand. Where it was not compiled the same is
done piece by piece.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wdstrain.memory.pieces import BufferList
from wdstrain.memory.shared import Memory
from wdstrain.native import kernels
from wdstrain.native.checksum import crc32

Ints = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]

NO_SUMS = (None, 0, *[None] * 5, 0)  # for the library to take

_ALL = (1 << 63) - 1
_NOTHING = memoryview(b"")
_AT_HAND = 256 << 10  # bytes that the processor still has when they are compared


class Runs:
    """Runs of bytes in some memories."""

    def __init__(self, memories: Sequence[Memory], of: Ints, start: Ints, size: Ints) -> None:
        """of: which of the memories; start, size: in it, int64[n] each. Raises ValueError beyond its end."""
        # addresses are believed by the system: what an index claims must not lead out of the memory it is for
        limit, base = _each([one.size for one in memories], of), _each([one.address for one in memories], of)
        if len(start) and (start.min() < 0 or size.min() < 0 or (start > limit - size).any()):  # in this order no sum overflows
            raise ValueError("a run of bytes is beyond the end of the memory it is in")
        self._memories, self._of, self._address, self._size = memories, of, start + base, np.ascontiguousarray(size)

    def __len__(self) -> int:
        return len(self._address)

    def __iter__(self) -> Iterator[memoryview]:
        return map(self.run, range(len(self)))

    def run(self, number: int) -> memoryview:
        """One of them."""
        memory = self._memories[int(self._of[number])]
        start = int(self._address[number]) - memory.address
        return memory.view[start : start + int(self._size[number])]

    def _cut(self, first: int, stop: int) -> None:
        """Be only these."""
        self._of, self._address, self._size = self._of[first:stop], self._address[first:stop], self._size[first:stop]


def _each(values: list[int], of: Ints) -> Any:
    """The values of the memories that runs are in."""
    return values[0] if len(values) == 1 else np.array(values)[of]


class Compared(Protocol):
    """What is compared of bytes as they come."""

    def take(self, before: int, now: int) -> None:
        """Compare what so many bytes are enough for, now that they are there, and were not before."""

    def within(self, before: int, now: int) -> Compared:
        """What can be compared of a part of the bytes alone; what comes is counted from its beginning."""

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What the library takes: runs whose sums it is to take, and samples that it is to compare."""


class ChecksumJob(Runs):
    """Runs whose crc32 is taken. found: uint32[n], of those of which it was."""

    def __init__(
        self, memories: Sequence[Memory], of: Ints, start: Ints, size: Ints, upto: Ints, joined: Truths | None = None
    ) -> None:
        """upto: how many bytes of what is being read have to be there for each, growing, int64[n].

        joined: taken of a run and the one before it, as if they were one, bool[n]; not so if it is None.
        """
        super().__init__(memories, of, start, size)
        self._upto, self._begun = np.ascontiguousarray(upto), 0  # what they count from
        self._joined = joined
        self.found: npt.NDArray[np.uint32] = np.zeros(len(self), np.uint32)

    def take(self, before: int = 0, now: int | None = None) -> None:
        """Of those for which that many bytes were too few, and so many are enough; of all others where `now` is None."""
        now = _ALL if now is None else now + self._begun
        first, stop = np.searchsorted(self._upto, (before + self._begun, now), side="right").tolist()
        if kernels.library is not None:
            kernels.library.sums(*self.part(first, stop).arrays[:-3])
            return
        for i in range(first, stop):
            joined = self._joined is not None and self._joined[i]
            self.found[i] = crc32(self.run(i), int(self.found[i - 1]) if joined else 0)

    def within(self, before: int, now: int) -> ChecksumJob:
        """Those of which nothing is among the bytes before, and all is there now."""
        before, now = before + self._begun, now + self._begun
        first, stop = np.searchsorted(self._upto - self._size, before), np.searchsorted(self._upto, now, side="right")
        part = self.part(int(first), max(int(first), int(stop)))
        part._begun = before
        return part

    def part(self, first: int, stop: int) -> ChecksumJob:
        """These of them. What is found of them is found here."""
        part = copy(self)
        part._cut(first, stop)
        part._upto, part.found = self._upto[first:stop], self.found[first:stop]
        part._joined = None if self._joined is None else self._joined[first:stop]
        return part

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What the library takes."""
        joined = None if self._joined is None else self._joined.ctypes.data
        lie = self._address.ctypes.data, self._size.ctypes.data
        return kernels.checksum, len(self), *lie, joined, self.found.ctypes.data, self._upto.ctypes.data, self._begun, None


class ScatterList(Runs):
    """Runs to be filled one after another. left: bytes that are still to come."""

    def __init__(self, memories: Sequence[Memory], of: Ints, start: Ints, size: Ints, compared: Compared | None = None) -> None:
        """compared: as it comes."""
        super().__init__(memories, of, start, size)
        self.left = self._all = int(size.sum())
        self._compared, self._seen = compared, 0  # and of how many bytes it was
        self._views: Iterator[memoryview] | None = None  # what is left, while `take` fills it, each looked up when it is begun
        self._view = _NOTHING

    def read(self, fd: int, offset: int) -> int:
        """Fill what is left from this offset of a file on, or a part of it. How many bytes: 0 at its end. Raises OSError."""
        if kernels.library is not None:
            return self._fill(fd, offset, self.left)
        count = BufferList(self._between(self.filled, self._all)).read(fd, offset)
        self.came(count)
        return count

    def receive(self, connection: socket.socket, most: int) -> int:
        """Fill `most` bytes, no more than are left, with those that come next. How many: fewer before a pause, 0 at the end.

        Raises OSError.
        """
        if kernels.library is not None:
            return self._fill(connection.fileno(), -1, most)
        count = BufferList(self._between(self.filled, self._all)).receive(connection, most)
        self.came(count)
        return count

    def take(self, data: bytes) -> None:
        """Fill them with these bytes, which are not more than are left."""
        rest = memoryview(data)
        if self._views is None and rest:
            self._views, self._view = iter(self._between(self.filled, self._all)), _NOTHING
        while self._views is not None and rest:
            while not self._view:
                self._view = next(self._views)
            count = min(len(self._view), len(rest))
            self._view[:count] = rest[:count]
            self._view, rest = self._view[count:], rest[count:]
        self.left -= len(data)
        if not self.left or self.filled - self._seen >= _AT_HAND:
            self._compare()

    def came(self, count: int) -> None:
        """So many bytes of them were filled."""
        self.left -= count
        self._views = None
        self._compare()

    def _compare(self) -> None:
        filled = self.filled
        if self._compared is not None and filled > self._seen:
            self._compared.take(self._seen, filled)
        self._seen = filled

    def summed(self, count: int) -> None:
        """So many bytes of them were filled, and compared."""
        self.left -= count
        self._seen = self.filled

    @property
    def filled(self) -> int:
        """Bytes that came."""
        return self._all - self.left

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What the library takes, beside what it is to read. They are this object's own."""
        self._views = None
        compared = (*NO_SUMS, None) if self._compared is None else self._compared.arrays
        return self.filled, self._seen, len(self), self._address.ctypes.data, self._size.ctypes.data, *compared

    def cut(self, count: int) -> ScatterList:
        """The places of the next `count` bytes, for another to fill."""
        begin = self.filled
        if begin or count < self.left:
            part = self._between(begin, begin + count)
            part._compared = None if self._compared is None else self._compared.within(begin, begin + count)
        else:
            part = copy(self)
        self.left -= count
        return part

    def _between(self, begin: int, stop: int) -> ScatterList:
        """The places of these bytes, nothing of which is compared."""
        part, ends = copy(self), self._size.cumsum()
        first, last = int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(ends, stop))
        part._cut(first, last + 1 if begin < stop else first)
        part.left = part._all = stop - begin
        part._compared, part._seen, part._views = None, 0, None
        if begin < stop:
            missing = begin - int(ends[first] - self._size[first])
            part._address, part._size = part._address.copy(), part._size.copy()
            part._address[0] += missing
            part._size[0] -= missing
            part._size[-1] -= int(ends[last]) - stop
        return part

    def _fill(self, fd: int, offset: int, most: int) -> int:
        count = int(kernels.library.fill(fd, offset, most, *self.arrays))
        if count < 0:
            raise OSError(-count, os.strerror(-count))
        self.summed(count)
        return count


def of_samples(
    memories: Sequence[Memory], of: Ints, start: Ints, size: Ints, starts: Ints, stops: Ints, compared: Compared | None = None
) -> ScatterList:
    """Places of n samples that follow one another in a shard, in w runs each.

    of, start, size: int64[n, w]; starts, stops: of the samples in the shard, int64[n]. What is between them there nobody wants, and
    goes to the last of the memories, over and over.
    """
    runs: list[Ints] = [of.reshape(-1), start.reshape(-1), size.reshape(-1)]
    gaps = starts[1:] - stops[:-1]
    if gaps.any():
        count, width = start.shape
        first, most = np.arange(0, count * width, width), memories[-1].size
        pieces = np.append(0, -(-gaps // most))  # before each sample
        sizes = np.full(int(pieces.sum()), most)
        sizes[np.cumsum(pieces)[1:][gaps > 0] - 1] -= (-gaps % most)[gaps > 0]
        values: tuple[Any, ...] = (len(memories) - 1, 0, sizes)
        where = np.repeat(first, pieces)
        runs = [np.insert(one, where, value) for one, value in zip(runs, values, strict=True)]
    return ScatterList(memories if gaps.any() else memories[:-1], runs[0], runs[1], runs[2], compared)
