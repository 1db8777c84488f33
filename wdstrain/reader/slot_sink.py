"""Arrays of one shape, read straight into the memory of their batch.

The plan gives the batch and the row of a sample before it is read. A scatter read therefore puts an
array into its batch slot, without a copy; the bytes around it (headers, other fields) go to the
arena. The slot of a batch is taken when its first sample is read, so slots are held for a whole
shuffle window. The reads run on a small I/O thread pool, which also computes checksums.

Conditions: local shards, tail="drop", the same fields in the same order in every sample, and one
size for all arrays of the field. Otherwise arrays go through the arena.

An array is a suspect if its checksum or header differs from the index and the field, for example in
byte order or axis order. Its sample is read again, and decoded by its field, when its batch is
requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from wdstrain.decode.batch_slots import Layout, Slots
from wdstrain.decode.fields import Field, NumpyArray
from wdstrain.errors import WdstrainError
from wdstrain.memory.scatter import ChecksumJob, ScatterList
from wdstrain.memory.shared import Memory
from wdstrain.native.checksum import crc32
from wdstrain.order.plan import Order, Plan
from wdstrain.reader.slot_scatter import DirectField, SlotScatter
from wdstrain.runtime.machine import cores
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.offsets import Ints
from wdstrain.storage.io_pool import IOThreadPool
from wdstrain.storage.local import LocalFile, open_source
from wdstrain.storage.prefetch import PendingRead, ReadStopped
from wdstrain.storage.remote import is_remote

READ_TOGETHER = 32 << 20  # most bytes of one read
_SCRATCH = 4 << 20  # bytes of memory for discarded gaps between samples
_LEAST = 4096  # bytes; copying a smaller array is cheaper than a segment of its own
_THREADS = 4  # most threads of the I/O pool
_OPEN_FILES = 64  # approximate limit of files that are open at a time


def direct_fields(
    index: Index, fields: Mapping[str, Field] | None, layout: Layout, plan: Order
) -> dict[str, DirectField]:
    """Return the fields whose arrays can be read straight into the batch, by name.

    They are in the order of their members in a sample. {} if a condition of this module fails.
    """
    if fields is None or not isinstance(plan, Plan) or plan.tail != "drop":
        return {}
    if any(is_remote(shard.path) for shard in index.shards):
        return {}
    table = index.offsets
    count = int(table.member_first[1] - table.member_first[0])
    if not count or (np.diff(table.member_first) != count).any():
        return {}
    kinds = table.member_field.reshape(-1, count)
    if (kinds != kinds[0]).any():
        return {}
    sizes, direct = table.member_size.reshape(-1, count), dict[str, DirectField]()
    for name, field in fields.items():
        present = [field_name for field_name in field.names if field_name in index.fields]
        if type(field) is not NumpyArray or field.example is None or len(present) != 1:
            continue
        members = np.flatnonzero(kinds[0] == index.fields.index(present[0])).tolist()
        row = (
            int(np.prod(field.example.shape, dtype=np.int64))
            * np.dtype(field.example.dtype).itemsize
        )
        if (
            len(members) != 1
            or row < _LEAST
            or (sizes[:, members[0]] != sizes[0, members[0]]).any()
        ):
            continue
        head = int(sizes[0, members[0]]) - row
        shared = any(present[0] in other.names for key, other in fields.items() if key != name)
        if head > 0 and not shared:  # bytes that another field reads must be in the arena
            direct[name] = DirectField(
                field, present[0], members[0], head, row, layout.columns[name][1]
            )
    # Slots are held for a window, so the direct columns must be at least half of a slot. Otherwise
    # the other columns would take much memory for little gain.
    if 2 * layout.rows * sum(field.row for field in direct.values()) < layout.size:
        return {}
    if not _first_sample_fits(index, list(direct.values())):
        return {}
    return dict(sorted(direct.items(), key=lambda item: item[1].member))


def _first_sample_fits(index: Index, fields: list[DirectField]) -> bool:
    """Return whether the arrays of the first sample have the byte and axis order of their fields.

    If they do not, the arrays of the other samples will not either.
    """
    table = index.offsets
    try:
        with LocalFile(index.shards[0].path) as source:
            for direct in fields:
                head = bytearray(direct.head)
                source.read_into([memoryview(head)], int(table.member_offset[direct.member]))
                if not direct.field.has_plain_layout(bytes(head)):
                    return False
    except WdstrainError:  # the reader meets the same error and raises or skips it
        return False
    return True


class Placed(NamedTuple):
    """Samples of one read.

    offsets: of their places in the arena. slot_offsets: of their slots. int64[n] each.
    """

    samples: SlotScatter
    offsets: Ints
    slot_offsets: Ints

    def part(self, start: int, stop: int) -> Placed:
        """Return the samples [start, stop) of the read."""
        return Placed(
            self.samples.part(slice(start, stop)),
            self.offsets[start:stop],
            self.slot_offsets[start:stop],
        )


class _SlotByBatch(dict[int, int]):
    """Slot of each batch number. A missing slot is taken from the pool."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def __missing__(self, batch_number: int) -> int:
        slot = self[batch_number] = self._slots.take()
        return slot


class SlotSink:
    """Reader of samples with arrays that go straight into batches. It has its own threads.

    bytes: bytes of a sample that are not in the arena.
    before: for each member of a sample, the bytes before it that are not in the arena.
    int64[members]
    """

    def __init__(
        self, index: Index, fields: Iterable[DirectField], slots: Slots, skip_unreadable: bool
    ) -> None:
        """skip_unreadable: record samples that cannot be read instead of raising an error."""
        self._index, self._fields, self._slots = index, list(fields), slots
        self._skip_unreadable = skip_unreadable
        self.bytes = sum(direct.row for direct in self._fields)
        members = np.arange(int(index.offsets.member_first[1]))
        self.before = np.zeros(len(members), np.int64)
        for direct in self._fields:
            self.before += (members > direct.member) * direct.row
        # By (offset of the slot, row), until the batch is requested. The I/O threads add to them.
        self._suspects: set[tuple[int, int]] = set()
        self._unreadable: dict[tuple[int, int], str] = {}
        self._open: set[LocalFile] = set()
        self._slot_by_batch = _SlotByBatch(slots)
        self._heads: dict[int, int] = {}  # by member: crc32 of the last .npy header that was right
        self._io_pool = IOThreadPool(min(_THREADS, cores()))
        self._scratch = Memory(_SCRATCH)

    def slot_offsets(self, batch_numbers: Ints) -> Ints:
        """Return the offsets of the slots of these batches, in bytes. int64[n]

        Slots that the batches do not have yet are taken. The caller holds the reader's lock.
        """
        slots = np.array(
            [self._slot_by_batch[number] for number in batch_numbers.tolist()], np.int64
        )
        return slots * self._slots.layout.size

    def scatter(self, plan: Order, rank: int, lane: int, start: int, ids: Ints) -> SlotScatter:
        """Return the destinations of the samples in places `start` and up of a lane.

        ids: of these samples, int64[n].
        """
        assert isinstance(plan, Plan)
        rows = (
            plan.positions(lane, start, start + len(ids)) % plan.samples_per_step_per_lane
            + plan.lanes_of(rank).index(lane) * plan.samples_per_step_per_lane
        )
        return SlotScatter.of_samples(self._index.offsets, self._fields, ids, rows)

    def slot(self, batch_number: int, ids: Ints) -> tuple[int, dict[int, str], int]:
        """Return (slot, reasons, suspects) of a batch that was read. The caller owns the slot.

        ids: of its samples, int64[rows]. reasons: by row, why a sample is unreadable. suspects: how
        many samples were read again. Raises ReadStopped if the reader was stopped.
        """
        slot = self._slot_by_batch.get(batch_number, -1)
        unreadable, count = dict[int, str](), 0
        if self._suspects or self._unreadable:
            slot_offset = slot * self._slots.layout.size
            for row, number in enumerate(ids.tolist()):
                reason = self._unreadable.pop((slot_offset, row), None)
                if reason is None and (slot_offset, row) in self._suspects:
                    self._suspects.discard((slot_offset, row))
                    reason = self.reread(number, row, slot)
                    count += 1
                if reason is not None:
                    unreadable[row] = reason
        # Last: `stop` in another thread may have cleared everything since this method began.
        if self._slot_by_batch.pop(batch_number, None) is None:
            raise ReadStopped
        return slot, unreadable, count

    def places(self, placed: Placed, arena: Memory) -> tuple[ScatterList, ChecksumJob]:
        """Return the scatter list of a read and the job that computes its checksums."""
        return placed.samples.places(
            placed.offsets, placed.slot_offsets, (arena, self._slots.memory, self._scratch)
        )

    def read(
        self,
        shard: Shard,
        placed: Placed,
        batch_numbers: Ints,
        places: ScatterList,
        sums: ChecksumJob,
        arena: Memory,
        on_done: Callable[[], None],
    ) -> PendingRead:
        """Start to read samples that follow one another in a shard; return the pending read.

        places, sums: from `places`. batch_numbers: batch numbers of the samples, int64[n].
        on_done: called, from any thread, when the read is done.
        """
        try:
            source = LocalFile(shard.path, self._index.expected_state(shard))
        except WdstrainError as error:
            if self._skip_unreadable:
                self._record_unreadable(placed, error)
            return PendingRead(error=None if self._skip_unreadable else error)
        reading = PendingRead(missing=1)

        def done() -> None:
            try:
                try:
                    self._read(source, placed, places, sums)
                except WdstrainError:
                    reading.retries = len(batch_numbers)
                    self._read_singly(reading, source, placed, batch_numbers, arena)
            except BaseException as problem:  # the reader raises it
                reason = f"{type(problem).__name__}: {problem}"
                reading.error = WdstrainError(f"{shard.shown}: reading failed ({reason}).")
            finally:
                self._open.discard(source)
                with suppress(OSError):  # a network file system may fail here; all bytes were read
                    source.close()
                reading.missing = 0
                on_done()

        self._open.add(source)
        if len(self._open) > _OPEN_FILES:
            # Small shards: read in this thread, so that no further file is opened meanwhile.
            done()
        else:
            source.start_read(self._io_pool, places, int(placed.samples.starts[0]), done)
        return reading

    def stop(self) -> None:
        """Wait for running reads and drop the others. Nothing is written to memory afterwards."""
        self._io_pool.stop()
        while self._open:  # files of dropped reads
            self._open.pop().close()
        self._slot_by_batch.clear()
        self._suspects.clear()
        self._unreadable.clear()

    def reread(self, number: int, row: int, slot: int) -> str | None:
        """Read sample `number` again and let its fields decode its arrays into a row of a slot.

        Returns None, or the reason why the sample is unreadable.
        """
        table, shard = (
            self._index.offsets,
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
        table = self._index.offsets
        pieces, offset = list[memoryview](), int(table.start[number])
        for direct in self._fields:
            member = int(table.member_first[number]) + direct.member
            numbers = int(table.member_offset[member]) + direct.head
            pieces += [target[: numbers - offset], memoryview(bytearray(direct.row))]
            target, offset = target[numbers - offset :], numbers + direct.row
        return [*pieces, target]

    # --- in the thread that completes a read ------------------------------------------------------

    def _read(
        self, source: LocalFile, placed: Placed, places: ScatterList, sums: ChecksumJob
    ) -> None:
        """Read the bytes that the pool has not read, and verify all samples of the read."""
        source.read_into(places, int(placed.samples.starts[0]) + places.filled)
        self._compare(placed, sums)

    def _read_singly(
        self,
        reading: PendingRead,
        source: LocalFile,
        placed: Placed,
        batch_numbers: Ints,
        arena: Memory,
    ) -> None:
        """Read samples of a damaged shard one by one, in the order of their batches.

        Samples that fail are recorded as unreadable, or the first one fails the read.
        """
        for i in np.argsort(batch_numbers, kind="stable").tolist():
            single = placed.part(i, i + 1)
            try:
                self._read(source, single, *self.places(single, arena))
            except WdstrainError as error:
                if not self._skip_unreadable:
                    reading.failed[i] = error
                    return
                self._record_unreadable(single, error)

    def _record_unreadable(self, placed: Placed, error: WdstrainError) -> None:
        """Record the samples of a read as unreadable."""
        rows = zip(placed.slot_offsets.tolist(), placed.samples.rows.tolist(), strict=True)
        for slot_offset, row in rows:
            self._unreadable[slot_offset, row] = f"it cannot be read ({str(error).rstrip('.')})"

    def _compare(self, placed: Placed, sums: ChecksumJob) -> None:
        """Record samples as suspects whose array headers or checksums are not as expected."""
        samples = placed.samples
        checksums = sums.checksums.reshape(len(placed.slot_offsets), len(self._fields), -1)
        for k, direct in enumerate(self._fields):
            head = checksums[:, k, 0]
            is_suspect = head != self._heads.get(direct.member, -1)
            for i in np.flatnonzero(is_suspect).tolist():
                run = (i * len(self._fields) + k) * checksums.shape[2]
                if direct.field.has_plain_layout(bytes(sums.run(run))):
                    self._heads[direct.member], is_suspect[i] = int(head[i]), False
            if samples.crc.size:
                is_suspect |= (checksums[:, k, 1] != samples.crc[:, k]) & (samples.crc[:, k] != 0)
            for i in np.flatnonzero(is_suspect).tolist():
                self._suspects.add((int(placed.slot_offsets[i]), int(samples.rows[i])))
