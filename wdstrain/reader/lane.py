"""Progress of one lane in one epoch, and its reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from wdstrain.errors import WdstrainError
from wdstrain.memory.scatter import Bools
from wdstrain.order.order import Order
from wdstrain.reader.blocks import LaneSteps, ReadBlock
from wdstrain.shards.index import Shard
from wdstrain.shards.offsets import Ints
from wdstrain.storage.prefetch import LaneStream, PendingRead


class LaneRead:
    """A read of the next places of a lane.

    This class reads nothing: no batch needs the samples of the places. The reads of samples derive
    from it. A read does not refer to its lane, which refers to it: the memory of samples
    must be freed without the garbage collector.
    count: places that it covers. pending: its progress. is_last: whether the lane ends with it.
    batch_numbers: of its n samples, int64[n]. size: bytes. position: shard and offset of its begin.
    """

    batch_numbers: Ints = np.zeros(0, np.int64)
    size = 0
    position: tuple[Shard, int] | None = None
    is_last = False

    def __init__(self, count: int) -> None:
        self.count, self.pending = count, PendingRead()

    def begin(self, lane: Lane) -> None:
        """Read, or start to read. It may take long: the caller does not hold the lock of the run."""

    def check(self, lane: Lane) -> WdstrainError | None:
        """Check a complete read. Returns its error. The caller holds the lock of the run."""
        return None


@dataclass(eq=False)
class Lane:
    """Progress of one lane in one epoch.

    epoch_first_batch: batch number of step 0; negative if the epoch was entered in the middle.
    first_step: step at which it was entered.
    offsets: ring buffer, place -> offset of its sample in the arena; negative if it is unreadable.
    unverified: ring buffer, place -> whether the checksums of its sample are not verified.
    any_unverified: whether any sample since the start was unverified.
    begun: places whose read was started. read: places that were read.
    requested: positions of the delivery order that were requested. needed: places that these
    positions need. in_flight: reads that are not settled, in order. block: places read next.
    """

    plan: Order
    number: int
    epoch_first_batch: int
    first_step: int
    offsets: Ints
    unverified: Bools
    any_unverified: bool
    stream: LaneStream
    begun: int
    read: int
    requested: int
    needed: int = 0
    in_flight: deque[LaneRead] = field(default_factory=deque)
    block: ReadBlock | None = None

    @property
    def all_begun(self) -> bool:
        """Whether the reads of all places were started."""
        return self.begun >= self.plan.lane_places(self.number)

    @property
    def is_read(self) -> bool:
        """Whether all requested samples are read."""
        return self.read >= self.needed

    @property
    def held(self) -> int:
        """Places that were started and not yet requested."""
        # An epoch that ends with padding has more requested positions than places.
        return max(0, self.begun - self.requested)

    def request(self, steps: LaneSteps, number: int) -> None:
        """Request the samples of step `number` of a block."""
        self.requested += steps.firsts[number + 1] - steps.firsts[number]
        self.needed = max(self.needed, steps.needed[number])

    def add(self, read: LaneRead) -> None:
        """Append a started read."""
        self.begun += read.count
        read.is_last = self.all_begun
        self.in_flight.append(read)

    def next_complete(self) -> LaneRead | None:
        """Return the first read in flight if it is complete or has failed."""
        if not self.in_flight:
            return None
        read = self.in_flight[0]
        if read.pending.error is not None:
            return read
        return read if not read.pending.missing else None

    def record_unverified(self, places: Ints, rows: Ints | slice) -> None:
        """Record which samples of a read are unverified. rows: positions in `places`.

        places: ring positions of the samples of the read, int64[n].
        """
        unverified = places[rows]
        if self.any_unverified or len(unverified):
            self.unverified[places] = False
            self.unverified[unverified] = self.any_unverified = True


@dataclass(frozen=True, eq=False)
class ReadSamples:
    """The n samples of one read, in the order of one shard.

    count: places of the lane that the read covers. leaves_shard: whether the lane reads nothing of
    the shard after them. ids, starts, stops (extent in the shard), batch_numbers: int64[n].
    places: positions in the rings of the lane. offsets: in the arena. int64[n] each.
    """

    shard: Shard
    count: int
    leaves_shard: bool
    ids: Ints
    starts: Ints
    stops: Ints
    batch_numbers: Ints
    places: Ints
    offsets: Ints


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
    """A read of samples into memory."""

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
