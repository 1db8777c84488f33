"""The order of an epoch over several sources with given shares.

Each source keeps a plan of its own (its lanes, its window, its seed); the mixture only says how many samples of each
source a step takes. The sources take turns, one sample each (`_turns`), over and over: of k turns a source with share s has
floor(s k) or ceil(s k). With q samples per lane and step a lane has taken q t samples before step t, so each source is within
one sample of its share at any time, the position is still (epoch, step), and everything a plan promises holds.

The road not taken: floor(b q t) - floor(a q t) for a source between the bounds a and b of its share. That is as exact, and
goes back by one now and then where a source has less than a sample of a step: what it gave came twice.

Stop rule: the epoch ends before the first step that a source cannot fill; nothing is repeated within an epoch. What the
others have left is left out of this epoch, another part each epoch.
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
from wdstrain.order.plan import Ints, Plan, Tail
from wdstrain.order.rng import key
from wdstrain.runtime.cached import cached_property

TURNS = 2  # version of the order in which sources take turns; what a plan makes of each source is another (`plan.ORDER`)


class Mixture:
    """A plan over several sources; it has the members of `Plan` that readers and loaders use.

    counts: samples of each shard, one array for each source; ids count through the sources in order. Lanes are numbered
    source by source. Raises PlanError when a source cannot fill its share of one step.
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
        self.seed, self.epoch, self.batch_size, self.world_size, self.shuffle = seed, epoch, batch_size, world_size, shuffle
        self.lane_count = lanes if lanes is not None else world_size
        self.global_batch = batch_size * world_size
        whole = Plan(  # checks what lanes, ranks and batches have to do with each other
            counts=np.array([max(1, self.global_batch)]),
            seed=0,
            epoch=0,
            batch_size=batch_size,
            world_size=world_size,
            lanes=lanes,
        )
        self._per_lane = whole.samples_per_step_per_lane
        self._turns = _turns(tuple(shares))
        self.samples = int(sum(count.sum() for count in counts))
        self.steps = self._most_steps([int(count.sum()) for count in counts], names)
        for source, name in enumerate(names):
            if self._taken(source, self.steps) < 1:
                raise PlanError(f"the source {name} gives no sample in an epoch of {self.steps} steps. Raise its weight.")
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
        self.samples_per_step_per_lane = self._per_lane  # most that a step takes from a lane

    @property
    def left_out(self) -> int:
        """Samples this epoch does not deliver."""
        return self.samples - self.steps * self.global_batch

    def lanes_of(self, rank: int) -> list[int]:
        mine = self._plans[0].lanes_of(rank)
        return [source * self.lane_count + lane for lane in mine for source in range(len(self._plans))]

    def lane_samples(self, lane: int) -> int:
        plan, own, _ = self._of(lane)
        return plan.lane_samples(own)

    def lane_places(self, lane: int) -> int:
        return self.lane_samples(lane)

    def span(self, lane: int, step: int) -> tuple[int, int]:
        """Delivery positions [start, stop) of a lane that make up its part of a step; none where its share is due later."""
        source = lane // self.lane_count
        return int(self._taken(source, step)), int(self._taken(source, step + 1))

    def order(self, lane: int, start: int, stop: int) -> Ints:
        plan, own, _ = self._of(lane)
        return plan.order(own, start, stop)

    def due(self, lane: int, start: int, stop: int) -> Ints:
        """The step that needs the sample, for places [start, stop) of a lane."""
        plan, own, source = self._of(lane)
        position = plan.due(own, start, stop)  # a plan of one sample a step: its step is the position
        return np.asarray(np.searchsorted(self._all_taken[source], position, side="right") - 1)

    def first_place(self, lane: int, step: int) -> int:
        plan, own, source = self._of(lane)
        return plan.first_place(own, int(self._taken(source, step)))

    def ids(self, lane: int, places: Ints) -> Ints:
        plan, own, source = self._of(lane)
        found: Ints = plan.ids(own, places) + self._firsts[source]
        return found

    # --- parts -------------------------------------------------------------------------------------------------------

    def _of(self, lane: int) -> tuple[Plan, int, int]:
        source, own = divmod(lane, self.lane_count)
        return self._plans[source], own, source

    def _taken(self, source: int, step: int) -> int:
        """Samples of a source that each lane has taken before a step."""
        had = self._turns[source]
        rounds, turn = divmod(self._per_lane * step, len(had) - 1)
        return rounds * int(had[-1]) + int(had[turn])

    @cached_property
    def _all_taken(self) -> list[Ints]:
        """`_taken` of every step, for each source. int64[steps + 1] each"""
        rounds, turn = np.divmod(np.arange(self.steps + 1, dtype=np.int64) * self._per_lane, self._turns.shape[1] - 1)
        return [rounds * had[-1] + had[turn] for had in self._turns]

    def _most_steps(self, totals: list[int], names: Sequence[str]) -> int:
        def fits(step: int) -> bool:
            return all(self._taken(source, step) * self.lane_count <= total for source, total in enumerate(totals))

        low, high = 0, sum(totals) // self.global_batch + 1  # fits(low), not fits(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        if low == 0:
            shares = ", ".join(f"{name} {total} samples" for name, total in zip(names, totals, strict=True))
            raise PlanError(
                f"these sources cannot fill one step of {self.global_batch} with their shares ({shares}). "
                f"Lower batch_size, or the weight of the smallest source."
            )
        return low


@lru_cache(maxsize=4)
def _turns(shares: tuple[Fraction, ...]) -> Ints:
    """How many of the first k turns each source has, until they repeat: int64[sources, turns + 1].

    A source is due its next turn once its share of the turns is more than it had, and must have it before that is one more. Whoever
    must have it first takes it: this finds such an order whenever there is one, and there always is (Steiner and Yeomans, 1993).
    """
    turns = lcm(*(share.denominator for share in shares))
    each = [int(share * turns) for share in shares]
    had, owner = [0] * len(shares), np.empty(turns, np.int64)
    waiting, due = [(0, source) for source in range(len(shares))], list[tuple[int, int]]()
    for turn in range(turns):
        while waiting and waiting[0][0] <= turn:
            source = heappop(waiting)[1]
            heappush(due, (-(-(had[source] + 1) * turns // each[source]), source))
        source = owner[turn] = heappop(due)[1]
        had[source] += 1
        heappush(waiting, (had[source] * turns // each[source], source))
    found = np.zeros((len(shares), turns + 1), np.int64)
    found[owner, np.arange(1, turns + 1)] = 1
    return found.cumsum(axis=1)
