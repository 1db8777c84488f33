"""One run of reading: a thread that reads the lanes of a rank from one step on, epoch after epoch.

A run is started once and stopped once. Nothing of it is used again; the memory it reads into
belongs to the reader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial

import numpy as np

from wdstrain.errors import WdstrainError
from wdstrain.order.plan import Order
from wdstrain.reader.lane import Lane
from wdstrain.reader.lane_reader import LaneReader
from wdstrain.reader.resources import ReadResources
from wdstrain.reader.run_state import ReadStats, RunState
from wdstrain.reader.settle import Settler
from wdstrain.reader.verifier import VerifiedRing
from wdstrain.runtime.watchdog import thread_stack
from wdstrain.storage.local import LocalFile
from wdstrain.storage.prefetch import LaneStream, RangePrefetcher


class ReadRun:
    """Thread, lanes and remote requests of one run. generation: the loop that uses it.

    state: what it shares with the loop's thread. released: buckets of the arena that were released.
    """

    def __init__(self, resources: ReadResources, stats: ReadStats, generation: int) -> None:
        self.generation, self.state, self.released = generation, RunState(stats), 0
        self._resources = resources
        settler = Settler(self.state, stats)
        self._prefetcher = RangePrefetcher(
            resources.cache, stats.fetch, settler.settle_all, resources.index
        )
        self._lane_reader = LaneReader(resources, self.state, settler, stats)
        self._thread: threading.Thread | None = None

    def start(self, epoch: int, step: int, until: int | None) -> None:
        """Start to read from (epoch, step) up to epoch `until`; None: there is no end.

        The caller defers signals. Raises RuntimeError if the system does not start a thread; then
        nothing runs.
        """
        thread = threading.Thread(
            target=self._read_epochs,
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
        self.state.stop()
        if self._thread is not None:
            self._thread.join()
        self._prefetcher.stop()
        self._resources.sink.stop()

    def may_resume(self) -> bool:
        """Return whether the lanes that wait for room may be read on."""
        return self._has_room(self.state.paused, self._resources.limits.resume_below)

    @property
    def is_paused(self) -> bool:
        """Whether the thread waits for room, or has started all reads."""
        return bool(self.state.paused) or not (self._thread is not None and self._thread.is_alive())

    def describe_wait(self) -> str | None:
        """Return what is being read, with the thread's stack, if the loop waits for a read."""
        if not self.state.is_waiting:
            return None
        lanes = [lane for lanes in list(self.state.lanes.values()) for lane in lanes]
        late = [read.position for lane in lanes for read in list(lane.in_flight)[:1]]
        position = late[0] if late else self.state.position
        progress = "nothing was read yet"
        if position is not None:
            progress = f"{position[0].shown} is being read at offset {position[1]}"
        stack = thread_stack(self._thread.ident if self._thread is not None else None)
        return f"{progress}; the reader:\n{stack}"

    # --- in the reader's thread -------------------------------------------------------------------

    def _read_epochs(self, epoch: int, step: int, until: int | None) -> None:
        """Read epochs from (epoch, step) on. This is the thread's function."""
        batch_number, state = -step, self.state
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
            if not isinstance(error, WdstrainError):
                error = WdstrainError(f"reading failed: {error!r}")
            state.fail(error)

    def _add_epoch(self, epoch: int, lanes: list[Lane]) -> bool:
        """Add the lanes of an epoch, at most one epoch ahead. Returns False after `stop`."""
        state = self.state
        with state.lock:
            state.changed.wait_for(lambda: state.is_stopped or len(state.lanes) < 2)
            if not state.is_stopped:
                state.lanes[epoch] = lanes
                state.notify_loop()
            return not state.is_stopped

    def _enter_epoch(self, epoch: int, batch_number: int, step: int) -> list[Lane]:
        """Return the lanes of an epoch from a step on, with their first blocks planned."""
        plan = self._resources.plans(epoch)
        numbers = plan.lanes_of(self._resources.rank)
        lanes = [self._enter_lane(plan, number, batch_number, step) for number in numbers]
        for lane in lanes:
            if not lane.all_begun:
                self._lane_reader.block_of(lane)
        return lanes

    def _enter_lane(self, plan: Order, number: int, batch_number: int, step: int) -> Lane:
        """Return a lane that begins at `step`; batch_number: of the epoch's step 0."""
        index = self._resources.index
        first = plan.first_place(number, step) if step else 0
        where = np.zeros(min(self._resources.limits.ring, plan.lane_places(number)) or 1, np.int64)
        return Lane(
            plan=plan,
            number=number,
            epoch_first_batch=batch_number,
            first_step=step,
            where=where,
            ring=VerifiedRing(len(where)),
            stream=LaneStream(
                lambda shard: LocalFile(shard.path, index.expected_state(shard)), self._prefetcher
            ),
            begun=first,
            read=first,
            requested=plan.span(number, step)[0],
        )

    def _read_epoch(self, lanes: list[Lane], following: Callable[[], list[Lane]]) -> None:
        """Read the lanes of one epoch. following: plans the next epoch."""
        state = self.state
        try:
            while (lane := self._next_lane(lanes, following)) is not None:
                self._lane_reader.read_next(lane)
            if (
                self._resources.is_remote
            ):  # the loop needs these reads before those of the next epoch
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
        state = self.state
        with state.lock:
            unread = [lane for lane in lanes if not lane.all_begun]
            if not unread or state.is_stopped:
                return None
            pausing = not self._with_room(unread)
        if pausing:
            with suppress(Exception):  # called again when the next epoch begins, which raises it
                following()
        with state.lock:
            free = [] if pausing else self._with_room(unread)
            # Check again after each wait: the end of an epoch may have taken the room back.
            while not free and not state.is_stopped:
                state.paused = unread
                state.changed.wait_for(lambda: state.is_stopped or self.may_resume())
                state.paused = []
                state.notify_loop()
                free = self._with_room(unread)
            return (
                None if state.is_stopped else min(free, key=lambda lane: lane.begun - lane.needed)
            )

    def _with_room(self, lanes: list[Lane]) -> list[Lane]:
        """Return the lanes with room. A lane without room would overwrite undelivered samples."""
        return [lane for lane in lanes if self._has_room([lane], self._resources.limits.held)]

    def _has_room(self, lanes: list[Lane], most: int) -> bool:
        """Return whether a batch needs the next read of a lane, or a lane holds fewer than `most`.

        Samples of the previous epoch that are still held count too.
        """
        return any(
            lane.begun < lane.needed or self.state.held(lane.number) < most for lane in lanes
        )
