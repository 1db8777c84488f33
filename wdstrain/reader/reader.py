"""One forward reader per rank: it executes the plan, and nothing else decides what is read.

A thread walks the places of its rank's lanes in order, with reads of some MiB that spread each sample straight to where
it will wait (`arena`), and runs ahead of what has been asked for by a bound of its own, into the next epoch too. So the
caller of `collect`, who sits inside the training loop, finds the bytes there. Offsets only grow within a lane; every
byte that is needed is read once; one shard is open per lane. Reads from far away are begun, several at a time, and the lane is
as far as the first of them that is not there yet.

Time is counted in `batch_number`, the number of batches since `start`: it goes on over the ends of epochs, and a bucket of the
arena is a run of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from wdstrain.errors import ShardError, WdstrainError
from wdstrain.memory.arena import Arena
from wdstrain.memory.scatter import Bools, ChecksumJob, ScatterList, scatter_samples
from wdstrain.memory.shared import Memory
from wdstrain.order.plan import Order
from wdstrain.reader.read_blocks import GAP, READ_SAMPLES, ReadBlock, read_bytes
from wdstrain.reader.slot_sink import READ_TOGETHER, Placed, SlotSink
from wdstrain.reader.step_blocks import StepBlock
from wdstrain.reader.verifier import PackedChecksums, ReadVerifier, VerifiedRing
from wdstrain.runtime.machine import memory
from wdstrain.runtime.signals import DeferSignals
from wdstrain.runtime.watchdog import thread_stack
from wdstrain.shards.index import Index, Ints, Shard
from wdstrain.shards.tar import is_sample
from wdstrain.storage.local import LocalFile
from wdstrain.storage.prefetch import FetchStats, LaneStream, PendingRead, RangePrefetcher, ReadStopped
from wdstrain.storage.remote import is_remote
from wdstrain.storage.shard_cache import Cache

_BUCKETS = 16  # slabs of a window leave in so many groups


class Batch(NamedTuple):
    """Where the samples of one batch wait. ids, offset: int64[b], offset in the arena; valid: bool[b], False is padding.

    unverified: bool[b], not yet found to be as they were packed; None: none is. unreadable: why the samples in some rows could not be read;
    their offset means nothing.
    """

    ids: Ints
    offset: Ints
    valid: Bools
    unverified: Bools | None
    unreadable: dict[int, str]


class _Begun(NamedTuple):
    """Places that are being read. last: the lane ends with them; place: shard and offset at which they begin.

    clocks: when the samples that are read are due. int64[n]
    """

    reading: PendingRead
    clocks: Ints
    places: int
    size: int
    last: bool
    place: tuple[Shard, int] | None
    comparison: ReadVerifier | None
    unsure: tuple[Ints, Ints] | None  # ids of samples whose headers are compared with the index, and their places in the ring


@dataclass
class _Run:
    """One lane in one epoch: how far reading was begun, how far it is done, how far it is asked for, where samples were put."""

    plan: Order
    lane: int
    epoch_first_batch: int  # batch number of the epoch's step 0, negative when it was entered in the middle
    first_step: int
    where: Ints  # ring: place -> offset in the arena
    found: VerifiedRing | None  # what was found of them, where anything is compared
    begun: int
    read: int
    forward: LaneStream
    delivered: int  # positions up to here, or asked for
    needed: int = 0  # places, for those
    on_the_way: deque[_Begun] = field(default_factory=deque)
    course: ReadBlock | None = None


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
        wanted: set[str] | None = None,
        salvage: bool = False,
        cache: Cache | None = None,
        landing: SlotSink | None = None,
    ) -> None:
        """ahead: bytes that are held beyond half a window. in_flight: most batches that are collected and not yet released.

        wanted: fields that are compared with their checksums while they are read; all if it is None, and none beside arrays that land.
        salvage: samples that a disk does not give are lost, and no error. cache: of shards on servers. landing: of arrays that are
        read straight into their batch.
        """
        self._index, self._plans, self._rank = index, plans, rank
        plan, table = plans(0), index.table
        extents = table.stop - table.start - (landing.bytes if landing is not None else 0)
        largest, total = int(np.max(extents)), int(np.sum(extents))
        _check_held(index, int(np.argmax(extents)), largest)
        lanes = len(plan.lanes_of(rank))
        window, ahead = reach(index, plan, rank, ahead)
        # a sample leaves half a window after its place, on average: so many wait when the window is full. At an epoch's end it empties,
        # and at the next one's begin it would have to be filled at twice the pace, had that not been read in its place
        self._held = window // 2 + ahead
        # whoever waits for room waits for that of some reads: begun one by one they would be alone on their way to a server, and the
        # loop would wait for the thread at each
        self._refilled = self._held - ahead // 4
        self._ring = window + ahead + 2 * READ_SAMPLES + plan.samples_per_step_per_lane
        self._bucket = max(1, (window + ahead) // (plan.samples_per_step_per_lane * _BUCKETS))
        near = 2 * _BUCKETS + in_flight // self._bucket + 4
        # of a lane that gives little, a window is many steps
        least = max(1, min(plan.lane_samples(lane) for lane in plan.lanes_of(rank)))
        farthest = (int(plan.steps * min(2.0, self._ring / least)) + in_flight + 2) // self._bucket + 1
        live = (
            min(self._ring * lanes * largest, 2 * total) * 3 // 2
            + (in_flight + 1) * plan.samples_per_step_per_lane * lanes * largest
        )
        self._arena = Arena(live=live, largest=largest, near=near, farthest=farthest)
        self._scratch = Memory(GAP)
        # the loop's own thread takes the lock itself and waits for news: an interrupt within a Condition would keep it locked
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # for the reader's thread
        self._news: SimpleQueue[None] = SimpleQueue()
        self._turning = threading.RLock()  # held by who starts or stops the thread
        self._halted = self._ended = False  # it is not to start: until it is resumed, or ever again
        self._thread: threading.Thread | None = None
        self._runs: dict[int, list[_Run]] = {}
        self._resting: list[_Run] = []  # lanes that wait until they may be read on
        self._fetchers = RangePrefetcher(cache, FetchStats(), self._settle_all)
        self._far = any(is_remote(shard.path) for shard in index.shards)
        self._error: WdstrainError | None = None
        # the first batch that cannot be read, and why; those before it are delivered, nothing after it is read
        self._broken: tuple[int, WdstrainError] | None = None
        self._stopping = False
        self._released = 0
        self._most = read_bytes(index) if landing is None else READ_TOGETHER
        self._salvage, self._cache, self._landing = salvage, cache, landing
        compares = len(index.table.member_crc) and landing is None
        self._packed = PackedChecksums(index.table, index.field_mask(wanted), self._arena.memory) if compares else None
        self._lost: dict[int, str] = {}  # by id
        self.read_seconds, self.read_bytes, self.tally = 0.0, 0, FetchStats()
        self.shuffle_seconds = 0.0  # a batch waited until all of the window that it needs was read
        self._asking = False
        self._place: tuple[Shard, int] | None = None  # what is being read

    @property
    def memory(self) -> Memory:
        return self._arena.memory

    def start(self, epoch: int, step: int, until: int | None = None) -> None:
        """Begin to read from this step on; whatever was read before is forgotten. Raises WdstrainError once it is halted or closed.

        until: the epoch of which nothing is read any more; None: read on without end.
        """
        with self._turning:
            if self._halted or self._ended:  # by another thread, which waits for this one to give up
                raise ReadStopped
            self.stop()
            self._arena.reset()
            self._runs, self._error, self._stopping, self._released, self._resting = {}, None, False, 0, []
            self._broken = None
            self._fetchers = RangePrefetcher(self._cache, self.tally, self._settle_all, self._index)
            thread = threading.Thread(target=self._read_epochs, args=(epoch, step, until), name="wdstrain-reader", daemon=True)
            with DeferSignals():
                thread.start()  # which may fail: then there is none to wait for
                self._thread = thread

    def stop(self) -> None:
        """End the thread; at most one read is waited for. Any thread may call it, also while another calls `start`."""
        with self._turning:
            if (thread := self._thread) is not None:
                with DeferSignals():
                    self._fail(ReadStopped())
                thread.join()
                self._thread = None
            self._fetchers.stop()
            if self._landing is not None:
                self._landing.stop()

    def halt(self) -> None:
        """Stop, and do not start until `resume`."""
        with self._turning:
            self._halted = True
            self.stop()

    def resume(self) -> None:
        """It may start again, unless it was closed."""
        self._halted = False

    def end(self) -> None:
        """Stop, and never start again."""
        with self._turning:
            self._ended = True
            self.stop()

    def close(self) -> None:
        """Stop for good. Its memory then goes with its last user, and does not wait for the collector."""
        self.end()
        with self._lock:  # what refers back to this: what the threads tell, and the frames of an error that was raised
            self._fetchers = RangePrefetcher(None, self.tally, _nobody)
            self._runs, self._error, self._broken = {}, ReadStopped(), None

    def collect(self, stretch: StepBlock, number: int) -> Batch:
        """The samples of the `number`th step of a stretch, once they are read. Steps are asked for in order.

        Raises what the reading raised, of what cannot be read when its step is asked for.
        """
        epoch = stretch.epoch
        if epoch not in self._runs:
            self._wait(lambda: epoch in self._runs)
        with self._lock:
            if epoch not in self._runs:
                raise self._error or WdstrainError("it was not read")
            runs = self._runs[epoch]
            batch_number = runs[0].epoch_first_batch + stretch.first + number
            for run, lane in zip(runs, stretch.lanes, strict=True):
                run.delivered += lane.firsts[number + 1] - lane.firsts[number]
                run.needed = max(run.needed, lane.needed[number])
            wakes = self._goes_on()  # else the thread would find nothing, for each batch
            if wakes:
                self._changed.notify_all()
            there = all(run.read >= run.needed for run in runs)
        if wakes:  # while this thread waits, the other is given Python's lock at once; else after five milliseconds
            self._wait(lambda: not self._goes_on())
        if not there:
            before = self.shuffle_seconds
            self._wait(lambda: self._breaks(batch_number) is not None or all(run.read >= run.needed for run in runs))
            self.read_seconds += self.shuffle_seconds - before if self._far or self._landing is not None else 0.0
        offset = []
        with self._lock:
            if (error := self._breaks(batch_number)) is not None:
                try:
                    raise error
                finally:
                    del error  # which refers to this frame
            if any(run.read < run.needed for run in runs):
                raise self._error or WdstrainError("it was not read")
            for run, lane in zip(runs, stretch.lanes, strict=True):
                places = lane.places[lane.firsts[number] : lane.firsts[number + 1]]
                offset.append(run.where[places % self._ring])
            unverified = self._doubtful(runs, stretch, number)
            if stretch.first + number == runs[0].plan.steps - 1:
                del self._runs[epoch]
                self._changed.notify_all()
        rows = slice(stretch.firsts[number], stretch.firsts[number + 1])
        ids, where = stretch.ids[rows], _joined(offset)
        unreadable = {row: self._lost[int(ids[row])] for row in np.flatnonzero(where < 0).tolist()} if self._lost else {}
        return Batch(ids, where, stretch.valid[rows], unverified, unreadable)

    def _breaks(self, batch_number: int) -> WdstrainError | None:
        """Why the batch of this number cannot be read, or one before it."""
        return self._broken[1] if self._broken is not None and self._broken[0] <= batch_number else None

    def _doubtful(self, runs: list[_Run], stretch: StepBlock, number: int) -> Bools | None:
        """Of each sample of a step, whether it is not known to be as it was packed; None if all are."""
        if self._landing is not None:  # the rest of what lands is compared by who decodes it
            return np.ones(stretch.firsts[number + 1] - stretch.firsts[number], bool)
        if not any(run.found is not None and run.found.any_unverified for run in runs):
            return None
        lanes = zip(runs, stretch.lanes, strict=True)
        wanted = [(run.found, lane.places[slice(*lane.firsts[number : number + 2])]) for run, lane in lanes]
        unverified: Bools = _joined([found.unverified(places) for found, places in wanted if found is not None])
        return unverified

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
        """Something is there that the loop may wait for. The lock is held."""
        if self._asking:
            self._news.put(None)

    def behind(self) -> str | None:
        """What is being read while a batch waits for it, with the stack of who reads; None if none waits."""
        if not self._asking:
            return None
        late = [begun.place for runs in list(self._runs.values()) for run in runs for begun in list(run.on_the_way)[:1]]
        place = late[0] if late else self._place
        what = f"{place[0].shown} is being read at offset {place[1]}" if place is not None else "nothing was read yet"
        return f"{what}; the reader:\n{thread_stack(self._thread.ident if self._thread is not None else None)}"

    def release(self, batch_number: int) -> None:
        """The batches up to this batch number are decoded; batch numbers come in order."""
        with self._lock:
            while (self._released + 1) * self._bucket <= batch_number + 1:
                self._arena.release()
                self._released += 1

    # --- the thread --------------------------------------------------------------------------------------------------

    def _read_epochs(self, epoch: int, step: int, until: int | None) -> None:
        batch_number = -step
        following: Callable[[], list[_Run]] = partial(self._entered, epoch, batch_number, step)
        try:
            while not self._stopping and epoch != until and self._broken is None:
                runs = following()
                with self._lock:  # one epoch ahead at most, however small the epochs are
                    self._changed.wait_for(lambda: self._stopping or len(self._runs) < 2)
                    self._runs[epoch] = runs
                    self._tell()
                batch_number, epoch = batch_number + runs[0].plan.steps, epoch + 1
                following = cache(partial(self._entered, epoch, batch_number, 0)) if epoch != until else list
                self._read_epoch(runs, following)
        except BaseException as error:  # handed to the loop, which raises it
            self._fail(error if isinstance(error, WdstrainError) else WdstrainError(f"reading failed: {error!r}"))

    def _entered(self, epoch: int, batch_number: int, step: int) -> list[_Run]:
        """The lanes of an epoch from a step on, and what comes first in each."""
        plan = self._plans(epoch)
        runs = [self._run(plan, lane, batch_number, step) for lane in plan.lanes_of(self._rank)]
        for run in runs:
            if run.begun < plan.lane_places(run.lane):
                self._course(run)
        return runs

    def _read_epoch(self, runs: list[_Run], following: Callable[[], list[_Run]]) -> None:
        try:
            while (run := self._next(runs, following)) is not None:
                self._read_piece(run)
            if self._far:  # what the loop needs first has the network for itself
                with self._lock:
                    self._changed.wait_for(lambda: self._stopping or not any(run.on_the_way for run in runs))
        finally:
            for run in runs:
                run.forward.close()

    def _fail(self, error: WdstrainError) -> None:
        with self._lock:
            self._error = self._error or error
            self._stopping = True
            self._changed.notify_all()
            self._tell()

    def _run(self, plan: Order, lane: int, batch_number: int, step: int) -> _Run:
        first = plan.first_place(lane, step) if step else 0
        ring = min(self._ring, plan.lane_places(lane)) or 1
        where = np.zeros(ring, np.int64)
        forward = LaneStream(lambda shard: LocalFile(shard.path, self._index.expected_state(shard)), self._fetchers)
        return _Run(
            plan,
            lane,
            batch_number,
            step,
            where,
            VerifiedRing(self._packed, where) if self._packed is not None else None,
            first,
            first,
            forward,
            plan.span(lane, step)[0],
        )

    def _next(self, runs: list[_Run], following: Callable[[], list[_Run]]) -> _Run | None:
        """The lane that is least ahead, once it may read on. None when all are read or the end was asked for.

        following: plans the next epoch. It is called in the first pause: when this epoch ends the loop has all that it needs, and
        makes none itself in which this thread would get Python's lock.
        """
        with self._lock:
            unread = [run for run in runs if run.begun < run.plan.lane_places(run.lane)]
            if not unread or self._stopping:
                return None
            pausing = not self._free(unread)
        if pausing:
            with suppress(Exception):  # it is tried again where it is due
                following()
        with self._lock:
            free = [] if pausing else self._free(unread)
            while not free and not self._stopping:  # also where what made room is gone meanwhile, with an epoch that ended
                self._resting = unread
                self._changed.wait_for(lambda: self._stopping or self._goes_on())
                self._resting = []
                self._tell()
                free = self._free(unread)
            return None if self._stopping else min(free, key=lambda run: run.begun - run.needed)

    def _free(self, lanes: list[_Run]) -> list[_Run]:
        """Those that may be read on: one of a smaller source may have room where another has none, and would be read over what is not
        delivered."""
        return [run for run in lanes if self._room_for([run], self._held)]

    def _goes_on(self) -> bool:
        """Whether lanes that wait for room are to be read on."""
        return self._room_for(self._resting, self._refilled)

    def _room_for(self, lanes: list[_Run], most: int) -> bool:
        """Whether a batch waits for what is read next, or less than that is held of one of these: also of the epoch before, which is
        ending."""
        return any(run.begun < run.needed or self._held_of(run.lane) < most for run in lanes)

    def _held_of(self, lane: int) -> int:
        """Places of a lane that were begun and not yet asked for. Of an epoch that ends with padding more is asked for than there is."""
        return sum(max(0, run.begun - run.delivered) for runs in self._runs.values() for run in runs if run.lane == lane)

    def _read_piece(self, run: _Run) -> None:
        """Read the next samples of a lane that lie together in one shard."""
        course = self._course(run)
        # the loop would have Python's lock at each of these steps, and be five milliseconds late to give it back; for this it waits once
        with self._lock:
            read = self._planned(run, course)
        read()

    def _planned(self, run: _Run, course: ReadBlock) -> Callable[[], None]:
        """What reads the next samples, which may take long, once they have their places. The lock is held."""
        due, ids, starts, stops = course.read_rows(run.begun)
        wanted = due >= run.first_step
        if self._broken is not None:
            wanted &= run.epoch_first_batch + due < self._broken[0]
        if not wanted.any():
            return partial(self._begin, run, PendingRead(), due[:0], len(due), 0)
        first = int(np.argmax(wanted))
        count = min(len(ids), course.next_break(run.begun + first) + 1 - run.begun)
        fitting = int(np.searchsorted(stops[first:count], starts[first] + self._most, side="right"))
        count = first + max(1, fitting)
        some = not wanted[first:count].all()  # the others were delivered before the step at which reading began, or never are
        rows: Ints | slice = first + np.flatnonzero(wanted[first:count]) if some else slice(first, count)
        clocks, sizes, ids, starts, stops = (
            run.epoch_first_batch + due[rows],
            (stops - starts)[rows],
            ids[rows],
            starts[rows],
            stops[rows],
        )
        if self._landing is not None:
            sizes = sizes - self._landing.bytes
        places = np.arange(run.begun, run.begun + count)[rows] % self._ring
        offsets = run.where[places] = self._arena.place(clocks // self._bucket, sizes)
        number, next_ = int(self._index.shard_of(ids[:1])[0]), run.begun + count
        shard, memory = self._index.shards[number], self._arena.memory
        self._place = (shard, int(starts[0]))
        if self._landing is not None:
            assert course.scatter is not None
            before = run.begun - course.start
            whole = course.scatter.part(slice(before, before + count))
            placed = Placed(whole.part(rows), offsets, self._landing.slot_offsets(clocks))
            return partial(self._land, run, shard, placed, clocks, self._landing.places(placed, memory), count)
        comparison = None
        if run.found is not None and some:
            run.found.not_compared(run.begun, count)
        elif run.found is not None:
            comparison = run.found.compared(run.begun + first, int(ids[0]), count - first)
        one_each = np.zeros((len(sizes), 1), np.int64), offsets[:, None], sizes[:, None]
        pieces = scatter_samples((memory, self._scratch), *one_each, starts, stops, comparison)
        leaving = next_ == course.end or int(self._index.shard_of(np.array([course.id(next_)]))[0]) != number
        begin = partial(run.forward.begin, shard, pieces, int(starts[0]), leaving=leaving)
        size = int(stops[-1] - starts[0])
        return partial(self._gather, run, shard, ids, clocks, places, begin, count, size, comparison)

    def _land(
        self, run: _Run, shard: Shard, placed: Placed, clocks: Ints, places: tuple[ScatterList, ChecksumJob], count: int
    ) -> None:
        """Begin to read samples whose arrays land."""
        assert self._landing is not None
        size = int(placed.samples.stops[-1] - placed.samples.starts[0])
        reading = self._landing.read(shard, placed, clocks, *places, self._arena.memory, self._settle_all)
        self._begin(run, reading, clocks, count, size)

    def _gather(
        self,
        run: _Run,
        shard: Shard,
        ids: Ints,
        clocks: Ints,
        places: Ints,
        begin: Callable[[], PendingRead],
        count: int,
        size: int,
        comparison: ReadVerifier | None,
    ) -> None:
        """Read samples into the arena, or begin to."""
        begun = time.perf_counter()
        reading = begin()
        if reading.error is not None and not is_remote(shard.path):
            reading, comparison = self._read_singly(run.forward, shard, ids, clocks, run.where, places), None
            if run.found is not None:
                run.found.not_compared(run.begun, count)
        self.read_seconds += time.perf_counter() - begun
        unsure = (ids, places) if self._index.needs_headers(shard) else None
        self._begin(run, reading, clocks, count, size, comparison, unsure)

    def _read_singly(self, forward: LaneStream, shard: Shard, ids: Ints, clocks: Ints, where: Ints, rows: Ints) -> PendingRead:
        """Read samples of a damaged shard one by one into the places that were made for them.

        Those that fail are lost, or the first of them that is due is an error.
        """
        view, table, reading = self._arena.memory.view, self._index.table, PendingRead(again=len(ids))
        for i in np.argsort(clocks, kind="stable").tolist():
            number, row = int(ids[i]), int(rows[i])
            start, offset = int(table.start[number]), int(where[row])
            place = view[offset : offset + int(table.stop[number]) - start]
            error = forward.begin(shard, [place], start, leaving=False).error
            if error is not None and not self._salvage:
                reading.failed[i] = error
                break
            if error is not None:
                self._lost[number] = f"it cannot be read ({str(error).rstrip('.')})"
                where[row] = -1
        return reading

    def _begin(
        self,
        run: _Run,
        reading: PendingRead,
        clocks: Ints,
        places: int,
        size: int,
        comparison: ReadVerifier | None = None,
        unsure: tuple[Ints, Ints] | None = None,
    ) -> None:
        """These places are on their way."""
        with self._lock:
            run.begun += places
            last = run.begun == run.plan.lane_places(run.lane)
            run.on_the_way.append(_Begun(reading, clocks, places, size, last, self._place, comparison, unsure))
        self._settle(run)

    def _settle_all(self) -> None:
        """Called from every thread that brings something. Raises nothing: nobody there could tell the loop, which would wait on."""
        try:
            with self._lock:
                for runs in self._runs.values():
                    for run in runs:
                        self._settle(run)
        except BaseException as error:
            self._fail(WdstrainError(f"reading failed: {error!r}"))

    def _settle(self, run: _Run) -> None:
        """The lane is read as far as nothing is missing."""
        with self._lock:
            before = run.read
            while run.on_the_way:
                reading, clocks, places, size, last, place, comparison, unsure = run.on_the_way[0]
                # whoever has the last byte of a lane may end this process: the cache is complete by then
                if reading.error is None and (reading.missing or (last and run.forward.filling)):
                    break
                if unsure is not None and place is not None and reading.error is None:
                    reading.error = self._replaced(run, place[0], *unsure)
                run.on_the_way.popleft()
                self.tally.retries += reading.again
                if reading.error is not None or reading.failed:
                    self._break_off(reading, clocks)
                elif comparison is not None:
                    comparison.settle()
                run.read += places
                self.read_bytes += size
            if run.read > before:
                self._tell()
                if not run.on_the_way:
                    self._changed.notify_all()

    def _replaced(self, run: _Run, shard: Shard, ids: Ints, places: Ints) -> ShardError | None:
        """An error if the headers of these samples are not as the index says. places: in the ring"""
        table, view = self._index.table, self._arena.memory.view
        for number, offset in zip(ids.tolist(), run.where[places].tolist(), strict=True):
            start, stop = int(table.start[number]), int(table.stop[number])
            fields = [(name, at - start, size) for name, at, size in self._index.members(number)]
            if not is_sample(view[offset : offset + stop - start], key := self._index.key(number), fields):
                return ShardError(
                    f"{shard.shown} was replaced since it was opened: its headers at offset {start} are not those of '{key}'. "
                    f"Start again with it as it is."
                )
        return None

    def _break_off(self, reading: PendingRead, clocks: Ints) -> None:
        """Samples of this reading cannot be read: the epoch ends before the batch that needs the first of them."""
        failed = reading.failed if reading.error is None else {int(np.argmin(clocks)): reading.error}
        first = min(failed, key=lambda i: int(clocks[i]))
        if self._breaks(int(clocks[first])) is None:
            self._broken = int(clocks[first]), failed[first]
        self._tell()

    def _course(self, run: _Run) -> ReadBlock:
        """What comes next in a lane: more than one read takes, or all of the rest."""
        course = run.course
        if course is None or not course.covers_read(run.begun):
            course = run.course = ReadBlock.of(
                self._index,
                run.plan,
                self._rank,
                run.lane,
                run.begun,
                self._landing,
            )
        return course


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
    at_once = min(READ_SAMPLES, READ_TOGETHER // int((index.table.stop - index.table.start).min()) + 1)
    longest = max(plan.lane_places(lane) for lane in plan.lanes_of(rank))
    window, ahead = reach(index, plan, rank, ahead)
    return -(-min(2 * longest, 2 * (window + ahead + at_once) + int(8 * window**0.5)) // plan.samples_per_step_per_lane) + 4


def _check_held(index: Index, number: int, size: int) -> None:
    """Raise ShardError for a sample that memory does not hold, before it is filled with it."""
    if size > (most := memory() // 2):
        shard = index.shards[int(index.shard_of(np.array([number]))[0])]
        raise ShardError(
            f"{shard.shown}: '{index.key(number)}' at offset {int(index.table.start[number])} has {size} bytes, and a sample is "
            f"held as a whole; {most}, half of this machine's memory, are the most. Leave it out, or pack it in parts."
        )


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _nobody() -> None:
    """Is told."""
