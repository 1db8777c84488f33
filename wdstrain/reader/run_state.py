"""State that three kinds of threads share while a reader runs.

The reader's thread starts reads, I/O threads complete them, and the loop's thread waits for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NoReturn

import numpy as np

from wdstrain.errors import WdstrainError
from wdstrain.reader.lane import Lane, LaneRead
from wdstrain.reader.resources import ReadLimits
from wdstrain.runtime.signals import DeferSignals
from wdstrain.shards.index import Shard
from wdstrain.storage.prefetch import FetchStats, ReadStopped


@dataclass
class ReadStats:
    """Totals of a reader since it was made.

    bytes: bytes that were read. read_seconds: time of reading. shuffle_seconds: time that the loop
    waited for samples. fetch: of remote reads.
    """

    bytes: int = 0
    read_seconds: float = 0.0
    shuffle_seconds: float = 0.0
    fetch: FetchStats = field(default_factory=FetchStats)


class RunState:
    """Lanes, failures and waiting threads of one run.

    lock: guards this object, its lanes and the arena. changed: waited for by the reader's thread.
    lanes: by epoch, until the last step of the epoch is collected. paused: lanes that wait for
    room. position: shard and offset of the last planned read. is_stopped: reading must end.
    is_waiting: whether the loop's thread waits.
    """

    def __init__(self, limits: ReadLimits, stats: ReadStats) -> None:
        # The loop's thread takes the lock directly and waits on a simple queue. A Ctrl-C inside a
        # Condition would leave the lock locked.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._news: SimpleQueue[None] = SimpleQueue()  # wakes the loop's thread
        self.is_waiting = self.is_stopped = False
        self.lanes: dict[int, list[Lane]] = {}
        self.paused: list[Lane] = []
        self.position: tuple[Shard, int] | None = None
        self._limits, self._stats = limits, stats
        self._error: WdstrainError | None = None  # of the run as a whole
        # First batch that cannot be read, and its error. Batches before it are delivered; nothing
        # after it is read.
        self._first_failed: tuple[int, WdstrainError] | None = None

    # --- in the loop's thread ---------------------------------------------------------------------

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until `until()` holds or the run has ended. The caller must not hold the lock."""
        begun = time.perf_counter()
        try:
            while True:
                with self.lock:
                    if until() or self.is_stopped:
                        return
                    self.is_waiting = True
                self._news.get()
        finally:
            self.is_waiting = False
            self._stats.shuffle_seconds += time.perf_counter() - begun

    def raise_error(self, batch_number: int | None = None) -> NoReturn:
        """Raise the reason why a batch is not read: its error, that of the run, or ReadStopped."""
        error = self.error_of(batch_number) if batch_number is not None else None
        error = error or self._error or ReadStopped()
        try:
            raise error
        finally:
            del error  # it refers to this frame

    def error_of(self, batch_number: int) -> WdstrainError | None:
        """Return the error of this batch or of one before it, if it cannot be read."""
        failed = self._first_failed
        return failed[1] if failed is not None and failed[0] <= batch_number else None

    # --- in the reader's thread -------------------------------------------------------------------

    @property
    def first_failed(self) -> int | None:
        """Number of the first batch that cannot be read, if there is one."""
        return None if self._first_failed is None else self._first_failed[0]

    def with_room(self, lanes: list[Lane]) -> list[Lane]:
        """Return the lanes with room. A lane without room would overwrite undelivered samples."""
        return [lane for lane in lanes if self._has_room([lane], self._limits.held)]

    # --- in any thread ----------------------------------------------------------------------------

    def may_resume(self) -> bool:
        """Return whether the lanes that wait for room may be read on."""
        return self._has_room(self.paused, self._limits.resume_below)

    def notify_loop(self) -> None:
        """Wake the loop's thread if it waits. The caller holds the lock."""
        if self.is_waiting:
            self._news.put(None)

    def fail(self, error: BaseException) -> None:
        """End reading; the loop's thread raises the error."""
        if not isinstance(error, WdstrainError):
            error = WdstrainError(f"reading failed: {error!r}")
        with self.lock:
            if not self.is_stopped:
                self._error = error
            self._end()

    def stop(self) -> None:
        """End reading; the loop's thread raises ReadStopped.

        Errors and lanes are dropped. Their frames and callbacks refer to this object, and the
        memory of samples must be freed with its last user, without the garbage collector.
        """
        with DeferSignals(), self.lock:
            self._error = self._first_failed = None
            self.lanes = {}
            self._end()

    def settle_all(self) -> None:
        """Settle all lanes. Called in I/O threads after a read.

        Must not raise: an error there would not reach the loop, which would wait forever.
        """
        try:
            with self.lock:
                for lanes in self.lanes.values():
                    for lane in lanes:
                        self.settle(lane)
        except BaseException as error:
            self.fail(error)

    def settle(self, lane: Lane) -> None:
        """Advance the lane over its complete reads, and check them."""
        with self.lock:
            before = lane.read
            while (read := lane.next_complete()) is not None:
                pending = read.pending
                if pending.error is None:
                    pending.error = read.check(lane)
                lane.in_flight.popleft()
                self._stats.fetch.retries += pending.retries
                if pending.error is not None or pending.failed:
                    self._fail_batches(read)
                lane.read += read.count
                self._stats.bytes += read.size
            if lane.read > before:
                self.notify_loop()
                if not lane.in_flight:
                    self.changed.notify_all()

    def _fail_batches(self, read: LaneRead) -> None:
        """Record the first batch that needs a failed sample; the epoch ends before it."""
        failed, batch_numbers = read.pending.failed, read.batch_numbers
        if read.pending.error is not None:
            failed = {int(np.argmin(batch_numbers)): read.pending.error}
        first = min(failed, key=lambda i: int(batch_numbers[i]))
        if self.error_of(int(batch_numbers[first])) is None:
            self._first_failed = int(batch_numbers[first]), failed[first]
        self.notify_loop()

    def _end(self) -> None:
        """Let all threads see that reading must end. The caller holds the lock."""
        self.is_stopped = True
        self.changed.notify_all()
        self.notify_loop()

    def _has_room(self, lanes: Iterable[Lane], most: int) -> bool:
        """Return whether a batch needs the next read of a lane, or a lane holds fewer than `most`.

        Samples of the previous epoch that are still held count too.
        """
        return any(lane.begun < lane.needed or self._held(lane.number) < most for lane in lanes)

    def _held(self, number: int) -> int:
        """Return the places of a lane that are started and not requested, in all epochs."""
        return sum(
            lane.held for lanes in self.lanes.values() for lane in lanes if lane.number == number
        )
