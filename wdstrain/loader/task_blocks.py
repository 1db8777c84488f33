"""Tasks of decoders: where the members of the samples of a batch lie, as integers.

Planning each task on its own would cost more than its work. The tasks of several batches are
planned at once, before the samples are read, and a task is a slice of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.decode.task import Members, Task
from wdstrain.memory.scatter import Bools
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints

_NONE, _NO_CRC = np.zeros(0, np.int64), np.zeros(0, np.uint32)


class BlockMembers(NamedTuple):
    """The m members that decoders need of n samples.

    first: number of the first member of each sample, int64[n + 1]; the last entry is m.
    row: row in its batch. start: where it begins in its sample's place in the arena. size: in
    bytes. int64[m] each. field: field number, uint16[m]. checksum: expected crc32, 0 if unknown,
    uint32[m or 0]. common_fields: as in `Members`.
    """

    first: Ints
    row: Ints
    start: Ints
    size: Ints
    field: npt.NDArray[np.uint16]
    checksum: npt.NDArray[np.uint32]
    common_fields: tuple[int, ...]


class TaskBlock(NamedTuple):
    """Tasks of some batches of an epoch, with n samples in all.

    ids: int64[n]. draws: see `Plan.draws`, int64[n]; `ids` itself if they are equal.
    firsts: where each batch begins in `ids` and the last ends. keys: n. sends_keys: whether tasks
    have keys.
    """

    epoch: int
    ids: Ints
    draws: Ints
    firsts: list[int]
    keys: list[str]
    sends_keys: bool
    members: BlockMembers

    def task(
        self,
        number: int,
        batch_number: int,
        slot: int,
        offset: Ints,
        unreadable: dict[int, str],
        unverified: Bools | None,
    ) -> Task:
        """Return the task of the batch `number` of the block.

        offset: where its samples begin in the arena, int64[b]. unreadable: reasons by row.
        unverified: bool[b], samples whose checksums are not verified yet; None: all are.
        """
        start, stop = self.firsts[number : number + 2]
        ids, keys = self.ids[start:stop], tuple(self.keys[start:stop]) if self.sends_keys else ()
        draws = ids if self.draws is self.ids else self.draws[start:stop]
        members = self._members(start, stop, offset, unverified)
        return Task(batch_number, self.epoch, slot, ids, members, keys, unreadable, draws)

    def _members(self, start: int, stop: int, offset: Ints, unverified: Bools | None) -> Members:
        """Return the members of the samples [start, stop), which begin at these offsets."""
        block = self.members
        first = block.first[start : stop + 1]
        if not len(block.row):  # no field is decoded
            return Members(first, block.field, _NONE, _NONE, _NONE, _NO_CRC, block.common_fields)
        part = slice(first[0], first[-1])
        row, unsure, checksum = block.row[part], _NONE, _NO_CRC
        if unverified is not None and len(block.checksum):
            expected = block.checksum[part]
            unsure = np.flatnonzero(unverified[row] & (expected != 0))
            checksum = expected[unsure]
        return Members(
            first=first - first[0],
            field=block.field[part],
            offset=block.start[part] + offset[row],
            size=block.size[part],
            unverified=unsure,
            checksum=checksum,
            common_fields=block.common_fields,
        )


class TaskBuilder:
    """Builds tasks for the samples of an index."""

    def __init__(self, index: Index, needed_fields: set[str] | None, *, with_keys: bool) -> None:
        """needed_fields: fields that decoders need; None: all. with_keys: decoders need the keys."""
        self._index, self._with_keys = index, with_keys
        self._needed = needed_fields

    def build_block(self, epoch: int, ids: Ints, draws: Ints, firsts: list[int]) -> TaskBlock:
        """Return the tasks of several batches; their samples need not be read yet.

        ids, draws: int64[n]. firsts: where each batch begins in them and the last ends.
        """
        keys, members = self._index.keys(ids), self._members(ids, firsts)
        return TaskBlock(epoch, ids, draws, firsts, keys, self._with_keys, members)

    def _members(self, ids: Ints, firsts: list[int]) -> BlockMembers:
        """Return the needed members of samples in batches."""
        table, common = self._index.offsets, tuple[int, ...]()
        members = table.members_of(ids, self._needed)
        sample, first, field = members.row, members.first, members.field
        each = int(first[1]) if len(ids) else 0
        if each and (np.diff(first) == each).all():
            by_sample = field.reshape(-1, each)
            common = tuple(field[:each].tolist()) if (by_sample == by_sample[0]).all() else ()
        return BlockMembers(
            first=first,
            row=sample - np.repeat(firsts[:-1], np.diff(first[firsts])),
            start=members.offset - table.start[ids][sample],
            size=members.size,
            field=field,
            checksum=members.crc if table.has_checksums else _NO_CRC,
            common_fields=common,
        )
