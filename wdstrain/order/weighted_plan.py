"""Epochs in which samples occur as often as their weights say.

A sample of weight w occurs floor(w) or ceil(w) times in an epoch. Random bits of (seed, epoch, id)
choose which of the two. The totals are exact: the sum of all weights, rounded, for the epoch, and
the sum of its weights within 1 for each stratum.

The line of an epoch has the first occurrences in the order of the shards, as in `Plan`. Further
occurrences are put between them, spread evenly over the epoch: a few samples of one shard at a
time, in the order in which they lie in it. So reads go forward, and no part of the epoch is
without the samples of large weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wdstrain.errors import PlanError
from wdstrain.order.order import Ints
from wdstrain.order.plan import Plan
from wdstrain.order.rng import bits
from wdstrain.runtime.cached import cached_property

Floats = npt.NDArray[np.float64]
Small = npt.NDArray[np.int32]

WEIGHTED_ORDER = 2  # version of the order with weights; see `ORDER` of `plan`
_MOST = (1 << 31) - 1  # samples of an epoch and of the index: ids are int32 here
_ONE = 1 << 32  # weights are fixed-point numbers, so that sums do not depend on their order
_TOGETHER = 256  # further occurrences of samples of one shard that are read together, about


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedPlan(Plan):
    """The order of one epoch with weights. Everything else is as in `Plan`.

    weights: float64[n], one for each sample, >= 0. strata: int64[n]; samples with the same number
    have an exact total. Raises PlanError for weights that give no epoch.
    """

    weights: Floats
    strata: Ints

    def _count(self) -> int:
        """Return the samples of an epoch, each counted as often as it occurs; equal in each."""
        total = float(self.weights.sum())
        if len(self.weights) > _MOST:
            raise PlanError(
                f"{len(self.weights)} samples have weights; {_MOST} is the limit.",
                "Choose fewer samples.",
            )
        if total > _MOST:
            raise PlanError(
                f"the weights add up to {total:g} samples in an epoch; {_MOST} is the limit.",
                "Divide them by a number.",
            )
        count = int((self._fixed_weights().sum() + _ONE // 2) // _ONE)
        if not count:
            raise PlanError(
                f"the weights add up to {total:g}, which gives no sample in an epoch. "
                f"A weight is how often a sample occurs: multiply them by a number."
            )
        return count

    def ids(self, lane: int, places: Ints) -> Ints:
        """Sample ids at these places of a lane; see `Plan.ids`."""
        return self._line[0][self._line_places(lane, places)].astype(np.int64)

    def rng_ids(self, lane: int, places: Ints, ids: Ints) -> Ints:
        """Numbers of the random bits at these places: another one for each occurrence of a sample."""
        numbers = self._line[1][self._line_places(lane, places)].astype(np.int64)
        return ids + numbers * len(self.weights)

    def _fixed_weights(self) -> Ints:
        return np.round(self.weights * _ONE).astype(np.int64)

    def _occurrences(self) -> Small:
        """Return how often each sample occurs in this epoch. int32[n]"""
        fixed = self._fixed_weights()
        whole, rest = (fixed // _ONE).astype(np.int32), (fixed % _ONE).astype(np.uint32)
        del fixed
        fractional = np.flatnonzero(rest)
        random = bits(fractional, "occurrences", self.seed, self.epoch)
        # The strata are in another order in each epoch. With the same order, samples whose weights
        # nearly all differ would be the same in each epoch.
        strata = np.arange(self.strata.max(initial=0) + 1)
        ranks = np.argsort(np.argsort(bits(strata, "stratum", self.seed, self.epoch)))
        turn = ranks.astype(np.int32)[self.strata[fractional]]
        order = fractional[np.lexsort((random, turn))]
        del random, turn, fractional
        steps = np.cumsum(rest[order], dtype=np.int64)
        del rest
        # The sum begins at a random part of a sample; its rounded end must be that of `_count`.
        part = int(steps[-1:].sum()) % _ONE
        low, high = (_ONE - part, _ONE) if part >= _ONE // 2 else (0, _ONE - part)
        steps += low + int(bits(np.zeros(1, np.int64), "part", self.seed, self.epoch)[0]) % (
            high - low
        )
        steps //= _ONE
        whole[order] += np.diff(steps, prepend=0).astype(np.int32)
        return whole

    @cached_property
    def _line(self) -> tuple[Small, Small]:
        """(ids, occurrences) along the line. int32[samples] each; occurrences count from 0.

        Arrays are small and dropped early: an epoch may have 50 million samples.
        """
        further = self._occurrences()
        edges = np.concatenate([[0], np.cumsum(self.counts)])
        first = np.concatenate(
            [
                np.flatnonzero(further[edges[number] : edges[number + 1]]).astype(np.int32)
                + np.int32(edges[number])
                for number in self.shard_order.tolist()
            ]
        )
        further -= further > 0
        ids, numbers, moments = self._further_occurrences(further)
        # First occurrences are spread evenly, in their order; further ones are put between them.
        even = (np.arange(len(first)) + 0.5) / len(first)
        places = np.searchsorted(even, moments)
        tied = np.flatnonzero(even[np.minimum(places, len(first) - 1)] == moments)
        places[tied] += first[places[tied]] < ids[tied]
        del even, moments
        places += np.arange(len(ids))
        line, line_numbers = np.empty((2, len(first) + len(ids)), np.int32)
        is_first = np.ones(len(line), np.bool_)
        is_first[places] = False
        line[places], line[is_first] = ids, first
        line_numbers[places], line_numbers[is_first] = numbers, 0
        return line, line_numbers

    def _further_occurrences(self, further: Small) -> tuple[Small, Small, Floats]:
        """Return (ids, occurrences from 1 on, moments in the epoch, 0 to 1), by moment and id.

        further: how many further occurrences each sample has, int32[n].
        """
        ids = np.repeat(np.arange(len(further), dtype=np.int32), further)
        numbers = np.arange(len(ids), dtype=np.int32)
        numbers -= np.repeat((np.cumsum(further) - further).astype(np.int32), further)
        # The epoch has so many rounds; a sample occurs in evenly spaced ones, once in each.
        shards = len(self.counts)
        rounds = max(int(further.max()), -(-len(ids) // (shards * _TOGETHER)))
        turns = (self._uniform(ids, "round") + numbers) * (rounds / further[ids])
        whole_turns = np.minimum(turns.astype(np.int64), rounds - 1)
        del turns
        shard = np.repeat(np.arange(shards, dtype=np.int32), self.counts)[ids]
        moments = (self._uniform(whole_turns * shards + shard, "moment") + whole_turns) / rounds
        order = np.lexsort((ids, moments))
        return ids[order], numbers[order] + np.int32(1), moments[order]

    def _uniform(self, numbers: Ints | Small, name: str) -> Floats:
        """Return a number in [0, 1) for each of these numbers."""
        random = bits(numbers, name, self.seed, self.epoch) >> np.uint64(11)
        return np.asarray(random * 2.0**-53)
