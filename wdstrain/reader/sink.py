"""Destinations of the bytes of samples.

A reader plans reads and waits for them; its sink decides where in memory the bytes go. `ArenaSink`
puts whole samples into the arena. `SlotSink` puts arrays straight into batch memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from wdstrain.errors import WdstrainError
from wdstrain.memory.shared import Memory
from wdstrain.order.plan import Order
from wdstrain.reader.lane import Lane, StartedRead
from wdstrain.reader.read_blocks import ReadBlock
from wdstrain.reader.slot_scatter import SlotScatter
from wdstrain.shards.index import Ints, Shard
from wdstrain.storage.prefetch import PendingRead


@dataclass(frozen=True, eq=False)
class ReadSamples:
    """The n samples of one read, which are contiguous in a shard.

    count: places of the lane that the read covers.
    rows: the samples among the covered places, a slice or int64[n]. is_partial: whether some
    places after the first sample are not needed.
    ids, starts, stops (extent in the shard), batch_numbers: int64[n].
    places: positions in the lane's ring. offsets: in the arena. int64[n] each. arena: its memory.
    """

    shard: Shard
    count: int
    rows: slice | Ints
    is_partial: bool
    ids: Ints
    starts: Ints
    stops: Ints
    batch_numbers: Ints
    places: Ints
    offsets: Ints
    arena: Memory

    @property
    def bytes(self) -> int:
        """Bytes from the first sample's start to the last one's end."""
        return int(self.stops[-1] - self.starts[0])


class UnreadableSamples:
    """Record of the samples that could not be read. reasons: by sample id."""

    def __init__(self, *, skip: bool) -> None:
        """skip: go on without a sample that cannot be read. Otherwise it fails its batch."""
        self.skip, self.reasons = skip, dict[int, str]()

    def add(self, lane: Lane, samples: ReadSamples, error: WdstrainError, row: int) -> None:
        """Record one sample of a read. Call this before the read is settled."""
        self.reasons[int(samples.ids[row])] = f"it cannot be read ({str(error).rstrip('.')})"
        lane.where[samples.places[row]] = -1

    def read_singly(
        self,
        lane: Lane,
        samples: ReadSamples,
        pending: PendingRead,
        read: Callable[[int], WdstrainError | None],
    ) -> None:
        """Read samples of a damaged shard one by one, in the order of their batches.

        Samples that fail are recorded as unreadable, or the first one fails the read.
        read: reads the sample in a row and returns its error.
        """
        pending.retries = len(samples.ids)
        for row in np.argsort(samples.batch_numbers, kind="stable").tolist():
            error = read(row)
            if error is not None and not self.skip:
                pending.failed[row] = error
                return
            if error is not None:
                self.add(lane, samples, error, row)


class Sink(Protocol):
    """Destination of samples.

    bytes_elsewhere: bytes of each sample that are not in the arena. most_bytes: of one read.
    in_background: whether reads go on while the reader's thread starts others.
    unreadable: samples that could not be read.
    """

    @property
    def bytes_elsewhere(self) -> int: ...
    @property
    def most_bytes(self) -> int: ...
    @property
    def in_background(self) -> bool: ...
    @property
    def unreadable(self) -> UnreadableSamples: ...

    def scatter(
        self, plan: Order, rank: int, lane: int, start: int, ids: Ints
    ) -> SlotScatter | None:
        """Return the destinations of the samples in places `start` and up of a lane.

        ids: of these samples, int64[n]. None: their destinations follow from the arena alone.
        """

    def plan(
        self, lane: Lane, block: ReadBlock, samples: ReadSamples, on_done: Callable[[], None]
    ) -> Callable[[], StartedRead]:
        """Return the function that reads these samples or starts to read them.

        The caller holds the lock of the run, and calls the function without it. on_done: called,
        from any thread, when a read in the background is complete.
        """

    def stop(self) -> None:
        """End reads in the background. Nothing is written to memory afterwards."""
