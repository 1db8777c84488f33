"""Epoch plans: which samples a rank reads, in which order, and the order of delivery.

A plan is a pure function over integers. Readers, workers and loaders execute it and keep no
position of their own. An epoch is laid out as follows:

* Line: all samples, shard after shard. The shards are permuted for each epoch.
* Hole, only with tail="drop": the samples that fill no step. They are one contiguous run of the
  line. Its position changes with the epoch.
* Lane: the line is cut by count into `lanes` equal runs. One rank reads each lane forward.
* Window: the sample at place i of its lane has the key i + jitter, with jitter uniform in
  [0, window). The delivery order is the stable sort of the keys. A sample is therefore delivered
  less than one window after it was read, and two windows of keys are enough to enter the order at
  any position. The places of the first step have a tenth of the jitter, so that the first batch
  needs few reads.
* Step: takes the same number of samples from each lane. A rank owns lanes / world_size lanes. With
  fixed `lanes` the global batches are the same for every world size.

The order depends only on the sizes of the shards, seed, epoch, batch_size * world_size, lanes,
window, shuffle and tail. A change of the order must change `ORDER` and the golden test in the same
commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import numpy.typing as npt

from wdstrain.errors import PlanError
from wdstrain.order.order import Ints, Order, Places, Steps, Tail
from wdstrain.order.rng import below, bits
from wdstrain.runtime.cached import cached_property
from wdstrain.runtime.options import integer

ORDER = 1  # version of the order; equal inputs and equal ORDER give equal epochs


_BLOCK = 4096  # least number of positions computed at a time; smaller blocks sort too often
_KEPT_BLOCKS = 3  # blocks before and after the newest one that are kept


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(Order):
    """The order of one epoch.

    counts: samples of each shard in index order, int64[shards].
    window: reach of the shuffle, in samples of a lane; 1 delivers in reading order.
    shuffle: False keeps the shards in index order. It does not change `window`.
    tail: handling of the samples that fill no whole step. "drop" leaves them out. "pad" repeats
    samples, which the batch marks as invalid. "keep" gives a short last batch, which is empty on a
    rank that has no samples left. With "keep", a lane without samples for the last step takes one
    from its step before, which is then shorter too.
    limit: most steps of the epoch; only with tail="drop". The rest counts as left out.
    kept: samples of the epoch that are not left out. block: positions that are computed and kept
    together. can_lend: there is a step before the last, with several samples of each lane.
    Raises PlanError if the sizes do not fit. The message names sizes that do.
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
    limit: int | None = None
    samples_per_step_per_lane: int = field(init=False)
    kept: int = field(init=False)
    block: int = field(init=False)
    can_lend: bool = field(init=False)
    _blocks: dict[tuple[int, int], Ints] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("seed", "epoch", "batch_size", "world_size", "window", "lanes"):
            if name != "lanes" or self.lanes is not None:
                vars(self)[name] = integer(name, getattr(self, name))
        _check_options(self)
        samples, lane_count = self._count(), self.lanes or self.world_size
        whole = samples // self.global_batch
        whole += self.tail != "drop" and samples % self.global_batch > 0
        steps = whole if self.limit is None else min(whole, self.limit)
        longest = -(-samples // lane_count)
        lanes_per_rank = lane_count // self.world_size
        vars(self).update(
            samples=samples,
            steps=steps,
            kept=steps * self.global_batch if self.tail == "drop" else samples,
            lane_count=lane_count,
            lanes_per_rank=lanes_per_rank,
            samples_per_step_per_lane=self.global_batch // lane_count,
            max_delay=lanes_per_rank * min(self.window, longest),
            block=max(_BLOCK, self.window),
            can_lend=self.global_batch > lane_count and steps > 1,
        )
        if self.samples < 1:
            raise PlanError(
                "these shards hold no samples.",
                "Check the address.",
            )
        if self.steps < 1:
            raise PlanError(
                f"{self.samples} samples cannot give {self.world_size} rank(s) one batch of "
                f"{self.batch_size} ({self.global_batch} needed).",
                "Lower {batch_size} or {world_size}, or use {tail}.",
                {"batch_size": ..., "world_size": ..., "tail": "pad"},
            )

    # --- sizes ------------------------------------------------------------------------------------

    def _count(self) -> int:
        """Return the samples of all shards, including those that this epoch leaves out."""
        return int(self.counts.sum())

    def lanes_of(self, rank: int) -> range:
        """Lanes that a rank reads, numbered over all ranks."""
        return range(rank * self.lanes_per_rank, (rank + 1) * self.lanes_per_rank)

    def lane_samples(self, lane: int) -> int:
        """Samples that a lane delivers, without padding."""
        return self.kept // self.lane_count + (lane < self.kept % self.lane_count)

    def cuts(self, lane: int, steps: Ints) -> Ints:
        """Delivery position of a lane at which each of these steps begins. int64, as `steps`.

        The step `self.steps` begins where the last one ends. With tail="pad", positions at
        `lane_samples` or later are padding. With tail="keep" the last step is short. If it has no
        sample for a rank, it has one position of padding for that rank, which gives the empty batch
        its fields and shapes.
        """
        cuts = steps * self.samples_per_step_per_lane
        if self.tail == "keep":
            # A lane without a sample for the last step moves one there from the step before.
            cuts[steps == self.steps - 1] -= int(_ends_early(self, lane) and self.can_lend)
            cuts[steps == self.steps] = self.lane_samples(lane) + _repeats(self, lane)
        return cuts

    def rows_before(self, rank: int, step: int) -> int:
        """Return how many rows a rank delivers before a step, padding included."""
        if self.tail != "keep":
            return step * self.batch_size
        return sum(
            min(int(self.cuts(lane, np.array([step]))[0]), self.lane_samples(lane))
            for lane in self.lanes_of(rank)
        )

    # --- delivery and reading ---------------------------------------------------------------------

    def delivery(self, rank: int, first: int, stop: int) -> Steps:
        """Return the samples that a rank delivers in the steps [first, stop), by step and lane."""
        steps = np.arange(first, stop + 1)
        lanes = [self._delivery_of(lane, self.cuts(lane, steps)) for lane in self.lanes_of(rank)]
        sizes = np.array([np.diff(self.cuts(lane, steps)) for lane in self.lanes_of(rank)])
        by_step = np.argsort(
            np.concatenate([np.repeat(steps[:-1], size) for size in sizes]), kind="stable"
        )
        ids, rng_ids, valid = (
            np.concatenate(column)[by_step] for column in zip(*lanes, strict=True)
        )
        firsts = np.append(0, sizes.sum(axis=0).cumsum()).tolist()
        is_same = all(own_rng_ids is own_ids for own_ids, own_rng_ids, _ in lanes)
        return Steps(ids, ids if is_same else rng_ids, firsts, valid)

    def reading(self, rank: int, lane: int, start: int, stop: int) -> Places:
        """Return the samples at the places [start, stop) of a lane; see `Order.reading`."""
        number = self.lanes_of(rank)[lane]
        count, end = self.lane_samples(number), int(self.cuts(number, np.array([self.steps]))[0])
        low, high = max(0, start - self.window + 1), min(count, stop + self.window - 1)
        # Padding repeats the place that is delivered last.
        delivered = self.order(number, low, end if high == count else high)
        inside = np.flatnonzero((delivered >= start) & (delivered < stop))
        inside = inside[_stable_argsort(delivered[inside] - start)]
        places, positions = delivered[inside], inside + low
        step = np.minimum(positions // self.samples_per_step_per_lane, self.steps - 1)
        step[positions >= self.cuts(number, np.array([self.steps - 1]))] = self.steps - 1
        row = positions - self.cuts(number, step)
        for before in self.lanes_of(rank)[:lane]:
            row += self.cuts(before, step + 1) - self.cuts(before, step)
        return Places(self.ids(number, places), step, row)

    def first_place(self, rank: int, lane: int, step: int) -> int:
        """Return the first place of a lane that is read if the epoch starts at `step`."""
        number = self.lanes_of(rank)[lane]
        last = max(0, self.lane_samples(number) - 1)  # a step of padding repeats the last sample
        return max(0, min(int(self.cuts(number, np.array([step]))[0]), last) - self.window + 1)

    # --- order ------------------------------------------------------------------------------------

    def order(self, lane: int, start: int, stop: int) -> Ints:
        """Places of a lane that are delivered at the positions [start, stop). int64[stop - start].

        The sample at place i is delivered before any sample at place i + window or later. Positions
        at `lane_samples` or later (padding) repeat the place that is delivered last. The cost is
        that of stop - start plus at most three windows of places, for any start.
        """
        count = self.lane_samples(lane)
        if count == 0 or start >= stop:
            return np.zeros(max(0, stop - start), np.int64)
        positions = np.minimum(np.arange(start, stop), count - 1)
        if self.window == 1:
            return np.asarray(positions, np.int64)
        low, high = int(positions[0]), int(positions[-1]) + 1
        first = low // self.block
        parts = [
            self._delivered(lane, block) for block in range(first, (high - 1) // self.block + 1)
        ]
        return np.asarray(np.concatenate(parts)[positions - first * self.block])

    def ids(self, lane: int, places: Ints) -> Ints:
        """Sample ids at these places of a lane. int64, shape of `places`.

        The id of a sample is its number in the data set, in index order.
        """
        line = self._line_places(lane, places)
        shard = np.searchsorted(self._line_stops, line, side="right")
        return np.asarray(self._line_ids[shard] + line)

    def rng_ids(self, lane: int, places: Ints, ids: Ints) -> Ints:
        """Numbers of the random bits of the samples at these places: their ids. int64.

        ids: of the samples at these places.
        """
        return ids

    def _line_places(self, lane: int, places: Ints) -> Ints:
        """Positions on the line of these places of a lane. int64, shape of `places`."""
        start = lane * (self.kept // self.lane_count) + min(lane, self.kept % self.lane_count)
        line = np.minimum(start + places, self.kept - 1)
        return np.asarray(line + (line >= self._hole) * self.left_out)

    # --- helpers ----------------------------------------------------------------------------------

    def _delivery_of(self, lane: int, cuts: Ints) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """Return (ids, rng_ids, valid) of the samples of a lane in the steps with these cuts."""
        positions = np.arange(cuts[0], cuts[-1])
        places = self.order(lane, int(cuts[0]), int(cuts[-1]))
        ids = self.ids(lane, places)
        return ids, self.rng_ids(lane, places, ids), positions < self.lane_samples(lane)

    @cached_property
    def shard_order(self) -> Ints:
        """Shard numbers in the order of the line. int64[shards]."""
        numbers = np.arange(len(self.counts))
        if not self.shuffle:
            return numbers
        return np.argsort(bits(numbers, "shards", self.seed, self.epoch), kind="stable")

    @cached_property
    def _line_stops(self) -> Ints:
        """End of each shard on the line, in line order. int64[shards]."""
        return np.cumsum(self.counts[self.shard_order])

    @cached_property
    def _line_ids(self) -> Ints:
        """A sample's id minus its position on the line, by shard in line order. int64[shards]."""
        first = np.cumsum(self.counts) - self.counts
        return np.asarray(
            first[self.shard_order] - (self._line_stops - self.counts[self.shard_order])
        )

    @cached_property
    def _hole(self) -> int:
        """Position on the line of the first sample that is left out."""
        if not self.shuffle or not self.left_out:
            return self.kept
        return int(bits(np.zeros(1, np.int64), "hole", self.seed, self.epoch)[0]) % (self.kept + 1)

    def _delivered(self, lane: int, number: int) -> Ints:
        """Places that a lane delivers at the positions of block `number`."""
        delivered = self._blocks.get((lane, number))
        if delivered is None:
            start, end = number * self.block, self.lane_samples(lane)
            delivered = _places_delivered(self, lane, start, min(start + self.block, end))
            for far in [at for at in list(self._blocks) if at[0] == lane]:  # threads may add others
                if abs(far[1] - number) > _KEPT_BLOCKS:
                    self._blocks.pop(far, None)
            self._blocks[lane, number] = delivered
        return delivered


def _repeats(plan: Plan, lane: int) -> int:
    """With tail="keep": 1 if a lane adds a position of padding to its last step.

    The first lane of a rank does so if no lane of the rank has a sample for that step.
    0 otherwise.
    """
    rank, own = divmod(lane, plan.lanes_per_rank)
    is_last = own == 0 and not plan.can_lend
    return int(is_last and all(_ends_early(plan, other) for other in plan.lanes_of(rank)))


def _ends_early(plan: Plan, lane: int) -> bool:
    """Return whether a lane has no sample for the last step."""
    return plan.lane_samples(lane) == (plan.steps - 1) * plan.samples_per_step_per_lane


def _places_delivered(plan: Plan, lane: int, start: int, stop: int) -> Ints:
    """Return the places that a lane delivers at the positions [start, stop). int64[stop - start].

    Places before `low` are delivered before `start`, and places from `high` on at `stop` or later.
    The rank of a key among those of [low, high), plus low, is its position.
    """
    low = max(0, start - plan.window + 1)
    high = min(plan.lane_samples(lane), stop + plan.window - 1)
    places = np.arange(low, high)
    short = max(1, plan.window // 10)
    reach = np.where(places < plan.samples_per_step_per_lane, short, plan.window)
    keys = places + below(reach, places, "jitter", plan.seed, plan.epoch, lane)
    return np.asarray(places[_stable_argsort(keys - low)[start - low : stop - low]])


def _stable_argsort(keys: Ints) -> Ints:
    """Return `np.argsort(keys, kind="stable")` of less than 2**31 keys in [0, 2**32).

    NumPy sorts numbers 5 to 40 times as fast as it sorts their places in a stable way.
    """
    return np.asarray(np.sort((keys << 31) | np.arange(len(keys))) & (2**31 - 1))


def _check_options(plan: Plan) -> None:
    """Raise PlanError for options that do not fit together."""
    for name in ("batch_size", "world_size", "window"):
        if getattr(plan, name) < 1:
            raise PlanError("must be >= 1.", option=name, value=getattr(plan, name))
    if plan.tail not in get_args(Tail):
        raise PlanError(
            f"must be one of {', '.join(get_args(Tail))}.",
            option="tail",
            value=plan.tail,
        )
    lanes = plan.lanes
    if lanes is not None and (lanes < 1 or lanes % plan.world_size):
        divisors = [size for size in range(1, max(1, lanes) + 1) if lanes % size == 0]
        raise PlanError(
            f"{lanes} lanes cannot be shared by {plan.world_size} ranks: every rank needs the "
            "same number.",
            f"Use a world size that divides lanes: {divisors}.",
        )
    if lanes is not None and plan.global_batch % lanes:
        raise PlanError(
            f"a global batch of {plan.batch_size} x {plan.world_size} = {plan.global_batch} "
            f"cannot be taken equally from {lanes} lanes.",
            "Let {batch_size} x {world_size} be a multiple of {lanes}.",
            {"batch_size": ..., "world_size": ..., "lanes": ...},
        )
    if plan.limit is not None and plan.tail != "drop":
        raise PlanError("{limit} needs {tail}.", "", {"limit": plan.limit, "tail": "drop"})
