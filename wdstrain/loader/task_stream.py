"""Tasks of consecutive batches, in plan order, each given out once its samples are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from wdstrain.decode.decoder import Task
from wdstrain.errors import WdstrainError
from wdstrain.loader.pipeline_parts import PipelineParts
from wdstrain.loader.stage_clock import StageClock
from wdstrain.loader.task_blocks import TaskBlock
from wdstrain.order.plan import Order
from wdstrain.reader.reader import CollectedBatch
from wdstrain.reader.step_blocks import StepBlock, step_blocks
from wdstrain.storage.prefetch import ReadStopped


class TaskStream:
    """Tasks from one step on, over the ends of epochs. They run in the training process.

    pending: by batch number, the samples and keys of tasks that were given out.
    error: why the tasks ended early. The loop gets the batches before it, and then raises it.
    """

    def __init__(
        self, parts: PipelineParts, plans: Callable[[int], Order], rank: int, clock: StageClock
    ) -> None:
        self._parts, self._plans, self._rank, self._clock = parts, plans, rank, clock
        self.pending: dict[int, tuple[CollectedBatch, list[str]]] = {}
        self.error: WdstrainError | None = None

    def tasks(self, epoch: int, step: int, until: int | None) -> Iterator[Task]:
        """Yield the tasks from this step on, up to epoch `until` or without end.

        The reader must have started there. Raises ReadStopped if its run is cancelled.
        """
        clock, batch_number = self._clock, 0
        while epoch != until:
            begun, waited = time.perf_counter(), clock.read.shuffle_seconds
            for steps in step_blocks(self._plans(epoch), self._rank, step):
                block = self._parts.task_builder.build_block(epoch, steps.ids, steps.firsts)
                for number in range(len(steps)):
                    try:
                        task = self._task(block, steps, number, batch_number)
                    except ReadStopped:
                        raise
                    except WdstrainError as error:
                        self.error = error
                        return
                    waited = clock.read.shuffle_seconds - waited
                    clock.parse += time.perf_counter() - begun - waited
                    yield task
                    begun, waited = time.perf_counter(), clock.read.shuffle_seconds
                    batch_number += 1
            epoch, step = epoch + 1, 0

    def _task(self, block: TaskBlock, steps: StepBlock, number: int, batch_number: int) -> Task:
        """Return the task of a step of the block, once its samples are read."""
        batch = self._parts.reader.collect(steps, number)
        slot = self._slot(batch_number, batch)
        keys = block.keys[steps.firsts[number] : steps.firsts[number + 1]]
        self.pending[batch_number] = batch, keys
        return block.task(
            number, batch_number, slot, batch.offset, batch.unreadable, batch.unverified
        )

    def _slot(self, batch_number: int, batch: CollectedBatch) -> int:
        """Return the slot to decode a batch into; its arrays may be there already."""
        sink = self._parts.sink
        if sink is None:
            return self._parts.slots.take()
        slot, unreadable, reread = sink.slot(batch_number, batch.ids)
        batch.unreadable.update(unreadable)
        self._clock.reread += reread
        return slot
