"""Progress of one lane in one epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from wdstrain.errors import WdstrainError
from wdstrain.order.plan import Order
from wdstrain.reader.read_blocks import ReadBlock
from wdstrain.reader.step_blocks import LaneSteps
from wdstrain.reader.verifier import VerifiedRing
from wdstrain.shards.index import Ints, Shard
from wdstrain.storage.prefetch import LaneStream, PendingRead


@dataclass(eq=False)
class StartedRead:
    """A read of consecutive places of a lane, started or complete.

    batch_numbers: batch numbers of its samples, int64[n]. places: how many places it covers.
    size: bytes. check: checks the samples of a complete read and returns an error; None: no check.
    position: shard and offset where it begins. is_last: whether the lane ends with it.
    """

    pending: PendingRead
    batch_numbers: Ints
    places: int
    size: int = 0
    check: Callable[[], WdstrainError | None] | None = None
    position: tuple[Shard, int] | None = None
    is_last: bool = False


@dataclass(eq=False)
class Lane:
    """Progress of one lane in one epoch.

    epoch_first_batch: batch number of step 0; negative if the epoch was entered in the middle.
    first_step: step at which it was entered. where: ring buffer, place -> offset in the arena;
    negative for an unreadable sample. ring: which samples are unverified.
    begun: places whose read was started. read: places that were read.
    requested: positions of the delivery order that were requested. needed: places that these
    positions need. in_flight: reads that are not settled, in order. block: places read next.
    """

    plan: Order
    number: int
    epoch_first_batch: int
    first_step: int
    where: Ints
    ring: VerifiedRing
    stream: LaneStream
    begun: int
    read: int
    requested: int
    needed: int = 0
    in_flight: deque[StartedRead] = field(default_factory=deque)
    block: ReadBlock | None = None

    @property
    def all_begun(self) -> bool:
        """Whether the reads of all places were started."""
        return self.begun >= self.plan.lane_places(self.number)

    @property
    def held(self) -> int:
        """Places that were started and not yet requested."""
        # An epoch that ends with padding has more requested positions than places.
        return max(0, self.begun - self.requested)

    def request(self, steps: LaneSteps, number: int) -> None:
        """Request the samples of step `number` of a block."""
        self.requested += steps.firsts[number + 1] - steps.firsts[number]
        self.needed = max(self.needed, steps.needed[number])

    def add(self, read: StartedRead) -> None:
        """Append a started read."""
        self.begun += read.places
        read.is_last = self.all_begun
        self.in_flight.append(read)

    def next_complete(self) -> StartedRead | None:
        """Return the first read in flight if it is complete or has failed."""
        if not self.in_flight:
            return None
        read = self.in_flight[0]
        if read.pending.error is not None:
            return read
        # The loop may end the process after the last sample, so the cache must be complete by then.
        is_complete = not read.pending.missing and not (read.is_last and self.stream.filling)
        return read if is_complete else None
