"""Arrays of one shape are read straight to where they lie in their batch.

The plan knows the batch and the row of a sample before it is read, so a scattering read puts an array's bytes there, and nothing
copies them again; what is around them in the shard (headers, other fields) goes to the arena as ever. A batch's slot is taken when the
first of its samples is read, so slots are held for a window instead of arena. Reads of some megabytes are shared by a few threads,
each of which compares what it read with the index. What is left to the loop's own thread is a quarter of what it takes to copy
arrays from the arena, and all together two thirds.

It is done where every sample has the same fields in the same order and what lands is of one size, on a disk here, with
tail="drop"; elsewhere arrays go through the arena. An array that is not as its index and field say, or laid down otherwise (another
byte order, the first axis fastest), is odd: it is read once more when its batch is asked for, by its field, as everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wdstrain.bulk import ALONE, JOINED, UNCHECKED, Places, of_samples
from wdstrain.checksum import crc32
from wdstrain.errors import WdstrainError
from wdstrain.fields import Field, NumpyArray
from wdstrain.forward import Reading
from wdstrain.indexing import Index, Ints, Shard
from wdstrain.machine import cores
from wdstrain.memory import Memory
from wdstrain.plan import Order, Plan
from wdstrain.remote import is_remote
from wdstrain.slots import Layout, Slots
from wdstrain.storage import LocalFile, open_source

READ_TOGETHER = 32 << 20  # bytes that are begun at a time, for the threads to share
_SCRATCH = 4 << 20  # bytes for what nobody wants
_LEAST = 4096  # bytes of an array that is worth it
_HANDS = 4  # threads, at most
_RUNS = 3  # of an array: what is before it, its head, and its numbers


@dataclass(frozen=True)
class Landed:
    """A field whose arrays land. member: its place among a sample's; head: bytes before the numbers; row: bytes of the numbers."""

    field: NumpyArray
    found: str
    member: int
    head: int
    row: int
    column: int  # where its column begins in a slot


def landed(index: Index, fields: Mapping[str, Field] | None, layout: Layout, plan: Order) -> dict[str, Landed]:
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
    sizes, made = table.member_size.reshape(-1, count), dict[str, Landed]()
    for name, field in fields.items():
        present = [one for one in field.names if one in index.fields]
        if not isinstance(field, NumpyArray) or field.example is None or len(present) != 1:
            continue
        members = np.flatnonzero(kinds[0] == index.fields.index(present[0])).tolist()
        row = int(np.prod(field.example.shape, dtype=np.int64)) * np.dtype(field.example.dtype).itemsize
        if len(members) != 1 or row < _LEAST or (sizes[:, members[0]] != sizes[0, members[0]]).any():
            continue
        head = int(sizes[0, members[0]]) - row
        shared = any(present[0] in other.names for key, other in fields.items() if key != name)
        if head > 0 and not shared:  # what another field reads has to be in the arena
            made[name] = Landed(field, present[0], members[0], head, row, layout.columns[name][1])
    # slots are held for a window: with a large column that does not land, that would be much memory for little
    if 2 * layout.rows * sum(one.row for one in made.values()) < layout.size or not _lie_so(index, list(made.values())):
        return {}
    return dict(sorted(made.items(), key=lambda item: item[1].member))


def _lie_so(index: Index, what: list[Landed]) -> bool:
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
    """Samples that are read together. ids, starts, stops (in the shard), offsets (in the arena), homes (of their slot), rows: int64[n]"""

    ids: Ints
    starts: Ints
    stops: Ints
    offsets: Ints
    homes: Ints
    rows: Ints


class Landing:
    """Reads samples whose arrays land, by threads of its own."""

    def __init__(self, index: Index, what: Iterable[Landed], slots: Slots, salvage: bool) -> None:
        self._index, self._what, self._slots, self._salvage = index, list(what), slots, salvage
        self.bytes = sum(one.row for one in self._what)  # of a sample, that are not in the arena
        # of a sample's members, by their place: bytes that lie before them in the shard and not in the arena. int64[members]
        count = int(index.table.member_first[1])
        self.before = sum((np.arange(count) > one.member) * one.row for one in self._what) + np.zeros(count, np.int64)
        # by home and row, until their batch is asked for; the threads add to them
        self._odd: set[tuple[int, int]] = set()
        self._lost: dict[tuple[int, int], str] = {}
        self._open: set[LocalFile] = set()
        self._slot_at: dict[int, int] = {}  # clock -> slot
        self._heads: dict[int, int] = {}  # by member: crc32 of a head that says that the array lies as it should, seen last
        self._hands: ThreadPoolExecutor | None = None
        self._todo: set[Future[None]] = set()
        self._count = min(_HANDS, cores())
        self._scratch = Memory(_SCRATCH)

    def homes(self, clocks: Ints) -> Ints:
        """Where the slots of these batches begin, in bytes. The reader's lock is held."""
        numbers, where = np.unique(clocks, return_inverse=True)
        for clock in numbers.tolist():
            if clock not in self._slot_at:
                self._slot_at[clock] = self._slots.take()
        return np.array([self._slot_at[clock] * self._slots.layout.size for clock in numbers.tolist()], np.int64)[where]

    def rows(self, plan: Order, rank: int, lane: int, start: int, stop: int) -> Ints:
        """The rows of their batches in which the places [start, stop) of a lane of this rank are. int64[stop - start]"""
        assert isinstance(plan, Plan)
        return plan.positions(lane, start, stop) % plan.quota + plan.lanes_of(rank).index(lane) * plan.quota

    def slot(self, clock: int, ids: Ints) -> tuple[int, dict[int, str], int]:
        """A batch of these samples that is read: its slot, the caller's now, why samples in some rows are lost, how many were odd."""
        slot = self._slot_at.pop(clock)
        lost, count = dict[int, str](), 0
        if self._odd or self._lost:
            home = slot * self._slots.layout.size
            for row, number in enumerate(ids.tolist()):
                why = self._lost.pop((home, row), None)
                if why is None and (home, row) in self._odd:
                    self._odd.discard((home, row))
                    why = self.again(number, row, slot)
                    count += 1
                if why is not None:
                    lost[row] = why
        return slot, lost, count

    def read(self, shard: Shard, samples: Placed, arena: Memory, told: Callable[[], None]) -> list[tuple[Reading, int]]:
        """Begin to read samples that follow one another in a shard: parts of them, and how many samples each has.

        told: called, from any thread, when a part is there.
        """
        hands = self._hands
        if hands is None:
            hands = self._hands = ThreadPoolExecutor(self._count, "wdstrain-land")
        count = len(samples.ids)
        try:
            source = LocalFile(shard.path, self._index.state(shard))
        except WdstrainError as error:
            if self._salvage:
                self._lose(samples, range(count), error)
            return [(Reading(error=None if self._salvage else error), count)]
        self._open.add(source)
        places, firsts = self._places(samples, arena)
        bounds = np.linspace(0, count, min(self._count, count) + 1).astype(int).tolist()
        readings, left, lock = [Reading(missing=1) for _ in bounds[1:]], [len(bounds) - 1], threading.Lock()

        def work(reading: Reading, start: int, stop: int) -> None:
            try:
                self._read(source, places, firsts[start:stop], Placed(*(column[start:stop] for column in samples)))
            except WdstrainError as problem:
                reading.error = problem
            except BaseException as problem:  # handed to the reader, which raises it
                reading.error = WdstrainError(f"{shard.shown}: reading failed ({type(problem).__name__}: {problem}).")
            with lock:
                left[0] -= 1
                last = not left[0]
            if last:
                self._open.discard(source)
                source.close()
            reading.missing = 0
            told()

        for reading, start, stop in zip(readings, bounds, bounds[1:], strict=False):
            future = hands.submit(work, reading, start, stop)
            self._todo.add(future)
            future.add_done_callback(self._todo.discard)
        return list(zip(readings, np.diff(bounds).tolist(), strict=True))

    def _places(self, samples: Placed, arena: Memory) -> tuple[Places, Ints]:
        """Where the bytes of samples go, in `_RUNS` runs for each array and one behind the last; and which is the first of each sample."""
        table, width = self._index.table, _RUNS * len(self._what) + 1
        start, size = np.empty((2, len(samples.ids), width), np.int64)
        upto, at = samples.offsets, samples.starts  # in the arena, and in the shard: what is placed so far
        for k, one in enumerate(self._what):
            row = table.member_offset[table.member_first[samples.ids] + one.member] + one.head
            head = upto + row - at - one.head
            before, of_head, of_row = range(_RUNS * k, _RUNS * k + _RUNS)
            start[:, before], size[:, before] = upto, head - upto
            start[:, of_head], size[:, of_head] = head, one.head
            start[:, of_row], size[:, of_row] = samples.homes + one.column + samples.rows * one.row, one.row
            upto, at = head + one.head, row + one.row
        start[:, -1], size[:, -1] = upto, samples.stops - at
        memories = (arena, self._slots.memory, self._scratch)
        return of_samples(
            memories,
            [0, 0, 1] * len(self._what) + [0],
            start,
            size,
            samples.starts,
            [UNCHECKED, ALONE, JOINED if len(table.member_crc) else UNCHECKED] * len(self._what) + [UNCHECKED],
        )

    def stop(self) -> None:
        """Wait for what is being read, forget what is not begun. No place is written to after that."""
        if self._hands is not None:
            self._hands.shutdown(wait=True, cancel_futures=True)
            self._hands = None
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
            with open_source(shard.path, shard.bytes, self._index.state(shard)) as source:
                source.read_into([memory], start)
        except WdstrainError as error:
            return f"it cannot be read ({str(error).rstrip('.')})"
        columns = self._slots.layout.arrays(self._slots.memory.view, slot * self._slots.layout.size, self._slots.layout.rows)
        by_offset = {offset: name for name, (_, offset) in self._slots.layout.columns.items()}
        for one in self._what:
            member = int(table.member_first[number]) + one.member
            at = int(table.member_offset[member]) - start
            data = memory[at : at + one.head + one.row]
            if len(table.member_crc) and crc32(data) != int(table.member_crc[member]):
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

    # --- the threads ---------------------------------------------------------------------------------------------------

    def _read(self, source: LocalFile, places: Places, firsts: Ints, part: Placed) -> None:
        width, whole = _RUNS * len(self._what) + 1, np.arange(len(part.ids))
        mine = places.part(int(firsts[0]), int(firsts[-1]) + width)
        try:
            source.read_into(mine, int(part.starts[0]))
        except WdstrainError:
            if not self._salvage:
                raise
            single = [places.part(first, first + width) for first in firsts.tolist()]
            whole = np.flatnonzero([self._single(source, one, part, i) for i, one in enumerate(single)])
        first, part = firsts[whole] - firsts[0], Placed(*(column[whole] for column in part))
        for k, one in enumerate(self._what):
            self._compare(one, mine, first + _RUNS * k, part)

    def _single(self, source: LocalFile, places: Places, part: Placed, i: int) -> bool:
        try:
            source.read_into(places, int(part.starts[i]))
            return True
        except WdstrainError as error:
            self._lose(part, [i], error)
            return False

    def _lose(self, part: Placed, which: Iterable[int], error: WdstrainError) -> None:
        for i in which:
            self._lost[int(part.homes[i]), int(part.rows[i])] = f"it cannot be read ({str(error).rstrip('.')})"

    def _compare(self, one: Landed, mine: Places, first: Ints, part: Placed) -> None:
        """What is not as its index and its field say is odd. first: of each sample, the first run of the array. int64[n]"""
        table = self._index.table
        head, both = mine.crc[first + 1], mine.crc[first + 2]
        odd = head != self._heads.get(one.member, -1)
        for i in np.flatnonzero(odd).tolist():
            if one.field.lies_as(bytes(mine.run(int(first[i]) + 1))):
                self._heads[one.member], odd[i] = int(head[i]), False
        if len(table.member_crc):
            odd |= both != table.member_crc[table.member_first[part.ids] + one.member]
        for i in np.flatnonzero(odd).tolist():
            self._odd.add((int(part.homes[i]), int(part.rows[i])))
