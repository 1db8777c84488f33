"""The loop's batches, made of decoded ones: repaired, with keys, sources and the mask of padding.

Bytes may be damaged on their way from the storage. Samples whose checksums differ are therefore
read once more, past any cache. If every sample of a batch is bad, another sample takes their place.
Both are rare and run in the training process, so they do not depend on the decoders: the substitute
is the next good sample of the data set, for every epoch, rank and worker.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from wdstrain.augment.gpu import NO_SAMPLE, RNG, are_images
from wdstrain.decode.batch_slots import Slots
from wdstrain.decode.decoder import Decoder
from wdstrain.decode.labels import LabelColumn
from wdstrain.decode.task import MISMATCH, BadSample, Result
from wdstrain.errors import SampleError, ShardError, StorageError, WdstrainError
from wdstrain.loader.nested import without_rows
from wdstrain.loader.options import LoaderOptions
from wdstrain.loader.stats import Finding, StageTotals
from wdstrain.loader.task_blocks import TaskBuilder
from wdstrain.memory.shared import Memory
from wdstrain.order.order import Order
from wdstrain.order.rng import bits
from wdstrain.reader.reader import CollectedBatch
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.storage.local import open_source

_MOST_TRIED = 100  # samples that are tried as substitutes, one after another


class TakenBatch(NamedTuple):
    """A batch of b rows, with its counts.

    values: by name. ids: sample ids in the rows, int64[b]. own: bool[b], whether a row has the
    sample that the plan put there; the other rows are bad samples, replaced or empty. padded: rows
    of padding. bad: the bad samples, without padding.
    """

    values: dict[str, Any]
    ids: Ints
    own: npt.NDArray[np.bool_]
    padded: int
    bad: list[Finding]


class BatchAssembler:
    """Makes the loop's batches. It runs in the training process."""

    def __init__(
        self,
        index: Index,
        options: LoaderOptions,
        columns: Mapping[str, LabelColumn],
        sources: Mapping[str, int],
        slots: Slots,
        repair: BatchRepair,
    ) -> None:
        """columns: labels that the index gives, by name. sources: their first sample ids."""
        self._index, self._columns, self._slots, self._repair_batch = index, columns, slots, repair
        self._on_error, self._has_transform = options.on_error, options.transform is not None
        self._source_names = list(sources)
        self._source_firsts = np.array(list(sources.values()), np.int64)

    def assemble(
        self, result: Result, batch: CollectedBatch, rng_ids: Ints, keys: list[str], plan: Order
    ) -> TakenBatch:
        """Return the batch and its counts.

        rng_ids: see `Plan.draws`, int64[b]. Raises SampleError for a bad sample that is not
        replaced.
        """
        findings = list[Finding]()
        ids, draws = batch.ids.copy(), rng_ids.copy()
        own = np.ones(len(ids), bool)
        if result.bad:
            result = self._repair(result, batch, rng_ids, plan.epoch)
            for bad in result.bad:
                ids[bad.row], draws[bad.row], own[bad.row] = bad.substitute, bad.substitute, False
                if batch.valid[bad.row]:
                    findings.append(self._finding(batch, bad))
        valid = len(ids) if plan.tail == "drop" else int(np.count_nonzero(batch.valid))
        rows = valid if plan.tail == "keep" else len(ids)
        values: dict[str, Any] = self._slots.lease(result.slot, rows)
        values |= result.values if rows else self._empty(result.values)
        values |= self._labels(ids[:rows], own[:rows])
        if any(map(are_images, values.values())):
            values[RNG] = bits(draws[:rows], "device", plan.seed, plan.epoch)
            if self._on_error == "mark":
                values[RNG][~own[:rows]] = NO_SAMPLE
        values["__key__"] = self._index.keys(ids[:rows]) if result.bad else keys[:rows]
        if self._source_names:
            numbers = np.searchsorted(self._source_firsts, ids, side="right") - 1
            values["__source__"] = [self._source_names[i] for i in numbers.tolist()]
        if plan.tail == "pad":
            values["__valid__"] = torch.from_numpy(batch.valid.copy())
        return TakenBatch(values, ids[:rows], own[:rows], rows - valid, findings)

    def _labels(self, ids: Ints, own: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """Return the labels that the index gives, for the samples in the rows."""
        labels = {name: column.rows(ids) for name, column in self._columns.items()}
        if self._on_error == "mark" and not own.all():
            for name, rows in labels.items():
                if isinstance(rows, list):
                    labels[name] = [
                        r if is_own else None for r, is_own in zip(rows, own, strict=True)
                    ]
                else:
                    rows[torch.from_numpy(~own)] = 0
        return labels

    def _empty(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values of decoders without their rows."""
        if self._has_transform:
            return {name: without_rows(value) for name, value in values.items()}
        return {name: value[:0] for name, value in values.items()}

    # --- bad samples ------------------------------------------------------------------------------

    def _repair(self, result: Result, batch: CollectedBatch, rng_ids: Ints, epoch: int) -> Result:
        """Return the batch after its bad samples were read again or replaced.

        Raises SampleError if a bad sample is left.
        """
        if any(bad.reason == MISMATCH for bad in result.bad):
            result = self._repair_batch.reread_damaged(result, epoch, batch, rng_ids)
        if self._on_error == "replace" and len(result.bad) == len(batch.ids):
            result = self._repair_batch.substitute_batch(result, epoch, batch.ids)
        left = [bad for bad in result.bad if bad.substitute < 0]
        if left:
            raise SampleError(self._message(batch, left))
        return result

    def _message(self, batch: CollectedBatch, left: list[BadSample]) -> str:
        """Return the error message for the bad samples of a batch that are not replaced."""
        sentence = self._finding(batch, left[0]).sentence
        if left[0].whole_batch:
            return f"a batch that begins with {sentence}"
        count = f" ({len(left)} bad samples in this batch.)" if len(left) > 1 else ""
        if self._on_error == "raise":
            return f'{sentence}{count} on_error="replace" goes on without it.'
        return f"{sentence}{count} No good sample was found near it to take its place."

    def _finding(self, batch: CollectedBatch, bad: BadSample) -> Finding:
        """Return where a bad sample of a batch is and what is wrong with it."""
        number = int(batch.ids[bad.row])
        shard = self._index.shard_with(number)
        offsets = {name: offset for name, offset, _ in self._index.members(number)}
        offset = offsets.get(bad.field, int(self._index.offsets.start[number]))
        if bad.field and bad.field not in offsets:
            # The field is missing. The decoder knows only the fields it needs, so name all here.
            bad = bad._replace(field="", reason=f"{bad.reason} (but {', '.join(offsets)})")
        return Finding(shard.shown, self._index.key(number), bad.field, offset, bad.reason)


class BatchRepair:
    """Decodes batches with bad samples again, in the calling thread."""

    def __init__(
        self,
        index: Index,
        options: LoaderOptions,
        decoder: Decoder,
        builder: TaskBuilder,
        totals: StageTotals,
    ) -> None:
        self._index, self._decoder, self._builder, self._totals = index, decoder, builder, totals
        self._cache = options.cache
        # Worker processes seed the global random generators for each sample.
        self._seeded = options.num_workers > 0

    def reread_damaged(
        self, failed: Result, epoch: int, batch: CollectedBatch, draws: Ints
    ) -> Result:
        """Return the result after the samples whose checksums differ were read again.

        draws: of the samples, int64[b].
        """
        decoder = self._decoder
        rows = [bad.row for bad in failed.bad if bad.reason == MISMATCH]
        self._totals.reread += len(rows)
        if self._cache is not None:
            for number in set(self._index.shard_of(batch.ids[rows]).tolist()):
                shard = self._index.shards[number]
                self._cache.forget(shard.path, shard.bytes, shard.sha256, shard.tag)
        for row in rows:
            number, start = int(batch.ids[row]), int(batch.offset[row])
            with suppress(WdstrainError):  # then it stays as bad as it is
                self._read(number, decoder.arena.view[start : start + self._size(number)])
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
            memory = Memory(self._size(number))
            try:
                self._read(number, memory.view)
            except (ShardError, StorageError):
                continue
            rows, decoder = np.full(len(ids), number), self._decoder.with_arena(memory)
            result = self._decode(decoder, failed, epoch, rows, rows, np.zeros_like(rows), {})
            if not result.bad:
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
        block = self._builder.build_block(epoch, ids, draws, [0, len(ids)])
        unverified = np.ones(len(ids), bool)
        task = block.task(0, failed.batch_number, failed.slot, offset, unreadable, unverified)
        with _generators_kept():
            return decoder(task, own_process=self._seeded)

    def _size(self, number: int) -> int:
        """Return the bytes of a sample."""
        return int(self._index.offsets.stop[number] - self._index.offsets.start[number])

    def _read(self, number: int, place: memoryview) -> None:
        """Read the bytes of a sample into `place`."""
        shard = self._index.shard_with(number)
        with open_source(shard.path, shard.bytes, self._index.expected_state(shard)) as source:
            source.read_into(place, int(self._index.offsets.start[number]))


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
