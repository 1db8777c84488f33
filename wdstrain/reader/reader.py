"""Forward reader: reads the samples of one rank in the order of the plan.

A thread reads the places of the rank's lanes in order. Each read has some MiB and scatters its
samples to their places in the arena. The thread runs ahead of the requested batches by a number of
bytes, also into the next epoch, because `collect` is called inside the training loop and must find
the bytes there.

Within a lane offsets only grow, every needed byte is read once, and one shard is open. Several
remote reads are in flight; a lane counts as read up to the first of them that is incomplete.

`batch_number` counts the batches since `start`, across epochs. A bucket of the arena holds the
samples of several consecutive batches.
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
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.offsets import Ints
from wdstrain.shards.tar import is_sample
from wdstrain.storage.local import LocalFile
from wdstrain.storage.prefetch import (
    FetchStats,
    LaneStream,
    PendingRead,
    RangePrefetcher,
    ReadStopped,
)
from wdstrain.storage.remote import is_remote
from wdstrain.storage.shard_cache import Cache

_BUCKETS = 16  # groups in which the memory of one window is released


class Batch(NamedTuple):
    """Places of the b samples of one batch in the arena.

    ids: int64[b]. offset: in the arena, int64[b]. valid: bool[b], False for padding.
    unverified: bool[b], True for samples whose checksums are not verified yet; None: all are.
    unreadable: by row, why a sample could not be read; its offset is meaningless.
    """

    ids: Ints
    offset: Ints
    valid: Bools
    unverified: Bools | None
    unreadable: dict[int, str]


class _StartedRead(NamedTuple):
    """A read of consecutive places of a lane, started or complete.

    batch_numbers: batch numbers of its samples, int64[n]. places: how many. size: bytes. last: whether it
    is the last read of the lane. position: shard and offset where it begins.
    verifier: of its samples, if any are verified.
    check_headers: (ids, ring positions) of samples whose headers must be compared with the index.
    """

    reading: PendingRead
    batch_numbers: Ints
    places: int
    size: int
    last: bool
    position: tuple[Shard, int] | None
    verifier: ReadVerifier | None
    check_headers: tuple[Ints, Ints] | None


@dataclass
class _LaneRun:
    """Progress of one lane in one epoch.

    epoch_first_batch: batch number of step 0; negative if the epoch was entered in the middle.
    first_step: step at which it was entered. where: ring buffer, place -> offset in the arena.
    ring: verified samples; None if nothing is verified. begun: places whose read was started.
    read: places that were read. delivered: positions of the delivery order that were requested.
    needed: places that these positions need. in_flight: reads that are not complete, in order.
    block: places that are read next.
    """

    plan: Order
    lane: int
    epoch_first_batch: int
    first_step: int
    where: Ints
    ring: VerifiedRing | None
    begun: int
    read: int
    stream: LaneStream
    delivered: int
    needed: int = 0
    in_flight: deque[_StartedRead] = field(default_factory=deque)
    block: ReadBlock | None = None


class Reader:
    """Forward reader of the lanes of one rank.

    read_seconds, read_bytes, tally: totals of reading since the beginning.
    shuffle_seconds: time that `collect` waited for samples.
    """

    def __init__(
        self,
        index: Index,
        plans: Callable[[int], Order],
        rank: int,
        *,
        ahead: int,
        in_flight: int,
        needed_fields: set[str] | None = None,
        skip_unreadable: bool = False,
        cache: Cache | None = None,
        slot_sink: SlotSink | None = None,
    ) -> None:
        """Set memory aside; `start` begins to read.

        plans: returns the plan of an epoch; all plans must have the same sizes.
        ahead: bytes that are read ahead, beyond half a shuffle window.
        in_flight: most batches that are collected and not yet released.
        needed_fields: fields that are verified while they are read; None: all. With a slot_sink,
        the sink verifies its arrays and the decoder all other fields.
        skip_unreadable: deliver samples that a local file does not give as unreadable, instead of
        raising an error. cache: of remote shards.
        slot_sink: reader of arrays that go straight into batches.
        Raises ShardError for a sample that is too large for this machine's memory.
        """
        self._index, self._plans, self._rank = index, plans, rank
        plan, table = plans(0), index.offsets
        extents = table.stop - table.start - (slot_sink.bytes if slot_sink is not None else 0)
        largest, total = int(np.max(extents)), int(np.sum(extents))
        _check_sample_size(index, int(np.argmax(extents)), largest)
        lanes = len(plan.lanes_of(rank))
        window, ahead = reach(index, plan, rank, ahead)
        # On average a sample leaves half a window after its place, so half a window is held. At the
        # end of an epoch it empties. The next epoch must be read meanwhile, or the reader would
        # have to fill its window at twice the pace.
        self._held_limit = window // 2 + ahead
        # Resume only when several reads fit. Single requests would wait for the server one after
        # another, and the loop would switch to this thread for each.
        self._resume_below = self._held_limit - ahead // 4
        self._ring_size = window + ahead + 2 * READ_SAMPLES + plan.samples_per_step_per_lane
        self._bucket = max(1, (window + ahead) // (plan.samples_per_step_per_lane * _BUCKETS))
        near = 2 * _BUCKETS + in_flight // self._bucket + 4
        # The window of a lane that gives few samples per step spans many steps.
        least = max(1, min(plan.lane_samples(lane) for lane in plan.lanes_of(rank)))
        farthest = (
            int(plan.steps * min(2.0, self._ring_size / least)) + in_flight + 2
        ) // self._bucket + 1
        live = (
            min(self._ring_size * lanes * largest, 2 * total) * 3 // 2
            + (in_flight + 1) * plan.samples_per_step_per_lane * lanes * largest
        )
        self._arena = Arena(live=live, largest=largest, near=near, farthest=farthest)
        self._scratch = Memory(GAP)
        # The loop's thread takes the lock directly and waits on a simple queue. A Ctrl-C inside a
        # Condition would leave the lock locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # waited for by the reader's thread
        self._news: SimpleQueue[None] = SimpleQueue()  # waited for by the loop's thread
        self._start_lock = threading.RLock()  # held while the thread is started or stopped
        self._halted = self._ended = False  # `start` must fail: until `resume`, or forever
        self._thread: threading.Thread | None = None
        self._runs: dict[int, list[_LaneRun]] = {}  # by epoch
        self._paused: list[_LaneRun] = []  # lanes that wait for room
        self._prefetcher = RangePrefetcher(cache, FetchStats(), self._settle_all)
        self._is_remote = any(is_remote(shard.path) for shard in index.shards)
        self._error: WdstrainError | None = None
        # First batch that cannot be read, and its error. Batches before it are delivered; nothing
        # after it is read.
        self._first_failed: tuple[int, WdstrainError] | None = None
        self._stopping = False
        self._released = 0
        self._read_limit = read_bytes(index) if slot_sink is None else READ_TOGETHER
        self._skip_unreadable, self._cache, self._slot_sink = skip_unreadable, cache, slot_sink
        verifies = len(index.offsets.member_crc) and slot_sink is None
        self._packed = (
            PackedChecksums(index.offsets, index.field_mask(needed_fields), self._arena.memory)
            if verifies
            else None
        )
        self._unreadable: dict[int, str] = {}  # by sample id
        self.read_seconds, self.read_bytes, self.tally = 0.0, 0, FetchStats()
        self.shuffle_seconds = 0.0
        self._is_waiting = False  # whether the loop waits on the queue
        self._position: tuple[Shard, int] | None = None  # shard and offset of the last read

    @property
    def memory(self) -> Memory:
        """The memory of the arena."""
        return self._arena.memory

    def start(self, epoch: int, step: int, until: int | None = None) -> None:
        """Start to read from this step on; earlier reads are dropped.

        until: the first epoch that is not read; None: there is no end. Raises ReadStopped if the
        reader is halted or closed.
        """
        with self._start_lock:
            if self._halted or self._ended:  # by another thread, which waits for this one to stop
                raise ReadStopped
            self.stop()
            self._arena.reset()
            self._runs, self._error, self._stopping, self._released, self._paused = (
                {},
                None,
                False,
                0,
                [],
            )
            self._first_failed = None
            self._prefetcher = RangePrefetcher(
                self._cache, self.tally, self._settle_all, self._index
            )
            thread = threading.Thread(
                target=self._read_epochs,
                args=(epoch, step, until),
                name="wdstrain-reader",
                daemon=True,
            )
            with DeferSignals():
                thread.start()  # may raise: then `stop` must not join it
                self._thread = thread

    def stop(self) -> None:
        """End the thread; wait for at most one read.

        Any thread may call this, also while another one calls `start`.
        """
        with self._start_lock:
            if (thread := self._thread) is not None:
                with DeferSignals():
                    self._fail(ReadStopped())
                thread.join()
                self._thread = None
            self._prefetcher.stop()
            if self._slot_sink is not None:
                self._slot_sink.stop()

    def halt(self) -> None:
        """Stop, and let `start` fail until `resume`."""
        with self._start_lock:
            self._halted = True
            self.stop()

    def resume(self) -> None:
        """Allow `start` again after `halt`."""
        self._halted = False

    def end(self) -> None:
        """Stop, and let `start` fail forever."""
        with self._start_lock:
            self._ended = True
            self.stop()

    def close(self) -> None:
        """End, and drop reference cycles: the arena is freed with its last user, without the GC."""
        self.end()
        with self._lock:  # callbacks of threads and frames of raised errors refer to this object
            self._prefetcher = RangePrefetcher(None, self.tally, _ignore)
            self._runs, self._error, self._first_failed = {}, ReadStopped(), None

    def collect(self, block: StepBlock, number: int) -> Batch:
        """Return the batch of step `number` of a block, once it is read. Call this in step order.

        Raises the error of the read if the step, or one before it, cannot be read.
        """
        epoch = block.epoch
        if epoch not in self._runs:
            self._wait(lambda: epoch in self._runs)
        with self._lock:
            if epoch not in self._runs:
                raise self._error or WdstrainError("the batch was not read")
            runs = self._runs[epoch]
            batch_number = runs[0].epoch_first_batch + block.first + number
            for run, lane in zip(runs, block.lanes, strict=True):
                run.delivered += lane.firsts[number + 1] - lane.firsts[number]
                run.needed = max(run.needed, lane.needed[number])
            wakes = self._may_resume()  # waking the thread for every batch would be a waste
            if wakes:
                self._changed.notify_all()
            is_read = all(run.read >= run.needed for run in runs)
        if wakes:  # waiting gives the GIL to the reader at once; otherwise it gets it after 5 ms
            self._wait(lambda: not self._may_resume())
        if not is_read:
            before = self.shuffle_seconds
            self._wait(
                lambda: (
                    self._error_of(batch_number) is not None
                    or all(run.read >= run.needed for run in runs)
                )
            )
            self.read_seconds += (
                self.shuffle_seconds - before
                if self._is_remote or self._slot_sink is not None
                else 0.0
            )
        offset = []
        with self._lock:
            if (error := self._error_of(batch_number)) is not None:
                try:
                    raise error
                finally:
                    del error  # it refers to this frame
            if any(run.read < run.needed for run in runs):
                raise self._error or WdstrainError("the batch was not read")
            for run, lane in zip(runs, block.lanes, strict=True):
                places = lane.places[lane.firsts[number] : lane.firsts[number + 1]]
                offset.append(run.where[places % self._ring_size])
            unverified = self._unverified(runs, block, number)
            if block.first + number == runs[0].plan.steps - 1:
                del self._runs[epoch]
                self._changed.notify_all()
        rows = slice(block.firsts[number], block.firsts[number + 1])
        ids, where = block.ids[rows], _joined(offset)
        unreadable = (
            {row: self._unreadable[int(ids[row])] for row in np.flatnonzero(where < 0).tolist()}
            if self._unreadable
            else {}
        )
        return Batch(ids, where, block.valid[rows], unverified, unreadable)

    def _error_of(self, batch_number: int) -> WdstrainError | None:
        """Return the error of this batch or of one before it, if it cannot be read."""
        return (
            self._first_failed[1]
            if self._first_failed is not None and self._first_failed[0] <= batch_number
            else None
        )

    def _unverified(self, runs: list[_LaneRun], block: StepBlock, number: int) -> Bools | None:
        """Return bool[b], True for the unverified samples of a step; None if all are verified."""
        if self._slot_sink is not None:  # the decoder verifies the bytes in the arena
            return np.ones(block.firsts[number + 1] - block.firsts[number], bool)
        if not any(run.ring is not None and run.ring.any_unverified for run in runs):
            return None
        lanes = zip(runs, block.lanes, strict=True)
        rings = [
            (run.ring, lane.places[slice(*lane.firsts[number : number + 2])]) for run, lane in lanes
        ]
        unverified: Bools = _joined(
            [ring.unverified(places) for ring, places in rings if ring is not None]
        )
        return unverified

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait until `until()` holds or the reader fails. The caller must not hold the lock."""
        begun = time.perf_counter()
        try:
            while True:
                with self._lock:
                    if until() or self._error is not None:
                        return
                    self._is_waiting = True
                self._news.get()
        finally:
            self._is_waiting = False
            self.shuffle_seconds += time.perf_counter() - begun

    def _notify(self) -> None:
        """Wake the loop's thread if it waits. The caller holds the lock."""
        if self._is_waiting:
            self._news.put(None)

    def behind(self) -> str | None:
        """Return what the reader reads, with its stack, while a batch waits; None if none waits."""
        if not self._is_waiting:
            return None
        runs = [run for runs in list(self._runs.values()) for run in runs]
        late = [read.position for run in runs for read in list(run.in_flight)[:1]]
        position = late[0] if late else self._position
        progress = "nothing was read yet"
        if position is not None:
            progress = f"{position[0].shown} is being read at offset {position[1]}"
        stack = thread_stack(self._thread.ident if self._thread is not None else None)
        return f"{progress}; the reader:\n{stack}"

    def release(self, batch_number: int) -> None:
        """Free the memory of the batches up to this one. Call this in order of batch numbers."""
        with self._lock:
            while (self._released + 1) * self._bucket <= batch_number + 1:
                self._arena.release()
                self._released += 1

    # --- in the reader's thread -------------------------------------------------------------------

    def _read_epochs(self, epoch: int, step: int, until: int | None) -> None:
        """Read epochs from (epoch, step) on. This is the thread's function."""
        batch_number = -step
        following: Callable[[], list[_LaneRun]] = partial(
            self._enter_epoch, epoch, batch_number, step
        )
        try:
            while not self._stopping and epoch != until and self._first_failed is None:
                runs = following()
                with self._lock:  # at most one epoch ahead, also of very small epochs
                    self._changed.wait_for(lambda: self._stopping or len(self._runs) < 2)
                    self._runs[epoch] = runs
                    self._notify()
                batch_number, epoch = batch_number + runs[0].plan.steps, epoch + 1
                following = (
                    cache(partial(self._enter_epoch, epoch, batch_number, 0))
                    if epoch != until
                    else list
                )
                self._read_epoch(runs, following)
        except BaseException as error:  # `collect` raises it in the loop
            if not isinstance(error, WdstrainError):
                error = WdstrainError(f"reading failed: {error!r}")
            self._fail(error)

    def _enter_epoch(self, epoch: int, batch_number: int, step: int) -> list[_LaneRun]:
        """Return the lanes of an epoch from a step on, with their first blocks planned."""
        plan = self._plans(epoch)
        runs = [
            self._lane_run(plan, lane, batch_number, step) for lane in plan.lanes_of(self._rank)
        ]
        for run in runs:
            if run.begun < plan.lane_places(run.lane):
                self._block_of(run)
        return runs

    def _read_epoch(self, runs: list[_LaneRun], following: Callable[[], list[_LaneRun]]) -> None:
        """Read the lanes of one epoch. following: plans the next epoch."""
        try:
            while (run := self._next_run(runs, following)) is not None:
                self._read_next(run)
            if self._is_remote:  # the loop needs these reads before those of the next epoch
                with self._lock:
                    self._changed.wait_for(
                        lambda: self._stopping or not any(run.in_flight for run in runs)
                    )
        finally:
            for run in runs:
                run.stream.close()

    def _fail(self, error: WdstrainError) -> None:
        """Stop reading; `collect` raises the error."""
        with self._lock:
            self._error = self._error or error
            self._stopping = True
            self._changed.notify_all()
            self._notify()

    def _lane_run(self, plan: Order, lane: int, batch_number: int, step: int) -> _LaneRun:
        """Return a lane that begins at `step`; batch_number: of the epoch's step 0."""
        first = plan.first_place(lane, step) if step else 0
        ring = min(self._ring_size, plan.lane_places(lane)) or 1
        where = np.zeros(ring, np.int64)
        stream = LaneStream(
            lambda shard: LocalFile(shard.path, self._index.expected_state(shard)), self._prefetcher
        )
        return _LaneRun(
            plan,
            lane,
            batch_number,
            step,
            where,
            VerifiedRing(self._packed, where) if self._packed is not None else None,
            first,
            first,
            stream,
            plan.span(lane, step)[0],
        )

    def _next_run(
        self, runs: list[_LaneRun], following: Callable[[], list[_LaneRun]]
    ) -> _LaneRun | None:
        """Return the lane that is least ahead, once there is room. None at the end or after `stop`.

        following: plans the next epoch. It is called in the first pause, because at the end of this
        epoch the loop does not wait and this thread would get the GIL late.
        """
        with self._lock:
            unread = [run for run in runs if run.begun < run.plan.lane_places(run.lane)]
            if not unread or self._stopping:
                return None
            pausing = not self._with_room(unread)
        if pausing:
            with suppress(Exception):  # called again when the next epoch begins, which raises it
                following()
        with self._lock:
            free = [] if pausing else self._with_room(unread)
            # Check again after each wait: the end of an epoch may have taken the room back.
            while not free and not self._stopping:
                self._paused = unread
                self._changed.wait_for(lambda: self._stopping or self._may_resume())
                self._paused = []
                self._notify()
                free = self._with_room(unread)
            return None if self._stopping else min(free, key=lambda run: run.begun - run.needed)

    def _with_room(self, lanes: list[_LaneRun]) -> list[_LaneRun]:
        """Return the lanes with room. A lane without room would overwrite undelivered samples."""
        return [run for run in lanes if self._has_room([run], self._held_limit)]

    def _may_resume(self) -> bool:
        """Return whether the lanes that wait for room may be read on."""
        return self._has_room(self._paused, self._resume_below)

    def _has_room(self, lanes: list[_LaneRun], most: int) -> bool:
        """Return whether a batch needs the next read of a lane, or a lane holds fewer than `most`.

        Samples of the previous epoch that are still held count too.
        """
        return any(run.begun < run.needed or self._held_samples(run.lane) < most for run in lanes)

    def _held_samples(self, lane: int) -> int:
        """Return the places of a lane that were started and not yet requested, in all epochs."""
        # An epoch that ends with padding has more requested positions than places.
        all_runs = (run for runs in self._runs.values() for run in runs if run.lane == lane)
        return sum(max(0, run.begun - run.delivered) for run in all_runs)

    def _read_next(self, run: _LaneRun) -> None:
        """Read the next samples of a lane that are contiguous in one shard."""
        block = self._block_of(run)
        # Plan under the lock. Otherwise the loop would take the GIL at each step and return it 5 ms
        # late.
        with self._lock:
            read = self._plan_read(run, block)
        read()

    def _plan_read(self, run: _LaneRun, block: ReadBlock) -> Callable[[], None]:
        """Give the next samples their places and return the function that reads them.

        The caller holds the lock, and calls the function without it because it may take long.
        """
        due, ids, starts, stops = block.read_rows(run.begun)
        wanted = due >= run.first_step
        if self._first_failed is not None:
            wanted &= run.epoch_first_batch + due < self._first_failed[0]
        if not wanted.any():
            return partial(self._add_read, run, PendingRead(), due[:0], len(due), 0)
        first = int(np.argmax(wanted))
        count = min(len(ids), block.next_break(run.begun + first) + 1 - run.begun)
        fitting = int(
            np.searchsorted(stops[first:count], starts[first] + self._read_limit, side="right")
        )
        count = first + max(1, fitting)
        # Samples that are not wanted were delivered before the first step, or never are.
        is_partial = not wanted[first:count].all()
        rows: Ints | slice = slice(first, count)
        if is_partial:
            rows = first + np.flatnonzero(wanted[first:count])
        batch_numbers, sizes, ids, starts, stops = (
            run.epoch_first_batch + due[rows],
            (stops - starts)[rows],
            ids[rows],
            starts[rows],
            stops[rows],
        )
        if self._slot_sink is not None:
            sizes = sizes - self._slot_sink.bytes
        places = np.arange(run.begun, run.begun + count)[rows] % self._ring_size
        offsets = run.where[places] = self._arena.place(batch_numbers // self._bucket, sizes)
        number, next_ = int(self._index.shard_of(ids[:1])[0]), run.begun + count
        shard, memory = self._index.shards[number], self._arena.memory
        self._position = (shard, int(starts[0]))
        if self._slot_sink is not None:
            assert block.scatter is not None
            before = run.begun - block.start
            whole = block.scatter.part(slice(before, before + count))
            placed = Placed(whole.part(rows), offsets, self._slot_sink.slot_offsets(batch_numbers))
            return partial(
                self._read_into_slots,
                run,
                shard,
                placed,
                batch_numbers,
                self._slot_sink.places(placed, memory),
                count,
            )
        verifier = None
        # With weights, a read may skip samples; the verifier counts ids on from the first.
        follows = int(ids[-1]) - int(ids[0]) == len(ids) - 1
        if run.ring is not None and (is_partial or not follows):
            run.ring.not_compared(run.begun, count)
        elif run.ring is not None:
            verifier = run.ring.compared(run.begun + first, int(ids[0]), count - first)
        segments = np.zeros((len(sizes), 1), np.int64), offsets[:, None], sizes[:, None]
        pieces = scatter_samples((memory, self._scratch), *segments, starts, stops, verifier)
        leaving = (
            next_ == block.end
            or int(self._index.shard_of(np.array([block.id(next_)]))[0]) != number
        )
        begin = partial(run.stream.begin, shard, pieces, int(starts[0]), leaving=leaving)
        size = int(stops[-1] - starts[0])
        return partial(
            self._read_into_arena,
            run,
            shard,
            ids,
            batch_numbers,
            places,
            begin,
            count,
            size,
            verifier,
        )

    def _read_into_slots(
        self,
        run: _LaneRun,
        shard: Shard,
        placed: Placed,
        batch_numbers: Ints,
        places: tuple[ScatterList, ChecksumJob],
        count: int,
    ) -> None:
        """Start to read samples with arrays that go straight into batches."""
        assert self._slot_sink is not None
        size = int(placed.samples.stops[-1] - placed.samples.starts[0])
        reading = self._slot_sink.read(
            shard, placed, batch_numbers, *places, self._arena.memory, self._settle_all
        )
        self._add_read(run, reading, batch_numbers, count, size)

    def _read_into_arena(
        self,
        run: _LaneRun,
        shard: Shard,
        ids: Ints,
        batch_numbers: Ints,
        places: Ints,
        begin: Callable[[], PendingRead],
        count: int,
        size: int,
        verifier: ReadVerifier | None,
    ) -> None:
        """Read local samples into the arena, or start to read remote ones."""
        begun = time.perf_counter()
        reading = begin()
        if reading.error is not None and not is_remote(shard.path):
            reading, verifier = (
                self._read_singly(run.stream, shard, ids, batch_numbers, run.where, places),
                None,
            )
            if run.ring is not None:
                run.ring.not_compared(run.begun, count)
        self.read_seconds += time.perf_counter() - begun
        check_headers = (ids, places) if self._index.needs_headers(shard) else None
        self._add_read(run, reading, batch_numbers, count, size, verifier, check_headers)

    def _read_singly(
        self,
        stream: LaneStream,
        shard: Shard,
        ids: Ints,
        batch_numbers: Ints,
        where: Ints,
        rows: Ints,
    ) -> PendingRead:
        """Read samples of a damaged shard one by one, in the order of their batches.

        Samples that fail are recorded as unreadable, or the first one fails the read.
        """
        view, table, reading = (
            self._arena.memory.view,
            self._index.offsets,
            PendingRead(retries=len(ids)),
        )
        for i in np.argsort(batch_numbers, kind="stable").tolist():
            number, row = int(ids[i]), int(rows[i])
            start, offset = int(table.start[number]), int(where[row])
            place = view[offset : offset + int(table.stop[number]) - start]
            error = stream.begin(shard, [place], start, leaving=False).error
            if error is not None and not self._skip_unreadable:
                reading.failed[i] = error
                break
            if error is not None:
                self._unreadable[number] = f"it cannot be read ({str(error).rstrip('.')})"
                where[row] = -1
        return reading

    def _add_read(
        self,
        run: _LaneRun,
        reading: PendingRead,
        batch_numbers: Ints,
        places: int,
        size: int,
        verifier: ReadVerifier | None = None,
        check_headers: tuple[Ints, Ints] | None = None,
    ) -> None:
        """Append a started read to the lane. places: how many places of the lane it covers."""
        with self._lock:
            run.begun += places
            last = run.begun == run.plan.lane_places(run.lane)
            run.in_flight.append(
                _StartedRead(
                    reading,
                    batch_numbers,
                    places,
                    size,
                    last,
                    self._position,
                    verifier,
                    check_headers,
                )
            )
        self._settle(run)

    def _settle_all(self) -> None:
        """Settle all lanes. Called in I/O threads after a read.

        Must not raise: an error there would not reach the loop, which would wait forever.
        """
        try:
            with self._lock:
                for runs in self._runs.values():
                    for run in runs:
                        self._settle(run)
        except BaseException as error:
            self._fail(WdstrainError(f"reading failed: {error!r}"))

    def _settle(self, run: _LaneRun) -> None:
        """Advance the lane over its complete reads, and check them."""
        with self._lock:
            before = run.read
            while run.in_flight:
                reading, batch_numbers, places, size, last, position, verifier, check_headers = (
                    run.in_flight[0]
                )
                # The loop may end the process after the last sample, so the cache must be complete
                # by then.
                if reading.error is None and (reading.missing or (last and run.stream.filling)):
                    break
                if check_headers is not None and position is not None and reading.error is None:
                    reading.error = self._header_error(run, position[0], *check_headers)
                run.in_flight.popleft()
                self.tally.retries += reading.retries
                if reading.error is not None or reading.failed:
                    self._fail_batches(reading, batch_numbers)
                elif verifier is not None:
                    verifier.settle()
                run.read += places
                self.read_bytes += size
            if run.read > before:
                self._notify()
                if not run.in_flight:
                    self._changed.notify_all()

    def _header_error(
        self, run: _LaneRun, shard: Shard, ids: Ints, places: Ints
    ) -> ShardError | None:
        """Return an error if the headers of these samples differ from the index.

        ids, places: ids and ring positions of the samples. int64[n] each.
        """
        table, view = self._index.offsets, self._arena.memory.view
        for number, offset in zip(ids.tolist(), run.where[places].tolist(), strict=True):
            start, stop = int(table.start[number]), int(table.stop[number])
            members = self._index.members(number)
            fields = [(name, member_offset - start, size) for name, member_offset, size in members]
            if not is_sample(
                view[offset : offset + stop - start], key := self._index.key(number), fields
            ):
                return ShardError(
                    f"{shard.shown} was replaced since it was opened: its headers at offset "
                    f"{start} are not those of '{key}'. Start again with the new shard."
                )
        return None

    def _fail_batches(self, reading: PendingRead, batch_numbers: Ints) -> None:
        """Record the first batch that needs a failed sample; the epoch ends before it."""
        failed = (
            reading.failed
            if reading.error is None
            else {int(np.argmin(batch_numbers)): reading.error}
        )
        first = min(failed, key=lambda i: int(batch_numbers[i]))
        if self._error_of(int(batch_numbers[first])) is None:
            self._first_failed = int(batch_numbers[first]), failed[first]
        self._notify()

    def _block_of(self, run: _LaneRun) -> ReadBlock:
        """Return the block with the next places of a lane; plan one if the last is used up."""
        block = run.block
        if block is None or not block.covers_read(run.begun):
            block = run.block = ReadBlock.of(
                self._index,
                run.plan,
                self._rank,
                run.lane,
                run.begun,
                self._slot_sink,
            )
        return block


def reach(index: Index, plan: Order, rank: int, ahead: int) -> tuple[int, int]:
    """Return (samples of a lane's window, samples of a lane in its share of `ahead` bytes)."""
    longest = max(plan.lane_places(lane) for lane in plan.lanes_of(rank))
    mean = max(1, int((index.offsets.stop - index.offsets.start).sum()) // max(1, plan.samples))
    return min(plan.window, longest), max(
        1, min(ahead // mean // len(plan.lanes_of(rank)), longest)
    )


def batches_begun(index: Index, plan: Order, rank: int, ahead: int) -> int:
    """Return the most batches that are read in part at one time. It bounds the batch slots.

    A sample leaves less than a window after its place, half a window on average. At the end of an
    epoch the reader holds half a window and what is read ahead, then as much again and the other
    half of a window for the next epoch. At most two epochs are started at a time.
    """
    at_once = min(
        READ_SAMPLES, READ_TOGETHER // int((index.offsets.stop - index.offsets.start).min()) + 1
    )
    longest = max(plan.lane_places(lane) for lane in plan.lanes_of(rank))
    window, ahead = reach(index, plan, rank, ahead)
    return (
        -(
            -min(2 * longest, 2 * (window + ahead + at_once) + int(8 * window**0.5))
            // plan.samples_per_step_per_lane
        )
        + 4
    )


def _check_sample_size(index: Index, number: int, size: int) -> None:
    """Raise ShardError for a sample that is too large for this machine's memory."""
    if size > (most := memory() // 2):
        shard = index.shards[int(index.shard_of(np.array([number]))[0])]
        raise ShardError(
            f"{shard.shown}: '{index.key(number)}' at offset {int(index.offsets.start[number])} has "
            f"{size} bytes, and a sample is held as a whole; the limit is {most}, half of this "
            f"machine's memory. Leave it out, or pack it in parts."
        )


def _joined(parts: list[Any]) -> Any:
    """Return the concatenation of arrays."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _ignore() -> None:
    """Callback of a reader that is closed."""
