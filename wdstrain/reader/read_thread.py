"""The reader's thread: reads the lanes of a rank from one step on, epoch after epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial

import numpy as np

from wdstrain.memory.scatter import Bools
from wdstrain.order.order import Order
from wdstrain.reader.arena_sink import ArenaSink
from wdstrain.reader.blocks import ReadBlock
from wdstrain.reader.lane import Lane, LaneRead, ReadSamples
from wdstrain.reader.resources import ReadResources
from wdstrain.reader.run_state import ReadStats, RunState
from wdstrain.storage.local import LocalFile
from wdstrain.storage.prefetch import LaneStream, RangePrefetcher


class ReadThread:
    """Plans and starts the reads of one run. All methods run in the reader's thread."""

    def __init__(
        self,
        resources: ReadResources,
        state: RunState,
        stats: ReadStats,
        sink: ArenaSink,
        prefetcher: RangePrefetcher,
    ) -> None:
        self._resources, self._index = resources, resources.index
        self._state, self._stats, self._sink = state, stats, sink
        self._prefetcher = prefetcher

    def read_epochs(self, epoch: int, step: int, until: int | None) -> None:
        """Read from (epoch, step) up to epoch `until`; None: there is no end."""
        batch_number, state = -step, self._state
        following: Callable[[], list[Lane]] = partial(self._enter_epoch, epoch, batch_number, step)
        try:
            while not state.is_stopped and epoch != until and state.first_failed is None:
                lanes = following()
                if not self._add_epoch(epoch, lanes):
                    return
                batch_number, epoch = batch_number + lanes[0].plan.steps, epoch + 1
                following = list
                if epoch != until:
                    following = cache(partial(self._enter_epoch, epoch, batch_number, 0))
                self._read_epoch(lanes, following)
        except BaseException as error:  # the loop's thread raises it
            state.fail(error)

    # --- epochs -----------------------------------------------------------------------------------

    def _enter_epoch(self, epoch: int, batch_number: int, step: int) -> list[Lane]:
        """Return the lanes of an epoch from a step on, with their first blocks planned.

        batch_number: of step 0.
        """
        plan = self._resources.plans(epoch)
        numbers = plan.lanes_of(self._resources.rank)
        lanes = [self._enter_lane(plan, number, batch_number, step) for number in numbers]
        for lane in lanes:
            if not lane.all_begun:
                self._block_of(lane)
        return lanes

    def _enter_lane(self, plan: Order, number: int, batch_number: int, step: int) -> Lane:
        """Return a lane that begins at `step`. batch_number: of step 0."""
        first = plan.first_place(number, step) if step else 0
        ring = min(self._resources.limits.ring, plan.lane_places(number)) or 1
        index = self._index
        return Lane(
            plan=plan,
            number=number,
            epoch_first_batch=batch_number,
            first_step=step,
            offsets=np.zeros(ring, np.int64),
            unverified=np.zeros(ring, bool),
            any_unverified=False,
            stream=LaneStream(
                lambda shard: LocalFile(shard.path, index.expected_state(shard) or ""),
                self._prefetcher,
            ),
            begun=first,
            read=first,
            requested=plan.span(number, step)[0],
        )

    def _add_epoch(self, epoch: int, lanes: list[Lane]) -> bool:
        """Add the lanes of an epoch, at most one epoch ahead. Returns False after `stop`."""
        state = self._state
        with state.lock:
            state.changed.wait_for(lambda: state.is_stopped or len(state.lanes) < 2)
            if not state.is_stopped:
                state.lanes[epoch] = lanes
                state.notify_loop()
            return not state.is_stopped

    def _read_epoch(self, lanes: list[Lane], following: Callable[[], list[Lane]]) -> None:
        """Read the lanes of one epoch. following: plans the next epoch."""
        state = self._state
        try:
            while (lane := self._next_lane(lanes, following)) is not None:
                self._read_next(lane)
            if self._resources.is_remote:  # the loop needs these reads before the next epoch's
                with state.lock:
                    state.changed.wait_for(
                        lambda: state.is_stopped or not any(lane.in_flight for lane in lanes)
                    )
        finally:
            for lane in lanes:
                lane.stream.close()

    def _next_lane(self, lanes: list[Lane], following: Callable[[], list[Lane]]) -> Lane | None:
        """Return the lane that is least ahead, once there is room. None at the end or after `stop`.

        following: plans the next epoch. It is called in the first pause, because at the end of this
        epoch the loop does not wait and this thread would get the GIL late.
        """
        state = self._state
        with state.lock:
            unread = [lane for lane in lanes if not lane.all_begun]
            if not unread or state.is_stopped:
                return None
            pausing = not state.with_room(unread)
        if pausing:
            with suppress(Exception):  # called again when the next epoch begins, which raises it
                following()
        with state.lock:
            free = [] if pausing else state.with_room(unread)
            # Check again after each wait: the end of an epoch may have taken the room back.
            while not free and not state.is_stopped:
                state.paused = unread
                state.changed.wait_for(lambda: state.is_stopped or state.may_resume())
                state.paused = []
                state.notify_loop()
                free = state.with_room(unread)
            ahead = min(free, key=lambda lane: lane.begun - lane.needed, default=None)
            return None if state.is_stopped else ahead

    # --- reads ------------------------------------------------------------------------------------

    def _read_next(self, lane: Lane) -> None:
        """Read the next samples of a lane, or start to read them."""
        block, state = self._block_of(lane), self._state
        # Plan under the lock. Otherwise the loop would take the GIL at each step and return it 5 ms
        # late.
        with state.lock:
            read = self._plan_read(lane, block)
        begun = time.perf_counter()
        read.begin(lane)
        self._stats.read_seconds += time.perf_counter() - begun
        with state.lock:
            lane.add(read)
        state.settle(lane)

    def _block_of(self, lane: Lane) -> ReadBlock:
        """Return the block with the next places of a lane; plan one if the last is used up."""
        block = lane.block
        if block is None or not block.covers_read(lane.begun):
            block = lane.block = ReadBlock.of(
                self._index,
                lane.plan,
                lane.number,
                lane.begun,
            )
        return block

    def _plan_read(self, lane: Lane, block: ReadBlock) -> LaneRead:
        """Return the next read of a lane. The caller holds the lock."""
        due = block.due_from(lane.begun)
        wanted = due >= lane.first_step  # others were delivered before the first step, or never are
        if (first_failed := self._state.first_failed) is not None:
            wanted &= lane.epoch_first_batch + due < first_failed
        if not wanted.any():
            return LaneRead(len(due))
        read = self._sink.plan(self._choose_samples(lane, block, wanted))
        self._state.position = read.position
        return read

    def _choose_samples(self, lane: Lane, block: ReadBlock, wanted: Bools) -> ReadSamples:
        """Return the samples of the next read, with their places in the arena.

        wanted: whether each of the next places is needed, bool[n].
        """
        resources, start = self._resources, lane.begun
        count = block.places_of_read(start, int(np.argmax(wanted)), resources.most_bytes)
        rows = start - block.start + np.flatnonzero(wanted[:count])
        ids, starts, stops = block.ids[rows], block.starts[rows], block.stops[rows]
        batch_numbers = lane.epoch_first_batch + block.due[rows]
        places = (block.start + rows) % resources.limits.ring
        offsets = resources.arena.place(batch_numbers // resources.limits.bucket, stops - starts)
        lane.offsets[places] = offsets
        shard = self._index.shards[block.shards[rows[0]]]
        return ReadSamples(
            shard=shard,
            count=count,
            leaves_shard=block.leaves_shard(start + count),
            ids=ids,
            starts=starts,
            stops=stops,
            batch_numbers=batch_numbers,
            places=places,
            offsets=offsets,
        )
