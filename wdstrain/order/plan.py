"""The order of an epoch, decided on integers before a byte is read.

A plan says which samples a rank reads, in which order it reads them (always forward) and in which order they are
delivered. Everything else obeys it and holds no position of its own; hence one order for any number of workers, equal
steps on every rank, and a resume that costs one window wherever it happens.

How an epoch is laid out:

    line    all samples of the data set, shard after shard, the shards in an order permuted for this epoch
    hole    with tail="drop": the samples that fill no step, one run of the line at a random place, another each epoch
    lane    the line cut by count into `lanes` equal runs; each is read forward, by one rank
    window  the sample at place i of its lane gets the key i + jitter, jitter uniform in [0, window); the delivery order
            is the stable sort of the keys. So a sample leaves less than one window after it was read, and the order can
            be entered at any position by looking at two windows of keys. The first batch's worth of places is jittered by
            a tenth of the window only, so that the first batch is due after a batch and a tenth of the window. The road
            not taken is webdataset's reservoir: it mixes as well for the same memory, but its state depends on all that
            went before, so it cannot be re-entered.
    step    every step takes the same number of samples from each lane; a rank owns lanes / world_size lanes. With
            `lanes` fixed, the global batches are therefore the same for every world size.

The order depends on the sizes of the shards, seed, epoch, batch_size * world_size, lanes, window and tail, and on
nothing else. A change of what a seed means must change `ORDER` and the golden test in the same commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from operator import index
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from wdstrain.errors import PlanError, UsageError
from wdstrain.order.rng import below, bits
from wdstrain.runtime.cached import cached_property

ORDER = 1  # version of the order: same inputs and same ORDER, same epoch

Ints = npt.NDArray[np.int64]
Tail = Literal["drop", "pad", "keep"]

_BLOCK = 4096  # positions computed at a time, at least; the cost per sample is that of sorting three windows


def integer(name: str, value: Any, least: int | None = None) -> int:
    """Return an argument as a Python int: ints and numpy's integers are taken, bools, floats and text refused.

    Raises UsageError, also for a value below `least`.
    """
    rule = "must be an integer" + (f" >= {least}" if least is not None else "")
    try:
        number = int(index(value))
    except TypeError:
        raise UsageError(f"{name}={value!r}: {rule}.") from None
    if isinstance(value, bool) or (least is not None and number < least):
        raise UsageError(f"{name}={value!r}: {rule}.")
    return number


def is_number(value: Any) -> bool:
    """Whether an argument is a real number, Python's or numpy's."""
    return isinstance(value, Real)


class Order(Protocol):
    """What readers and loaders use of a plan."""

    @property
    def seed(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def lane_count(self) -> int: ...
    @property
    def samples_per_step_per_lane(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def shuffle(self) -> bool: ...
    @property
    def tail(self) -> Tail: ...
    @property
    def samples(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def left_out(self) -> int: ...
    def lanes_of(self, rank: int) -> Sequence[int]: ...
    def lane_samples(self, lane: int) -> int: ...
    def lane_places(self, lane: int) -> int: ...
    def span(self, lane: int, step: int) -> tuple[int, int]: ...
    def order(self, lane: int, start: int, stop: int) -> Ints: ...
    def due(self, lane: int, start: int, stop: int) -> Ints: ...
    def first_place(self, lane: int, step: int) -> int: ...
    def ids(self, lane: int, places: Ints) -> Ints: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The order of one epoch.

    counts: samples of each shard, in index order. window: 1 delivers in reading order. tail: what is done with samples
    that fill no whole step: "drop" leaves them out, "pad" repeats samples that are marked invalid, "keep" gives a short
    last batch, empty on a rank for which there is no sample left. A lane with no sample for the last batch takes one from its part
    of the batch before, which is then shorter as well. Raises PlanError, with the numbers that would do, when the sizes do not fit.
    """

    counts: Ints
    seed: int
    epoch: int
    batch_size: int
    world_size: int = 1
    lanes: int | None = None
    window: int = 1
    shuffle: bool = True
    tail: Tail = "drop"
    limit: int | None = None  # most steps; what it leaves out counts as left out
    _blocks: dict[tuple[int, int], Ints] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("seed", "epoch", "batch_size", "world_size", "window"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        for name in ("batch_size", "world_size", "window"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)} is below 1.")
        if self.tail not in get_args(Tail):
            raise PlanError(f"tail={self.tail!r} is not one of {', '.join(get_args(Tail))}.")
        if self.lanes is not None:
            object.__setattr__(self, "lanes", integer("lanes", self.lanes))
        if self.lanes is not None and (self.lanes < 1 or self.lanes % self.world_size):
            fits = [w for w in range(1, max(1, self.lanes) + 1) if self.lanes % w == 0]
            raise PlanError(f"{self.lanes} lanes cannot be shared by {self.world_size} ranks; world sizes that fit: {fits}.")
        if self.global_batch % self.lane_count:
            raise PlanError(
                f"a global batch of {self.batch_size} x {self.world_size} = {self.global_batch} cannot be taken equally "
                f"from {self.lane_count} lanes. Make batch_size * world_size a multiple of lanes."
            )
        if self.limit is not None and self.tail != "drop":
            raise PlanError(f'limit={self.limit} leaves samples out, tail="{self.tail}" none. Use tail="drop".')
        if self.samples < 1:
            raise PlanError("there are no samples in these shards. Check the address.")
        if self.steps < 1:
            raise PlanError(
                f"{self.samples} samples cannot give {self.world_size} rank(s) one batch of {self.batch_size} "
                f'({self.global_batch} needed). Lower batch_size or world_size, or use tail="pad".'
            )

    # --- sizes -------------------------------------------------------------------------------------------------------

    @property
    def lane_count(self) -> int:
        return self.lanes if self.lanes is not None else self.world_size

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size

    @property
    def samples_per_step_per_lane(self) -> int:
        """Samples a step takes from each lane."""
        return self.global_batch // self.lane_count

    @cached_property
    def samples(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def steps(self) -> int:
        """Batches per rank, the same for every rank."""
        whole = self.samples // self.global_batch
        whole += self.tail != "drop" and self.samples % self.global_batch > 0
        return whole if self.limit is None else min(whole, self.limit)

    @property
    def left_out(self) -> int:
        """Samples this epoch does not deliver: only with tail="drop", and fewer than a global batch if there is no limit."""
        return max(0, self.samples - self.steps * self.global_batch) if self.tail == "drop" else 0

    def lanes_of(self, rank: int) -> range:
        share = self.lane_count // self.world_size
        return range(rank * share, (rank + 1) * share)

    def lane_samples(self, lane: int) -> int:
        """Samples delivered by a lane as themselves, not as padding."""
        kept = self.samples - self.left_out
        return kept // self.lane_count + (lane < kept % self.lane_count)

    def lane_places(self, lane: int) -> int:
        """Places a lane reads. One more than it delivers only where an empty lane must pad and needs something to repeat."""
        count = self.lane_samples(lane)
        return 1 if count == 0 and (self.tail == "pad" or self._repeats(lane)) else count

    def span(self, lane: int, step: int) -> tuple[int, int]:
        """Delivery positions [start, stop) of a lane that make up its part of a step.

        With tail="pad" they may lie beyond `lane_samples`: those are padding. With tail="keep" the last step is short; where
        nothing is left for the rank, it is one position of padding, which shows what an empty batch is made of.
        """
        start, stop = step * self.samples_per_step_per_lane, (step + 1) * self.samples_per_step_per_lane
        if self.tail == "keep":
            lent = self._lent(lane)
            start -= lent if step == self.steps - 1 else 0
            stop = (
                self.lane_samples(lane) + self._repeats(lane)
                if step == self.steps - 1
                else stop - (lent if step == self.steps - 2 else 0)
            )
        return start, stop

    # --- order -------------------------------------------------------------------------------------------------------

    def order(self, lane: int, start: int, stop: int) -> Ints:
        """Places of a lane in the order they are delivered, for delivery positions [start, stop).

        int64[stop - start]. The sample at place i is delivered before any at place i + window or later. Positions beyond
        the lane's samples (tail="pad") repeat the place delivered last. Costs stop - start plus at most three windows,
        wherever start is.
        """
        count = self.lane_samples(lane)
        if count == 0 or start >= stop:
            return np.zeros(max(0, stop - start), np.int64)
        positions = np.minimum(np.arange(start, stop), count - 1)
        if self.window == 1:
            return np.asarray(positions, np.int64)
        low, high = int(positions[0]), int(positions[-1]) + 1
        first = low // self._block
        parts = [self._delivered(lane, block) for block in range(first, (high - 1) // self._block + 1)]
        delivered: Ints = np.concatenate(parts)[positions - first * self._block]
        return delivered

    def due(self, lane: int, start: int, stop: int) -> Ints:
        """The last step that needs the sample, for places [start, stop) of a lane. int64[stop - start]."""
        count = self.lane_samples(lane)
        if count == 0:
            return np.full(stop - start, self.steps - 1, np.int64)
        position = self.positions(lane, start, stop)
        step = position // self.samples_per_step_per_lane
        if self.tail == "pad" or self._lent(lane) or self._repeats(lane):  # padding repeats the last until the end
            step[position == count - 1] = self.steps - 1
        return step

    def positions(self, lane: int, start: int, stop: int) -> Ints:
        """Delivery positions of the places [start, stop) of a lane, each less than a window from its place. int64[stop - start]"""
        if self.window == 1:
            return np.arange(start, stop)
        low, high = max(0, start - self.window + 1), min(self.lane_samples(lane), stop + self.window - 1)
        places = self.order(lane, low, high)
        mine = (places >= start) & (places < stop)
        position = np.empty(stop - start, np.int64)
        position[places[mine] - start] = np.flatnonzero(mine) + low
        return position

    def first_place(self, lane: int, step: int) -> int:
        """The first place to read when the epoch is entered at `step`: at most one window before it."""
        last = max(0, self.lane_samples(lane) - 1)  # what padding repeats is needed however late the step is
        return max(0, min(self.span(lane, step)[0], last) - self.window + 1)

    def ids(self, lane: int, places: Ints) -> Ints:
        """Sample ids (numbers in the whole data set, in index order) at these places of a lane. int64, as `places`."""
        kept = self.samples - self.left_out
        start = lane * (kept // self.lane_count) + min(lane, kept % self.lane_count)
        line = np.minimum(start + places, kept - 1)
        line = line + (line >= self._hole) * self.left_out
        shard = np.searchsorted(self._line_stops, line, side="right")
        return np.asarray(self._line_ids[shard] + line)

    # --- parts -------------------------------------------------------------------------------------------------------

    @cached_property
    def shard_order(self) -> Ints:
        """Shard numbers in the order of the line. int64[shards]"""
        numbers = np.arange(len(self.counts))
        if not self.shuffle:
            return numbers
        return np.argsort(bits(numbers, "shards", self.seed, self.epoch), kind="stable")

    @cached_property
    def _line_stops(self) -> Ints:
        return np.cumsum(self.counts[self.shard_order])

    @cached_property
    def _line_ids(self) -> Ints:
        """What to add to a place of the line to get the id, for each shard in line order. int64[shards]"""
        first = np.cumsum(self.counts) - self.counts
        return np.asarray(first[self.shard_order] - (self._line_stops - self.counts[self.shard_order]))

    @cached_property
    def _hole(self) -> int:
        kept = self.samples - self.left_out
        if not self.shuffle or not self.left_out:
            return kept
        return int(bits(np.zeros(1, np.int64), "hole", self.seed, self.epoch)[0]) % (kept + 1)

    @cached_property
    def _block(self) -> int:
        return max(_BLOCK, self.window)

    def _delivered(self, lane: int, block: int) -> Ints:
        """Places delivered at positions [block * _block, (block + 1) * _block) of a lane."""
        found = self._blocks.get((lane, block))
        if found is None:
            count = self.lane_samples(lane)
            start, stop = block * self._block, min((block + 1) * self._block, count)
            # Places before low are all delivered before start, and places from high on all at stop or later, so the
            # sorted keys of the places between them, shifted by low, are the positions themselves.
            low, high = max(0, start - self.window + 1), min(count, stop + self.window - 1)
            places = np.arange(low, high)
            reach = np.where(places < self.samples_per_step_per_lane, max(1, self.window // 10), self.window)
            keys = places + below(reach, places, "jitter", self.seed, self.epoch, lane)
            found = places[np.argsort(keys, kind="stable")[start - low : stop - low]]
            for old in [k for k in list(self._blocks) if k[0] == lane and abs(k[1] - block) > 3]:
                self._blocks.pop(old, None)
            self._blocks[lane, block] = found
        return found

    def _lent(self, lane: int) -> int:
        """With tail="keep": 1 if a lane moves one sample of its last but one step into the last, which would be empty."""
        return int(self.tail == "keep" and self._ends(lane) and self.samples_per_step_per_lane > 1 and self.steps > 1)

    def _repeats(self, lane: int) -> int:
        """With tail="keep": 1 if nothing is left for any lane of a rank in the last step, and this is the first of them."""
        share = self.lane_count // self.world_size
        if self.tail != "keep" or lane % share or (self.samples_per_step_per_lane > 1 and self.steps > 1):
            return 0
        return int(all(self._ends(one) for one in range(lane, lane + share)))

    def _ends(self, lane: int) -> bool:
        """Whether a lane has no sample for the last step."""
        return self.lane_samples(lane) == (self.steps - 1) * self.samples_per_step_per_lane
