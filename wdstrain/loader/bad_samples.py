"""Bad samples of a decoded batch: damaged ones are read again, others are replaced or reported."""

from __future__ import annotations

from wdstrain.decode.decoder import MISMATCH, Bad, Result
from wdstrain.decode.worker_processes import WorkerProcesses
from wdstrain.errors import SampleError
from wdstrain.loader.pipeline_parts import PipelineOptions, PipelineParts
from wdstrain.loader.stage_clock import StageClock
from wdstrain.loader.stats import Finding
from wdstrain.reader.reader import CollectedBatch
from wdstrain.shards.index import Index


class BadSampleHandler:
    """Repairs decoded batches with bad samples. It runs in the training process."""

    def __init__(
        self, index: Index, parts: PipelineParts, options: PipelineOptions, clock: StageClock
    ) -> None:
        self._index, self._parts, self._options, self._clock = index, parts, options, clock
        # Worker processes seed the global random generators for each sample.
        self._seeded = isinstance(parts.workers, WorkerProcesses)

    def repair(self, result: Result, batch: CollectedBatch, epoch: int) -> Result:
        """Return the batch after its bad samples were read again or replaced.

        Raises SampleError if a bad sample is left.
        """
        if any(bad.reason == MISMATCH for bad in result.bad):
            result = self._reread(result, batch, epoch)
        is_all_bad = len(result.bad) == len(batch.ids)
        if is_all_bad and self._options.replaces and not self._options.marks:
            result = self._parts.task_builder.substitute_batch(
                self._parts.decoder, result, epoch, batch.ids, seeded=self._seeded
            )
        left = [bad for bad in result.bad if bad.substitute < 0]
        if left:
            raise SampleError(self._message(batch, left))
        return result

    def finding(self, batch: CollectedBatch, bad: Bad) -> Finding:
        """Return where a bad sample of a batch is and what is wrong with it."""
        number = int(batch.ids[bad.row])
        shard = self._index.shards[int(self._index.shard_of(batch.ids[bad.row : bad.row + 1])[0])]
        offsets = {name: offset for name, offset, _ in self._index.members(number)}
        offset = offsets.get(bad.field, int(self._index.table.start[number]))
        if bad.field and bad.field not in offsets:
            # The field is missing. The decoder knows only the fields it needs, so name all here.
            bad = bad._replace(field="", reason=f"{bad.reason} (but {', '.join(offsets)})")
        return Finding(shard.shown, self._index.key(number), bad.field, offset, bad.reason)

    def _message(self, batch: CollectedBatch, left: list[Bad]) -> str:
        """Return the error message for the bad samples of a batch that are not replaced."""
        sentence = self.finding(batch, left[0]).sentence
        if left[0].of_batch:
            return f"a batch that begins with {sentence}"
        count = f" ({len(left)} bad samples in this batch.)" if len(left) > 1 else ""
        if self._options.replaces:
            return f"{sentence}{count} No good sample was found near it to take its place."
        return f'{sentence}{count} on_bad="replace" goes on without it.'

    def _reread(self, failed: Result, batch: CollectedBatch, epoch: int) -> Result:
        """Return the batch decoded again, after its damaged samples were read past any cache."""
        damaged = batch.ids[[bad.row for bad in failed.bad if bad.reason == MISMATCH]]
        self._clock.reread += len(damaged)
        if self._options.cache is not None:
            for number in set(self._index.shard_of(damaged).tolist()):
                self._options.cache.forget(self._index.shards[number])
        sink, builder = self._parts.sink, self._parts.task_builder
        if sink is not None:
            # The decoder may have copied other samples over the arrays in the rows of bad ones.
            for row in {bad.row for bad in failed.bad} - batch.unreadable.keys():
                sink.reread(int(batch.ids[row]), row, failed.slot)
        task = builder.make(
            failed.batch_number, epoch, failed.slot, batch.ids, batch.offset, batch.unreadable
        )
        return builder.again(self._parts.decoder, failed, task, batch.offset, seeded=self._seeded)
