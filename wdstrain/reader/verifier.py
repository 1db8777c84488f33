"""Checksums of samples, verified as their bytes arrive.

The index has a crc32 of every field. The thread that reads bytes verifies them at once: they are
still in the processor's cache, and the C library runs without the GIL. A read only gets the place
and the id of its first sample; the library looks the rest up in the index's arrays and marks each
place of the ring as sound or not.

A sample that is not marked sound is only unverified: its decoder compares it again. So it is safe
to skip verification, for example for a sample that came in two requests or was read again.
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
from wdstrain.shards.offsets import Ints, Offsets


class PackedChecksums:
    """Expected checksums of all samples, and the memory that the samples are read into."""

    def __init__(self, table: Offsets, compared: Bools, memory: Memory) -> None:
        """table: must have checksums. compared: the fields to verify, bool[fields]."""
        self.offsets, self.memory, self._compared = table, memory, compared
        kinds = (np.int64,) * 5 + (np.uint32, np.uint16, bool)
        columns = (
            table.start,
            table.stop,
            table.member_first,
            table.member_offset,
            table.member_size,
        )
        arrays = *columns, table.member_crc, table.member_field, compared
        # The library reads these arrays by address: keep references to them.
        self._arrays = [
            np.require(array, kind, ["C", "A"]) for array, kind in zip(arrays, kinds, strict=True)
        ]
        addresses = (array.ctypes.data for array in self._arrays)
        self.library = kernels.PackedIndex(
            kernels.checksum, *addresses, len(compared), memory.address, memory.size
        )

    def is_sound(self, number: int, where: int) -> bool:
        """Return whether sample `number`, which begins at offset `where` of the memory, is sound.

        True if all verified fields have the crc32 of the index.
        """
        table = self.offsets
        start, extent = int(table.start[number]), int(table.stop[number] - table.start[number])
        if not 0 <= where <= self.memory.size - extent:
            return False
        for m in range(*table.member_first[number : number + 2].tolist()):
            within, size = int(table.member_offset[m]) - start, int(table.member_size[m])
            if not 0 <= within <= extent - size <= extent:  # a damaged index may have any value
                return False
            data = self.memory.view[where + within : where + within + size]
            crc = int(table.member_crc[m])
            if crc and self._compared[table.member_field[m]] and crc32(data) != crc:
                return False
        return True


class VerifiedRing:
    """Ring buffer of a lane: by place, whether the sample there is verified as sound.

    any_unverified: whether any sample since the start was not sound. While it is False,
    `unverified` need not be called.
    """

    def __init__(self, packed: PackedChecksums, where: Ints) -> None:
        """where: by place, the offset of its sample in the memory, int64[ring].

        The reader fills it later.
        """
        self.packed, self.where, self.any_unverified = packed, where, False
        self.sound = bytearray(len(where))
        self._is_sound: Bools = np.frombuffer(self.sound, bool)
        addresses = ctypes.addressof(packed.library), where.ctypes.data, self._is_sound.ctypes.data
        self.library = kernels.SampleRing(*addresses, len(where))

    def compared(self, place: int, number: int, count: int) -> ReadVerifier:
        """Return the verifier of a read of `count` samples that follow one another in a shard.

        place, number: place in the lane and id of the first.
        """
        self._mark_unverified(place, count)
        return ReadVerifier(self, place, number, count)

    def not_compared(self, place: int, count: int) -> None:
        """Mark the samples in `count` places from `place` on as unverified."""
        self._mark_unverified(place, count)
        self.any_unverified = True

    def settle(self, place: int, count: int) -> None:
        """Update `any_unverified` after a verified read of these places has ended."""
        if self.any_unverified:
            return
        self.any_unverified = any(self.sound.find(0, *run) >= 0 for run in self._runs(place, count))

    def unverified(self, places: Ints) -> Bools:
        """Return for each of these places whether its sample is not verified as sound. bool[n]"""
        return ~self._is_sound[places % len(self.sound)]

    def _mark_unverified(self, place: int, count: int) -> None:
        for first, stop in self._runs(place, count):
            self.sound[first:stop] = bytes(stop - first)

    def _runs(self, place: int, count: int) -> list[tuple[int, int]]:
        """Return the one or two ranges [first, stop) of the ring for `count` places."""
        ring = len(self.sound)
        first = place % ring
        if first + count <= ring:
            return [(first, first + count)]
        return [(first, ring), (0, first + count - ring)]


class ReadVerifier:
    """Verifier of the samples of one read, while its bytes arrive."""

    def __init__(
        self, ring: VerifiedRing, place: int, number: int, count: int, first_byte: int | None = None
    ) -> None:
        """place, number: place in the lane and id of the first of `count` samples.

        first_byte: offset in the shard of the first byte of the read; None: where the first sample
        begins.
        """
        self._ring, self._place, self._number, self._count = ring, place, number, count
        if first_byte is None:
            first_byte = int(ring.packed.offsets.start[number])
        self._first_byte = first_byte
        self._library = kernels.SampleRun(
            ctypes.addressof(ring.library), place, number, count, first_byte
        )

    def update(self, before: int, now: int) -> None:
        """Verify the samples that become complete between `before` and `now` bytes of the read.

        A sample that began in another read stays unverified.
        """
        if kernels.library is not None:
            kernels.library.verify_samples(ctypes.byref(self._library), before, now)
            return
        ring, first = self._ring, self._number
        table, rows = ring.packed.offsets, slice(first, first + self._count)
        starts, stops = table.start[rows].tolist(), table.stop[rows].tolist()
        for i in range(
            *(bisect_right(stops, self._first_byte + arrived) for arrived in (before, now))
        ):
            if starts[i] >= self._first_byte:
                slot = (self._place + i) % len(ring.sound)
                ring.sound[slot] = ring.packed.is_sound(first + i, int(ring.where[slot]))

    def settle(self) -> None:
        """Tell the ring that all bytes of the read have arrived."""
        self._ring.settle(self._place, self._count)

    def within(self, before: int, now: int) -> ReadVerifier:
        """Return the verifier of the bytes [before, now) of the read, as a read of their own."""
        return ReadVerifier(
            self._ring, self._place, self._number, self._count, self._first_byte + before
        )

    @property
    def c_arguments(self) -> tuple[Any, ...]:
        """Arguments of the library's read functions. They are valid while this object exists."""
        return (*NO_CHECKSUMS, ctypes.byref(self._library))
