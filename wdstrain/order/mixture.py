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

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from math import lcm

import numpy as np

from wdstrain.errors import PlanError
from wdstrain.order.order import Ints, Order, Places, Steps
from wdstrain.order.plan import Plan
from wdstrain.order.rng import key

TURNS = 2  # version of the cycle of turns; `plan.ORDER` is the version of the order within a source


class Mixture(Order):
    """The order of one epoch over several sources.

    counts: samples of each shard, one array for each source, int64[shards] each.
    names: the name of each source; its seed depends on it.
    shares: the share of each source; they add up to 1.
    window: reach of the shuffle in samples of a lane, over all sources.
    The other arguments are those of `Plan`. Sample ids count through the sources in order. A rank
    reads the same lanes of all sources.
    Raises PlanError if a source cannot fill its share of one step.
    """

    tail = "drop"

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
        # The lanes of all sources that have one number take so many samples together. Raises
        # PlanError if batch_size, world_size and lanes do not fit together.
        self._per_lane = Plan(
            counts=np.array([max(1, self.global_batch)]),
            seed=0,
            epoch=0,
            batch_size=batch_size,
            world_size=world_size,
            lanes=lanes,
        ).samples_per_step_per_lane
        self._turns = _turns(tuple(shares))
        self.samples = int(sum(count.sum() for count in counts))
        self.steps = self._most_steps([int(count.sum()) for count in counts], names)
        # samples of each source that each lane has taken before each step. int64[sources, steps + 1]
        self._taken = self._taken_before(np.arange(self.steps + 1))
        for taken, name in zip(self._taken, names, strict=True):
            if taken[-1] < 1:
                raise PlanError(
                    f"source {name} gives no sample in an epoch of {self.steps} steps: each "
                    "source must give one.",
                    "Raise its weight.",
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
                limit=int(taken[-1]),
            )
            for count, name, share, taken in zip(counts, names, shares, self._taken, strict=True)
        ]
        self._firsts = [0, *accumulate(int(count.sum()) for count in counts)]
        self.window = max(plan.window for plan in self._plans)
        self.max_delay = sum(plan.max_delay for plan in self._plans)
        self.lanes_per_rank = sum(plan.lanes_per_rank for plan in self._plans)

    def delivery(self, rank: int, first: int, stop: int) -> Steps:
        """Return the samples that a rank delivers in the steps [first, stop).

        A step has the samples of each lane in turn, of a lane those of each source in turn.
        """
        parts = []
        for source, (plan, taken) in enumerate(zip(self._plans, self._taken, strict=True)):
            begin, end = int(taken[first]), int(taken[stop])
            ids = plan.delivery(rank, begin, end).ids + self._firsts[source]
            position = np.repeat(np.arange(begin, end), plan.lanes_per_rank)
            lane = np.tile(np.arange(plan.lanes_per_rank), end - begin)
            step = np.searchsorted(taken, position, side="right") - 1
            parts.append((ids, position, np.full(len(ids), source), lane, step))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        ids = columns[0][np.lexsort(columns[1:])]
        firsts = range(0, len(ids) + 1, self.batch_size)
        return Steps(ids, ids, list(firsts), np.ones(len(ids), bool))

    def reading(self, rank: int, lane: int, start: int, stop: int) -> Places:
        """Return the samples at the places [start, stop) of a lane; see `Order.reading`."""
        source, own = divmod(lane, self._plans[0].lanes_per_rank)
        # the plan of a source takes one sample of each lane per step
        ids, position, _ = self._plans[source].reading(rank, own, start, stop)
        step = np.searchsorted(self._taken[source], position, side="right") - 1
        row = own * self._per_lane + position - self._taken[source][step]
        for taken in self._taken[:source]:
            row += taken[step + 1] - taken[step]
        return Places(ids + self._firsts[source], step, row)

    def first_place(self, rank: int, lane: int, step: int) -> int:
        """Return the first place of a lane that is read if the epoch starts at `step`."""
        source, own = divmod(lane, self._plans[0].lanes_per_rank)
        return self._plans[source].first_place(rank, own, int(self._taken[source][step]))

    # --- helpers ----------------------------------------------------------------------------------

    def _taken_before(self, step: int | Ints) -> Ints:
        """Samples of each source that each lane has taken before a step. int64[sources, ...]"""
        cycles, turn = np.divmod(
            np.asarray(step, np.int64) * self._per_lane, self._turns.shape[1] - 1
        )
        return np.asarray(np.multiply.outer(self._turns[:, -1], cycles) + self._turns[:, turn])

    def _most_steps(self, totals: list[int], names: Sequence[str]) -> int:
        """Return the most steps for which every source has enough samples. Raises PlanError if 0.

        totals: samples of each source.
        """

        def lacks(step: int) -> bool:
            return bool((self._taken_before(step) * self.lane_count > totals).any())

        most = bisect_left(range(1, sum(totals) // self.global_batch + 1), True, key=lacks)
        if most == 0:
            shares = ", ".join(
                f"{name} {total} samples" for name, total in zip(names, totals, strict=True)
            )
            raise PlanError(
                f"these sources cannot fill one step of {self.global_batch} samples by their "
                f"shares ({shares}).",
                "Lower {batch_size} or the weight of the smallest source.",
                {"batch_size": ...},
            )
        return most


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
