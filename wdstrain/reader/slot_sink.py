"""Arrays of one shape, read straight into the memory of their batch.

The plan gives the batch and the row of a sample before it is read. A scatter read therefore puts an
array into its batch slot, without a copy; the bytes around it (headers, other fields) go to the
arena. The slot of a batch is taken when its first sample is read, so slots are held for a whole
shuffle window. The reads run on a small I/O thread pool, which also computes checksums.

An array is a suspect if its checksum or header differs from the index and the field, for example in
byte order or axis order. Its sample is read again, and decoded by its field, when its batch is
requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from wdstrain.decode.batch_slots import Slots
from wdstrain.errors import WdstrainError
from wdstrain.memory.scatter import Bools, ChecksumJob, ScatterList
from wdstrain.memory.shared import Memory
from wdstrain.native.checksum import crc32
from wdstrain.order.plan import Order, Plan
from wdstrain.reader.lane import Lane, StartedRead
from wdstrain.reader.read_blocks import READ_TOGETHER, ReadBlock
from wdstrain.reader.sink import ReadSamples, UnreadableSamples
from wdstrain.reader.slot_scatter import DirectField, SlotScatter
from wdstrain.runtime.machine import cores
from wdstrain.shards.index import Index, Ints
from wdstrain.storage.io_pool import IOThreadPool
from wdstrain.storage.local import LocalFile, open_source
from wdstrain.storage.prefetch import PendingRead, ReadStopped

_SCRATCH = 4 << 20  # bytes of memory for discarded gaps between samples
_THREADS = 4  # most threads of the I/O pool
_OPEN_FILES = 64  # approximate limit of files that are open at a time


class _SlotRead(NamedTuple):
    """A read of n samples of a lane. slot_offsets: offsets of their slots, int64[n]."""

    lane: Lane
    samples: ReadSamples
    scatter: SlotScatter
    slot_offsets: Ints


class _SlotByBatch(dict[int, int]):
    """Slot of each batch number. A missing slot is taken from the pool."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def __missing__(self, batch_number: int) -> int:
        slot = self[batch_number] = self._slots.take()
        return slot


class SlotSink:
    """`Sink` of samples with arrays that go straight into batches. It has its own threads.

    before: for each member of a sample, the bytes before it that are not in the arena.
    int64[members]
    """

    in_background, most_bytes = True, READ_TOGETHER

    def __init__(
        self, index: Index, fields: Iterable[DirectField], slots: Slots, skip_unreadable: bool
    ) -> None:
        """skip_unreadable: record samples that cannot be read instead of raising an error."""
        self._index, self._fields, self._slots = index, list(fields), slots
        self.unreadable = UnreadableSamples(skip=skip_unreadable)
        self.bytes_elsewhere = sum(direct.row for direct in self._fields)
        members = np.arange(int(index.table.member_first[1]))
        self.before = np.zeros(len(members), np.int64)
        for direct in self._fields:
            self.before += (members > direct.member) * direct.row
        # By (offset of the slot, row), until the batch is requested. The I/O threads add to them.
        self._suspects: set[tuple[int, int]] = set()
        self._open: set[LocalFile] = set()
        self._slot_by_batch = _SlotByBatch(slots)
        self._heads: dict[int, int] = {}  # by member: crc32 of the last .npy header that was right
        self._io_pool = IOThreadPool(min(_THREADS, cores()))
        self._scratch = Memory(_SCRATCH)

    def scatter(self, plan: Order, rank: int, lane: int, start: int, ids: Ints) -> SlotScatter:
        """Return the destinations of the samples in places `start` and up of a lane.

        ids: of these samples, int64[n].
        """
        assert isinstance(plan, Plan)
        rows = (
            plan.positions(lane, start, start + len(ids)) % plan.samples_per_step_per_lane
            + plan.lanes_of(rank).index(lane) * plan.samples_per_step_per_lane
        )
        return SlotScatter.of_samples(self._index.table, self._fields, ids, rows)

    def plan(
        self, lane: Lane, block: ReadBlock, samples: ReadSamples, on_done: Callable[[], None]
    ) -> Callable[[], StartedRead]:
        """Return the function that starts to read these samples.

        The caller holds the lock of the run. The batches' slots are taken.
        """
        assert block.scatter is not None
        lane.ring.record(samples.places)  # the decoder verifies the bytes in the arena
        first = lane.begun - block.start
        scatter = block.scatter.part(slice(first, first + samples.count)).part(samples.rows)
        slots = [self._slot_by_batch[number] for number in samples.batch_numbers.tolist()]
        offsets = np.array(slots, np.int64) * self._slots.layout.size
        read = _SlotRead(lane, samples, scatter, offsets)
        return partial(self._start, read, *self._scatter_list(read, slice(None)), on_done)

    def slot(self, batch_number: int, ids: Ints) -> tuple[int, dict[int, str], int]:
        """Return (slot, reasons, suspects) of a batch that was read. The caller owns the slot.

        ids: of its samples, int64[rows]. reasons: by row, why a suspect is unreadable. suspects: how
        many samples were read again. Raises ReadStopped if the reader was stopped.
        """
        slot = self._slot_by_batch.get(batch_number, -1)
        unreadable, suspects = dict[int, str](), list[int]()
        if self._suspects:
            slot_offset = slot * self._slots.layout.size
            suspects = [row for row in range(len(ids)) if (slot_offset, row) in self._suspects]
            for row in suspects:
                self._suspects.discard((slot_offset, row))
                reason = self.reread(int(ids[row]), row, slot)
                if reason is not None:
                    unreadable[row] = reason
        # Last: `stop` in another thread may have cleared everything since this method began.
        if self._slot_by_batch.pop(batch_number, None) is None:
            raise ReadStopped
        return slot, unreadable, len(suspects)

    def stop(self) -> None:
        """Wait for running reads and drop the others. Nothing is written to memory afterwards."""
        self._io_pool.stop()
        while self._open:  # files of dropped reads
            self._open.pop().close()
        self._slot_by_batch.clear()
        self._suspects.clear()

    def reread(self, number: int, row: int, slot: int) -> str | None:
        """Read sample `number` again and let its fields decode its arrays into a row of a slot.

        Returns None, or the reason why the sample is unreadable.
        """
        table, shard = (
            self._index.table,
            self._index.shards[int(self._index.shard_of(np.array([number]))[0])],
        )
        start = int(table.start[number])
        memory = memoryview(bytearray(int(table.stop[number]) - start))
        try:
            with open_source(shard.path, shard.bytes, self._index.expected_state(shard)) as source:
                source.read_into([memory], start)
        except WdstrainError as error:
            return f"it cannot be read ({str(error).rstrip('.')})"
        layout = self._slots.layout
        columns = layout.arrays(self._slots.memory.view, slot * layout.size, layout.rows)
        by_offset = {offset: name for name, (_, offset) in layout.columns.items()}
        for direct in self._fields:
            member = int(table.member_first[number]) + direct.member
            offset = int(table.member_offset[member]) - start
            data = memory[offset : offset + direct.head + direct.row]
            crc = int(table.member_crc[member]) if len(table.member_crc) else 0
            if crc and crc32(data) != crc:
                return f"the bytes of {direct.field_name} are not those that were packed (crc32), also when they are read again"
            try:
                target = columns[by_offset[direct.column]][row, ...]
                direct.field.read(direct.field_name, data, target, np.zeros(0))
            except Exception as error:  # as in the decoder: the sample is bad, the loader goes on
                return f"{direct.field_name}: {error}"
        return None

    def arena_pieces(self, number: int, target: memoryview) -> list[memoryview]:
        """Return buffers for a scatter read of sample `number` that keeps only its arena bytes.

        target: memory for the arena bytes. The arrays go to buffers that are discarded.
        """
        table = self._index.table
        pieces, offset = list[memoryview](), int(table.start[number])
        for direct in self._fields:
            member = int(table.member_first[number]) + direct.member
            numbers = int(table.member_offset[member]) + direct.head
            pieces += [target[: numbers - offset], memoryview(bytearray(direct.row))]
            target, offset = target[numbers - offset :], numbers + direct.row
        return [*pieces, target]

    # --- in the reader's thread -------------------------------------------------------------------

    def _start(
        self,
        read: _SlotRead,
        scatter_list: ScatterList,
        checksums: ChecksumJob,
        on_done: Callable[[], None],
    ) -> StartedRead:
        """Start a read."""
        samples, pending = read.samples, PendingRead(missing=1)
        started = StartedRead(pending, samples.batch_numbers, samples.count, samples.bytes)
        try:
            source = LocalFile(samples.shard.path, self._index.expected_state(samples.shard))
        except WdstrainError as error:
            pending.missing = 0
            if not self.unreadable.skip:
                pending.error = error
                return started
            for row in range(len(samples.ids)):
                self.unreadable.add(read.lane, samples, error, row)
            return started
        complete = partial(self._complete, read, pending, source, scatter_list, checksums, on_done)
        self._open.add(source)
        if len(self._open) > _OPEN_FILES:
            # Small shards: read in this thread, so that no further file is opened meanwhile.
            complete()
        else:
            source.start_read(self._io_pool, scatter_list, int(samples.starts[0]), complete)
        return started

    def _scatter_list(self, read: _SlotRead, rows: slice) -> tuple[ScatterList, ChecksumJob]:
        """Return the scatter list of some samples of a read, and the job of its checksums."""
        return read.scatter.part(rows).places(
            read.samples.offsets[rows],
            read.slot_offsets[rows],
            (read.samples.arena, self._slots.memory, self._scratch),
        )

    # --- in the thread that completes a read ------------------------------------------------------

    def _complete(
        self,
        read: _SlotRead,
        pending: PendingRead,
        source: LocalFile,
        scatter_list: ScatterList,
        checksums: ChecksumJob,
        on_done: Callable[[], None],
    ) -> None:
        """Read the bytes that the pool has not read, verify all samples, and close the file.

        Must not raise: an error here would not reach the loop, which would wait forever.
        """
        try:
            try:
                self._read(read, source, slice(None), scatter_list, checksums)
            except WdstrainError:
                single = partial(self._read_sample, read, source)
                self.unreadable.read_singly(read.lane, read.samples, pending, single)
        except BaseException as problem:  # the reader raises it
            reason = f"{type(problem).__name__}: {problem}"
            pending.error = WdstrainError(f"{read.samples.shard.shown}: reading failed ({reason}).")
        finally:
            self._open.discard(source)
            with suppress(OSError):  # a network file system may fail here; all bytes were read
                source.close()
            pending.missing = 0
            on_done()

    def _read_sample(self, read: _SlotRead, source: LocalFile, row: int) -> WdstrainError | None:
        """Read one sample of a damaged shard. Returns the error."""
        rows = slice(row, row + 1)
        try:
            self._read(read, source, rows, *self._scatter_list(read, rows))
        except WdstrainError as error:
            return error
        return None

    def _read(
        self,
        read: _SlotRead,
        source: LocalFile,
        rows: slice,
        scatter_list: ScatterList,
        checksums: ChecksumJob,
    ) -> None:
        """Read the unfilled bytes of some samples, and record their suspects."""
        source.read_into(scatter_list, int(read.samples.starts[rows][0]) + scatter_list.filled)
        for row in np.flatnonzero(self._suspect_rows(read.scatter.part(rows), checksums)).tolist():
            batch_row = int(read.scatter.rows[rows][row])
            self._suspects.add((int(read.slot_offsets[rows][row]), batch_row))

    def _suspect_rows(self, samples: SlotScatter, job: ChecksumJob) -> Bools:
        """Return for each sample whether an array header or a checksum is not as expected. bool[n]"""
        count, width, _ = samples.checked_start.shape
        checksums = job.checksums.reshape(count, width, -1)
        is_suspect = np.zeros(count, bool)
        for k, direct in enumerate(self._fields):
            head = checksums[:, k, 0]
            is_other = head != self._heads.get(direct.member, -1)
            for i in np.flatnonzero(is_other).tolist():
                run = (i * width + k) * checksums.shape[2]
                if direct.field.has_plain_layout(bytes(job.run(run))):
                    self._heads[direct.member], is_other[i] = int(head[i]), False
            is_suspect |= is_other
            if samples.crc.size:
                is_suspect |= (checksums[:, k, 1] != samples.crc[:, k]) & (samples.crc[:, k] != 0)
        return is_suspect
