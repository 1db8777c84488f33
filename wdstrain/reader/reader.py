"""Forward reader: reads the samples of one rank in the order of the plan.

A thread reads the places of the rank's lanes in order. Each read has some MiB and scatters its
samples to their places in memory. The thread runs ahead of the requested batches by a number of
bytes, also into the next epoch, because `collect` is called inside the training loop and must find
the bytes there.

Within a lane offsets only grow, every needed byte is read once, and one shard is open. Several
remote reads are in flight; a lane counts as read up to the first of them that is incomplete.

`Reader` keeps the memory and the statistics, and alone starts and ends runs. Each `start` makes a
`ReadRun`, which has the thread, the lanes, the sink and the errors, and is not used again after its
end. `RunState` is what the threads of a run share, `ReadThread` starts reads, and `ArenaSink` says
where their bytes go.

`batch_number` counts the batches of a run, across epochs. A bucket of the arena holds the samples
of several consecutive batches.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, NamedTuple

import numpy as np

from wdstrain.memory.scatter import Bools
from wdstrain.memory.shared import Memory
from wdstrain.reader.arena_sink import ArenaSink
from wdstrain.reader.blocks import StepBlock
from wdstrain.reader.lane import Lane
from wdstrain.reader.read_thread import ReadThread
from wdstrain.reader.resources import ReadResources
from wdstrain.reader.run_state import ReadStats, RunState
from wdstrain.runtime.signals import DeferSignals
from wdstrain.runtime.watchdog import thread_stack
from wdstrain.shards.offsets import Ints
from wdstrain.storage.prefetch import RangePrefetcher, ReadStopped


class CollectedBatch(NamedTuple):
    """The b samples of one batch, which are read.

    batch_number: in the run. slot: its receiver owns it. ids: int64[b].
    offset: in the arena, int64[b]. valid: bool[b], False for padding.
    unverified: bool[b], True for samples whose checksums are not verified yet; None: all are.
    unreadable: by row, why a sample could not be read; its bytes are meaningless.
    """

    batch_number: int
    slot: int
    ids: Ints
    offset: Ints
    valid: Bools
    unverified: Bools | None
    unreadable: dict[int, str]


class Reader:
    """Forward reader of the lanes of one rank. stats: totals since it was made.

    Each run belongs to a generation, a number that the caller increases with every loop.
    """

    def __init__(self, resources: ReadResources) -> None:
        self._resources = resources
        self.stats = ReadStats()
        self._lifecycle = threading.RLock()  # held while a run is started or ended
        self._cancelled = -1  # the highest cancelled generation
        self._run: ReadRun | None = None

    @property
    def memory(self) -> Memory:
        """The memory of the arena."""
        return self._resources.arena.memory

    @property
    def held_bytes(self) -> int:
        """Bytes of the arena that are in use."""
        return self._resources.arena.held

    @property
    def is_paused(self) -> bool:
        """Whether no read starts until the loop requests more batches."""
        run = self._run
        return run is None or run.is_paused

    def start(self, generation: int, epoch: int, step: int, until: int | None = None) -> ReadRun:
        """Return a run that reads from this step on. An earlier run ends, and its slots are freed.

        until: the first epoch that is not read; None: there is no end. Raises ReadStopped if the
        generation is cancelled, RuntimeError if the system does not start a thread.
        """
        with self._lifecycle:
            # Another thread may cancel the generation before this call, and wait for this thread.
            if generation <= self._cancelled:
                raise ReadStopped
            self._end_run()
            self._resources.arena.reset()
            self._resources.slots.reset()
            run = ReadRun(self._resources, self.stats, generation)
            with DeferSignals():
                run.start(epoch, step, until)
                self._run = run
            return run

    def renew(self, run: ReadRun, generation: int) -> bool:
        """Let a run go on for a later generation. Returns False if the run has ended."""
        with self._lifecycle:
            # After an interrupted `cancel` a cancelled run is still here.
            if run is not self._run or run.generation <= self._cancelled:
                return False
            run.generation = generation
            return True

    def cancel(self, generation: int) -> None:
        """End the run of this generation or an earlier one, and let `start` fail for them.

        A thread that waits for such a run raises ReadStopped. Any thread may call this, also while
        another one calls `start`.
        """
        with self._lifecycle:
            self._cancelled = max(self._cancelled, generation)
            if self._run is not None and self._run.generation <= generation:
                self._end_run()

    def close(self) -> None:
        """Cancel all generations forever. The memory is freed with its last user, without the GC."""
        self.cancel(sys.maxsize)

    def _end_run(self) -> None:
        """End the run, if there is one. After an interrupt the next call ends the rest of it."""
        if self._run is not None:
            self._run.stop()
            self._run = None


class ReadRun:
    """One run of reading, from its start to its end. generation: the loop that uses it.

    `Reader` starts and stops it; the loop's thread collects and releases its batches.
    """

    def __init__(self, resources: ReadResources, stats: ReadStats, generation: int) -> None:
        self.generation = generation
        self._resources, self._stats = resources, stats
        self._state = RunState(resources.limits, stats)
        self._sink = ArenaSink(resources)
        self._prefetcher = RangePrefetcher(
            resources.options.cache, stats.fetch, self._state.settle_all, resources.index
        )
        self._thread: threading.Thread | None = None
        self._released = 0  # buckets of the arena

    @property
    def is_paused(self) -> bool:
        """Whether no read starts until the loop requests more batches."""
        state, thread = self._state, self._thread
        return bool(state.paused) or thread is None or not thread.is_alive()

    @property
    def held_samples(self) -> int:
        """Samples whose read was started and that are not requested yet."""
        with self._state.lock:
            return sum(lane.held for lanes in self._state.lanes.values() for lane in lanes)

    def start(self, epoch: int, step: int, until: int | None) -> None:
        """Start to read from (epoch, step) up to epoch `until`. The caller defers signals.

        Raises RuntimeError if the system does not start a thread; then nothing runs.
        """
        reading = ReadThread(
            self._resources, self._state, self._stats, self._sink, self._prefetcher
        )
        thread = threading.Thread(
            target=reading.read_epochs,
            args=(epoch, step, until),
            name="wdstrain-reader",
            daemon=True,
        )
        thread.start()  # may raise: then `stop` must not join it
        self._thread = thread

    def stop(self) -> None:
        """End the run; wait for at most one read. May be called again after an interrupt.

        No memory is written to after that. Only a server that does not answer can keep a thread of
        the prefetcher longer, and that thread writes nothing.
        """
        self._state.stop()
        if self._thread is not None:
            self._thread.join()
        self._prefetcher.stop()

    def describe_wait(self) -> str | None:
        """Return what is being read, with the reader's stack, if the loop waits for a read."""
        state = self._state
        if not state.is_waiting:
            return None
        lanes = [lane for lanes in list(state.lanes.values()) for lane in lanes]
        late = [read.position for lane in lanes for read in list(lane.in_flight)[:1]]
        position = late[0] if late else state.position
        progress = "nothing was read yet"
        if position is not None:
            progress = f"{position[0].shown} is being read at offset {position[1]}"
        stack = thread_stack(self._thread.ident if self._thread is not None else None)
        return f"{progress}; the reader:\n{stack}"

    # --- in the loop's thread ---------------------------------------------------------------------

    def collect(self, block: StepBlock, number: int) -> CollectedBatch:
        """Return the batch of step `number` of a block, once it is read. Call this in step order.

        Raises the error of the read if the step, or one before it, cannot be read, and ReadStopped
        if the run was cancelled.
        """
        state = self._state
        lanes, is_read = self._request(block, number)
        batch_number = lanes[0].epoch_first_batch + block.first + number
        if not is_read:
            self._wait_for_reads(lanes, batch_number)
        with state.lock:
            if state.error_of(batch_number) is not None or not _are_read(lanes):
                state.raise_error(batch_number)
            offset, unverified = self._take(lanes, block, number)
            if block.first + number == lanes[0].plan.steps - 1:
                state.lanes.pop(block.epoch, None)
                state.changed.notify_all()
        rows = slice(block.firsts[number], block.firsts[number + 1])
        ids = block.ids[rows]
        slot, unreadable = self._resources.slots.take(), dict[int, str]()
        if reasons := self._sink.unreadable.reasons:
            for row in np.flatnonzero(offset < 0).tolist():
                unreadable[row] = reasons[int(ids[row])]
        valid = block.valid[rows]
        return CollectedBatch(batch_number, slot, ids, offset, valid, unverified, unreadable)

    def release(self, batch_number: int) -> None:
        """Free the memory of the batches up to this one. Call this in order of batch numbers."""
        with self._state.lock:
            while (self._released + 1) * self._resources.limits.bucket <= batch_number + 1:
                self._resources.arena.release()
                self._released += 1

    def _request(self, block: StepBlock, number: int) -> tuple[list[Lane], bool]:
        """Request a step. Returns the lanes of its epoch, and whether they are read that far."""
        state, epoch = self._state, block.epoch
        if epoch not in state.lanes:
            state.wait(lambda: epoch in state.lanes)
        with state.lock:
            if epoch not in state.lanes:
                state.raise_error()
            lanes = state.lanes[epoch]
            for lane, steps in zip(lanes, block.lanes, strict=True):
                lane.request(steps, number)
            wakes = state.may_resume()  # waking the thread for every batch would be a waste
            if wakes:
                state.changed.notify_all()
            is_read = _are_read(lanes)
        if wakes:  # waiting gives the GIL to the reader at once; otherwise it gets it after 5 ms
            state.wait(lambda: not state.may_resume())
        return lanes, is_read

    def _wait_for_reads(self, lanes: list[Lane], batch_number: int) -> None:
        """Wait until the requested samples are read, or this batch fails."""
        state, before = self._state, self._stats.shuffle_seconds
        state.wait(lambda: state.error_of(batch_number) is not None or _are_read(lanes))
        if self._resources.is_remote:
            self._stats.read_seconds += self._stats.shuffle_seconds - before

    def _take(self, lanes: list[Lane], block: StepBlock, number: int) -> tuple[Ints, Bools | None]:
        """Return the offsets of a step's samples in the arena, and which of them are unverified."""
        ring, offsets, unverified = self._resources.limits.ring, list[Ints](), list[Bools]()
        any_unverified = any(lane.any_unverified for lane in lanes)
        for lane, steps in zip(lanes, block.lanes, strict=True):
            places = steps.places[steps.firsts[number] : steps.firsts[number + 1]] % ring
            offsets.append(lane.offsets[places])
            if any_unverified:
                unverified.append(lane.unverified[places])
        return _joined(offsets), _joined(unverified) if any_unverified else None


def _are_read(lanes: list[Lane]) -> bool:
    """Return whether the lanes are read as far as the requested batches need."""
    return all(lane.is_read for lane in lanes)


def _joined(parts: list[Any]) -> Any:
    """Return the concatenation of arrays."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
