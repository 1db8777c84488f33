"""Samples that are read into the arena as a whole, headers included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from wdstrain.errors import ShardError, WdstrainError
from wdstrain.memory.scatter import Bools, scatter_samples
from wdstrain.memory.shared import Memory
from wdstrain.order.plan import Order
from wdstrain.reader.lane import Lane, StartedRead
from wdstrain.reader.read_blocks import GAP, ReadBlock, read_bytes
from wdstrain.reader.sink import ReadSamples, UnreadableSamples
from wdstrain.reader.verifier import ReadVerifier
from wdstrain.shards.index import Index, Ints
from wdstrain.shards.tar import is_sample
from wdstrain.storage.prefetch import PendingRead
from wdstrain.storage.remote import is_remote


class ArenaSink:
    """`Sink` of whole samples. Local reads run in the reader's thread."""

    bytes_elsewhere = 0

    def __init__(self, index: Index, needed_fields: Bools, *, skip_unreadable: bool) -> None:
        """needed_fields: fields whose checksums are verified while they are read, bool[fields].

        skip_unreadable: record local samples that cannot be read instead of raising an error.
        """
        self._index, self._needed_fields = index, needed_fields
        self._scratch = Memory(GAP)
        self.unreadable = UnreadableSamples(skip=skip_unreadable)
        self.most_bytes = read_bytes(index)
        self.in_background = any(is_remote(shard.path) for shard in index.shards)

    def scatter(self, plan: Order, rank: int, lane: int, start: int, ids: Ints) -> None:
        """Return None: destinations follow from the arena."""

    def stop(self) -> None:
        """Do nothing: remote reads are stopped by the prefetcher."""

    def plan(
        self, lane: Lane, block: ReadBlock, samples: ReadSamples, on_done: Callable[[], None]
    ) -> Callable[[], StartedRead]:
        """Return the function that reads local samples, or starts to read remote ones."""
        verifier, sizes = self._verifier(lane, samples), samples.stops - samples.starts
        scatter_list = scatter_samples(
            (samples.arena, self._scratch),
            np.zeros((len(sizes), 1), np.int64),
            samples.offsets[:, None],
            sizes[:, None],
            samples.starts,
            samples.stops,
            None if verifier is None else verifier.job,
        )
        leaves = self._leaves_shard(lane, block, samples)
        begin = partial(
            lane.stream.begin, samples.shard, scatter_list, int(samples.starts[0]), leaving=leaves
        )
        return partial(self._read, lane, samples, verifier, begin)

    def _verifier(self, lane: Lane, samples: ReadSamples) -> ReadVerifier | None:
        """Return the verifier of a read; None if its samples are not verified."""
        table = self._index.table
        if not len(table.member_crc):
            return None
        if samples.is_partial:
            lane.ring.record(samples.places)
            return None
        return ReadVerifier(
            table,
            self._needed_fields,
            samples.arena,
            int(samples.ids[0]),
            samples.offsets,
            samples.places,
        )

    def _leaves_shard(self, lane: Lane, block: ReadBlock, samples: ReadSamples) -> bool:
        """Return whether the lane reads nothing of the shard after these samples."""
        following = lane.begun + samples.count
        if following == block.end:
            return True
        (number,) = self._index.shard_of(np.array([block.id(following)]))
        return self._index.shards[int(number)] is not samples.shard

    # --- reading, without the lock ----------------------------------------------------------------

    def _read(
        self,
        lane: Lane,
        samples: ReadSamples,
        verifier: ReadVerifier | None,
        begin: Callable[[], PendingRead],
    ) -> StartedRead:
        """Read local samples into the arena, or start to read remote ones."""
        pending = begin()
        if pending.error is not None and not is_remote(samples.shard.path):
            pending, verifier = PendingRead(), None
            lane.ring.record(samples.places)
            self.unreadable.read_singly(
                lane, samples, pending, partial(self._read_sample, lane, samples)
            )
        check = partial(self._check, lane, samples, verifier)
        return StartedRead(pending, samples.batch_numbers, samples.count, samples.bytes, check)

    def _read_sample(self, lane: Lane, samples: ReadSamples, row: int) -> WdstrainError | None:
        """Read one sample of a local shard. Returns the error."""
        start, offset = int(samples.starts[row]), int(samples.offsets[row])
        place = samples.arena.view[offset : offset + int(samples.stops[row]) - start]
        return lane.stream.begin(samples.shard, [place], start, leaving=False).error

    def _check(
        self, lane: Lane, samples: ReadSamples, verifier: ReadVerifier | None
    ) -> ShardError | None:
        """Record the unverified samples of a complete read. Returns the error of a replaced shard."""
        if self._index.needs_headers(samples.shard):
            error = self._header_error(samples, lane.where[samples.places])
            if error is not None:
                return error
        if verifier is not None:
            lane.ring.record(samples.places, verifier.unverified_rows())
        return None

    def _header_error(self, samples: ReadSamples, offsets: Ints) -> ShardError | None:
        """Return an error if the headers of these samples differ from the index.

        offsets: of the samples in the arena, int64[n]; negative for an unreadable sample.
        """
        for row in range(len(offsets)):
            number, start = int(samples.ids[row]), int(samples.starts[row])
            fields = [
                (name, offset - start, size) for name, offset, size in self._index.members(number)
            ]
            offset, key = int(offsets[row]), self._index.key(number)
            sample = samples.arena.view[offset : offset + int(samples.stops[row]) - start]
            if not is_sample(sample, key, fields):
                return ShardError(
                    f"{samples.shard.shown} was replaced since it was opened: its headers at "
                    f"offset {start} are not those of '{key}'. Start again with the new shard."
                )
        return None
