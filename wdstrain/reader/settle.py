"""Completion of reads: lanes advance over them in order, and damaged ones end the epoch."""

from __future__ import annotations

import numpy as np

from wdstrain.errors import WdstrainError
from wdstrain.reader.lane import Lane, StartedRead
from wdstrain.reader.run_state import ReadStats, RunState


class Settler:
    """Settles the complete reads of a run."""

    def __init__(self, state: RunState, stats: ReadStats) -> None:
        self._state, self._stats = state, stats

    def settle_all(self) -> None:
        """Settle all lanes. Called in I/O threads after a read.

        Must not raise: an error there would not reach the loop, which would wait forever.
        """
        try:
            with self._state.lock:
                for lanes in self._state.lanes.values():
                    for lane in lanes:
                        self.settle(lane)
        except BaseException as error:
            self._state.fail(WdstrainError(f"reading failed: {error!r}"))

    def settle(self, lane: Lane) -> None:
        """Advance the lane over its complete reads, and check them."""
        with self._state.lock:
            before = lane.read
            while (read := lane.next_complete()) is not None:
                pending = read.pending
                if pending.error is None and read.check is not None:
                    pending.error = read.check()
                lane.in_flight.popleft()
                self._stats.fetch.retries += pending.retries
                if pending.error is not None or pending.failed:
                    self._fail_batches(read)
                lane.read += read.places
                self._stats.bytes += read.size
            if lane.read > before:
                self._state.notify_loop()
                if not lane.in_flight:
                    self._state.changed.notify_all()

    def _fail_batches(self, read: StartedRead) -> None:
        """Record the first batch that needs a failed sample; the epoch ends before it."""
        failed, batch_numbers = read.pending.failed, read.batch_numbers
        if read.pending.error is not None:
            failed = {int(np.argmin(batch_numbers)): read.pending.error}
        first = min(failed, key=lambda i: int(batch_numbers[i]))
        self._state.fail_batch(int(batch_numbers[first]), failed[first])
