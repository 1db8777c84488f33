"""Where the bytes of samples go whose arrays land in their batches.

An array goes to a row of its batch's slot, and what is around it in the shard to the arena. Where in the slot, and where in the
sample's place in the arena, follows from the plan and the index alone: it is computed for thousands of samples at a time, and a read
adds where its slots and places begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.decode.fields import NumpyArray
from wdstrain.memory.scatter import ChecksumJob, ScatterList, scatter_samples
from wdstrain.memory.shared import Memory
from wdstrain.shards.index import Ints, Table


@dataclass(frozen=True)
class DirectField:
    """A field whose arrays land. member: its place among a sample's; head: bytes before the numbers; row: bytes of the numbers."""

    field: NumpyArray
    found: str
    member: int
    head: int
    row: int
    column: int  # where its column begins in a slot


class SlotScatter(NamedTuple):
    """n samples, each of which has w arrays that land.

    ids, starts, stops (in the shard), rows (in their batches): int64[n]. Of their bytes, what is around an array and the array by
    turns: of: 0 in the arena, 1 in the slot, start: from where the sample or the slot begins, size: int64[n, 2w + 1] each. What is
    compared, an array's head and, where the index has checksums, its numbers: where, length, and there, where it ends in the shard:
    int64[n, w, 1 or 2] each. crc: of head and numbers, uint32[n, w or 0].
    """

    ids: Ints
    starts: Ints
    stops: Ints
    rows: Ints
    of: Ints
    start: Ints
    size: Ints
    where: Ints
    length: Ints
    there: Ints
    crc: npt.NDArray[np.uint32]

    @classmethod
    def of_samples(cls, table: Table, what: Sequence[DirectField], ids: Ints, rows: Ints) -> SlotScatter:
        """what: in the order in which they follow one another in a sample."""
        count, width, kinds = len(ids), len(what), 2 if len(table.member_crc) else 1
        starts, stops, first = table.start[ids], table.stop[ids], table.member_first[ids]
        start, size = np.empty((2, count, 2 * width + 1), np.int64)
        where, length, there = np.empty((3, count, width, 2), np.int64)
        upto, at = np.zeros_like(starts), starts  # in the arena, and in the shard: what is placed so far
        for k, one in enumerate(what):
            numbers = table.member_offset[first + one.member] + one.head
            end = upto + numbers - at
            start[:, 2 * k], size[:, 2 * k] = upto, numbers - at
            start[:, 2 * k + 1], size[:, 2 * k + 1] = one.column + rows * one.row, one.row
            where[:, k, 0], where[:, k, 1], length[:, k] = end - one.head, start[:, 2 * k + 1], (one.head, one.row)
            there[:, k, 0], there[:, k, 1] = numbers, numbers + one.row
            upto, at = end, numbers + one.row
        start[:, -1], size[:, -1] = upto, stops - at
        of = np.tile(np.array([0, 1] * width + [0]), (count, 1))
        crc = table.member_crc[first[:, None] + [one.member for one in what]] if kinds == 2 else np.zeros((count, 0), np.uint32)
        where, length, there = (np.ascontiguousarray(one[..., :kinds]) for one in (where, length, there))
        return cls(ids, starts, stops, rows, of, start, size, where, length, there, crc)

    def part(self, rows: slice | Ints) -> SlotScatter:
        """Some of them."""
        return SlotScatter._make(column[rows] for column in self)

    def places(self, offsets: Ints, homes: Ints, memories: Sequence[Memory]) -> tuple[ScatterList, ChecksumJob]:
        """Where their bytes go, and the sums that are compared. offsets: in the arena, homes: of their slots, int64[n].

        memories: the arena, that of the slots, and one for what nobody wants.
        """
        start = np.empty_like(self.start)
        start[:, ::2], start[:, 1::2] = offsets[:, None], homes[:, None]
        count, width, kinds = self.where.shape
        where = start[:, :-1].reshape(count, width, 2)[..., :kinds] + self.where
        start += self.start
        of = np.tile(np.arange(kinds), count * width)
        there = (self.there - self.starts[0]).reshape(-1)
        sums = ChecksumJob(memories, of, where.reshape(-1), self.length.reshape(-1), there, of == 1)
        return scatter_samples(memories, self.of, start, self.size, self.starts, self.stops, sums), sums
