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

import numpy as np
import torch

from wdstrain.decoder import MISMATCH, Decoder, Result, Task
from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.indexing import Index, Ints
from wdstrain.landing import Landing
from wdstrain.memory import Memory
from wdstrain.storage import open_source
from wdstrain.watching import Desk

_TRIED = 100  # samples that are asked to stand in, one after another, before the batch is given up


class Tasks:
    """Makes tasks for the samples of an index. `wanted`: the fields that are sent, all if None. `landing`: what is not in the arena."""

    def __init__(self, index: Index, wanted: set[str] | None, *, with_keys: bool, landing: Landing | None = None) -> None:
        self._index, self._with_keys, self._landing = index, with_keys, landing
        self._sent = np.array([wanted is None or name in wanted for name in index.fields] or [False])
        self._all_sent, self._desk = bool(self._sent.all()), Desk.apart()

    def make(self, clock: int, epoch: int, slot: int, ids: Ints, offset: Ints, lost: dict[int, str]) -> Task:
        """The task of these samples, which begin at these offsets in the arena. ids, offset: int64[b]; lost: by row, why"""
        table = self._index.table
        # rows: member numbers of the batch's samples one after another; of: the row of the batch each belongs to
        low = table.member_first[ids]
        counts = table.member_first[ids + 1] - low
        first = np.zeros(len(ids) + 1, np.int64)
        counts.cumsum(out=first[1:])
        of = np.repeat(np.arange(len(ids)), counts)
        rows = np.arange(len(of)) + (low - first[:-1])[of]
        if not self._all_sent:
            kept = self._sent[table.member_field[rows]]
            rows, of = rows[kept], of[kept]
            np.bincount(of, minlength=len(ids)).cumsum(out=first[1:])
        at = table.member_offset[rows] + (offset - table.start[ids])[of]
        if self._landing is not None:
            at -= self._landing.before[rows - low[of]]
        return Task(
            clock=clock,
            epoch=epoch,
            slot=slot,
            ids=ids,
            first=first,
            field=table.member_field[rows],
            offset=at,
            size=table.member_size[rows],
            crc=table.member_crc[rows] if len(table.member_crc) else table.member_crc,
            keys=tuple(self._index.keys(ids)) if self._with_keys else (),
            lost=lost,
        )

    def again(self, decoder: Decoder, failed: Result, task: Task, offset: Ints, *, seeded: bool) -> Result:
        """The result of a task after the samples whose checksums differ were read once more. offset: of its samples, int64[b]"""
        damaged = [one.row for one in failed.bad if one.reason == MISMATCH]
        for row in damaged:
            number, at = int(task.ids[row]), int(offset[row])
            with suppress(WdstrainError):  # then it stays as bad as it is
                self._read(number, decoder.arena.view[at : at + self._size(number)])
        with _generators_kept():
            result = decoder(task, self._desk, own_process=seeded)
        twice = MISMATCH.replace("(crc32)", "(crc32), also when they are read again")
        return result._replace(bad=[one._replace(reason=twice) if one.reason == MISMATCH else one for one in result.bad])

    def stand_in(self, decoder: Decoder, failed: Result, epoch: int, ids: Ints, *, seeded: bool) -> Result:
        """The next good sample after a batch of bad ones, in every row of its slot; if 100 are bad too, what failed.

        seeded: global random generators are seeded per sample, as in worker processes, and put back after it.
        """
        bad = set(ids.tolist())
        for number in range(int(ids[0]) + 1, int(ids[0]) + min(_TRIED + len(bad), len(self._index))):
            number %= len(self._index)
            if number in bad:
                continue
            memory = Memory(self._size(number))
            try:
                self._read(number, memory.view)
            except (ShardError, StorageError):
                continue
            rows = np.full(len(ids), number)
            task = self.make(failed.clock, epoch, failed.slot, rows, np.zeros_like(rows), {})
            with _generators_kept():
                result = decoder.over(memory)(task, self._desk, own_process=seeded)
            landing = self._landing
            lands = landing is None or not any(landing.again(number, row, failed.slot) for row in range(len(ids)))
            if not result.bad and lands:
                return result._replace(bad=[one._replace(donor=number) for one in failed.bad])
        return failed

    def _size(self, number: int) -> int:
        whole = int(self._index.table.stop[number] - self._index.table.start[number])
        return whole - (self._landing.bytes if self._landing is not None else 0)

    def _read(self, number: int, into: memoryview) -> None:
        """Read what of a sample is in the arena."""
        shard = self._index.shards[int(self._index.shard_of(np.array([number]))[0])]
        with open_source(shard.path, shard.bytes, self._index.state(shard)) as source:
            pieces = [into] if self._landing is None else self._landing.around(number, into)
            source.read_into(pieces, int(self._index.table.start[number]))


@contextmanager
def _generators_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
