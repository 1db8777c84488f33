"""Scatter lists: many runs of memory that are filled from one file or socket and checksummed.

A batch has at least one run per sample. A call of Python per run would take and release the GIL
each time. Here all runs are integer arrays, and one call of C (`native/kernels.c`) fills them
without the GIL. It computes checksums while the bytes are in the CPU cache. Without the C library
the same is done in Python, run by run.

The C code writes to the addresses that it gets. `Runs` therefore checks every run against the end
of its memory, because offsets may come from a hostile index file.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wdstrain.native import kernels
from wdstrain.native.checksum import crc32

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NO_CHECKSUMS = (None, 0, *[None] * 5, 0)  # C arguments of an empty checksum job

_MAX_INT64 = (1 << 63) - 1
_MAX_VIEWS = 1024  # buffers that one system call takes (IOV_MAX of Linux)
_CACHED_BYTES = 256 << 10  # bytes that are still in the CPU cache when they are verified


class Buffer(Protocol):
    """Writable bytes at a fixed address, such as a `Memory`."""

    @property
    def view(self) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...


class _ViewBuffer:
    """A writable memoryview as a `Buffer`. Raises TypeError if the view is read-only."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.size = view, len(view)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(view))


class Runs:
    """Runs of bytes in one or several memories."""

    def __init__(
        self, memories: Sequence[Buffer], memory_index: Ints, start: Ints, size: Ints
    ) -> None:
        """memory_index: the memory of each run, as an index into `memories`. int64[n].

        start, size: offset and length of each run in its memory, in bytes. int64[n] each.
        Raises ValueError if a run reaches beyond its memory.
        """
        limit = _by_run([memory.size for memory in memories], memory_index)
        base = _by_run([memory.address for memory in memories], memory_index)
        # `limit - size` cannot overflow once size >= 0 holds; `start + size` could
        if len(start) and (start.min() < 0 or size.min() < 0 or (start > limit - size).any()):
            raise ValueError(
                "a run of bytes is beyond its memory: start + size must be <= memory size"
            )
        self._memories, self._memory_index = memories, memory_index
        self._address, self._size = start + base, np.ascontiguousarray(size)

    def __len__(self) -> int:
        return len(self._address)

    def __iter__(self) -> Iterator[memoryview]:
        return map(self.run, range(len(self)))

    def run(self, number: int) -> memoryview:
        """Return the bytes of one run as a writable view."""
        memory = self._memories[int(self._memory_index[number])]
        start = int(self._address[number]) - memory.address
        return memory.view[start : start + int(self._size[number])]

    def _keep(self, first: int, stop: int) -> None:
        """Drop all runs but [first, stop)."""
        kept = slice(first, stop)
        self._memory_index, self._address, self._size = (
            self._memory_index[kept],
            self._address[kept],
            self._size[kept],
        )


def _by_run(values: list[int], memory_index: Ints) -> Any:
    """Return the value of each run's memory, or one number if there is one memory."""
    return values[0] if len(values) == 1 else np.array(values, np.int64)[memory_index]


class Verification(Protocol):
    """Work that is done on the bytes of a scatter list as they arrive.

    Byte counts are those of the list: its first byte is byte 0.
    """

    def update(self, before: int, now: int) -> None:
        """Process what becomes complete between the first `before` and the first `now` bytes."""

    def within(self, before: int, now: int) -> Verification:
        """Return the work on bytes [before, now) alone. Its byte counts start at `before`."""

    @property
    def c_arguments(self) -> tuple[Any, ...]:
        """Arguments of the C functions: a checksum job, and samples to verify."""


class ChecksumJob(Runs):
    """Runs whose crc32 is computed as bytes arrive.

    checksums: crc32 of each run, uint32[n]; 0 until it is computed.
    """

    def __init__(
        self,
        memories: Sequence[Buffer],
        memory_index: Ints,
        start: Ints,
        size: Ints,
        complete_at: Ints,
        joined: Bools | None = None,
    ) -> None:
        """memory_index, start, size: as in `Runs`.

        complete_at: number of bytes of the scatter list that must be there for each run to be
        complete, not decreasing. int64[n].
        joined: whether a run continues the checksum of the run before it. bool[n]; None: none does.
        """
        super().__init__(memories, memory_index, start, size)
        self._complete_at, self._first_byte = np.ascontiguousarray(complete_at), 0
        self._joined = joined
        self.checksums: npt.NDArray[np.uint32] = np.zeros(len(self), np.uint32)

    def update(self, before: int = 0, now: int | None = None) -> None:
        """Compute the checksums of the runs that become complete between `before` and `now` bytes.

        now: None stands for all bytes.
        """
        now = _MAX_INT64 if now is None else now + self._first_byte
        first, stop = np.searchsorted(
            self._complete_at, (before + self._first_byte, now), side="right"
        ).tolist()
        if kernels.library is not None:
            kernels.library.compute_checksums(*self._part(first, stop).c_arguments[:-3])
            return
        for i in range(first, stop):
            joined = self._joined is not None and self._joined[i]
            self.checksums[i] = crc32(self.run(i), int(self.checksums[i - 1]) if joined else 0)

    def within(self, before: int, now: int) -> ChecksumJob:
        """Return the runs that lie entirely in bytes [before, now) of the scatter list."""
        before, now = before + self._first_byte, now + self._first_byte
        first = int(np.searchsorted(self._complete_at - self._size, before))
        stop = int(np.searchsorted(self._complete_at, now, side="right"))
        part = self._part(first, max(first, stop))
        part._first_byte = before
        return part

    def _part(self, first: int, stop: int) -> ChecksumJob:
        """Return the runs [first, stop). They share `checksums` with this job."""
        part = copy(self)
        part._keep(first, stop)
        part._complete_at, part.checksums = (
            self._complete_at[first:stop],
            self.checksums[first:stop],
        )
        part._joined = None if self._joined is None else self._joined[first:stop]
        return part

    @property
    def c_arguments(self) -> tuple[Any, ...]:
        """Arguments of the C functions. The addresses are valid while this object exists."""
        joined = None if self._joined is None else self._joined.ctypes.data
        runs = self._address.ctypes.data, self._size.ctypes.data
        checksums, complete_at = self.checksums.ctypes.data, self._complete_at.ctypes.data
        return (
            kernels.checksum,
            len(self),
            *runs,
            joined,
            checksums,
            complete_at,
            self._first_byte,
            None,
        )


class ScatterList(Runs):
    """Runs that are filled one after another. left: bytes that are not filled yet."""

    def __init__(
        self,
        memories: Sequence[Buffer],
        memory_index: Ints,
        start: Ints,
        size: Ints,
        verification: Verification | None = None,
    ) -> None:
        """memory_index, start, size: as in `Runs`. verification: work on arriving bytes."""
        super().__init__(memories, memory_index, start, size)
        self._ends = self._size.cumsum()  # byte at which each run ends
        self.left = self._total = int(self._ends[-1]) if len(size) else 0
        self._verification, self._verified = verification, 0  # bytes that were verified

    @classmethod
    def from_buffers(cls, buffers: Iterable[memoryview]) -> ScatterList:
        """Return the scatter list of these writable buffers, which are filled in order."""
        memories = [_ViewBuffer(buffer) for buffer in buffers if len(buffer)]
        size = np.array([memory.size for memory in memories], np.int64)
        return cls(memories, np.arange(len(size)), np.zeros_like(size), size)

    @property
    def filled(self) -> int:
        """Bytes that are filled."""
        return self._total - self.left

    def read(self, fd: int, offset: int) -> int:
        """Fill runs from this offset of a file on.

        Returns the number of bytes, which may be fewer than `left`; 0 at the end of the file.
        Raises OSError.
        """
        if kernels.library is not None:
            return self._fill(fd, offset, self.left)
        count = os.preadv(fd, list(islice(self._next_views(self.left), _MAX_VIEWS)), offset)
        self.advance(count)
        return count

    def receive(self, connection: socket.socket, most: int) -> int:
        """Fill runs with the next `most` bytes of a socket; `most` must be <= left.

        Returns the number of bytes: fewer if the socket times out, 0 at the end of the stream.
        Raises OSError.
        """
        if kernels.library is not None:
            return self._fill(connection.fileno(), -1, most)
        views = islice(self._next_views(most), _MAX_VIEWS)
        count = connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        self.advance(count)
        return count

    def write(self, data: bytes | memoryview) -> None:
        """Copy these bytes into the runs that are filled next; len(data) must be <= left."""
        rest = memoryview(data)
        for view in self._next_views(len(data)):
            view[:], rest = rest[: len(view)], rest[len(view) :]
        self.left -= len(data)
        if not self.left or self.filled - self._verified >= _CACHED_BYTES:
            self._verify()

    def advance(self, count: int) -> None:
        """Count the next `count` bytes as filled, and verify them."""
        self.left -= count
        self._verify()

    def advance_verified(self, count: int) -> None:
        """Count the next `count` bytes as filled and verified."""
        self.left -= count
        self._verified = self.filled

    def split_off(self, count: int) -> ScatterList:
        """Remove and return the runs of the next `count` bytes, for another reader to fill."""
        begin, part = self.filled, copy(self)
        first = int(np.searchsorted(self._ends, begin, side="right"))
        stop = int(np.searchsorted(self._ends, begin + count)) + 1 if count else first
        part._keep(first, stop)
        part._ends = np.minimum(self._ends[first:stop] - begin, count)
        if count:
            part._address = part._address.copy()
            part._address[0] += begin - int(self._ends[first] - self._size[first])
            part._size = np.diff(part._ends, prepend=0)
        part.left, part._total, part._verified = count, count, 0
        if self._verification is not None:
            part._verification = self._verification.within(begin, begin + count)
        self.left -= count
        return part

    @property
    def c_arguments(self) -> tuple[Any, ...]:
        """Arguments of C's `fill` from `filled` on. They are valid while this object exists."""
        verification = (
            (*NO_CHECKSUMS, None) if self._verification is None else self._verification.c_arguments
        )
        runs = len(self), self._address.ctypes.data, self._size.ctypes.data
        return self.filled, self._verified, *runs, *verification

    def _next_views(self, count: int) -> Iterator[memoryview]:
        """Yield views of the next `count` bytes."""
        begin = self.filled
        stop, run = begin + count, int(np.searchsorted(self._ends, begin, side="right"))
        while begin < stop:
            view, end = self.run(run), int(self._ends[run])
            if len(view):
                yield view[begin - end + len(view) : min(end, stop) - end + len(view)]
            begin, run = end, run + 1

    def _fill(self, fd: int, offset: int, most: int) -> int:
        """Fill at most `most` bytes in C, from a file, or from a socket if offset is -1."""
        count = int(kernels.library.fill(fd, offset, most, *self.c_arguments))
        if count < 0:
            raise OSError(-count, os.strerror(-count))
        self.advance_verified(count)
        return count

    def _verify(self) -> None:
        filled = self.filled
        if self._verification is not None and filled > self._verified:
            self._verification.update(self._verified, filled)
        self._verified = filled


def as_scatter_list(target: ScatterList | Iterable[memoryview]) -> ScatterList:
    """Return a scatter list as it is, or the scatter list of writable buffers."""
    return target if isinstance(target, ScatterList) else ScatterList.from_buffers(target)


def scatter_samples(
    memories: Sequence[Buffer],
    memory_index: Ints,
    start: Ints,
    size: Ints,
    starts: Ints,
    stops: Ints,
    verification: Verification | None = None,
) -> ScatterList:
    """Return the scatter list of n samples, in shard order, with w runs each.

    memories: the last is scratch memory. Bytes of the shard between two samples go there; they
    overwrite each other.
    memory_index, start, size: as in `Runs`, int64[n, w] each.
    starts, stops: first byte and end of each sample in the shard, int64[n] each.
    Raises ValueError if a run reaches beyond its memory.
    """
    runs: tuple[Ints, Ints, Ints] = memory_index.reshape(-1), start.reshape(-1), size.reshape(-1)
    gaps = starts[1:] - stops[:-1]
    if not gaps.any():
        return ScatterList(memories[:-1], *runs, verification=verification)
    count, width = start.shape
    scratch = memories[-1].size
    gap_runs = np.append(0, -(-gaps // scratch))  # runs of scratch memory before each sample
    gap_sizes = np.full(int(gap_runs.sum()), scratch)
    gap_sizes[np.cumsum(gap_runs)[1:][gaps > 0] - 1] -= (-gaps % scratch)[gaps > 0]
    insert_at = np.repeat(np.arange(0, count * width, width), gap_runs)
    gap_values: tuple[Any, ...] = (len(memories) - 1, 0, gap_sizes)
    with_gaps = [
        np.insert(column, insert_at, value) for column, value in zip(runs, gap_values, strict=True)
    ]
    return ScatterList(memories, with_gaps[0], with_gaps[1], with_gaps[2], verification)
