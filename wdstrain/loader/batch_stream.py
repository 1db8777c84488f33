"""Stream of decoded batches of one rank, in plan order, over the ends of epochs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from wdstrain.decode.task import Result, Task
from wdstrain.errors import WdstrainError
from wdstrain.loader.pipeline_parts import PipelineParts
from wdstrain.loader.task_blocks import TaskBlock
from wdstrain.reader.blocks import StepBlock, step_blocks
from wdstrain.reader.reader import CollectedBatch, ReadRun
from wdstrain.runtime.watchdog import thread_stack
from wdstrain.shards.offsets import Ints
from wdstrain.storage.prefetch import ReadStopped

OVER = (
    "this pass over the loader is over: it was closed, or ended with an error. Begin another one."
)


_SHOWN_KEYS = 16  # of the awaited batch in a message


class PendingBatch(NamedTuple):
    """Samples of a batch that is being decoded. draws: see `Plan.draws`, int64[b]."""

    batch: CollectedBatch
    keys: list[str]
    draws: Ints


class BatchStream:
    """Decoded batches from a step on.

    first: (epoch, step) of the first batch. until: the first epoch that is not read, if any.
    position: (epoch, step) of the next batch; None after the last one.
    is_interrupted: an exception came while a batch was made, so the next batch may be lost.
    run: reads the samples; None before the first task is requested.
    """

    def __init__(self, parts: PipelineParts, epoch: int, step: int, until: int | None) -> None:
        self.first, self.until = (epoch, step), until
        self.position: tuple[int, int] | None = self.first
        self.is_interrupted = False
        self.run: ReadRun | None = None
        self._parts = parts
        # By batch number, the samples of the batches in flight.
        self._pending: dict[int, PendingBatch] = {}
        self._batch_number = 0  # of the next batch; counts from the start
        # Why the tasks ended early. The loop gets the batches before it, and then raises it.
        self._error: WdstrainError | None = None

    def tasks(self, run: ReadRun) -> Iterator[Task]:
        """Yield the tasks of all batches, each once `run` has read its samples.

        Raises ReadStopped if the run is cancelled.
        """
        read, totals = self._parts.reader.stats, self._parts.totals
        begun, waited = time.perf_counter(), read.shuffle_seconds
        for block, steps, number in self._steps():
            try:
                task = self._task(run, block, steps, number)
            except ReadStopped:
                raise
            except WdstrainError as error:
                self._error = error
                return
            waited = read.shuffle_seconds - waited
            totals.parse_seconds += time.perf_counter() - begun - waited
            yield task
            begun, waited = time.perf_counter(), read.shuffle_seconds

    def next(self, results: Iterator[Result]) -> tuple[Result, PendingBatch]:
        """Return the next decoded batch, with its samples.

        results: of the decoders for `tasks`. They refer to this object, so it does not keep them.
        Raises WdstrainError if there is none.
        """
        totals = self._parts.totals
        begun, others = time.perf_counter(), self._seconds_before_decoding
        try:
            result = next(results, None)
        except MemoryError as error:  # for one sample it would be the reason why it is bad
            raise WdstrainError(
                "there was no memory to make a batch. Lower batch_size, num_workers or "
                "shuffle_buffer, or give it more memory."
            ) from error
        if result is None:  # all batches before the one that cannot be read were delivered
            reason, self._error = self._error, None
            try:
                raise reason or WdstrainError(OVER)
            finally:
                del reason  # it refers to this frame
        # The hand-off is the time in which a batch was both requested and decoded, but not here.
        # This thread did other work meanwhile.
        others = self._seconds_before_decoding - others
        handoff = time.perf_counter() - max(begun, result.finished) - others
        totals.handoff_seconds += max(0.0, handoff)
        totals.decode_seconds += result.rows_done - result.started
        totals.compute_seconds += result.cpu_seconds
        totals.queued_seconds += result.queued_seconds
        totals.collate_seconds += result.finished - result.rows_done
        self._batch_number = result.batch_number + 1
        return result, self._pending.pop(result.batch_number)

    def advance(self, steps: int) -> None:
        """Go on to the next position. steps: of the epoch."""
        assert self.position is not None
        epoch, step = self.position
        after = (epoch, step + 1) if step + 1 < steps else (epoch + 1, 0)
        self.position = after if after[0] != self.until else None

    def describe_stall(self, thread: int) -> str:
        """Return which stage is stuck, with the awaited samples and Python stacks.

        thread: identity of the thread that waits for a batch. Runs in the watchdog's thread.
        """
        reading = self.run.describe_wait() if self.run is not None else None
        if reading is not None:
            return f"Stage read: {reading}"
        pending, index = self._pending.get(self._batch_number), self._parts.index
        waiting = f"the thread that waits:\n{thread_stack(thread)}"
        if pending is None:
            return f"Stage hand-off: {self._parts.workers.describe()}\n{waiting}"
        first, more = int(pending.batch.ids[0]), len(pending.keys) - _SHOWN_KEYS
        keys = ", ".join(pending.keys[:_SHOWN_KEYS]) + (f" and {more} more" if more > 0 else "")
        return (
            f"Stage decode: the awaited samples are {keys}; the first is in "
            f"{index.shard_with(first).shown} at offset {int(index.offsets.start[first])}. "
            f"{self._parts.workers.describe()}\n{waiting}"
        )

    @property
    def _seconds_before_decoding(self) -> float:
        """Seconds in which the loop's thread built tasks or waited for samples."""
        return self._parts.totals.parse_seconds + self._parts.reader.stats.shuffle_seconds

    def _steps(self) -> Iterator[tuple[TaskBlock, StepBlock, int]]:
        """Yield for each batch a block of tasks, its steps, and the batch's number in the block."""
        parts, (epoch, step) = self._parts, self.first
        while epoch != self.until:
            for steps in step_blocks(parts.plans(epoch), parts.rank, step):
                block = parts.task_builder.build_block(epoch, steps.ids, steps.draws, steps.firsts)
                for number in range(len(steps)):
                    yield block, steps, number
            epoch, step = epoch + 1, 0

    def _task(self, run: ReadRun, block: TaskBlock, steps: StepBlock, number: int) -> Task:
        """Return the task of a step of the block, once its samples are read."""
        batch = run.collect(steps, number)
        rows = slice(*steps.firsts[number : number + 2])
        pending = PendingBatch(batch, block.keys[rows], steps.draws[rows])
        self._pending[batch.batch_number] = pending
        return block.task(
            number,
            batch.batch_number,
            batch.slot,
            batch.offset,
            batch.unreadable,
            batch.unverified,
        )
