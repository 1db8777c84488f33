"""Starts the reads of lanes: plans the next read, gives its samples their memory, and reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from wdstrain.memory.scatter import Bools
from wdstrain.reader.lane import Lane, StartedRead
from wdstrain.reader.read_blocks import ReadBlock
from wdstrain.reader.resources import ReadResources
from wdstrain.reader.run_state import ReadStats, RunState
from wdstrain.reader.settle import Settler
from wdstrain.reader.sink import ReadSamples
from wdstrain.shards.index import Ints
from wdstrain.storage.prefetch import PendingRead


class LaneReader:
    """Reader of the next samples of a lane. Used by the reader's thread alone."""

    def __init__(
        self, resources: ReadResources, state: RunState, settler: Settler, stats: ReadStats
    ) -> None:
        self._resources, self._index = resources, resources.index
        self._state, self._settler, self._stats = state, settler, stats

    def read_next(self, lane: Lane) -> None:
        """Read the next samples of a lane that are contiguous in one shard."""
        block = self.block_of(lane)
        # Plan under the lock. Otherwise the loop would take the GIL at each step and return it 5 ms
        # late. Read without it, because that may take long.
        with self._state.lock:
            read = self._plan(lane, block)
        begun = time.perf_counter()
        started = read()
        self._stats.read_seconds += time.perf_counter() - begun
        self._add(lane, started)

    def block_of(self, lane: Lane) -> ReadBlock:
        """Return the block with the next places of a lane; plan one if the last is used up."""
        block, resources = lane.block, self._resources
        if block is None or not block.covers_read(lane.begun):
            destinations = partial(resources.sink.scatter, lane.plan, resources.rank, lane.number)
            block = lane.block = ReadBlock.of(
                self._index, lane.plan, lane.number, lane.begun, destinations
            )
        return block

    def _add(self, lane: Lane, read: StartedRead) -> None:
        """Append a started read to the lane."""
        with self._state.lock:
            read.position = self._state.position
            lane.add(read)
        self._settler.settle(lane)

    # --- planning, under the lock -----------------------------------------------------------------

    def _plan(self, lane: Lane, block: ReadBlock) -> Callable[[], StartedRead]:
        """Give the next samples their places and return the function that reads them."""
        due, *_ = block.read_rows(lane.begun)
        wanted = due >= lane.first_step  # others were delivered before the first step, or never are
        if (first_failed := self._state.first_failed) is not None:
            wanted &= lane.epoch_first_batch + due < first_failed
        if not wanted.any():
            return partial(StartedRead, PendingRead(), due[:0], len(due))
        samples = self._choose(lane, block, wanted)
        self._state.position = (samples.shard, int(samples.starts[0]))
        return self._resources.sink.plan(lane, block, samples, self._settler.settle_all)

    def _choose(self, lane: Lane, block: ReadBlock, wanted: Bools) -> ReadSamples:
        """Return the samples of the next read, with their places in the arena."""
        due, ids, starts, stops = block.read_rows(lane.begun)
        resources = self._resources
        first = int(np.argmax(wanted))
        count = min(len(ids), block.next_break(lane.begun + first) + 1 - lane.begun)
        limit = starts[first] + resources.sink.most_bytes
        count = first + max(1, int(np.searchsorted(stops[first:count], limit, side="right")))
        is_partial = not wanted[first:count].all()
        rows: Ints | slice = slice(first, count)
        if is_partial:
            rows = first + np.flatnonzero(wanted[first:count])
        batch_numbers = lane.epoch_first_batch + due[rows]
        sizes = (stops - starts)[rows] - resources.sink.bytes_elsewhere
        places = np.arange(lane.begun, lane.begun + count)[rows] % resources.limits.ring
        offsets = resources.arena.place(batch_numbers // resources.limits.bucket, sizes)
        lane.where[places] = offsets
        shard = self._index.shards[int(self._index.shard_of(ids[rows][:1])[0])]
        return ReadSamples(
            shard,
            count,
            rows,
            is_partial,
            ids[rows],
            starts[rows],
            stops[rows],
            batch_numbers,
            places,
            offsets,
            resources.arena.memory,
        )
