"""What a decoder is told of a batch: where the members of its samples lie, as integers.

Also the two cases in which a batch is not decoded from what was sent. Bytes that are not those that were packed are read once
more, past any cache: they may have been damaged on the way. And where every sample of a batch is bad, others are asked to
stand in. Both happen in the training process, off the forward road, because they are rare and must not depend on who decodes:
the substitute is the next good sample of the data set, whatever epoch, rank or worker asks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from wdstrain.decode.bad_samples import MISMATCH
from wdstrain.decode.decoder import Decoder
from wdstrain.decode.task import Members, Result, Task
from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.memory.scatter import Bools
from wdstrain.memory.shared import Memory
from wdstrain.reader.slot_sink import SlotSink
from wdstrain.runtime.watchdog import ProgressCell
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.storage.local import open_source

_NONE, _NO_CRC = np.zeros(0, np.int64), np.zeros(0, np.uint32)
_TRIED = 100  # samples that are asked to stand in, one after another, before the batch is given up


class TaskBlock(NamedTuple):
    """Some batches of an epoch: n samples with m members in all.

    ids, draws: int64[n]; firsts: where each batch begins in them and the last ends; keys: n; first: int64[n + 1] into what there is
    of each member: row in its batch, field, within: where it begins in its sample as that lies in the arena, and size. member: their numbers in the table that has
    their checksums. common_fields: as in `Members`.
    """

    epoch: int
    ids: Ints
    draws: Ints
    firsts: list[int]
    keys: list[str]
    sends_keys: bool
    first: Ints
    row: Ints
    field: npt.NDArray[np.uint16]
    within: Ints
    size: Ints
    member: Ints
    offsets: Offsets
    common_fields: tuple[int, ...]

    def task(
        self,
        number: int,
        batch_number: int,
        slot: int,
        offset: Ints,
        unreadable: dict[int, str],
        unverified: Bools | None,
    ) -> Task:
        """The task of the `number`th batch, whose samples begin at these offsets in the arena. offset: int64[b]; unreadable: by row, why

        unverified: bool[b], samples that nobody compared with their checksums yet; none if it is None.
        """
        start, stop = self.firsts[number : number + 2]
        ids, keys = self.ids[start:stop], tuple(self.keys[start:stop]) if self.sends_keys else ()
        draws = ids if self.draws is self.ids else self.draws[start:stop]
        if not len(self.member):  # everything lands: nothing is to be said of it
            nothing = self.field, self.within, self.size, _NONE, _NO_CRC
            none = Members(self.first[start : stop + 1], *nothing, self.common_fields)
            return Task(batch_number, self.epoch, slot, ids, none, keys, unreadable, draws)
        first = self.first[start : stop + 1]
        members = slice(first[0], first[-1])
        unsure: Ints = _NONE
        if unverified is not None and len(self.offsets.member_crc):
            unsure = np.flatnonzero(
                unverified[self.row[members]] & (self.offsets.member_crc[self.member[members]] != 0)
            )
        sent = Members(
            first=first - first[0],
            field=self.field[members],
            offset=self.within[members] + offset[self.row[members]],
            size=self.size[members],
            unverified=unsure,
            checksum=self.offsets.member_crc[self.member[members][unsure]]
            if len(unsure)
            else _NO_CRC,
            common_fields=self.common_fields,
        )
        return Task(batch_number, self.epoch, slot, ids, sent, keys, unreadable, draws)


class TaskBuilder:
    """Makes tasks for the samples of an index. `wanted`: the fields that are sent, all if None. `landing`: what is not in the arena."""

    def __init__(
        self,
        index: Index,
        wanted: set[str] | None,
        *,
        with_keys: bool,
        landing: SlotSink | None = None,
    ) -> None:
        self._index, self._with_keys, self._landing = index, with_keys, landing
        self._sent = index.field_mask(wanted)
        self._all_sent, self._desk = bool(self._sent.all()), ProgressCell.unwatched()

    def make(
        self,
        batch_number: int,
        epoch: int,
        slot: int,
        ids: Ints,
        draws: Ints,
        offset: Ints,
        unreadable: dict[int, str],
    ) -> Task:
        """Return the task of these samples, which begin at these offsets in the arena.

        ids, draws, offset: int64[b]. unreadable: reasons by row.
        """
        return self.build_block(epoch, ids, draws, [0, len(ids)]).task(
            0, batch_number, slot, offset, unreadable, np.ones(len(ids), bool)
        )

    def build_block(self, epoch: int, ids: Ints, draws: Ints, firsts: list[int]) -> TaskBlock:
        """What can be said of the tasks of several batches before they are read. firsts: where each begins in ids and the last ends."""
        table, keys = self._index.offsets, self._index.keys(ids)
        if not self._sent.any():  # everything lands
            nothing = _NONE, np.zeros(0, np.uint16), _NONE, _NONE, _NONE
            return TaskBlock(
                epoch,
                ids,
                draws,
                firsts,
                keys,
                self._with_keys,
                np.zeros(len(ids) + 1, np.int64),
                *nothing,
                table,
                (),
            )
        of, member = table.members_of(ids)
        if not self._all_sent:
            kept = self._sent[table.member_field[member]]
            of, member = of[kept], member[kept]
        first = np.append(0, np.bincount(of, minlength=len(ids)).cumsum())
        within = table.member_offset[member] - table.start[ids][of]
        if self._landing is not None:
            within -= self._landing.before[member - table.member_first[ids][of]]
        field, each = table.member_field[member], int(first[1]) if len(ids) else 0
        alike = (
            each
            and (np.diff(first) == each).all()
            and (field.reshape(-1, each) == field[:each]).all()
        )
        return TaskBlock(
            epoch,
            ids,
            draws,
            firsts,
            keys,
            self._with_keys,
            first,
            of - np.repeat(firsts[:-1], np.diff(first[firsts])),
            field,
            within,
            table.member_size[member],
            member,
            table,
            tuple(field[:each].tolist()) if alike else (),
        )

    def again(
        self, decoder: Decoder, failed: Result, task: Task, offset: Ints, *, seeded: bool
    ) -> Result:
        """The result of a task after the samples whose checksums differ were read once more. offset: of its samples, int64[b]"""
        damaged = [one.row for one in failed.bad if one.reason == MISMATCH]
        for row in damaged:
            number, at = int(task.ids[row]), int(offset[row])
            with suppress(WdstrainError):  # then it stays as bad as it is
                self._read(number, decoder.arena.view[at : at + self._size(number)])
        with _generators_kept():
            result = decoder(task, self._desk, own_process=seeded)
        twice = MISMATCH.replace("(crc32)", "(crc32), also when they are read again")
        return result._replace(
            bad=[
                one._replace(reason=twice) if one.reason == MISMATCH else one for one in result.bad
            ]
        )

    def substitute_batch(
        self, decoder: Decoder, failed: Result, epoch: int, ids: Ints, *, seeded: bool
    ) -> Result:
        """The next good sample after a batch of bad ones, in every row of its slot; if 100 are bad too, what failed.

        seeded: global random generators are seeded per sample, as in worker processes, and put back after it.
        """
        bad = set(ids.tolist())
        for number in range(
            int(ids[0]) + 1, int(ids[0]) + min(_TRIED + len(bad), len(self._index))
        ):
            number %= len(self._index)
            if number in bad:
                continue
            memory = Memory(self._size(number))
            try:
                self._read(number, memory.view)
            except (ShardError, StorageError):
                continue
            rows = np.full(len(ids), number)
            task = self.make(
                failed.batch_number, epoch, failed.slot, rows, rows, np.zeros_like(rows), {}
            )
            with _generators_kept():
                result = decoder.with_arena(memory)(task, self._desk, own_process=seeded)
            landing = self._landing
            lands = landing is None or not any(
                landing.reread(number, row, failed.slot) for row in range(len(ids))
            )
            if not result.bad and lands:
                return result._replace(bad=[one._replace(substitute=number) for one in failed.bad])
        return failed

    def _size(self, number: int) -> int:
        whole = int(self._index.offsets.stop[number] - self._index.offsets.start[number])
        return whole - (self._landing.bytes if self._landing is not None else 0)

    def _read(self, number: int, into: memoryview) -> None:
        """Read what of a sample is in the arena."""
        shard = self._index.shards[int(self._index.shard_of(np.array([number]))[0])]
        with open_source(shard.path, shard.bytes, self._index.expected_state(shard)) as source:
            pieces = [into] if self._landing is None else self._landing.arena_pieces(number, into)
            source.read_into(pieces, int(self._index.offsets.start[number]))


@contextmanager
def _generators_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
