"""Destinations of the bytes of samples.

A run plans reads and waits for them; its sink decides where in memory the bytes go. `ArenaSink`
puts whole samples into the arena. `SlotSink` puts arrays straight into batch memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from wdstrain.errors import WdstrainError
from wdstrain.reader.lane import Lane, LaneRead
from wdstrain.shards.index import Shard
from wdstrain.shards.offsets import Ints


@dataclass(frozen=True, eq=False)
class ReadSamples:
    """The n samples of one read, in the order of one shard.

    count: places of the lane that the read covers. leaves_shard: whether the lane reads nothing of
    the shard after them. ids, starts, stops (extent in the shard), batch_numbers: int64[n].
    batch_rows: their rows in the batches; None if a sink does not need them.
    places: positions in the rings of the lane. offsets: in the arena. int64[n] each.
    """

    shard: Shard
    count: int
    leaves_shard: bool
    ids: Ints
    starts: Ints
    stops: Ints
    batch_numbers: Ints
    batch_rows: Ints | None
    places: Ints
    offsets: Ints

    def only(self, row: int) -> ReadSamples:
        """Return one of the samples."""
        names = ("ids", "starts", "stops", "batch_numbers", "batch_rows", "places", "offsets")
        values = {name: getattr(self, name) for name in names}
        return replace(
            self,
            **{name: value[row : row + 1] for name, value in values.items() if value is not None},
        )


class UnreadableSamples:
    """Record of the samples that could not be read. reasons: by sample id."""

    def __init__(self, *, skip: bool) -> None:
        """skip: go on without a sample that cannot be read. Otherwise it fails its batch."""
        self.skip, self.reasons = skip, dict[int, str]()

    def add(self, lane: Lane, samples: ReadSamples, row: int, error: WdstrainError) -> None:
        """Record one sample of a read. Call this before the read is settled."""
        self.reasons[int(samples.ids[row])] = f"it cannot be read ({str(error).rstrip('.')})"
        lane.offsets[samples.places[row]] = -1


class SampleRead(LaneRead):
    """A read of samples into a sink."""

    def __init__(self, samples: ReadSamples, unreadable: UnreadableSamples) -> None:
        super().__init__(samples.count)
        self.samples, self.unreadable = samples, unreadable
        self.batch_numbers = samples.batch_numbers
        self.size = int(samples.stops[-1] - samples.starts[0])
        self.position = (samples.shard, int(samples.starts[0]))

    def read_singly(self, lane: Lane, read: Callable[[int], WdstrainError | None]) -> None:
        """Read the samples one by one, in the order of their batches, because the shard is damaged.

        Samples that fail are recorded as unreadable, or the first one fails the read.
        read: reads the sample in a row and returns its error.
        """
        self.pending.retries = len(self.samples.ids)
        for row in np.argsort(self.batch_numbers, kind="stable").tolist():
            error = read(row)
            if error is not None and not self.unreadable.skip:
                self.pending.failed[row] = error
                return
            if error is not None:
                self.unreadable.add(lane, self.samples, row, error)


class BatchSlot(NamedTuple):
    """The slot of a batch that was read; its receiver owns it.

    unreadable: by row, why a sample is unreadable. reread: samples that were read again.
    """

    slot: int
    unreadable: dict[int, str]
    reread: int


class Sink(Protocol):
    """Destination of the samples of one run. It is stopped with the run, and not used again."""

    @property
    def unreadable(self) -> UnreadableSamples:
        """Samples that could not be read."""

    def plan(self, samples: ReadSamples) -> SampleRead:
        """Return a read of these samples. The caller holds the lock of the run."""

    def slot(self, batch_number: int, ids: Ints) -> BatchSlot:
        """Return the slot of a batch that was read. ids: of its samples, int64[rows]."""

    def stop(self) -> None:
        """End reads in the background. Nothing is written to memory afterwards."""
