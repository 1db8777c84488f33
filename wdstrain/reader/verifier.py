"""Which samples came as they were packed, found out while their bytes come.

The index has a crc32 of every field. Whoever reads a run of bytes compares it there and then: the processor still has the bytes at
hand, another thread computes meanwhile, and Python's lock is not held. Compared where they are decoded, samples of 100 KB had to
be fetched from memory once more, in the one thread that everything waits for: 0.83 of the speed.

A read is told which samples come and where they go, a few integers; what they are compared with is looked up in the index's own arrays,
by the library in C, which notes of each place whether what is there is sound. Laid out by numpy for many samples at a time, and
compared by it, this took 0.4 us more for a sample of 8 KB, with Python's lock.

A sample that is not found sound is no more than unverified: it is compared again where it is decoded, and what is done about a
difference (`tasks`) depends on nothing here. So nothing is lost where there was no comparison: of a sample that came in two requests,
that was read once more by itself, or by a decoder with bytes of its own.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from typing import Any

import numpy as np

from wdstrain.memory.scatter import NO_CHECKSUMS, Bools
from wdstrain.memory.shared import Memory
from wdstrain.native import kernels
from wdstrain.native.checksum import crc32
from wdstrain.shards.index import Ints, Table


class PackedChecksums:
    """Samples as an index says that they were packed, and the memory they are read into."""

    def __init__(self, table: Table, compared: Bools, memory: Memory) -> None:
        """compared: which of the fields are, bool[fields]. The table has checksums."""
        self.table, self.memory, self._compared = table, memory, compared
        kinds = (np.int64,) * 5 + (np.uint32, np.uint16, bool)
        columns = table.start, table.stop, table.member_first, table.member_offset, table.member_size
        arrays = *columns, table.member_crc, table.member_field, compared
        self._kept = [np.require(one, kind, ["C", "A"]) for one, kind in zip(arrays, kinds, strict=True)]
        addresses = (one.ctypes.data for one in self._kept)
        self.library = kernels.PackedIndex(kernels.checksum, *addresses, len(compared), memory.address, memory.size)

    def is_sound(self, number: int, where: int) -> bool:
        """Whether a sample that begins there in the memory is, in all that is compared of it."""
        table = self.table
        start, extent = int(table.start[number]), int(table.stop[number] - table.start[number])
        if not 0 <= where <= self.memory.size - extent:
            return False
        for m in range(*table.member_first[number : number + 2].tolist()):
            within, size = int(table.member_offset[m]) - start, int(table.member_size[m])
            if not 0 <= within <= extent - size <= extent:  # an index may say anything
                return False
            data = self.memory.view[where + within : where + within + size]
            crc = int(table.member_crc[m])
            if crc and self._compared[table.member_field[m]] and crc32(data) != crc:
                return False
        return True


class VerifiedRing:
    """Which samples of a lane were found sound: by place, over and over in a ring.

    any_unverified: whether one was not, since the beginning; else nobody has to look.
    """

    def __init__(self, packed: PackedChecksums, where: Ints) -> None:
        """where: of the samples in the memory, by place, as it will be: int64[ring]."""
        self.packed, self.where, self.any_unverified = packed, where, False
        self.sound = bytearray(len(where))
        self._truths: Bools = np.frombuffer(self.sound, bool)
        addresses = ctypes.addressof(packed.library), where.ctypes.data, self._truths.ctypes.data
        self.library = kernels.SampleRing(*addresses, len(where))

    def compared(self, place: int, number: int, count: int) -> ReadVerifier:
        """What comes for samples that follow one another in a shard, from this number of the index on, is to be compared."""
        self._forget(place, count)
        return ReadVerifier(self, place, number, count)

    def not_compared(self, place: int, count: int) -> None:
        """What comes for these samples is not, or what was found of them is not to be believed."""
        self._forget(place, count)
        self.any_unverified = True

    def settle(self, place: int, count: int) -> None:
        """All has come for these samples that were to be compared."""
        self.any_unverified = self.any_unverified or any(self.sound.find(0, *run) >= 0 for run in self._runs(place, count))

    def unverified(self, places: Ints) -> Bools:
        """Whether the samples in these places are not known to be sound. bool[n]"""
        return ~self._truths[places % len(self.sound)]

    def _forget(self, place: int, count: int) -> None:
        for first, stop in self._runs(place, count):
            self.sound[first:stop] = bytes(stop - first)

    def _runs(self, place: int, count: int) -> list[tuple[int, int]]:
        ring = len(self.sound)
        first = place % ring
        return [(first, first + count)] if first + count <= ring else [(first, ring), (0, first + count - ring)]


class ReadVerifier:
    """Compares samples of one read while they come."""

    def __init__(self, found: VerifiedRing, place: int, number: int, count: int, begun: int | None = None) -> None:
        """place: of the first, whose number in the index is `number`. begun: bytes of the shard before those that come; those before
        the first where it is None."""
        self._found, self._place, self._number, self._count = found, place, number, count
        self._begun = int(found.packed.table.start[number]) if begun is None else begun
        self._library = kernels.SampleRun(ctypes.addressof(found.library), place, number, count, self._begun)

    def update(self, before: int, now: int) -> None:
        """Compare what is whole now that so many bytes are there, and was not before; nothing of which comes in another read."""
        if kernels.library is not None:
            kernels.library.verify_samples(ctypes.byref(self._library), before, now)
            return
        found, first = self._found, self._number
        table, rows = found.packed.table, slice(first, first + self._count)
        starts, stops = table.start[rows].tolist(), table.stop[rows].tolist()
        for i in range(*(bisect_right(stops, self._begun + bytes_) for bytes_ in (before, now))):
            if starts[i] >= self._begun:
                at = (self._place + i) % len(found.sound)
                found.sound[at] = found.packed.is_sound(first + i, int(found.where[at]))

    def settle(self) -> None:
        """All came."""
        self._found.settle(self._place, self._count)

    def within(self, before: int, now: int) -> ReadVerifier:
        """Of a part of the bytes. It ends with what comes."""
        return ReadVerifier(self._found, self._place, self._number, self._count, self._begun + before)

    @property
    def c_arguments(self) -> tuple[Any, ...]:
        """What the library takes. It is this object's own."""
        return (*NO_CHECKSUMS, ctypes.byref(self._library))
