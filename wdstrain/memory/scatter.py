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
from isal.isal_zlib import crc32

from wdstrain.native import kernels

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

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


class ChecksumJob(Runs):
    """Runs whose crc32 is computed as the bytes of a scatter list arrive.

    checksums: crc32 of each run, uint32[n]; 0 until it is computed.
    """

    def __init__(
        self,
        memories: Sequence[Buffer],
        memory_index: Ints,
        start: Ints,
        size: Ints,
        complete_at: Ints,
        *,
        first_byte: int = 0,
    ) -> None:
        """memory_index, start, size: as in `Runs`.

        complete_at: offset in the shard at which each run ends, not decreasing. int64[n].
        first_byte: offset in the shard at which the scatter list begins.
        """
        super().__init__(memories, memory_index, start, size)
        self._complete_at, self._first_byte = np.ascontiguousarray(complete_at), first_byte
        self.checksums: npt.NDArray[np.uint32] = np.zeros(len(self), np.uint32)

    def update(self, before: int = 0, now: int | None = None) -> None:
        """Compute the checksums of the runs that become complete between `before` and `now` bytes.

        now: None stands for all bytes.
        """
        now = _MAX_INT64 - self._first_byte if now is None else now
        if kernels.library is not None:
            kernels.library.update_checksums(ctypes.byref(self.c_job), before, now)
            return
        bounds = np.array([before, now]) + self._first_byte
        for i in range(*np.searchsorted(self._complete_at, bounds, side="right").tolist()):
            self.checksums[i] = crc32(self.run(i))

    def within(self, before: int, now: int) -> ChecksumJob:
        """Return the runs that lie entirely in bytes [before, now) of the scatter list.

        They share `checksums` with this job.
        """
        part, bounds = copy(self), np.array([before, now]) + self._first_byte
        first = int(np.searchsorted(self._complete_at - self._size, bounds[0]))
        stop = max(first, int(np.searchsorted(self._complete_at, bounds[1], side="right")))
        part._keep(first, stop)
        part._first_byte = int(bounds[0])
        part._complete_at = self._complete_at[first:stop]
        part.checksums = self.checksums[first:stop]
        return part

    @property
    def c_job(self) -> kernels.ChecksumJob:
        """The job as a C struct. Its addresses are valid while this object exists."""
        return kernels.ChecksumJob(
            kernels.checksum,
            len(self),
            self._address.ctypes.data,
            self._size.ctypes.data,
            self._complete_at.ctypes.data,
            self._first_byte,
            self.checksums.ctypes.data,
        )


class ScatterList(Runs):
    """Runs that are filled one after another. left: bytes that are not filled yet."""

    def __init__(
        self,
        memories: Sequence[Buffer],
        memory_index: Ints,
        start: Ints,
        size: Ints,
        job: ChecksumJob | None = None,
    ) -> None:
        """memory_index, start, size: as in `Runs`. job: checksums of arriving bytes."""
        super().__init__(memories, memory_index, start, size)
        self._ends = self._size.cumsum()  # byte at which each run ends
        self.left = self._total = int(self._ends[-1]) if len(size) else 0
        self._job, self._verified = job, 0  # bytes whose checksums are computed

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
        if self._job is not None:
            part._job = self._job.within(begin, begin + count)
        self.left -= count
        return part

    def fill_request(self, fd: int, offset: int, most: int) -> kernels.FillRequest:
        """Return the C struct of a read from `filled` on. It is valid while this object exists.

        offset: in the file; -1 if `fd` is a socket. most: bytes to read, <= left.
        """
        request = kernels.FillRequest(
            fd,
            offset,
            most,
            self.filled,
            self._verified,
            len(self),
            self._address.ctypes.data,
            self._size.ctypes.data,
        )
        if self._job is not None:
            request.checksums = self._job.c_job
        return request

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
        count = int(kernels.library.fill(ctypes.byref(self.fill_request(fd, offset, most))))
        if count < 0:
            raise OSError(-count, os.strerror(-count))
        self.advance_verified(count)
        return count

    def _verify(self) -> None:
        filled = self.filled
        if self._job is not None and filled > self._verified:
            self._job.update(self._verified, filled)
        self._verified = filled


def as_scatter_list(target: ScatterList | Iterable[memoryview]) -> ScatterList:
    """Return a scatter list as it is, or the scatter list of writable buffers."""
    return target if isinstance(target, ScatterList) else ScatterList.from_buffers(target)


def scatter_samples(
    memories: tuple[Buffer, Buffer],
    start: Ints,
    size: Ints,
    starts: Ints,
    stops: Ints,
    job: ChecksumJob | None = None,
) -> ScatterList:
    """Return the scatter list of n samples, in shard order.

    memories: the first is that of the samples, the second is scratch memory. Bytes of the shard
    between two samples go there; they overwrite each other.
    start, size: of each sample in its memory, int64[n] each.
    starts, stops: first byte and end of each sample in the shard, int64[n] each.
    Raises ValueError if a run reaches beyond its memory.
    """
    runs = np.zeros_like(start), start, size
    gaps = starts[1:] - stops[:-1]
    if not gaps.any():
        return ScatterList(memories[:1], *runs, job)
    scratch = memories[1].size
    gap_runs = np.append(0, -(-gaps // scratch))  # runs of scratch memory before each sample
    gap_sizes = np.full(int(gap_runs.sum()), scratch)
    gap_sizes[np.cumsum(gap_runs)[1:][gaps > 0] - 1] -= (-gaps % scratch)[gaps > 0]
    insert_at = np.repeat(np.arange(len(start)), gap_runs)
    gap_values: tuple[Any, ...] = (1, 0, gap_sizes)
    with_gaps = [
        np.insert(column, insert_at, value) for column, value in zip(runs, gap_values, strict=True)
    ]
    return ScatterList(memories, with_gaps[0], with_gaps[1], with_gaps[2], job)
