"""The order of an epoch over several sources with given shares.

Each source keeps a plan of its own (its lanes, its window, its seed); the mixture only says how many samples of each
source a step takes. For share boundaries 0 = b0 < b1 < ... = 1 and q samples per lane and step, a lane has taken
`floor(b[i+1] q t) - floor(b[i] q t)` samples of source i before step t: always exactly q t in all, and each source within
one sample of its share at any time. So the position is still (epoch, step), and everything a plan promises holds.

Stop rule: the epoch ends before the first step that a source cannot fill; nothing is repeated within an epoch. What the
others have left is left out of this epoch, another part each epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from wdstrain.bits import key
from wdstrain.errors import PlanError
from wdstrain.plan import Ints, Plan, Tail


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
        self._per_lane = whole.quota
        self._edges = [Fraction(0), *np.cumsum(np.array(shares, object))]
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
        self.quota = self._per_lane  # most that a step takes from a lane

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
        low, high = self._edges[source], self._edges[source + 1]
        return int(high * self._per_lane * step) - int(low * self._per_lane * step)

    @cached_property
    def _all_taken(self) -> list[Ints]:
        """`_taken` of every step, for each source. int64[steps + 1] each"""
        slots = np.arange(self.steps + 1, dtype=np.int64) * self._per_lane
        # numerators stay below 2**63: edges have denominators of at most 2**16
        floors = [slots * edge.numerator // edge.denominator for edge in self._edges]
        return [high - low for low, high in pairwise(floors)]

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
