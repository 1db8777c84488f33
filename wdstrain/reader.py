"""One forward reader per rank: it executes the plan, and nothing else decides what is read.

A thread walks the places of its rank's lanes in order, with reads of some MiB that spread each sample straight to where
it will wait (`arena`), and runs ahead of what has been asked for by a bound of its own, into the next epoch too. So the
caller of `collect`, who sits inside the training loop, finds the bytes there. Offsets only grow within a lane; every
byte that is needed is read once; one shard is open per lane.

Time is counted in `clock`, the number of batches since `start`: it goes on over the ends of epochs, and a bucket of the
arena is a run of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.arena import Arena
from wdstrain.cache import Cache
from wdstrain.errors import ShardError, StorageError, WdstrainError
from wdstrain.forward import Extent, Forward, Tally
from wdstrain.indexing import Index, Ints, Shard
from wdstrain.memory import Memory
from wdstrain.plan import Order
from wdstrain.remote import is_remote
from wdstrain.storage import open_source

READ_BYTES = 4 << 20  # of one read
_PIECES = 1024  # samples in one read
_BUCKETS = 16  # slabs of a window leave in so many groups


class Batch(NamedTuple):
    """Where the samples of one batch wait. ids, offset: int64[b], offset in the arena; valid: bool[b], False is padding.

    lost: why the samples in some rows could not be read; their offset means nothing.
    """

    ids: Ints
    offset: Ints
    valid: npt.NDArray[np.bool_]
    lost: dict[int, str]


@dataclass
class _Run:
    """One lane in one epoch: how far it was read, how far it is asked for, where its samples were put."""

    plan: Order
    lane: int
    epoch_clock: int  # clock of the epoch's step 0, negative when it was entered in the middle
    first_step: int
    where: Ints  # ring: place -> offset in the arena
    read: int
    needed: int = 0
    due: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # of the places from due_start on
    due_start: int = 0
    forward: Forward | None = None

    def close(self) -> None:
        if self.forward is not None:
            self.forward.close()
            self.forward = None


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
    ) -> None:
        """ahead: bytes read beyond what was asked for. in_flight: most batches that are collected and not yet released.

        salvage: samples that a disk does not give are lost, and no error. cache: of shards on servers.
        """
        self._index, self._plans, self._rank = index, plans, rank
        plan, table = plans(0), index.table
        extents = table.stop - table.start
        largest, total = int(np.max(extents)), int(np.sum(extents))
        lanes = len(plan.lanes_of(rank))
        longest = max(plan.lane_places(lane) for lane in plan.lanes_of(rank))
        mean = max(1, total // max(1, plan.samples))
        self._ahead = max(1, min(ahead // mean // lanes, longest))
        self._ring = min(plan.window, longest) + self._ahead + 2 * _PIECES + plan.quota
        self._bucket = max(1, (min(plan.window, longest) + self._ahead) // (plan.quota * _BUCKETS))
        buckets = 2 * _BUCKETS + in_flight // self._bucket + 4
        live = min(self._ring * lanes * largest, 2 * total) + (in_flight + 1) * plan.quota * lanes * largest
        self._arena = Arena(live=live, largest=largest, buckets=buckets)
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._runs: dict[int, list[_Run]] = {}
        self._reading: list[_Run] = []  # what the thread is in
        self._error: WdstrainError | None = None
        self._stopping = False
        self._released = 0
        self._salvage, self._cache = salvage, cache
        self._lost: dict[int, str] = {}  # by id
        self.read_seconds, self.read_bytes, self.tally = 0.0, 0, Tally()

    @property
    def memory(self) -> Memory:
        return self._arena.memory

    def start(self, epoch: int, step: int) -> None:
        """Begin to read from this step on; whatever was read before is forgotten."""
        self.stop()
        self._arena.reset()
        self._runs, self._error, self._stopping, self._released = {}, None, False, 0
        self._thread = threading.Thread(target=self._read_epochs, args=(epoch, step), name="wdstrain-reader", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; at most one read is waited for."""
        if self._thread is not None:
            with self._lock:
                self._stopping = True
                self._lock.notify_all()
            for run in self._reading:
                if run.forward is not None:
                    run.forward.stop()
            self._thread.join()
            self._thread = None

    def collect(self, epoch: int, step: int) -> Batch:
        """The samples of a batch, once they are read. Steps are asked for in order. Raises what the reading raised."""
        with self._lock:
            self._lock.wait_for(lambda: epoch in self._runs or self._error is not None)
            if epoch not in self._runs:
                raise self._error or WdstrainError("the reader was stopped")
            runs = self._runs[epoch]
        plan = runs[0].plan
        spans = [plan.span(run.lane, step) for run in runs]
        places = [plan.order(run.lane, *span) for run, span in zip(runs, spans, strict=True)]
        with self._lock:
            for run, wanted in zip(runs, places, strict=True):
                run.needed = max(run.needed, int(np.max(wanted)) + 1 if len(wanted) else 0)
            self._lock.notify_all()
            self._lock.wait_for(lambda: all(run.read >= run.needed for run in runs) or self._error is not None)
            if any(run.read < run.needed for run in runs):
                raise self._error or WdstrainError("the reader was stopped")
            offset = [run.where[wanted % self._ring] for run, wanted in zip(runs, places, strict=True)]
            if step == plan.steps - 1:
                del self._runs[epoch]
                self._lock.notify_all()
        ids = [plan.ids(run.lane, wanted) for run, wanted in zip(runs, places, strict=True)]
        valid = [np.arange(*span) < plan.lane_samples(run.lane) for run, span in zip(runs, spans, strict=True)]
        found = Batch(np.concatenate(ids), np.concatenate(offset), np.concatenate(valid), {})
        found.lost.update((row, self._lost[int(found.ids[row])]) for row in np.flatnonzero(found.offset < 0).tolist())
        return found

    def release(self, clock: int) -> None:
        """The batches up to this clock are decoded; clocks come in order."""
        with self._lock:
            while (self._released + 1) * self._bucket <= clock + 1:
                self._arena.release(self._released)
                self._released += 1

    # --- the thread --------------------------------------------------------------------------------------------------

    def _read_epochs(self, epoch: int, step: int) -> None:
        runs: list[_Run] = []
        clock = -step
        try:
            while not self._stopping:
                plan = self._plans(epoch)
                runs = self._reading = [self._run(plan, lane, clock, step) for lane in plan.lanes_of(self._rank)]
                with self._lock:  # one epoch ahead at most, however small the epochs are
                    self._lock.wait_for(lambda: self._stopping or len(self._runs) < 2)
                    self._runs[epoch] = runs
                    self._lock.notify_all()
                while (run := self._next(runs)) is not None:
                    self._read_piece(run)
                for run in runs:
                    run.close()
                clock += plan.steps
                epoch, step = epoch + 1, 0
        except BaseException as error:  # handed to the loop, which raises it
            with self._lock:
                self._error = error if isinstance(error, WdstrainError) else WdstrainError(f"reading failed: {error!r}")
                self._lock.notify_all()
        finally:
            for run in runs:
                run.close()

    def _run(self, plan: Order, lane: int, clock: int, step: int) -> _Run:
        first = plan.first_place(lane, step) if step else 0
        return _Run(plan, lane, clock, step, np.zeros(min(self._ring, plan.lane_places(lane)) or 1, np.int64), first)

    def _next(self, runs: list[_Run]) -> _Run | None:
        """The lane that is least ahead, once it may read on. None when all are read or the end was asked for."""
        with self._lock:
            unread = [run for run in runs if run.read < run.plan.lane_places(run.lane)]
            if not unread or self._stopping:
                return None
            self._lock.wait_for(lambda: self._stopping or any(r.read - r.needed < self._ahead for r in unread))
            return None if self._stopping else min(unread, key=lambda run: run.read - run.needed)

    def _read_piece(self, run: _Run) -> None:
        """Read the next samples of a lane that lie together in one shard."""
        table = self._index.table
        stop = min(run.read + _PIECES, run.plan.lane_places(run.lane))
        due = self._due(run, run.read, stop)
        ids = run.plan.ids(run.lane, np.arange(run.read, run.read + len(due)))
        wanted = due >= run.first_step
        if not wanted.any():
            self._advance(run, len(due))
            return
        first = int(np.argmax(wanted))
        shard = int(self._index.shard_of(ids[first : first + 1])[0])
        starts, stops = table.start[ids], table.stop[ids]
        together = np.flatnonzero(
            (np.diff(ids) != 1)
            | (ids[1:] >= self._index.first[shard + 1])
            | (stops[1:] - starts[first] > READ_BYTES)
            | (starts[1:] - stops[:-1] > READ_BYTES)
        )
        count = int(together[together >= first][0]) + 1 if (together >= first).any() else len(ids)
        if run.forward is None:
            extents = self._extents(run, run.read + first)
            run.forward = Forward(extents, lambda path, size: open_source(path, size), self._cache, self.tally)
        pieces, at = [], int(starts[first])
        view = self._arena.memory.view
        with self._lock:
            for i in range(first, count):
                begin, end = int(starts[i]), int(stops[i])
                if not wanted[i]:
                    continue
                while at < begin:  # members that are no samples, or samples this resume does not need
                    pieces.append(self._scratch[: min(begin - at, READ_BYTES)])
                    at += len(pieces[-1])
                offset = self._arena.place((run.epoch_clock + int(due[i])) // self._bucket, end - begin)
                run.where[(run.read + i) % self._ring] = offset
                pieces.append(view[offset : offset + end - begin])
                at = end
        begun = time.perf_counter()
        source = self._index.shards[shard]
        try:
            run.forward.read_into(source, pieces, int(starts[first]))
        except (ShardError, StorageError):
            if not self._salvage or is_remote(source.path):
                raise
            rows = first + np.flatnonzero(wanted[first:count])
            self._read_singly(run.forward, source, ids[rows], run.where, (run.read + rows) % self._ring)
        self.read_seconds += time.perf_counter() - begun
        self.read_bytes += at - int(starts[first])
        self._advance(run, count)

    def _read_singly(self, forward: Forward, shard: Shard, ids: Ints, where: Ints, rows: Ints) -> None:
        """Read samples of a damaged shard one by one into the places that were made for them; those that fail are lost."""
        view = self._arena.memory.view
        for number, row in zip(ids.tolist(), rows.tolist(), strict=True):
            start, size = (
                int(self._index.table.start[number]),
                int(self._index.table.stop[number] - self._index.table.start[number]),
            )
            offset = int(where[row])
            try:
                forward.read_into(shard, [view[offset : offset + size]], start)
            except (ShardError, StorageError) as error:
                self._lost[number] = f"it cannot be read ({str(error).rstrip('.')})"
                where[row] = -1

    def _advance(self, run: _Run, count: int) -> None:
        with self._lock:
            run.read += count
            self._lock.notify_all()

    def _due(self, run: _Run, start: int, stop: int) -> Ints:
        """Steps that need the places [start, stop), computed for a window of places at a time."""
        if not run.due_start <= start or stop > run.due_start + len(run.due):
            block = max(run.plan.window, 4 * _PIECES)
            run.due_start = start
            run.due = run.plan.due(run.lane, start, min(start + block, run.plan.lane_places(run.lane)))
        return run.due[start - run.due_start : stop - run.due_start]

    def _extents(self, run: _Run, place: int) -> Iterator[Extent]:
        """The runs of bytes that a lane reads from a place on."""
        table, stop = self._index.table, run.plan.lane_places(run.lane)
        last: Extent | None = None
        while place < stop:
            ids = run.plan.ids(run.lane, np.arange(place, min(place + _PIECES, stop)))
            shards = self._index.shard_of(ids)
            for part in np.split(np.arange(len(ids)), np.flatnonzero((np.diff(ids) != 1) | (np.diff(shards) != 0)) + 1):
                shard = self._index.shards[int(shards[part[0]])]
                start, end = int(table.start[ids[part[0]]]), int(table.stop[ids[part[-1]]])
                if last is not None and last.shard.path == shard.path and last.stop <= start <= last.stop + READ_BYTES:
                    last = last._replace(stop=end)
                    continue
                if last is not None:
                    yield last
                last = Extent(shard, start, end)
            place += len(ids)
        if last is not None:
            yield last
