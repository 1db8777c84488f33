"""The decoder: encoded samples in the arena to values in a batch slot.

A decoder keeps no order, no position and no open file. Any thread, or any worker process that
received it by pickling, can decode any task with the same result.
"""

from __future__ import annotations

import time
from copy import copy

from wdstrain.decode.bad_samples import substitute
from wdstrain.decode.batch_bytes import BatchBytes
from wdstrain.decode.field_decoder import decode_fields
from wdstrain.decode.task import DecodedRows, DecoderSettings, Result, Task
from wdstrain.decode.transform_runner import run_transform
from wdstrain.memory.shared import Memory
from wdstrain.runtime.machine import queued_seconds
from wdstrain.runtime.watchdog import ProgressCell

_MUCH_IDLE = 0.05  # of the computing time of a batch


class Decoder:
    """Decodes tasks by fields, by a transform, or by neither, which delivers bytes."""

    def __init__(self, settings: DecoderSettings, arena: Memory, slots: Memory) -> None:
        """arena: memory with the encoded samples. slots: memory of all batch slots."""
        self.settings, self.arena, self.slots = settings, arena, slots

    def __call__(self, task: Task, progress: ProgressCell, *, own_process: bool = False) -> Result:
        """Return the decoded batch of a task. Bad samples are reported in the result.

        progress: gets the batch and row, for the stall watchdog.
        own_process: the global random generators of this process belong to the decoder.
        """
        started = time.perf_counter()
        if not task.unreadable and self._is_read_directly:
            return Result(task.batch_number, task.slot, {}, [], started, started, started, 0.0, 0.0)
        cpu_start = time.thread_time()
        progress.begin(task.batch_number)
        slot_size = self.settings.layout.size
        self.slots.populate(task.slot * slot_size, slot_size)
        rows = self._decode(task, progress, own_process)
        progress.set_idle()
        finished, cpu_seconds = time.perf_counter(), time.thread_time() - cpu_start
        idle = finished - started - cpu_seconds
        # Asking costs 5 us, so batches that computed nearly all the time do not ask.
        queued = min(idle, queued_seconds()) if idle > _MUCH_IDLE * cpu_seconds else 0.0
        return Result(
            task.batch_number,
            task.slot,
            rows.values,
            rows.bad,
            started,
            rows.rows_done,
            finished,
            cpu_seconds,
            queued,
        )

    def with_arena(self, arena: Memory) -> Decoder:
        """Return a decoder of the same settings for samples in another arena."""
        other = copy(self)
        other.arena = arena
        return other

    @property
    def _is_read_directly(self) -> bool:
        """Whether the reader puts every value straight into the batch slot."""
        return self.settings.fields == {}

    def _decode(self, task: Task, progress: ProgressCell, own_process: bool) -> DecodedRows:
        data = BatchBytes(task, self.arena, self.settings.field_names)
        if self.settings.transform is not None:
            return run_transform(self.settings, task, data, progress, own_process=own_process)
        if self.settings.fields is not None:
            return decode_fields(self.settings, task, data, self.slots, progress)
        columns, bad = data.columns(), list(data.find_damaged().values())
        rows_done = time.perf_counter()
        bad = substitute(bad, task.ids, list(columns.values()), self.settings.on_error)
        return DecodedRows(dict(columns), bad, rows_done)
