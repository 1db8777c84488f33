"""Batches that are decoded again: after damaged samples were read again, or from a substitute.

Bytes may be damaged on their way from the storage. Samples whose checksums differ are therefore
read once more, past any cache. If every sample of a batch is bad, another sample takes their
place. Both are rare and run in the training process, so they do not depend on the decoders: the
substitute is the next good sample of the data set, for every epoch, rank and worker.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch

from wdstrain.decode.bad_samples import MISMATCH
from wdstrain.decode.decoder import Decoder
from wdstrain.decode.task import Result
from wdstrain.decode.worker_processes import WorkerProcesses
from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.loader.pipeline_parts import PipelineParts
from wdstrain.memory.shared import Memory
from wdstrain.reader.reader import CollectedBatch
from wdstrain.runtime.watchdog import ProgressCell
from wdstrain.shards.offsets import Ints
from wdstrain.storage.local import open_source

_MOST_TRIED = 100  # samples that are tried as substitutes, one after another


class BatchRepair:
    """Decodes batches with bad samples again, in the calling thread."""

    def __init__(self, parts: PipelineParts) -> None:
        self._parts, self._index, self._direct = parts, parts.index, parts.direct
        self._progress = ProgressCell.unwatched()
        # Worker processes seed the global random generators for each sample.
        self._seeded = isinstance(parts.workers, WorkerProcesses)

    def reread_damaged(
        self, failed: Result, epoch: int, batch: CollectedBatch, draws: Ints
    ) -> Result:
        """Return the result after the samples whose checksums differ were read again.

        draws: of the samples, int64[b].
        """
        parts, decoder = self._parts, self._parts.decoder
        rows = [bad.row for bad in failed.bad if bad.reason == MISMATCH]
        parts.totals.reread += len(rows)
        if parts.options.cache is not None:
            for number in set(self._index.shard_of(batch.ids[rows]).tolist()):
                parts.options.cache.forget(self._index.shards[number])
        # The decoder may have copied other samples over the direct arrays in the rows of bad ones.
        for row in {bad.row for bad in failed.bad} - batch.unreadable.keys():
            self._direct.reread(int(batch.ids[row]), row, failed.slot)
        for row in rows:
            number, start = int(batch.ids[row]), int(batch.offset[row])
            with suppress(WdstrainError):  # then it stays as bad as it is
                self._read(number, decoder.arena.view[start : start + self._arena_size(number)])
        result = self._decode(
            decoder, failed, epoch, batch.ids, draws, batch.offset, batch.unreadable
        )
        twice = MISMATCH.replace("(crc32)", "(crc32), also when they are read again")
        bad_samples = [
            bad._replace(reason=twice) if bad.reason == MISMATCH else bad for bad in result.bad
        ]
        return result._replace(bad=bad_samples)

    def substitute_batch(self, failed: Result, epoch: int, ids: Ints) -> Result:
        """Return a batch with the next good sample after a batch of bad ones in every row.

        Returns the failed batch if the next 100 samples are bad too. ids: int64[b].
        """
        bad_ids = set(ids.tolist())
        most = min(_MOST_TRIED + len(bad_ids), len(self._index))
        for number in range(int(ids[0]) + 1, int(ids[0]) + most):
            number %= len(self._index)
            if number in bad_ids:
                continue
            memory = Memory(self._arena_size(number))
            try:
                self._read(number, memory.view)
            except (ShardError, StorageError):
                continue
            rows, decoder = np.full(len(ids), number), self._parts.decoder.with_arena(memory)
            result = self._decode(decoder, failed, epoch, rows, rows, np.zeros_like(rows), {})
            is_direct = not any(
                self._direct.reread(number, row, failed.slot) for row in range(len(ids))
            )
            if not result.bad and is_direct:
                return result._replace(bad=[bad._replace(substitute=number) for bad in failed.bad])
        return failed

    def _decode(
        self,
        decoder: Decoder,
        failed: Result,
        epoch: int,
        ids: Ints,
        draws: Ints,
        offset: Ints,
        unreadable: dict[int, str],
    ) -> Result:
        """Decode samples into the slot of a failed batch; their checksums are compared."""
        block = self._parts.task_builder.build_block(epoch, ids, draws, [0, len(ids)])
        unverified = np.ones(len(ids), bool)
        task = block.task(0, failed.batch_number, failed.slot, offset, unreadable, unverified)
        with _generators_kept():
            return decoder(task, self._progress, own_process=self._seeded)

    def _arena_size(self, number: int) -> int:
        """Return the bytes of a sample in the arena."""
        table = self._index.offsets
        return int(table.stop[number] - table.start[number]) - self._direct.bytes

    def _read(self, number: int, place: memoryview) -> None:
        """Read the bytes of a sample that belong to the arena into `place`."""
        shard = self._index.shards[int(self._index.shard_of(np.array([number]))[0])]
        with open_source(shard.path, shard.bytes, self._index.expected_state(shard)) as source:
            pieces = self._direct.arena_pieces(number, place)
            source.read_into(pieces, int(self._index.offsets.start[number]))


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the global random generators at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
