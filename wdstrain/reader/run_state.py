"""State that three kinds of threads share while a reader runs.

The reader's thread starts reads, I/O threads complete them, and the loop's thread waits for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import NoReturn

from wdstrain.errors import WdstrainError
from wdstrain.reader.lane import Lane
from wdstrain.runtime.signals import DeferSignals
from wdstrain.shards.index import Shard
from wdstrain.storage.prefetch import FetchStats, ReadStopped


class ReadStats:
    """Totals of a reader since it was made.

    bytes: bytes that were read. read_seconds: time of reading. shuffle_seconds: time that the loop
    waited for samples. fetch: of remote reads.
    """

    def __init__(self) -> None:
        self.bytes, self.read_seconds, self.shuffle_seconds = 0, 0.0, 0.0
        self.fetch = FetchStats()


class RunState:
    """Lanes, failures and waiting threads of one run.

    lock: guards this object, its lanes and the arena. changed: waited for by the reader's thread.
    lanes: by epoch, until the last step of the epoch is collected. paused: lanes that wait for
    room. position: shard and offset of the last started read. is_stopped: reading must end.
    """

    def __init__(self, stats: ReadStats) -> None:
        # The loop's thread takes the lock directly and waits on a simple queue. A Ctrl-C inside a
        # Condition would leave the lock locked.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._news: SimpleQueue[None] = SimpleQueue()  # wakes the loop's thread
        self.is_waiting = False  # whether the loop's thread waits on the queue
        self.lanes: dict[int, list[Lane]] = {}
        self.paused: list[Lane] = []
        self.position: tuple[Shard, int] | None = None
        self.is_stopped = False
        self._stats = stats
        self._error: WdstrainError | None = None  # of the run as a whole
        # First batch that cannot be read, and its error. Batches before it are delivered; nothing
        # after it is read.
        self._first_failed: tuple[int, WdstrainError] | None = None

    # --- the loop's thread ------------------------------------------------------------------------

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

    def error_of(self, batch_number: int) -> WdstrainError | None:
        """Return the error of this batch or of one before it, if it cannot be read."""
        failed = self._first_failed
        return failed[1] if failed is not None and failed[0] <= batch_number else None

    def raise_unread(self) -> NoReturn:
        """Raise the reason why a batch was not read: the error of the run, or that it was stopped."""
        error = self._error or ReadStopped()
        try:
            raise error
        finally:
            del error  # it refers to this frame

    # --- any thread -------------------------------------------------------------------------------

    def notify_loop(self) -> None:
        """Wake the loop's thread if it waits. The caller holds the lock."""
        if self.is_waiting:
            self._news.put(None)

    def fail(self, error: WdstrainError) -> None:
        """End reading; the loop's thread raises the error."""
        with self.lock:
            if not self.is_stopped:
                self._error = error
            self._end()

    def fail_batch(self, batch_number: int, error: WdstrainError) -> None:
        """Record the error of a batch; reading ends before it. The caller holds the lock."""
        if self.error_of(batch_number) is None:
            self._first_failed = batch_number, error
        self.notify_loop()

    @property
    def first_failed(self) -> int | None:
        """Number of the first batch that cannot be read, if there is one."""
        return None if self._first_failed is None else self._first_failed[0]

    def stop(self) -> None:
        """End reading; the loop's thread raises ReadStopped.

        Errors and lanes are dropped. Their frames and callbacks refer to this object, and the
        memory of samples must be freed with its last user, without the garbage collector.
        """
        with DeferSignals(), self.lock:
            self._error = self._first_failed = None
            self.lanes = {}
            self._end()

    def _end(self) -> None:
        self.is_stopped = True
        self.changed.notify_all()
        self.notify_loop()

    def held(self, number: int) -> int:
        """Return the places of a lane that are started and not requested, in all epochs."""
        return sum(
            lane.held for lanes in self.lanes.values() for lane in lanes if lane.number == number
        )
