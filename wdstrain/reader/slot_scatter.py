"""Scatter lists for samples whose arrays are read straight into their batch.

An array goes to a row of its batch's slot; the bytes around it in the shard go to the arena. The
positions within the slot and within the sample's place in the arena follow from the plan and the
index. They are computed for thousands of samples at once, and a read adds the start of its slots
and places.
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
    """A field whose arrays are read straight into the batch.

    field_name: its name in the index. member: its position among the members of a sample.
    head: bytes of the .npy header. row: bytes of the numbers. column: offset of its column in a
    slot.
    """

    field: NumpyArray
    field_name: str
    member: int
    head: int
    row: int
    column: int


class SlotScatter(NamedTuple):
    """Destinations of the bytes of n samples with w direct arrays each.

    ids, starts, stops (extent in the shard), rows (in their batches): int64[n].
    A sample has 2w + 1 segments: the bytes before an array and the array by turns, then the rest.
    memory_index: memory of each segment, 0 for the arena, 1 for the slot. start: its offset from
    the begin of the sample's place or of the slot. size: its bytes. int64[n, 2w + 1] each.
    The verified ranges are the header of each array and, if the index has checksums, its numbers.
    checked_start, checked_size: the range in its memory. complete_at: its end in the shard.
    int64[n, w, 1 or 2] each. crc: crc32 of header and numbers, uint32[n, w or 0].
    """

    ids: Ints
    starts: Ints
    stops: Ints
    rows: Ints
    memory_index: Ints
    start: Ints
    size: Ints
    checked_start: Ints
    checked_size: Ints
    complete_at: Ints
    crc: npt.NDArray[np.uint32]

    @classmethod
    def of_samples(
        cls, table: Table, fields: Sequence[DirectField], ids: Ints, rows: Ints
    ) -> SlotScatter:
        """Return the destinations of the samples `ids` in the batch rows `rows`, int64[n] each.

        fields: in the order of their members in a sample.
        """
        count, width, kinds = len(ids), len(fields), 2 if len(table.member_crc) else 1
        starts, stops, first = table.start[ids], table.stop[ids], table.member_first[ids]
        start, size = np.empty((2, count, 2 * width + 1), np.int64)
        checked_start, checked_size, complete_at = np.empty((3, count, width, 2), np.int64)
        arena_end, shard_end = np.zeros_like(starts), starts  # ends of the segments so far
        for k, direct in enumerate(fields):
            numbers = table.member_offset[first + direct.member] + direct.head
            # `numbers` is where the array begins in the shard
            head_end = arena_end + numbers - shard_end
            start[:, 2 * k], size[:, 2 * k] = arena_end, numbers - shard_end
            start[:, 2 * k + 1] = direct.column + rows * direct.row
            size[:, 2 * k + 1] = direct.row
            checked_start[:, k, 0] = head_end - direct.head
            checked_start[:, k, 1] = start[:, 2 * k + 1]
            checked_size[:, k] = (direct.head, direct.row)
            complete_at[:, k, 0], complete_at[:, k, 1] = numbers, numbers + direct.row
            arena_end, shard_end = head_end, numbers + direct.row
        start[:, -1], size[:, -1] = arena_end, stops - shard_end
        memory_index = np.tile(np.array([0, 1] * width + [0]), (count, 1))
        crc = np.zeros((count, 0), np.uint32)
        if kinds == 2:
            crc = table.member_crc[first[:, None] + [direct.member for direct in fields]]
        checked_start, checked_size, complete_at = (
            np.ascontiguousarray(array[..., :kinds])
            for array in (checked_start, checked_size, complete_at)
        )
        return cls(
            ids,
            starts,
            stops,
            rows,
            memory_index,
            start,
            size,
            checked_start,
            checked_size,
            complete_at,
            crc,
        )

    def part(self, rows: slice | Ints) -> SlotScatter:
        """Return the destinations of some of the samples. rows: positions among the n samples."""
        return SlotScatter._make(column[rows] for column in self)

    def places(
        self, offsets: Ints, slot_offsets: Ints, memories: Sequence[Memory]
    ) -> tuple[ScatterList, ChecksumJob]:
        """Return the scatter list of one read and the job that computes its checksums.

        offsets: of the samples' places in the arena, int64[n]. slot_offsets: offsets of their slots,
        int64[n]. memories: the arena, the memory of the slots, and one for bytes that are discarded.
        """
        start = np.empty_like(self.start)
        start[:, ::2], start[:, 1::2] = offsets[:, None], slot_offsets[:, None]
        count, width, kinds = self.checked_start.shape
        checked = start[:, :-1].reshape(count, width, 2)[..., :kinds] + self.checked_start
        start += self.start
        memory_index = np.tile(np.arange(kinds), count * width)
        checksums = ChecksumJob(
            memories,
            memory_index,
            checked.reshape(-1),
            self.checked_size.reshape(-1),
            self.complete_at.reshape(-1),
            first_byte=int(self.starts[0]),
            joined=memory_index == 1,
        )
        scatter_list = scatter_samples(
            memories, self.memory_index, start, self.size, self.starts, self.stops, checksums
        )
        return scatter_list, checksums
