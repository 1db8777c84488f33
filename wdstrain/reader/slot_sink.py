"""Arrays of one shape are read straight to where they lie in their batch.

The plan knows the batch and the row of a sample before it is read, so a scattering read puts an array's bytes there, and nothing
copies them again; what is around them in the shard (headers, other fields) goes to the arena as ever. A batch's slot is taken when the
first of its samples is read, so slots are held for a window instead of arena. Reads of some megabytes are done by a few hands
(`hands`), which take checksums as they go; what these say is looked at in the thread that tells. What is left to the loop's own
thread is a quarter of what it takes to copy arrays from the arena, and all together two thirds.

It is done where every sample has the same fields in the same order and what lands is of one size, on a disk here, with
tail="drop"; elsewhere arrays go through the arena. An array that is not as its index and field say, or laid down otherwise (another
byte order, the first axis fastest), is odd: it is read once more when its batch is asked for, by its field, as everywhere.
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
from wdstrain.shards.index import Index, Ints, Shard
from wdstrain.storage.io_pool import IOThreadPool
from wdstrain.storage.local import LocalFile, open_source
from wdstrain.storage.prefetch import PendingRead, ReadStopped
from wdstrain.storage.remote import is_remote

READ_TOGETHER = 32 << 20  # bytes of one read
_SCRATCH = 4 << 20  # bytes for what nobody wants
_LEAST = 4096  # bytes of an array that is worth it
_HANDS = 4  # threads, at most
_OPEN = 64  # files that are open at a time, about


def direct_fields(index: Index, fields: Mapping[str, Field] | None, layout: Layout, plan: Order) -> dict[str, DirectField]:
    """The fields of a loader whose arrays can be read straight into their batch, by name, as they follow one another in a sample."""
    if fields is None or not isinstance(plan, Plan) or plan.tail != "drop" or any(is_remote(s.path) for s in index.shards):
        return {}
    table = index.table
    count = int(table.member_first[1] - table.member_first[0])
    if not count or (np.diff(table.member_first) != count).any():
        return {}
    kinds = table.member_field.reshape(-1, count)
    if (kinds != kinds[0]).any():
        return {}
    sizes, made = table.member_size.reshape(-1, count), dict[str, DirectField]()
    for name, field in fields.items():
        present = [one for one in field.names if one in index.fields]
        if type(field) is not NumpyArray or field.example is None or len(present) != 1:
            continue
        members = np.flatnonzero(kinds[0] == index.fields.index(present[0])).tolist()
        row = int(np.prod(field.example.shape, dtype=np.int64)) * np.dtype(field.example.dtype).itemsize
        if len(members) != 1 or row < _LEAST or (sizes[:, members[0]] != sizes[0, members[0]]).any():
            continue
        head = int(sizes[0, members[0]]) - row
        shared = any(present[0] in other.names for key, other in fields.items() if key != name)
        if head > 0 and not shared:  # what another field reads has to be in the arena
            made[name] = DirectField(field, present[0], members[0], head, row, layout.columns[name][1])
    # slots are held for a window: with a large column that does not land, that would be much memory for little
    if 2 * layout.rows * sum(one.row for one in made.values()) < layout.size or not _lie_alike(index, list(made.values())):
        return {}
    return dict(sorted(made.items(), key=lambda item: item[1].member))


def _lie_alike(index: Index, what: list[DirectField]) -> bool:
    """Whether the arrays of the first sample lie as they are wanted: where they do not, those of the others will not either."""
    table = index.table
    try:
        with LocalFile(index.shards[0].path) as source:
            for one in what:
                head = bytearray(one.head)
                source.read_into([memoryview(head)], int(table.member_offset[one.member]))
                if not one.field.lies_as(bytes(head)):
                    return False
    except WdstrainError:  # the reader will meet it too, and tells it or goes round it
        return False
    return True


class Placed(NamedTuple):
    """Samples that are read together. offsets: in the arena; homes: where their slots begin. int64[n]"""

    samples: SlotScatter
    offsets: Ints
    homes: Ints

    def part(self, start: int, stop: int) -> Placed:
        return Placed(self.samples.part(slice(start, stop)), self.offsets[start:stop], self.homes[start:stop])


class _Taken(dict[int, int]):
    """batch number -> slot, which is taken when it is first asked for."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def __missing__(self, batch_number: int) -> int:
        slot = self[batch_number] = self._slots.take()
        return slot


class SlotSink:
    """Reads samples whose arrays land, by threads of its own."""

    def __init__(self, index: Index, what: Iterable[DirectField], slots: Slots, salvage: bool) -> None:
        self._index, self._what, self._slots, self._salvage = index, list(what), slots, salvage
        self.bytes = sum(one.row for one in self._what)  # of a sample, that are not in the arena
        # of a sample's members, by their place: bytes that lie before them in the shard and not in the arena. int64[members]
        count = int(index.table.member_first[1])
        self.before = sum((np.arange(count) > one.member) * one.row for one in self._what) + np.zeros(count, np.int64)
        # by home and row, until their batch is asked for; the threads add to them
        self._odd: set[tuple[int, int]] = set()
        self._lost: dict[tuple[int, int], str] = {}
        self._open: set[LocalFile] = set()
        self._slot_at = _Taken(slots)
        self._heads: dict[int, int] = {}  # by member: crc32 of a head that says that the array lies as it should, seen last
        self._hands = IOThreadPool(min(_HANDS, cores()))
        self._scratch = Memory(_SCRATCH)

    def homes(self, clocks: Ints) -> Ints:
        """Where the slots of these batches begin, in bytes. The reader's lock is held."""
        slots = np.array(list(map(self._slot_at.__getitem__, clocks.tolist())), np.int64)
        return slots * self._slots.layout.size

    def spread(self, plan: Order, rank: int, lane: int, start: int, ids: Ints) -> SlotScatter:
        """Where the samples in the places of a lane of this rank from `start` on go. ids: int64[n]"""
        assert isinstance(plan, Plan)
        rows = (
            plan.positions(lane, start, start + len(ids)) % plan.samples_per_step_per_lane
            + plan.lanes_of(rank).index(lane) * plan.samples_per_step_per_lane
        )
        return SlotScatter.of_samples(self._index.table, self._what, ids, rows)

    def slot(self, batch_number: int, ids: Ints) -> tuple[int, dict[int, str], int]:
        """A batch of these samples that is read: its slot, the caller's now, why samples in some rows are lost, how many were odd."""
        slot = self._slot_at.get(batch_number, -1)
        unreadable, count = dict[int, str](), 0
        if self._odd or self._lost:
            home = slot * self._slots.layout.size
            for row, number in enumerate(ids.tolist()):
                why = self._lost.pop((home, row), None)
                if why is None and (home, row) in self._odd:
                    self._odd.discard((home, row))
                    why = self.again(number, row, slot)
                    count += 1
                if why is not None:
                    unreadable[row] = why
        # last: another thread may have ended the reading since the batch was there, and what was known of it is gone after that
        if self._slot_at.pop(batch_number, None) is None:
            raise ReadStopped
        return slot, unreadable, count

    def places(self, placed: Placed, arena: Memory) -> tuple[ScatterList, ChecksumJob]:
        """Where their bytes go, and the sums that are compared."""
        return placed.samples.places(placed.offsets, placed.homes, (arena, self._slots.memory, self._scratch))

    def read(
        self,
        shard: Shard,
        placed: Placed,
        clocks: Ints,
        places: ScatterList,
        sums: ChecksumJob,
        arena: Memory,
        told: Callable[[], None],
    ) -> PendingRead:
        """Begin to read samples that follow one another in a shard. clocks: when they are due, int64[n].

        told: called, from any thread, when they are there.
        """
        try:
            source = LocalFile(shard.path, self._index.expected_state(shard))
        except WdstrainError as error:
            if self._salvage:
                self._lose(placed, error)
            return PendingRead(error=None if self._salvage else error)
        reading = PendingRead(missing=1)

        def done() -> None:
            try:
                try:
                    self._read(source, placed, places, sums)
                except WdstrainError:
                    reading.again = len(clocks)
                    self._read_singly(reading, source, placed, clocks, arena)
            except BaseException as problem:  # handed to the reader, which raises it
                reading.error = WdstrainError(f"{shard.shown}: reading failed ({type(problem).__name__}: {problem}).")
            finally:
                self._open.discard(source)
                with suppress(OSError):  # of a network's file system; all was read
                    source.close()
                reading.missing = 0
                told()

        self._open.add(source)
        if len(self._open) > _OPEN:  # small shards: this thread reads too, and opens no more meanwhile
            done()
        else:
            source.fill(self._hands, places, int(placed.samples.starts[0]), done)
        return reading

    def stop(self) -> None:
        """Wait for what is being read, forget what is not begun. No place is written to after that."""
        self._hands.stop()
        while self._open:  # of what was not begun any more
            self._open.pop().close()
        self._slot_at.clear()
        self._odd.clear()
        self._lost.clear()

    def again(self, number: int, row: int, slot: int) -> str | None:
        """Read an odd sample once more and let its fields read it, into this row. What is wrong with it, if that is no help."""
        table, shard = self._index.table, self._index.shards[int(self._index.shard_of(np.array([number]))[0])]
        start = int(table.start[number])
        memory = memoryview(bytearray(int(table.stop[number]) - start))
        try:
            with open_source(shard.path, shard.bytes, self._index.expected_state(shard)) as source:
                source.read_into([memory], start)
        except WdstrainError as error:
            return f"it cannot be read ({str(error).rstrip('.')})"
        columns = self._slots.layout.arrays(self._slots.memory.view, slot * self._slots.layout.size, self._slots.layout.rows)
        by_offset = {offset: name for name, (_, offset) in self._slots.layout.columns.items()}
        for one in self._what:
            member = int(table.member_first[number]) + one.member
            at = int(table.member_offset[member]) - start
            data = memory[at : at + one.head + one.row]
            crc = int(table.member_crc[member]) if len(table.member_crc) else 0
            if crc and crc32(data) != crc:
                return f"the bytes of {one.found} are not those that were packed (crc32), also when they are read again"
            try:
                one.field.read(one.found, data, columns[by_offset[one.column]][row, ...], np.zeros(0))
            except Exception as error:  # as in the decoder: a reason, not a crash
                return f"{one.found}: {error}"
        return None

    def around(self, number: int, into: memoryview) -> list[memoryview]:
        """Where the bytes of a sample go when only what is in the arena is wanted, into a place for that."""
        table, pieces, at = self._index.table, list[memoryview](), int(self._index.table.start[number])
        for one in self._what:
            numbers = int(table.member_offset[int(table.member_first[number]) + one.member]) + one.head
            pieces += [into[: numbers - at], memoryview(bytearray(one.row))]
            into, at = into[numbers - at :], numbers + one.row
        return [*pieces, into]

    # --- the thread that tells what the hands did ----------------------------------------------------------------------

    def _read(self, source: LocalFile, placed: Placed, places: ScatterList, sums: ChecksumJob) -> None:
        """Read what the hands left, and compare all of it."""
        source.read_into(places, int(placed.samples.starts[0]) + places.filled)
        self._compare(placed, sums)

    def _read_singly(self, reading: PendingRead, source: LocalFile, placed: Placed, clocks: Ints, arena: Memory) -> None:
        """Read samples of a damaged shard one by one. Those that fail are lost, or the first of them that is due is an error."""
        for i in np.argsort(clocks, kind="stable").tolist():
            single = placed.part(i, i + 1)
            try:
                self._read(source, single, *self.places(single, arena))
            except WdstrainError as error:
                if not self._salvage:
                    reading.failed[i] = error
                    return
                self._lose(single, error)

    def _lose(self, placed: Placed, error: WdstrainError) -> None:
        for home, row in zip(placed.homes.tolist(), placed.samples.rows.tolist(), strict=True):
            self._lost[home, row] = f"it cannot be read ({str(error).rstrip('.')})"

    def _compare(self, placed: Placed, sums: ChecksumJob) -> None:
        """What is not as its index and its field say is odd."""
        samples, found = placed.samples, sums.checksums.reshape(len(placed.homes), len(self._what), -1)
        for k, one in enumerate(self._what):
            head = found[:, k, 0]
            odd = head != self._heads.get(one.member, -1)
            for i in np.flatnonzero(odd).tolist():
                if one.field.lies_as(bytes(sums.run((i * len(self._what) + k) * found.shape[2]))):
                    self._heads[one.member], odd[i] = int(head[i]), False
            if samples.crc.size:
                odd |= (found[:, k, 1] != samples.crc[:, k]) & (samples.crc[:, k] != 0)
            for i in np.flatnonzero(odd).tolist():
                self._odd.add((int(placed.homes[i]), int(samples.rows[i])))
