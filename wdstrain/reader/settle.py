"""Completion of reads: lanes advance over them in order, and damaged ones end the epoch."""

from __future__ import annotations

import numpy as np

from wdstrain.errors import ShardError, WdstrainError
from wdstrain.memory.shared import Memory
from wdstrain.reader.lane import Lane, StartedRead
from wdstrain.reader.run_state import ReadStats, RunState
from wdstrain.shards.index import Index, Ints, Shard
from wdstrain.shards.tar import is_sample


class Settler:
    """Settles the complete reads of a run."""

    def __init__(self, index: Index, memory: Memory, state: RunState, stats: ReadStats) -> None:
        """memory: of the arena."""
        self._index, self._memory, self._state, self._stats = index, memory, state, stats

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
                self._check_headers(lane, read)
                lane.in_flight.popleft()
                self._stats.fetch.retries += read.pending.again
                if read.pending.error is not None or read.pending.failed:
                    self._fail_batches(read)
                elif read.verifier is not None:
                    read.verifier.settle()
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

    def _check_headers(self, lane: Lane, read: StartedRead) -> None:
        """Fail the read if headers that must be compared with the index differ from it."""
        if read.check_headers is None or read.position is None or read.pending.error is not None:
            return
        ids, places = read.check_headers
        read.pending.error = self._header_error(read.position[0], ids, lane.where[places])

    def _header_error(self, shard: Shard, ids: Ints, offsets: Ints) -> ShardError | None:
        """Return an error if the headers of these samples differ from the index.

        ids, offsets: ids of the samples and their offsets in the arena. int64[n] each.
        """
        table, view = self._index.table, self._memory.view
        for number, offset in zip(ids.tolist(), offsets.tolist(), strict=True):
            start, stop = int(table.start[number]), int(table.stop[number])
            members = self._index.members(number)
            fields = [(name, member_offset - start, size) for name, member_offset, size in members]
            sample, key = view[offset : offset + stop - start], self._index.key(number)
            if not is_sample(sample, key, fields):
                return ShardError(
                    f"{shard.shown} was replaced since it was opened: its headers at offset "
                    f"{start} are not those of '{key}'. Start again with the new shard."
                )
        return None
