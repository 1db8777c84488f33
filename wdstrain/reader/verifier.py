"""Samples compared with the checksums of the index while they are read into the arena.

The index has a crc32 of every field. The checksums of a read are computed as its bytes arrive,
while they are in the CPU cache (`memory.scatter`), and compared when the read is complete.

A sample that is not verified may still be sound: its decoder compares it again. So it is safe not to
verify a sample, for example if it came in two requests or was read again.
"""

from __future__ import annotations

import numpy as np

from wdstrain.memory.scatter import Bools, ChecksumJob
from wdstrain.memory.shared import Memory
from wdstrain.shards.index import Ints, Table


class ReadVerifier:
    """Expected checksums of the samples of one read.

    job: computes the real ones. places: ring positions of the samples, int64[n].
    """

    def __init__(
        self, table: Table, fields: Bools, memory: Memory, number: int, offsets: Ints, places: Ints
    ) -> None:
        """number: id of the first of n samples that follow one another in a shard.

        table: must have checksums. fields: those to verify, bool[fields].
        offsets: of the samples in the memory, int64[n].
        Raises ValueError if a field of a sample lies beyond the memory.
        """
        self.places = places
        firsts = table.member_first[number : number + len(offsets) + 1]
        members = slice(int(firsts[0]), int(firsts[-1]))
        rows = np.repeat(np.arange(len(offsets)), np.diff(firsts))
        begin, size = table.member_offset[members], table.member_size[members]
        crc = table.member_crc[members]
        if not fields.all():
            kept = fields[table.member_field[members]]
            rows, begin, size, crc = rows[kept], begin[kept], size[kept], crc[kept]
        self._rows, self._expected = rows, crc
        starts = table.start[number : number + len(offsets)]
        self.job = ChecksumJob(
            [memory],
            np.zeros_like(rows),
            begin + (offsets - starts)[rows],
            size,
            begin + size,
            first_byte=int(starts[0]),
        )

    def unverified_rows(self) -> Ints:
        """Return the samples that are not verified, as positions among the n samples."""
        differs = (self.job.checksums != self._expected) & (self._expected != 0)
        rows: Ints = self._rows[differs]
        return rows


class VerifiedRing:
    """Ring buffer of a lane: by place, whether the sample there is unverified.

    any_unverified: whether any sample since the start was unverified. While it is False,
    `unverified` need not be called.
    """

    def __init__(self, size: int) -> None:
        self._unverified, self.any_unverified = np.zeros(size, bool), False

    def record(self, places: Ints, unverified: Ints | None = None) -> None:
        """Record samples that were read. places: their ring positions, int64[n].

        unverified: the unverified ones, as positions among the n samples; None: all of them.
        """
        if unverified is None:
            self._unverified[places] = self.any_unverified = True
        elif self.any_unverified or len(unverified):
            self._unverified[places] = False
            self._unverified[places[unverified]] = self.any_unverified = True

    def unverified(self, places: Ints) -> Bools:
        """Return for each of these places whether its sample is unverified. bool[n]"""
        flags: Bools = self._unverified[places % len(self._unverified)]
        return flags
