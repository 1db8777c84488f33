"""Epoch plan over several sources with given shares.

Each source has a `Plan` of its own, with its own lanes, window and seed. The mixture decides how
many samples of each source a step takes. The sources take turns of one sample in a fixed cycle
(`_turns`): of the first k turns, a source with share s has floor(s * k) or ceil(s * k). Each lane
follows the cycle, so a source is always within one sample per lane of its share. The position of an
epoch is (epoch, step), as in a `Plan`.

The number of turns of a source must never decrease from one step to the next, or a sample would be
delivered twice.

The epoch ends before the first step that a source cannot fill. No sample is repeated within an
epoch. The remaining samples of the other sources are left out; they differ between epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from math import lcm

import numpy as np

from wdstrain.errors import PlanError
from wdstrain.order.order import Ints, Tail
from wdstrain.order.plan import Plan
from wdstrain.order.rng import key
from wdstrain.runtime.cached import cached_property

TURNS = 2  # version of the cycle of turns; `plan.ORDER` is the version of the order within a source


class Mixture:
    """The order of one epoch over several sources. It has the members of `plan.Order`.

    counts: samples of each shard, one array for each source, int64[shards] each.
    names: the name of each source; its seed depends on it.
    shares: the share of each source; they add up to 1.
    window: reach of the shuffle in samples of a lane, over all sources.
    The other arguments are those of `Plan`. Sample ids count through the sources in order. Lanes
    are numbered source by source, `lane_count` lanes each.
    Raises PlanError if a source cannot fill its share of one step.
    """

    tail: Tail = "drop"

    def __init__(
        self,
        *,
        counts: Sequence[Ints],
        names: Sequence[str],
        shares: Sequence[Fraction],
        seed: int,
        epoch: int,
        batch_size: int,
        world_size: int,
        lanes: int | None,
        window: int,
        shuffle: bool,
    ) -> None:
        self.seed, self.epoch, self.batch_size, self.world_size, self.shuffle = (
            seed,
            epoch,
            batch_size,
            world_size,
            shuffle,
        )
        self.lane_count = lanes if lanes is not None else world_size
        self.global_batch = batch_size * world_size
        checked = Plan(  # raises PlanError if batch_size, world_size and lanes do not fit together
            counts=np.array([max(1, self.global_batch)]),
            seed=0,
            epoch=0,
            batch_size=batch_size,
            world_size=world_size,
            lanes=lanes,
        )
        # a lane of one source takes at most this many; the lanes of all sources together, exactly
        self.samples_per_step_per_lane = checked.samples_per_step_per_lane
        self._turns = _turns(tuple(shares))
        self.samples = int(sum(count.sum() for count in counts))
        self.steps = self._most_steps([int(count.sum()) for count in counts], names)
        for source, name in enumerate(names):
            if self._taken(source, self.steps) < 1:
                raise PlanError(
                    f"source {name} gives no sample in an epoch of {self.steps} steps: "
                    f"each source must give one. Raise its weight."
                )
        self._plans = [
            Plan(
                counts=count,
                seed=key("source", seed, name),
                epoch=epoch,
                batch_size=self.lane_count // world_size,
                world_size=world_size,
                lanes=self.lane_count,
                window=min(max(1, round(window * share)), int(count.sum())) if shuffle else 1,
                shuffle=shuffle,
                limit=int(self._taken(source, self.steps)),
            )
            for source, (count, name, share) in enumerate(zip(counts, names, shares, strict=True))
        ]
        self._firsts = [0, *accumulate(int(count.sum()) for count in counts)]
        self.window = max(plan.window for plan in self._plans)

    @property
    def left_out(self) -> int:
        """Samples that this epoch does not deliver."""
        return self.samples - self.steps * self.global_batch

    def lanes_of(self, rank: int) -> list[int]:
        """Lanes that a rank reads, of all sources."""
        source_lanes = self._plans[0].lanes_of(rank)
        return [
            source * self.lane_count + lane
            for lane in source_lanes
            for source in range(len(self._plans))
        ]

    def lane_samples(self, lane: int) -> int:
        """Samples that a lane delivers."""
        plan, source_lane, _ = self._locate(lane)
        return plan.lane_samples(source_lane)

    def lane_places(self, lane: int) -> int:
        """Places that a lane reads: as many as it delivers, since a mixture has no padding."""
        return self.lane_samples(lane)

    def span(self, lane: int, step: int) -> tuple[int, int]:
        """Delivery positions [start, stop) of a lane that a step takes; empty if no turn is due."""
        source = lane // self.lane_count
        return int(self._taken(source, step)), int(self._taken(source, step + 1))

    def order(self, lane: int, start: int, stop: int) -> Ints:
        """Places of a lane that are delivered at positions [start, stop). int64[stop - start]."""
        plan, source_lane, _ = self._locate(lane)
        return plan.order(source_lane, start, stop)

    def due(self, lane: int, start: int, stop: int) -> Ints:
        """Step that needs each of the places [start, stop) of a lane. int64[stop - start]."""
        plan, source_lane, source = self._locate(lane)
        position = plan.due(source_lane, start, stop)  # the source's plan takes one sample per step
        return np.asarray(np.searchsorted(self._all_taken[source], position, side="right") - 1)

    def first_place(self, lane: int, step: int) -> int:
        """First place of a lane that is read if the epoch starts at `step`."""
        plan, source_lane, source = self._locate(lane)
        return plan.first_place(source_lane, int(self._taken(source, step)))

    def ids(self, lane: int, places: Ints) -> Ints:
        """Sample ids at these places of a lane. int64, shape of `places`."""
        plan, source_lane, source = self._locate(lane)
        sample_ids: Ints = plan.ids(source_lane, places) + self._firsts[source]
        return sample_ids

    def draws(self, lane: int, places: Ints, ids: Ints) -> Ints:
        """Numbers of the random bits of the samples at these places: their ids; see `Plan.draws`."""
        return ids

    # --- helpers ----------------------------------------------------------------------------------

    def _locate(self, lane: int) -> tuple[Plan, int, int]:
        """Return the plan of a lane's source, the lane's number in it, and the source's number."""
        source, source_lane = divmod(lane, self.lane_count)
        return self._plans[source], source_lane, source

    def _taken(self, source: int, step: int) -> int:
        """Samples of a source that each lane has taken before a step."""
        turns = self._turns[source]
        cycles, turn = divmod(self.samples_per_step_per_lane * step, len(turns) - 1)
        return cycles * int(turns[-1]) + int(turns[turn])

    @cached_property
    def _all_taken(self) -> list[Ints]:
        """`_taken` of every step, for each source. int64[steps + 1] each."""
        taken = np.arange(self.steps + 1, dtype=np.int64) * self.samples_per_step_per_lane
        cycles, turn = np.divmod(taken, self._turns.shape[1] - 1)
        return [cycles * turns[-1] + turns[turn] for turns in self._turns]

    def _most_steps(self, totals: list[int], names: Sequence[str]) -> int:
        """Return the most steps for which every source has enough samples. Raises PlanError if 0.

        totals: samples of each source.
        """

        def fits(step: int) -> bool:
            return all(
                self._taken(source, step) * self.lane_count <= total
                for source, total in enumerate(totals)
            )

        low, high = 0, sum(totals) // self.global_batch + 1  # fits(low), not fits(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        if low == 0:
            shares = ", ".join(
                f"{name} {total} samples" for name, total in zip(names, totals, strict=True)
            )
            raise PlanError(
                f"these sources cannot fill one step of {self.global_batch} samples "
                f"by their shares ({shares}). Lower batch_size or the weight of the smallest source."
            )
        return low


@lru_cache(maxsize=4)
def _turns(shares: tuple[Fraction, ...]) -> Ints:
    """Return how many of the first k turns each source has. int64[sources, turns + 1].

    `turns` is the length of the cycle. A source may take its next turn once its share of the turns
    exceeds the turns it has taken. Its deadline is the turn at which the excess would reach one.
    The source with the earliest deadline takes each turn. That keeps every deadline (Steiner and
    Yeomans, 1993).
    """
    turns = lcm(*(share.denominator for share in shares))
    quotas = [int(share * turns) for share in shares]
    taken, owner = [0] * len(shares), np.empty(turns, np.int64)
    # heaps of (first allowed turn, source) and (deadline, source)
    upcoming, due = [(0, source) for source in range(len(shares))], list[tuple[int, int]]()
    for turn in range(turns):
        while upcoming and upcoming[0][0] <= turn:
            source = heappop(upcoming)[1]
            heappush(due, (-(-(taken[source] + 1) * turns // quotas[source]), source))
        source = owner[turn] = heappop(due)[1]
        taken[source] += 1
        heappush(upcoming, (taken[source] * turns // quotas[source], source))
    has_turn = np.zeros((len(shares), turns + 1), np.int64)
    has_turn[owner, np.arange(1, turns + 1)] = 1
    return has_turn.cumsum(axis=1)
