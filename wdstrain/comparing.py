"""Which samples came as they were packed, found out while their bytes come.

The index has a crc32 of every field. Whoever reads a run of bytes compares it there and then: the processor still has the bytes at
hand, another thread computes meanwhile, and Python's lock is not held. Compared where they are decoded, samples of 100 KB had to
be fetched from memory once more, in the one thread that everything waits for: 0.83 of the speed.

A sample that is not found sound is no more than doubtful: it is compared again where it is decoded, and what is done about a
difference (`tasks`) depends on nothing here. So nothing is lost where there was no comparison: of a sample that was read once
more by itself, or by a decoder with bytes of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.bulk import Sums, Truths
from wdstrain.indexing import Ints, Table
from wdstrain.memory import Memory


class Comparison(NamedTuple):
    """Of n samples that are read together, with m fields that are compared. sums: to be taken while their bytes come.

    crc: uint32[m], as they were packed; of: which of the samples each belongs to, int64[m], or None where each has just one.
    """

    sums: Sums
    crc: npt.NDArray[np.uint32]
    of: Ints | None
    samples: int

    @property
    def sound(self) -> Truths:
        """Of each sample, once all that was compared is there. bool[n]"""
        same: Truths = self.sums.found == self.crc
        if self.of is None:
            return same
        found = np.ones(self.samples, bool)
        found[self.of[~same]] = False
        return found


class Expected:
    """What samples are compared with, looked up for many at a time: thousands, of which a read takes some hundred."""

    def __init__(self, table: Table, compared: Truths, ids: Ints, memory: Memory) -> None:
        """compared: of each field, bool[fields]; ids: of the samples, int64[n]; memory: where they will be, each once."""
        of, member = table.members_of(ids)
        if not compared.all():
            kept = compared[table.member_field[member]]
            of, member = of[kept], member[kept]
        self._single = len(of) == len(ids) and bool((np.diff(of) == 1).all())
        self._of, self._first = of, np.searchsorted(of, np.arange(len(ids) + 1))
        start, self._start = table.member_offset[member], table.start[ids]
        self._size, self._crc = table.member_size[member], table.member_crc[member]
        self._within, self._upto = start - self._start[of], start + self._size
        extent = (table.stop[ids] - self._start)[of]
        if (self._within < 0).any() or (self._size < 0).any() or (self._within > extent - self._size).any():
            raise ValueError("a field lies beyond its sample, as the index says")
        self._within += memory.address
        self._memory = memory
        # the sum of each is another than that of the index until it is taken, and where a field is never all in one place
        self._found = ~self._crc
        self._breaks = np.flatnonzero(start[1:] < self._upto[:-1]) + 1  # before these, what follows does not lie behind

    def at(self, first: int, stop: int, offsets: Ints) -> Comparison | None:
        """The comparison of samples [first, stop), which follow one another in a shard. offsets: where they will be in the memory.

        None where their fields do not follow one another, as only an odd index says: of which all came, would not be known in time.
        """
        rows, of = slice(first, stop) if self._single else slice(*self._first[[first, stop]].tolist()), None
        low, high = np.searchsorted(self._breaks, (rows.start + 1, rows.stop)).tolist()
        if low < high:
            return None
        if not self._single:
            of = self._of[rows] - first
        address = self._within[rows] + (offsets if of is None else offsets[of])
        sums = Sums.known(self._memory, address, self._size[rows], self._upto[rows], int(self._start[first]), self._found[rows])
        return Comparison(sums, self._crc[rows], of, stop - first)
