"""The decoder: encoded samples in the arena to values in a batch slot.

A decoder keeps no order, no position and no open file. Any thread, or any worker process that
received it by pickling, can decode any task with the same result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from typing import Any

import numpy as np
import torch

from wdstrain.decode.batch_bytes import BatchBytes
from wdstrain.decode.fields import Field, Image, read_field, torch_has
from wdstrain.decode.task import (
    BadSample,
    DecodedRows,
    DecoderSettings,
    Result,
    Task,
    is_incomplete,
    reason_of,
    substitute,
)
from wdstrain.decode.transform_runner import run_transform
from wdstrain.decode.transforms import DRAWS
from wdstrain.errors import SampleError
from wdstrain.memory.shared import Memory
from wdstrain.order.rng import uniform
from wdstrain.runtime.machine import queued_seconds
from wdstrain.shards.values import Array

_MUCH_IDLE = 0.05  # of the computing time of a batch


class Decoder:
    """Decodes tasks by fields, by a transform, or by neither, which delivers bytes."""

    def __init__(self, settings: DecoderSettings, arena: Memory, slots: Memory) -> None:
        """arena: memory with the encoded samples. slots: memory of all batch slots."""
        self.settings, self.arena, self.slots = settings, arena, slots

    def __call__(self, task: Task, *, own_process: bool = False) -> Result:
        """Return the decoded batch of a task. Bad samples are reported in the result.

        own_process: the global random generators of this process belong to the decoder.
        """
        started = time.perf_counter()
        cpu_start = time.thread_time()
        slot_size = self.settings.layout.size
        self.slots.populate(task.slot * slot_size, slot_size)
        rows = self._decode(task, own_process)
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

    def _decode(self, task: Task, own_process: bool) -> DecodedRows:
        data = BatchBytes(task, self.arena, self.settings.field_names)
        if self.settings.transform is not None:
            return run_transform(self.settings, task, data, own_process=own_process)
        if self.settings.fields is not None:
            return decode_fields(self.settings, task, data, self.slots)
        columns, bad = data.columns(), list(data.find_damaged().values())
        rows_done = time.perf_counter()
        bad = substitute(bad, task.ids, list(columns.values()), self.settings.on_error)
        return DecodedRows(dict(columns), bad, rows_done)


def decode_fields(
    settings: DecoderSettings, task: Task, data: BatchBytes, slots: Memory
) -> DecodedRows:
    """Decode the fields of a batch. Values with a fixed size go to its slot, others are returned."""
    fields = settings.fields or {}
    slot_start = task.slot * settings.layout.size
    columns = settings.layout.arrays(slots.view, slot_start, len(task.ids))
    batch = _FieldBatch(task, data, columns, settings.seed)
    # field by field: a label that is decoded between two images takes five times as long
    values = {name: batch.decode(name, field) for name, field in fields.items()}
    rows_done = time.perf_counter()
    lists = {name: rows for name, rows in values.items() if rows is not None}
    bad = substitute(
        sorted(batch.bad.values()),
        task.ids,
        [*columns.values(), *lists.values()],
        settings.on_error,
    )
    if is_incomplete(bad):
        return DecodedRows({}, bad, rows_done)
    collated = {name: _collate(fields[name], rows) for name, rows in lists.items()}
    return DecodedRows(collated, bad, rows_done)


class _FieldBatch:
    """Rows of one batch while its fields are decoded, one field after another."""

    def __init__(
        self,
        task: Task,
        data: BatchBytes,
        columns: Mapping[str, Array],
        seed: int,
    ) -> None:
        """columns: arrays of the batch slot, by field name."""
        self.bad = data.find_damaged()  # by row
        self._ids, self._data, self._columns = task.ids, data, columns
        self._draws = uniform(task.draws, DRAWS, "sample", seed, task.epoch)
        self._draws.flags.writeable = False  # all fields of a sample share its numbers

    def decode(self, name: str, field: Field) -> list[Any] | None:
        """Decode a field of all rows. Returns its values, or None if they went to the slot."""
        column = self._columns.get(name)
        done = self._decode_together(field, column)
        values: list[Any] | None = [None] * len(self._ids) if column is None else None
        if len(done) == len(self._ids):
            return values
        for row, (member, data) in enumerate(self._data.values(field.names)):
            if row in done or row in self.bad:
                continue
            out = None if column is None else column[row, ...]
            try:
                if data is None:
                    raise LookupError(f"it has none of {', '.join(field.names)}")
                value = read_field(field, member, data, out, self._draws[row])
                if values is not None:
                    values[row] = _checked(value)
            except Exception as error:  # a user's field may raise anything
                self.bad[row] = BadSample(row, member or name, reason_of(error))
        return values

    def _decode_together(self, field: Field, column: Array | None) -> set[int]:
        """Decode plain JPEGs by one call of C. Returns the rows that are done.

        Rows that fail here are decoded again one by one, which finds the reason.
        """
        # a subclass of a user may decode differently
        images = self._data.images(field.names) if type(field) is Image else None
        if not isinstance(field, Image) or column is None or images is None:
            return set()
        rows = [row for row in range(len(self._ids)) if row not in self.bad]
        with suppress(Exception):
            return field.read_rows(images, rows, column, self._draws)
        return set()


def _checked(value: Any) -> Any:
    """Return the value of a field for `_collate`, arrays of numbers in this machine's byte order.

    Raises SampleError for an array of numbers that torch does not support.
    """
    if not _is_numeric(value):
        return value
    if not torch_has(value.dtype):
        raise SampleError(
            f"it is an array of {value.dtype}, which torch does not support; "
            "store it as float64 or complex128"
        )
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))


def _collate(field: Field, values: list[Any]) -> Any:
    """Return the batch value of a field: a tensor if all values are arrays of one shape, else a list.

    Images are always a list: the type of a batch value must not depend on the samples.
    """
    first = values[0]
    is_uniform = isinstance(first, np.ndarray) and all(
        isinstance(value, np.ndarray) and (value.shape, value.dtype) == (first.shape, first.dtype)
        for value in values
    )
    if is_uniform and not isinstance(field, Image):
        return _tensor(np.stack(values))
    return [_tensor(value) for value in values]


def _tensor(value: Any) -> Any:
    """Return arrays of numbers as tensors, anything else as it is."""
    if not _is_numeric(value):
        return value
    # torch takes no negative strides, and warns of read-only memory
    return torch.from_numpy(np.require(value, requirements=["C", "W"]))


def _is_numeric(value: Any) -> bool:
    """Return whether a value is an array of numbers; arrays of text or times are not."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
