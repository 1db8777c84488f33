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

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.decode.batch_slots import Slots
from wdstrain.errors import WdstrainError
from wdstrain.memory.scatter import Bools, ChecksumJob, ScatterList, scatter_samples
from wdstrain.memory.shared import Memory
from wdstrain.reader.direct_fields import DirectField
from wdstrain.reader.lane import BatchSlot, Lane, ReadSamples, SampleRead, UnreadableSamples
from wdstrain.reader.resources import ReadResources
from wdstrain.runtime.machine import cores
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.storage.io_pool import IOThreadPool
from wdstrain.storage.local import LocalFile

_THREADS = 4  # most threads of the I/O pool
_OPEN_FILES = 64  # approximate limit of files that are open at a time


class SlotSink:
    """`Sink` of samples with arrays that go straight into batches. It has its own threads.

    on_done: called, from any thread, when a read is complete. open_files: of reads in flight.
    """

    def __init__(self, resources: ReadResources, on_done: Callable[[], None]) -> None:
        self._index, self._direct, self._slots = resources.index, resources.direct, resources.slots
        self._memories = resources.arena.memory, resources.slots.memory, resources.scratch
        self.unreadable = UnreadableSamples(skip=resources.options.skip_unreadable)
        self.on_done, self.open_files = on_done, set[LocalFile]()
        self.io_pool = IOThreadPool(min(_THREADS, cores()))
        self._slot_by_batch = _SlotByBatch(self._slots)
        # By (batch number, row), until the batch is requested. The I/O threads add to them.
        self._suspects: set[tuple[int, int]] = set()
        self._heads: dict[int, int] = {}  # by member: crc32 of the last .npy header that was right

    def plan(self, samples: ReadSamples) -> SlotRead:
        """Return the read of these samples. The slots of their batches are taken."""
        slots = [self._slot_by_batch[number] for number in samples.batch_numbers.tolist()]
        slot_offsets = np.array(slots, np.int64) * self._slots.layout.size
        return SlotRead(self, samples, slot_offsets)

    def slot(self, batch_number: int, ids: Ints) -> BatchSlot:
        """Return the slot of a batch, after its suspects were read again."""
        slot, unreadable, rows = (
            self._slot_by_batch.pop(batch_number),
            dict[int, str](),
            list[int](),
        )
        if self._suspects:
            rows = [row for row in range(len(ids)) if (batch_number, row) in self._suspects]
        for row in rows:
            self._suspects.discard((batch_number, row))
            reason = self._direct.reread(int(ids[row]), row, slot)
            if reason is not None:
                unreadable[row] = reason
        return BatchSlot(slot, unreadable, len(rows))

    def stop(self) -> None:
        """Wait for running reads and drop the others. Nothing is written to memory afterwards."""
        self.io_pool.stop()
        while self.open_files:  # of dropped reads
            self.open_files.pop().close()

    def open(self, samples: ReadSamples) -> LocalFile:
        """Return the open shard of a read. Raises WdstrainError."""
        return LocalFile(samples.shard.path, self._index.expected_state(samples.shard))

    def scatter(self, samples: ReadSamples, slot_offsets: Ints) -> SlotScatter:
        """Return the destinations of the bytes of samples."""
        return scatter_into_slots(
            self._index.offsets, self._direct.fields, samples, slot_offsets, self._memories
        )

    def record_suspects(self, samples: ReadSamples, scatter: SlotScatter) -> None:
        """Record the samples whose array headers or checksums are not as expected."""
        assert samples.batch_rows is not None
        fields, job = self._direct.fields, scatter.job
        checksums = job.checksums.reshape(len(samples.ids), len(fields), -1)
        is_suspect: Bools = np.zeros(len(samples.ids), bool)
        for k, direct in enumerate(fields):
            head = checksums[:, k, 0]
            is_other = head != self._heads.get(direct.member, -1)
            for i in np.flatnonzero(is_other).tolist():
                run = (i * len(fields) + k) * checksums.shape[2]
                if direct.field.has_plain_layout(bytes(job.run(run))):
                    self._heads[direct.member], is_other[i] = int(head[i]), False
            is_suspect |= is_other
            if scatter.crc.size:
                is_suspect |= (checksums[:, k, 1] != scatter.crc[:, k]) & (scatter.crc[:, k] != 0)
        for i in np.flatnonzero(is_suspect).tolist():
            self._suspects.add((int(samples.batch_numbers[i]), int(samples.batch_rows[i])))


class SlotRead(SampleRead):
    """A read of samples with direct arrays. slot_offsets: offsets of their slots, int64[n]."""

    def __init__(self, sink: SlotSink, samples: ReadSamples, slot_offsets: Ints) -> None:
        super().__init__(samples, sink.unreadable)
        self._sink, self._slot_offsets = sink, slot_offsets
        self._scatter = sink.scatter(samples, slot_offsets)

    def begin(self, lane: Lane) -> None:
        """Start to read in an I/O thread."""
        sink, samples = self._sink, self.samples
        try:
            source = sink.open(samples)
        except WdstrainError as error:
            if not self.unreadable.skip:
                self.pending.error = error
                return
            for row in range(len(samples.ids)):
                self.unreadable.add(lane, samples, row, error)
            return
        self.pending.missing = 1
        sink.open_files.add(source)
        if len(sink.open_files) > _OPEN_FILES:
            # Small shards: read in this thread, so that no further file is opened meanwhile.
            self._complete(source, lane)
        else:
            target, offset = self._scatter.target, int(samples.starts[0])
            complete = partial(self._complete, source, lane)
            source.start_read(sink.io_pool, target, offset, complete)

    def _complete(self, source: LocalFile, lane: Lane) -> None:
        """Read the bytes that the pool has not read, verify all samples, and close the file.

        Must not raise: an error here would not reach the loop, which would wait forever.
        """
        sink = self._sink
        try:
            try:
                self._fill(source, self.samples, self._scatter)
            except WdstrainError:
                self.read_singly(lane, partial(self._read_one, source))
        except BaseException as error:  # the reader raises it
            reason = f"{type(error).__name__}: {error}"
            self.pending.error = WdstrainError(
                f"{self.samples.shard.shown}: reading failed ({reason})."
            )
        finally:
            sink.open_files.discard(source)
            with suppress(OSError):  # a network file system may fail here; all bytes were read
                source.close()
            self.pending.missing = 0
            sink.on_done()

    def _read_one(self, source: LocalFile, row: int) -> WdstrainError | None:
        """Read one sample of a damaged shard. Returns the error."""
        sample, slot_offset = self.samples.only(row), self._slot_offsets[row : row + 1]
        try:
            self._fill(source, sample, self._sink.scatter(sample, slot_offset))
        except WdstrainError as error:
            return error
        return None

    def _fill(self, source: LocalFile, samples: ReadSamples, scatter: SlotScatter) -> None:
        """Read the unfilled bytes of some samples, and record their suspects."""
        source.read_into(scatter.target, int(samples.starts[0]) + scatter.target.filled)
        self._sink.record_suspects(samples, scatter)


class _SlotByBatch(dict[int, int]):
    """Slot of each batch number. A missing slot is taken from the pool."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def __missing__(self, batch_number: int) -> int:
        slot = self[batch_number] = self._slots.take()
        return slot


class SlotScatter(NamedTuple):
    """Destinations of the bytes of n samples with w direct arrays each.

    job: computes the crc32 of the header of each array and, if the index has checksums, of header
    and numbers. crc: the expected ones of header and numbers, uint32[n, w or 0].
    """

    target: ScatterList
    job: ChecksumJob
    crc: npt.NDArray[np.uint32]


def scatter_into_slots(
    table: Offsets,
    fields: Sequence[DirectField],
    samples: ReadSamples,
    slot_offsets: Ints,
    memories: Sequence[Memory],
) -> SlotScatter:
    """Return the destinations of the samples of one read.

    A sample has 2w + 1 segments: the bytes before an array and the array by turns, then the rest.
    fields: in the order of their members in a sample. slot_offsets: of their slots, int64[n].
    memories: the arena, the memory of the slots, and one for bytes that are discarded.
    """
    assert samples.batch_rows is not None
    count, width, kinds = len(samples.ids), len(fields), 2 if len(table.member_crc) else 1
    first = table.member_first[samples.ids]
    start, size = np.empty((2, count, 2 * width + 1), np.int64)
    checked_start, checked_size, complete_at = np.empty((3, count, width, 2), np.int64)
    arena_end, shard_end = samples.offsets, samples.starts  # ends of the segments so far
    for k, direct in enumerate(fields):
        # where the array begins in the shard
        numbers = table.member_offset[first + direct.member] + direct.head
        start[:, 2 * k], size[:, 2 * k] = arena_end, numbers - shard_end
        start[:, 2 * k + 1] = slot_offsets + direct.column + samples.batch_rows * direct.row
        size[:, 2 * k + 1] = direct.row
        arena_end, shard_end = arena_end + numbers - shard_end, numbers + direct.row
        checked_start[:, k, 0], checked_start[:, k, 1] = (
            arena_end - direct.head,
            start[:, 2 * k + 1],
        )
        checked_size[:, k] = (direct.head, direct.row)
        complete_at[:, k, 0], complete_at[:, k, 1] = numbers, shard_end
    start[:, -1], size[:, -1] = arena_end, samples.stops - shard_end
    memory_index = np.tile(np.arange(kinds), count * width)
    checked = (array[..., :kinds] for array in (checked_start, checked_size, complete_at))
    job = ChecksumJob(
        memories,
        memory_index,
        *(array.reshape(-1) for array in checked),
        first_byte=int(samples.starts[0]),
        joined=memory_index == 1,
    )
    segments = np.tile(np.array([0, 1] * width + [0]), (count, 1)), start, size
    target = scatter_samples(memories, *segments, samples.starts, samples.stops, job)
    crc = np.zeros((count, 0), np.uint32)
    if kinds == 2:
        crc = table.member_crc[first[:, None] + [direct.member for direct in fields]]
    return SlotScatter(target, job, crc)
