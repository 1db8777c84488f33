"""Samples that are read into the arena as a whole, headers included.

The index has a crc32 of every field. The checksums of a read are computed as its bytes arrive,
while they are in the CPU cache (`memory.scatter`), and compared when the read is complete. A sample
that is not verified may still be sound: its decoder compares it again. So it is safe not to verify
a sample, for example if it came in two requests or was read again.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from wdstrain.errors import ShardError, WdstrainError
from wdstrain.memory.scatter import ChecksumJob, ScatterList, scatter_samples
from wdstrain.memory.shared import Memory
from wdstrain.reader.lane import Lane, ReadSamples, SampleRead, UnreadableSamples
from wdstrain.reader.resources import ReadResources
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.shards.tar import is_sample
from wdstrain.storage.prefetch import PendingRead
from wdstrain.storage.remote import is_remote


class ArenaSink:
    """Destination of the samples of one run. Local reads run in the reader's thread."""

    def __init__(self, resources: ReadResources) -> None:
        options = resources.options
        self._index = resources.index
        self._memories = resources.arena.memory, resources.scratch
        self._needed_fields = options.needed_fields
        self.unreadable = UnreadableSamples(skip=options.skip_unreadable)

    def plan(self, samples: ReadSamples) -> ArenaRead:
        """Return the read of these samples into their places in the arena."""
        table, sizes, checksums = self._index.offsets, samples.stops - samples.starts, None
        if table.has_checksums:
            checksums = ReadChecksums(
                table, self._needed_fields, self._memories[0], samples.ids, samples.offsets
            )
        target = scatter_samples(
            self._memories,
            samples.offsets,
            sizes,
            samples.starts,
            samples.stops,
            checksums.job if checksums is not None else None,
        )
        return ArenaRead(self, samples, target, checksums)

    def view(self, samples: ReadSamples, row: int, offset: int) -> memoryview:
        """Return the memory of a sample at this offset of the arena."""
        size = int(samples.stops[row] - samples.starts[row])
        return self._memories[0].view[offset : offset + size]

    def header_error(self, lane: Lane, samples: ReadSamples) -> ShardError | None:
        """Return an error if the headers of these samples differ from the index.

        Only shards of which nothing else tells whether they were replaced are checked.
        """
        if not self._index.needs_headers(samples.shard):
            return None
        for row, offset in enumerate(lane.offsets[samples.places].tolist()):
            number, start = int(samples.ids[row]), int(samples.starts[row])
            if not _has_headers(self._index, number, self.view(samples, row, offset)):
                return ShardError(
                    f"{samples.shard.shown} was replaced since it was opened: its headers at "
                    f"offset {start} are not those of '{self._index.key(number)}'. Start again "
                    f"with the new shard."
                )
        return None


class ArenaRead(SampleRead):
    """A read of whole samples. checksums: None if its samples are not verified."""

    def __init__(
        self,
        sink: ArenaSink,
        samples: ReadSamples,
        target: ScatterList,
        checksums: ReadChecksums | None,
    ) -> None:
        super().__init__(samples, sink.unreadable)
        self._sink, self._target, self._checksums = sink, target, checksums

    def begin(self, lane: Lane) -> None:
        """Read local samples, or start to read remote ones."""
        samples = self.samples
        self.pending = lane.stream.begin(samples.shard, self._target, int(samples.starts[0]))
        if self.pending.error is not None and not is_remote(samples.shard.path):
            self.pending, self._checksums = PendingRead(), None
            lane.record_unverified(samples.places, slice(None))
            self.read_singly(lane, partial(self._read_one, lane))

    def check(self, lane: Lane) -> WdstrainError | None:
        """Record the unverified samples. Returns an error if the shard was replaced."""
        if self._checksums is not None:
            lane.record_unverified(self.samples.places, self._checksums.unverified_rows())
        return self._sink.header_error(lane, self.samples)

    def _read_one(self, lane: Lane, row: int) -> WdstrainError | None:
        """Read one sample of a local shard. Returns the error."""
        place = self._sink.view(self.samples, row, int(self.samples.offsets[row]))
        start = int(self.samples.starts[row])
        return lane.stream.begin(self.samples.shard, [place], start).error


class ReadChecksums:
    """Expected checksums of the n samples of one read. job: computes the actual ones."""

    def __init__(
        self, table: Offsets, fields: set[str] | None, memory: Memory, ids: Ints, offsets: Ints
    ) -> None:
        """table: must have checksums. fields: those to verify; None: all.

        ids: in the order of the shard. offsets: of the samples in the memory. int64[n] each.
        Raises ValueError if a field of a sample lies beyond the memory.
        """
        members = table.members_of(ids, fields)
        rows, begin, size = members.row, members.offset, members.size
        self._rows, self._expected = rows, members.crc
        self.job = ChecksumJob(
            [memory],
            np.zeros_like(rows),
            begin + (offsets - table.start[ids])[rows],
            size,
            begin + size,
            first_byte=int(table.start[ids[0]]),
        )

    def unverified_rows(self) -> Ints:
        """Return the samples that are not verified, as positions among those of the read."""
        differs = (self.job.checksums != self._expected) & (self._expected != 0)
        rows: Ints = self._rows[differs]
        return rows


def _has_headers(index: Index, number: int, sample: memoryview) -> bool:
    """Return whether these bytes have the headers of sample `number`."""
    start = int(index.offsets.start[number])
    fields = [(name, offset - start, size) for name, offset, size in index.members(number)]
    return is_sample(sample, index.key(number), fields)
