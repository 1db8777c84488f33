"""Forward reader: reads the samples of one rank in the order of the plan.

A thread reads the places of the rank's lanes in order. Each read has some MiB and scatters its
samples to their places in the arena. The thread runs ahead of the requested batches by a number of
bytes, also into the next epoch, because `collect` is called inside the training loop and must find
the bytes there.

Within a lane offsets only grow, every needed byte is read once, and one shard is open. Several
remote reads are in flight; a lane counts as read up to the first of them that is incomplete.

`batch_number` counts the batches since `start`, across epochs. A bucket of the arena holds the
samples of several consecutive batches.

`Reader` keeps memory and statistics. Each `start` makes a `ReadRun`, which has the thread, the lanes
and the errors, and is thrown away when it ends. `RunState` is what its threads share, `LaneReader`
starts reads, and `Settler` completes them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from wdstrain.memory.scatter import Bools
from wdstrain.memory.shared import Memory
from wdstrain.order.plan import Order
from wdstrain.reader.lane import Lane
from wdstrain.reader.read_run import ReadRun
from wdstrain.reader.resources import ReadOptions, ReadResources
from wdstrain.reader.run_state import ReadStats, RunState
from wdstrain.reader.slot_sink import SlotSink
from wdstrain.reader.step_blocks import StepBlock
from wdstrain.runtime.signals import DeferSignals
from wdstrain.shards.index import Index, Ints
from wdstrain.storage.prefetch import ReadStopped


class CollectedBatch(NamedTuple):
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


class Reader:
    """Forward reader of the lanes of one rank. stats: totals since it was made.

    Each run of reading belongs to a generation, a number that its user lets grow with every loop.
    """

    def __init__(
        self,
        index: Index,
        plans: Callable[[int], Order],
        rank: int,
        options: ReadOptions,
        slot_sink: SlotSink | None = None,
    ) -> None:
        """Set memory aside; `start` begins to read.

        plans: returns the plan of an epoch; all plans must have the same sizes.
        slot_sink: reader of arrays that go straight into batches.
        Raises ShardError for a sample that is too large for this machine's memory.
        """
        self._resources = ReadResources(index, plans, rank, options, slot_sink)
        self.stats = ReadStats()
        self._lifecycle = threading.RLock()  # held while a run is started or stopped
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
        """Whether no further read starts until the loop requests more batches."""
        run = self._run
        return run is None or run.is_paused

    def start(self, generation: int, epoch: int, step: int, until: int | None = None) -> None:
        """Start to read from this step on, for a generation; an earlier run ends.

        until: the first epoch that is not read; None: there is no end. Raises ReadStopped if the
        generation is cancelled, RuntimeError if the system does not start a thread.
        """
        with self._lifecycle:
            # Another thread may cancel the generation before this call, and wait for this thread.
            if generation <= self._cancelled:
                raise ReadStopped
            self._end_run()
            self._resources.arena.reset()
            run = ReadRun(self._resources, self.stats, generation)
            with DeferSignals():
                run.start(epoch, step, until)
                self._run = run

    def renew(self, generation: int) -> bool:
        """Let the run go on for a later generation. Returns False if there is no run."""
        with self._lifecycle:
            # After an interrupted `cancel` a cancelled run is still here.
            if self._run is not None and self._run.generation > self._cancelled:
                self._run.generation = generation
                return True
            return False

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

    def collect(self, block: StepBlock, number: int) -> CollectedBatch:
        """Return the batch of step `number` of a block, once it is read. Call this in step order.

        Raises the error of the read if the step, or one before it, cannot be read, and ReadStopped
        if the run was cancelled.
        """
        run = self._run
        if run is None:
            raise ReadStopped
        lanes, is_read = self._request(run, block, number)
        state = run.state
        batch_number = lanes[0].epoch_first_batch + block.first + number
        if not is_read:
            self._wait_for_reads(state, lanes, batch_number)
        with state.lock:
            if (error := state.error_of(batch_number)) is not None:
                try:
                    raise error
                finally:
                    del error  # it refers to this frame
            if not _are_read(lanes):
                state.raise_unread()
            offsets = self._offsets(lanes, block, number)
            unverified = self._unverified(lanes, block, number)
            if block.first + number == lanes[0].plan.steps - 1:
                state.lanes.pop(block.epoch, None)
                state.changed.notify_all()
        rows = slice(block.firsts[number], block.firsts[number + 1])
        ids = block.ids[rows]
        unreadable = self._unreadable(ids, offsets)
        return CollectedBatch(ids, offsets, block.valid[rows], unverified, unreadable)

    def release(self, batch_number: int) -> None:
        """Free the memory of the batches up to this one. Call this in order of batch numbers."""
        run, limits = self._run, self._resources.limits
        if run is None:  # the next run frees all memory
            return
        with run.state.lock:
            while (run.released + 1) * limits.bucket <= batch_number + 1:
                self._resources.arena.release()
                run.released += 1

    def describe_wait(self) -> str | None:
        """Return what is being read, with the reader's stack, if the loop waits for a read."""
        run = self._run
        return None if run is None else run.describe_wait()

    # --- parts of `collect` -----------------------------------------------------------------------

    def _request(self, run: ReadRun, block: StepBlock, number: int) -> tuple[list[Lane], bool]:
        """Request a step. Returns the lanes of its epoch, and whether they are read that far."""
        state, epoch = run.state, block.epoch
        if epoch not in state.lanes:
            state.wait(lambda: epoch in state.lanes)
        with state.lock:
            if epoch not in state.lanes:
                state.raise_unread()
            lanes = state.lanes[epoch]
            for lane, steps in zip(lanes, block.lanes, strict=True):
                lane.request(steps, number)
            wakes = run.may_resume()  # waking the thread for every batch would be a waste
            if wakes:
                state.changed.notify_all()
            is_read = _are_read(lanes)
        if wakes:  # waiting gives the GIL to the reader at once; otherwise it gets it after 5 ms
            state.wait(lambda: not run.may_resume())
        return lanes, is_read

    def _wait_for_reads(self, state: RunState, lanes: list[Lane], batch_number: int) -> None:
        """Wait until the requested samples are read, or this batch fails."""
        before = self.stats.shuffle_seconds
        state.wait(lambda: state.error_of(batch_number) is not None or _are_read(lanes))
        if self._resources.sink.in_background:
            self.stats.read_seconds += self.stats.shuffle_seconds - before

    def _offsets(self, lanes: list[Lane], block: StepBlock, number: int) -> Ints:
        """Return the offsets of a step's samples in the arena. int64[b]"""
        offsets = []
        for lane, steps in zip(lanes, block.lanes, strict=True):
            places = steps.places[steps.firsts[number] : steps.firsts[number + 1]]
            offsets.append(lane.where[places % self._resources.limits.ring])
        joined: Ints = _joined(offsets)
        return joined

    def _unverified(self, lanes: list[Lane], block: StepBlock, number: int) -> Bools | None:
        """Return bool[b], True for the unverified samples of a step; None if all are verified."""
        if not any(lane.ring.any_unverified for lane in lanes):
            return None
        unverified: Bools = _joined(
            [
                lane.ring.unverified(steps.places[slice(*steps.firsts[number : number + 2])])
                for lane, steps in zip(lanes, block.lanes, strict=True)
            ]
        )
        return unverified

    def _unreadable(self, ids: Ints, offsets: Ints) -> dict[int, str]:
        """Return by row why a sample could not be read."""
        reasons = self._resources.sink.unreadable.reasons
        if not reasons:
            return {}
        return {row: reasons[int(ids[row])] for row in np.flatnonzero(offsets < 0).tolist()}


def _are_read(lanes: list[Lane]) -> bool:
    """Return whether the lanes are read as far as the requested batches need."""
    return all(lane.read >= lane.needed for lane in lanes)


def _joined(parts: list[Any]) -> Any:
    """Return the concatenation of arrays."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
