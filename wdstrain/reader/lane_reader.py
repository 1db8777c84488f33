"""Starts the reads of lanes: plans the next read, gives its samples their memory, and reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from wdstrain.memory.scatter import Bools, scatter_samples
from wdstrain.reader.lane import Lane, StartedRead
from wdstrain.reader.read_blocks import ReadBlock
from wdstrain.reader.resources import ReadResources
from wdstrain.reader.run_state import ReadStats, RunState
from wdstrain.reader.settle import Settler
from wdstrain.reader.slot_sink import Placed, SlotSink
from wdstrain.reader.verifier import ReadVerifier
from wdstrain.shards.index import Ints, Shard
from wdstrain.storage.prefetch import PendingRead
from wdstrain.storage.remote import is_remote


@dataclass(frozen=True, eq=False)
class _ReadSamples:
    """The n samples of one read, which are contiguous in a shard.

    count: places of the lane that the read covers. skipped: places before the first sample.
    rows: the samples among the covered places, a slice or int64[n]. is_partial: whether some
    places after the first sample are not needed.
    ids, starts, stops (extent in the shard), batch_numbers: int64[n].
    places: positions in the lane's ring. offsets: in the arena. int64[n] each.
    """

    shard: Shard
    count: int
    skipped: int
    rows: slice | Ints
    is_partial: bool
    ids: Ints
    starts: Ints
    stops: Ints
    batch_numbers: Ints
    places: Ints
    offsets: Ints

    @property
    def bytes(self) -> int:
        """Bytes from the first sample's start to the last one's end."""
        return int(self.stops[-1] - self.starts[0])


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
        self._add(lane, read())

    def block_of(self, lane: Lane) -> ReadBlock:
        """Return the block with the next places of a lane; plan one if the last is used up."""
        block, resources = lane.block, self._resources
        if block is None or not block.covers_read(lane.begun):
            block = lane.block = ReadBlock.of(
                self._index,
                lane.plan,
                resources.rank,
                lane.number,
                lane.begun,
                resources.slot_sink,
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
        sink = self._resources.slot_sink
        if sink is not None:
            return self._plan_into_slots(sink, lane, block, samples)
        return self._plan_into_arena(lane, block, samples)

    def _choose(self, lane: Lane, block: ReadBlock, wanted: Bools) -> _ReadSamples:
        """Return the samples of the next read, with their places in the arena."""
        due, ids, starts, stops = block.read_rows(lane.begun)
        resources = self._resources
        first = int(np.argmax(wanted))
        count = min(len(ids), block.next_break(lane.begun + first) + 1 - lane.begun)
        limit = starts[first] + resources.most_bytes
        count = first + max(1, int(np.searchsorted(stops[first:count], limit, side="right")))
        is_partial = not wanted[first:count].all()
        rows: Ints | slice = slice(first, count)
        if is_partial:
            rows = first + np.flatnonzero(wanted[first:count])
        batch_numbers, sizes = lane.epoch_first_batch + due[rows], (stops - starts)[rows]
        if resources.slot_sink is not None:
            sizes = sizes - resources.slot_sink.bytes
        places = np.arange(lane.begun, lane.begun + count)[rows] % resources.limits.ring
        offsets = resources.arena.place(batch_numbers // resources.limits.bucket, sizes)
        lane.where[places] = offsets
        shard = self._index.shards[int(self._index.shard_of(ids[rows][:1])[0])]
        return _ReadSamples(
            shard,
            count,
            first,
            rows,
            is_partial,
            ids[rows],
            starts[rows],
            stops[rows],
            batch_numbers,
            places,
            offsets,
        )

    def _plan_into_slots(
        self, sink: SlotSink, lane: Lane, block: ReadBlock, samples: _ReadSamples
    ) -> Callable[[], StartedRead]:
        """Return the function that reads samples with arrays that go straight into batches."""
        assert block.scatter is not None
        before, memory = lane.begun - block.start, self._resources.arena.memory
        scatter = block.scatter.part(slice(before, before + samples.count)).part(samples.rows)
        placed = Placed(scatter, samples.offsets, sink.slot_offsets(samples.batch_numbers))
        places, checksums = sink.places(placed, memory)

        def read() -> StartedRead:
            pending = sink.read(
                samples.shard,
                placed,
                samples.batch_numbers,
                places,
                checksums,
                memory,
                self._settler.settle_all,
            )
            return StartedRead(pending, samples.batch_numbers, samples.count, samples.bytes)

        return read

    def _plan_into_arena(
        self, lane: Lane, block: ReadBlock, samples: _ReadSamples
    ) -> Callable[[], StartedRead]:
        """Return the function that reads local samples into the arena, or starts a remote read."""
        resources, verifier = self._resources, self._verifier(lane, samples)
        sizes = samples.stops - samples.starts
        scatter_list = scatter_samples(
            (resources.arena.memory, resources.scratch),
            np.zeros((len(sizes), 1), np.int64),
            samples.offsets[:, None],
            sizes[:, None],
            samples.starts,
            samples.stops,
            verifier,
        )
        leaves = self._leaves_shard(lane, block, samples)
        begin = partial(
            lane.stream.begin, samples.shard, scatter_list, int(samples.starts[0]), leaving=leaves
        )
        return partial(self._read_into_arena, lane, samples, verifier, begin)

    def _verifier(self, lane: Lane, samples: _ReadSamples) -> ReadVerifier | None:
        """Return the verifier of a read; None if its samples stay unverified."""
        if lane.ring is None:
            return None
        if samples.is_partial:
            lane.ring.not_compared(lane.begun, samples.count)
            return None
        place, count = lane.begun + samples.skipped, samples.count - samples.skipped
        return lane.ring.compared(place, int(samples.ids[0]), count)

    def _leaves_shard(self, lane: Lane, block: ReadBlock, samples: _ReadSamples) -> bool:
        """Return whether the lane reads nothing of the shard after these samples."""
        following = lane.begun + samples.count
        if following == block.end:
            return True
        (number,) = self._index.shard_of(np.array([block.id(following)]))
        return self._index.shards[int(number)] is not samples.shard

    # --- reading, without the lock ----------------------------------------------------------------

    def _read_into_arena(
        self,
        lane: Lane,
        samples: _ReadSamples,
        verifier: ReadVerifier | None,
        begin: Callable[[], PendingRead],
    ) -> StartedRead:
        """Read local samples into the arena, or start to read remote ones."""
        begun = time.perf_counter()
        pending = begin()
        if pending.error is not None and not is_remote(samples.shard.path):
            pending, verifier = self._read_singly(lane, samples), None
            if lane.ring is not None:
                lane.ring.not_compared(lane.begun, samples.count)
        self._stats.read_seconds += time.perf_counter() - begun
        needs_headers = self._index.needs_headers(samples.shard)
        return StartedRead(
            pending,
            samples.batch_numbers,
            samples.count,
            samples.bytes,
            verifier,
            (samples.ids, samples.places) if needs_headers else None,
        )

    def _read_singly(self, lane: Lane, samples: _ReadSamples) -> PendingRead:
        """Read samples of a damaged shard one by one, in the order of their batches.

        Samples that fail are recorded as unreadable, or the first one fails the read.
        """
        view, pending = self._resources.arena.memory.view, PendingRead(again=len(samples.ids))
        for i in np.argsort(samples.batch_numbers, kind="stable").tolist():
            start, stop = int(samples.starts[i]), int(samples.stops[i])
            offset = int(samples.offsets[i])
            place = view[offset : offset + stop - start]
            error = lane.stream.begin(samples.shard, [place], start, leaving=False).error
            if error is not None and not self._resources.skip_unreadable:
                pending.failed[i] = error
                break
            if error is not None:
                reason = f"it cannot be read ({str(error).rstrip('.')})"
                self._resources.unreadable[int(samples.ids[i])] = reason
                lane.where[samples.places[i]] = -1
        return pending
