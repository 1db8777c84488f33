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

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wdstrain.checksum import crc32
from wdstrain.errors import WdstrainError
from wdstrain.fields import Field, NumpyArray
from wdstrain.forward import Reading
from wdstrain.indexing import Index, Ints, Shard
from wdstrain.memory import Memory
from wdstrain.plan import Order, Plan
from wdstrain.remote import is_remote
from wdstrain.slots import Layout, Slots
from wdstrain.storage import LocalFile, open_source

READ_TOGETHER = 32 << 20  # bytes that are begun at a time, for the threads to share
_CHUNK = 4 << 20  # bytes that one thread reads and compares at a time
_LEAST = 4096  # bytes of an array that is worth it
_HANDS = 4  # threads, at most


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
        self._heads: dict[tuple[int, bytes], bool] = {}
        self._hands: ThreadPoolExecutor | None = None
        self._todo: set[Future[None]] = set()
        self._scratch = memoryview(bytearray(_CHUNK))

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

    def read(self, shard: Shard, samples: Placed, arena: Memory, told: Callable[[], None]) -> Reading:
        """Begin to read samples that follow one another in a shard. told: called, from any thread, when all are there."""
        if self._hands is None:
            count = min(_HANDS, os.cpu_count() or 1)
            self._hands = ThreadPoolExecutor(count, "wdstrain-land")
        mean = max(1, int(samples.stops[-1] - samples.starts[0]) // len(samples.ids))
        each = max(1, _CHUNK // mean)
        parts = [Placed(*(column[at : at + each] for column in samples)) for at in range(0, len(samples.ids), each)]
        reading, lock = Reading(missing=len(parts)), threading.Lock()
        try:
            source = LocalFile(shard.path, self._index.state(shard))
        except WdstrainError as error:
            reading.missing = 0
            if self._salvage:
                self._lose(samples, range(len(samples.ids)), error)
            else:
                reading.error = error
            return reading
        self._open.add(source)

        def work(part: Placed) -> None:
            error: WdstrainError | None = None
            try:
                self._read(source, part, arena)
            except WdstrainError as problem:
                error = problem
            except BaseException as problem:  # handed to the reader, which raises it
                error = WdstrainError(f"{shard.shown}: reading failed ({type(problem).__name__}: {problem}).")
            with lock:
                reading.error = reading.error or error
                reading.missing -= 1
                last = not reading.missing
            if last:
                self._open.discard(source)
                source.close()
                told()

        for part in parts:
            future = self._hands.submit(work, part)
            self._todo.add(future)
            future.add_done_callback(self._todo.discard)
        return reading

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

    def _read(self, source: LocalFile, part: Placed, arena: Memory) -> None:
        table, count = self._index.table, 2 * len(self._what) + 1
        pieces: list[memoryview] = [self._scratch[:0]] * (count * len(part.ids))
        upto = part.offsets  # in the arena, and in the shard: what is placed so far
        at = part.starts
        heads: list[list[memoryview]] = []
        rows: list[list[memoryview]] = []
        for k, one in enumerate(self._what):
            numbers = table.member_offset[table.member_first[part.ids] + one.member] + one.head
            ends = upto + numbers - at
            pieces[2 * k :: count] = _views(arena.view, upto, ends)
            heads.append(_views(arena.view, ends - one.head, ends))
            homes = part.homes + one.column + part.rows * one.row
            rows.append(_views(self._slots.memory.view, homes, homes + one.row))
            pieces[2 * k + 1 :: count] = rows[-1]
            upto, at = ends, numbers + one.row
        pieces[count - 1 :: count] = _views(arena.view, upto, upto + part.stops - at)
        try:
            self._all(source, pieces, count, part)
            whole = list(range(len(part.ids)))
        except WdstrainError:
            if not self._salvage:
                raise
            whole = [i for i in range(len(part.ids)) if self._single(source, pieces[i * count : (i + 1) * count], part, i)]
        self._compare(part, whole, heads, rows)

    def _all(self, source: LocalFile, pieces: list[memoryview], count: int, part: Placed) -> None:
        """Read all samples at once, and what is between them for nobody."""
        pieces = pieces.copy()
        gaps = part.starts[1:] - part.stops[:-1]  # members that are no samples, or samples this resume does not need
        for i in np.flatnonzero(gaps)[::-1].tolist():
            skipped = range(0, int(gaps[i]), _CHUNK)
            pieces[(i + 1) * count : (i + 1) * count] = [self._scratch[: min(_CHUNK, int(gaps[i]) - at)] for at in skipped]
        source.read_into(pieces, int(part.starts[0]))

    def _single(self, source: LocalFile, pieces: list[memoryview], part: Placed, i: int) -> bool:
        try:
            source.read_into(pieces, int(part.starts[i]))
            return True
        except WdstrainError as error:
            self._lose(part, [i], error)
            return False

    def _lose(self, part: Placed, which: Iterable[int], error: WdstrainError) -> None:
        for i in which:
            self._lost[int(part.homes[i]), int(part.rows[i])] = f"it cannot be read ({str(error).rstrip('.')})"

    def _compare(self, part: Placed, whole: list[int], heads: list[list[memoryview]], rows: list[list[memoryview]]) -> None:
        """What is not as its index and its field say is odd."""
        table = self._index.table
        for one, of_heads, of_rows in zip(self._what, heads, rows, strict=True):
            crcs = table.member_crc[table.member_first[part.ids] + one.member].tolist() if len(table.member_crc) else None
            for i in whole:
                head = bytes(of_heads[i])
                known = self._heads.get((one.member, head))
                if known is None:
                    known = self._heads[one.member, head] = one.field.lies_as(head)
                if not known or (crcs is not None and crc32(of_rows[i], crc32(head)) != crcs[i]):
                    self._odd.add((int(part.homes[i]), int(part.rows[i])))


def _views(memory: memoryview, starts: Ints, ends: Ints) -> list[memoryview]:
    return [memory[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
