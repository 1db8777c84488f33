"""One forward reader per rank: it executes the plan, and nothing else decides what is read.

A thread walks the places of its rank's lanes in order, with reads of some MiB that spread each sample straight to where
it will wait (`arena`), and runs ahead of what has been asked for by a bound of its own, into the next epoch too. So the
caller of `collect`, who sits inside the training loop, finds the bytes there. Offsets only grow within a lane; every
byte that is needed is read once; one shard is open per lane. Reads from far away are begun, several at a time, and the lane is
as far as the first of them that is not there yet.

Time is counted in `clock`, the number of batches since `start`: it goes on over the ends of epochs, and a bucket of the
arena is a run of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.arena import Arena
from wdstrain.cache import Cache
from wdstrain.errors import ShardError, WdstrainError
from wdstrain.forward import Fetchers, Forward, Reading, Tally
from wdstrain.indexing import Index, Ints, Shard
from wdstrain.interrupts import Held
from wdstrain.landing import READ_TOGETHER, Landing, Placed
from wdstrain.machine import memory
from wdstrain.memory import Memory
from wdstrain.plan import Order
from wdstrain.remote import is_remote
from wdstrain.storage import open_source
from wdstrain.watching import stack_of

READ_BYTES = 4 << 20  # of one read
READ_SAMPLES = 1024  # samples in one read
_BUCKETS = 16  # slabs of a window leave in so many groups


class Batch(NamedTuple):
    """Where the samples of one batch wait. ids, offset: int64[b], offset in the arena; valid: bool[b], False is padding.

    lost: why the samples in some rows could not be read; their offset means nothing.
    """

    ids: Ints
    offset: Ints
    valid: npt.NDArray[np.bool_]
    lost: dict[int, str]


class _Begun(NamedTuple):
    """Places that are being read. last: the lane ends with them; place: shard and offset at which they begin."""

    reading: Reading
    places: int
    size: int
    last: bool
    place: tuple[Shard, int] | None


@dataclass
class _Run:
    """One lane in one epoch: how far reading was begun, how far it is done, how far it is asked for, where samples were put."""

    plan: Order
    lane: int
    epoch_clock: int  # clock of the epoch's step 0, negative when it was entered in the middle
    first_step: int
    where: Ints  # ring: place -> offset in the arena
    begun: int
    read: int
    forward: Forward
    needed: int = 0
    on_the_way: deque[_Begun] = field(default_factory=deque)
    due: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # of the places from due_start on
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # of the batch that is due, for what lands
    due_start: int = 0
    asked: tuple[Ints, Ints] = field(default_factory=lambda: (np.zeros(0, np.int64), np.zeros(0, np.int64)))
    asked_start: int = 0  # delivery position from which on places and ids are in `asked`


class Reader:
    """Reads the lanes of one rank. `plans(epoch)` gives the plan of an epoch; sizes must not change between epochs."""

    def __init__(
        self,
        index: Index,
        plans: Callable[[int], Order],
        rank: int,
        *,
        ahead: int,
        in_flight: int,
        salvage: bool = False,
        cache: Cache | None = None,
        landing: Landing | None = None,
    ) -> None:
        """ahead: bytes read beyond what was asked for. in_flight: most batches that are collected and not yet released.

        salvage: samples that a disk does not give are lost, and no error. cache: of shards on servers. landing: of arrays that are
        read straight into their batch.
        """
        self._index, self._plans, self._rank = index, plans, rank
        plan, table = plans(0), index.table
        extents = table.stop - table.start - (landing.bytes if landing is not None else 0)
        largest, total = int(np.max(extents)), int(np.sum(extents))
        _check_held(index, int(np.argmax(extents)), largest)
        lanes = len(plan.lanes_of(rank))
        window, self._ahead = reach(index, plan, rank, ahead)
        self._ring = window + self._ahead + 2 * READ_SAMPLES + plan.quota
        self._bucket = max(1, (window + self._ahead) // (plan.quota * _BUCKETS))
        buckets = 2 * _BUCKETS + in_flight // self._bucket + 4
        live = min(self._ring * lanes * largest, 2 * total) + (in_flight + 1) * plan.quota * lanes * largest
        self._arena = Arena(live=live, largest=largest, buckets=buckets)
        self._scratch = memoryview(bytearray(READ_BYTES))
        # the loop's own thread takes the lock itself and waits for news: an interrupt within a Condition would keep it locked
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # for the reader's thread
        self._news: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._runs: dict[int, list[_Run]] = {}
        self._fetchers = Fetchers(cache, Tally(), self._settle_all)
        self._far = any(is_remote(shard.path) for shard in index.shards)
        self._error: WdstrainError | None = None
        self._stopping = False
        self._released = 0
        self._most = READ_BYTES if landing is None else READ_TOGETHER
        self._salvage, self._cache, self._landing = salvage, cache, landing
        self._lost: dict[int, str] = {}  # by id
        self.read_seconds, self.read_bytes, self.tally = 0.0, 0, Tally()
        self.shuffle_seconds = 0.0  # a batch waited until all of the window that it needs was read
        self._asking = False
        self._place: tuple[Shard, int] | None = None  # what is being read

    @property
    def memory(self) -> Memory:
        return self._arena.memory

    def start(self, epoch: int, step: int) -> None:
        """Begin to read from this step on; whatever was read before is forgotten."""
        self.stop()
        self._arena.reset()
        self._runs, self._error, self._stopping, self._released = {}, None, False, 0
        self._fetchers = Fetchers(self._cache, self.tally, self._settle_all)
        with Held():
            self._thread = threading.Thread(target=self._read_epochs, args=(epoch, step), name="wdstrain-reader", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; at most one read is waited for."""
        if self._thread is not None:
            with Held():
                self._fail(WdstrainError("the reader was stopped"))
            self._thread.join()
            self._thread = None
        self._fetchers.stop()
        if self._landing is not None:
            self._landing.stop()

    def close(self) -> None:
        """Stop for good. Its memory then goes with its last user, and does not wait for the collector."""
        self.stop()
        with self._lock:  # what refers back to this: what the threads tell, and the frames of an error that was raised
            self._fetchers = Fetchers(None, self.tally, _nobody)
            self._runs, self._error = {}, WdstrainError("the reader was stopped")

    def collect(self, epoch: int, step: int) -> Batch:
        """The samples of a batch, once they are read. Steps are asked for in order. Raises what the reading raised."""
        self._wait(lambda: epoch in self._runs)
        with self._lock:
            if epoch not in self._runs:
                raise self._error or WdstrainError("it was not read")
            runs = self._runs[epoch]
        plan = runs[0].plan
        spans = [plan.span(run.lane, step) for run in runs]
        asked = [self._asked(run, *span) for run, span in zip(runs, spans, strict=True)]
        places = [of_lane[0] for of_lane in asked]
        with self._lock:
            for run, wanted in zip(runs, places, strict=True):
                run.needed = max(run.needed, int(np.max(wanted)) + 1 if len(wanted) else 0)
            self._changed.notify_all()
        before = self.shuffle_seconds
        self._wait(lambda: all(run.read >= run.needed for run in runs))
        self.read_seconds += self.shuffle_seconds - before if self._far or self._landing is not None else 0.0
        with self._lock:
            if any(run.read < run.needed for run in runs):
                raise self._error or WdstrainError("it was not read")
            offset = [run.where[wanted % self._ring] for run, wanted in zip(runs, places, strict=True)]
            if step == plan.steps - 1:
                del self._runs[epoch]
                self._changed.notify_all()
        ids = _joined([of_lane[1] for of_lane in asked])
        where = _joined(offset)
        if plan.tail == "drop":
            valid: npt.NDArray[np.bool_] = np.ones(len(ids), bool)
        else:
            stops = [plan.lane_samples(run.lane) for run in runs]
            valid = np.concatenate([np.arange(*span) < stop for span, stop in zip(spans, stops, strict=True)])
        lost = {row: self._lost[int(ids[row])] for row in np.flatnonzero(where < 0).tolist()} if self._lost else {}
        return Batch(ids, where, valid, lost)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait for the thread, which fails or gets there. The lock is not held."""
        begun = time.perf_counter()
        try:
            while True:
                with self._lock:
                    if until() or self._error is not None:
                        return
                    self._asking = True
                self._news.get()
        finally:
            self._asking = False
            self.shuffle_seconds += time.perf_counter() - begun

    def _tell(self) -> None:
        """Something is there that may be waited for. The lock is held."""
        self._changed.notify_all()
        if self._asking:
            self._news.put(None)

    def behind(self) -> str | None:
        """What is being read while a batch waits for it, with the stack of who reads; None if none waits."""
        if not self._asking:
            return None
        late = [begun.place for runs in list(self._runs.values()) for run in runs for begun in list(run.on_the_way)[:1]]
        place = late[0] if late else self._place
        what = f"{place[0].shown} is being read at offset {place[1]}" if place is not None else "nothing was read yet"
        return f"{what}; the reader:\n{stack_of(self._thread.ident if self._thread is not None else None)}"

    def release(self, clock: int) -> None:
        """The batches up to this clock are decoded; clocks come in order."""
        with self._lock:
            while (self._released + 1) * self._bucket <= clock + 1:
                self._arena.release(self._released)
                self._released += 1

    # --- the thread --------------------------------------------------------------------------------------------------

    def _read_epochs(self, epoch: int, step: int) -> None:
        clock = -step
        try:
            while not self._stopping:
                plan = self._plans(epoch)
                runs = [self._run(plan, lane, clock, step) for lane in plan.lanes_of(self._rank)]
                with self._lock:  # one epoch ahead at most, however small the epochs are
                    self._changed.wait_for(lambda: self._stopping or len(self._runs) < 2)
                    self._runs[epoch] = runs
                    self._tell()
                self._read_epoch(runs)
                clock += plan.steps
                epoch, step = epoch + 1, 0
        except BaseException as error:  # handed to the loop, which raises it
            self._fail(error if isinstance(error, WdstrainError) else WdstrainError(f"reading failed: {error!r}"))

    def _read_epoch(self, runs: list[_Run]) -> None:
        try:
            while (run := self._next(runs)) is not None:
                self._read_piece(run)
            with self._lock:  # what the loop needs first has the network for itself
                self._changed.wait_for(lambda: self._stopping or not any(run.on_the_way for run in runs))
        finally:
            for run in runs:
                run.forward.close()

    def _fail(self, error: WdstrainError) -> None:
        with self._lock:
            self._error = self._error or error
            self._stopping = True
            self._tell()

    def _run(self, plan: Order, lane: int, clock: int, step: int) -> _Run:
        first = plan.first_place(lane, step) if step else 0
        where = np.zeros(min(self._ring, plan.lane_places(lane)) or 1, np.int64)
        forward = Forward(lambda shard: open_source(shard.path, shard.bytes, self._index.state(shard)), self._fetchers)
        return _Run(plan, lane, clock, step, where, first, first, forward)

    def _next(self, runs: list[_Run]) -> _Run | None:
        """The lane that is least ahead, once it may read on. None when all are read or the end was asked for."""
        with self._lock:
            unread = [run for run in runs if run.begun < run.plan.lane_places(run.lane)]
            if not unread or self._stopping:
                return None
            self._changed.wait_for(lambda: self._stopping or any(r.begun - r.needed < self._ahead for r in unread))
            return None if self._stopping else min(unread, key=lambda run: run.begun - run.needed)

    def _read_piece(self, run: _Run) -> None:
        """Read the next samples of a lane that lie together in one shard."""
        table, end = self._index.table, run.plan.lane_places(run.lane)
        stop = min(run.begun + READ_SAMPLES, end)
        due = self._due(run, run.begun, stop)
        ids = run.plan.ids(run.lane, np.arange(run.begun, run.begun + len(due)))
        wanted = due >= run.first_step
        if not wanted.any():
            self._begin(run, Reading(), len(due), 0)
            return
        first = int(np.argmax(wanted))
        shard = int(self._index.shard_of(ids[first : first + 1])[0])
        starts, stops = table.start[ids], table.stop[ids]
        together = np.flatnonzero(
            (np.diff(ids) != 1)
            | (ids[1:] >= self._index.first[shard + 1])
            | (stops[1:] - starts[first] > self._most)
            | (starts[1:] - stops[:-1] > READ_BYTES)
        )
        count = int(together[together >= first][0]) + 1 if (together >= first).any() else len(ids)
        rows = first + np.flatnonzero(wanted[first:count])
        with self._lock:
            clocks, sizes = run.epoch_clock + due[rows], stops[rows] - starts[rows]
            if self._landing is not None:
                sizes -= self._landing.bytes
                homes = self._landing.homes(clocks)
            offsets = run.where[(run.begun + rows) % self._ring] = self._arena.place(clocks // self._bucket, sizes)
        source, next_ = self._index.shards[shard], run.begun + count
        self._place = (source, int(starts[first]))
        if self._landing is not None:
            of_batch = run.rows[run.begun - run.due_start + rows]
            samples = Placed(ids[rows], starts[rows], stops[rows], offsets, homes, of_batch)
            reading = self._landing.read(source, samples, self._arena.memory, self._settle_all)
            self._begin(run, reading, count, int(stops[rows[-1]] - starts[first]))
            return
        pieces = self._pieces(starts[rows], stops[rows], offsets)
        leaving = next_ == end or int(self._index.shard_of(run.plan.ids(run.lane, np.array([next_])))[0]) != shard
        begun = time.perf_counter()
        reading = run.forward.begin(source, pieces, int(starts[first]), leaving=leaving)
        if reading.error is not None and self._salvage and not is_remote(source.path):
            self._read_singly(run.forward, source, ids[rows], run.where, (run.begun + rows) % self._ring)
            reading = Reading()
        self.read_seconds += time.perf_counter() - begun
        self._begin(run, reading, count, int(stops[rows[-1]] - starts[first]))

    def _pieces(self, starts: Ints, stops: Ints, offsets: Ints) -> list[memoryview]:
        """Where the bytes of a shard go, from the first of these samples to the end of the last."""
        view = self._arena.memory.view
        pieces = [view[at:end] for at, end in zip(offsets.tolist(), (offsets + stops - starts).tolist(), strict=True)]
        gaps = starts[1:] - stops[:-1]  # members that are no samples, or samples this resume does not need
        for row in np.flatnonzero(gaps)[::-1].tolist():
            size = int(gaps[row])
            pieces[row + 1 : row + 1] = [self._scratch[: min(size - at, READ_BYTES)] for at in range(0, size, READ_BYTES)]
        return pieces

    def _read_singly(self, forward: Forward, shard: Shard, ids: Ints, where: Ints, rows: Ints) -> None:
        """Read samples of a damaged shard one by one into the places that were made for them; those that fail are lost."""
        view, table = self._arena.memory.view, self._index.table
        for number, row in zip(ids.tolist(), rows.tolist(), strict=True):
            start, offset = int(table.start[number]), int(where[row])
            place = view[offset : offset + int(table.stop[number]) - start]
            error = forward.begin(shard, [place], start, leaving=False).error
            if error is not None:
                self._lost[number] = f"it cannot be read ({str(error).rstrip('.')})"
                where[row] = -1

    def _begin(self, run: _Run, reading: Reading, places: int, size: int) -> None:
        """These places are on their way."""
        with self._lock:
            run.begun += places
            last = run.begun == run.plan.lane_places(run.lane)
            run.on_the_way.append(_Begun(reading, places, size, last, self._place))
        self._settle(run)

    def _settle_all(self) -> None:
        """Called from every thread that brings something."""
        with self._lock:
            for runs in self._runs.values():
                for run in runs:
                    self._settle(run)

    def _settle(self, run: _Run) -> None:
        """The lane is read as far as nothing is missing."""
        with self._lock:
            before = run.read
            while run.on_the_way:
                reading, places, size, last, _ = run.on_the_way[0]
                if reading.error is not None:
                    self._fail(reading.error)
                    break
                # whoever has the last byte of a lane may end this process: the cache is complete by then
                if reading.missing or (last and run.forward.filling):
                    break
                run.on_the_way.popleft()
                run.read += places
                self.read_bytes += size
            if run.read > before:
                self._tell()

    def _asked(self, run: _Run, start: int, stop: int) -> tuple[Ints, Ints]:
        """(places, ids) at the delivery positions [start, stop) of a lane, computed for many positions at a time."""
        if not run.asked_start <= start <= stop <= run.asked_start + len(run.asked[0]):
            places = run.plan.order(run.lane, start, max(stop, min(start + READ_SAMPLES, run.plan.lane_samples(run.lane))))
            run.asked, run.asked_start = (places, run.plan.ids(run.lane, places)), start
        places, ids = run.asked
        return places[start - run.asked_start : stop - run.asked_start], ids[start - run.asked_start : stop - run.asked_start]

    def _due(self, run: _Run, start: int, stop: int) -> Ints:
        """Steps that need the places [start, stop), computed for a window of places at a time."""
        if not run.due_start <= start or stop > run.due_start + len(run.due):
            block = max(run.plan.window, 4 * READ_SAMPLES)
            run.due_start = start
            last = min(start + block, run.plan.lane_places(run.lane))
            run.due = run.plan.due(run.lane, start, last)
            if self._landing is not None:
                run.rows = self._landing.rows(run.plan, self._rank, run.lane, start, last)
        return run.due[start - run.due_start : stop - run.due_start]


def reach(index: Index, plan: Order, rank: int, ahead: int) -> tuple[int, int]:
    """Samples of the window of a lane of this rank, and of `ahead` bytes that are shared by its lanes."""
    longest = max(plan.lane_places(lane) for lane in plan.lanes_of(rank))
    mean = max(1, int((index.table.stop - index.table.start).sum()) // max(1, plan.samples))
    return min(plan.window, longest), max(1, min(ahead // mean // len(plan.lanes_of(rank)), longest))


def batches_begun(index: Index, plan: Order, rank: int, ahead: int) -> int:
    """Most batches of which something is read, and not everything asked for, at one time: for memory that is only set aside.

    A sample leaves less than a window from its place, on average half of one; so at an epoch's end there is half a window and what
    is read ahead of it, and as much again and the other half of the next. No more than two epochs are ever begun.
    """
    longest = max(plan.lane_places(lane) for lane in plan.lanes_of(rank))
    window, ahead = reach(index, plan, rank, ahead)
    return -(-min(2 * longest, 2 * (window + ahead + READ_SAMPLES) + int(8 * window**0.5)) // plan.quota) + 4


def _check_held(index: Index, number: int, size: int) -> None:
    """Raise ShardError for a sample that memory does not hold, before it is filled with it."""
    if size > (most := memory() // 2):
        shard = index.shards[int(index.shard_of(np.array([number]))[0])]
        raise ShardError(
            f"{shard.shown}: '{index.key(number)}' at offset {int(index.table.start[number])} has {size} bytes, and a sample is "
            f"held as a whole; {most}, half of this machine's memory, are the most. Leave it out, or pack it in parts."
        )


def _nobody() -> None:
    """Is told."""


def _joined(parts: list[Ints]) -> Ints:
    """What the lanes give to a batch; the caller's own."""
    return np.concatenate(parts) if len(parts) > 1 else parts[0].copy()
