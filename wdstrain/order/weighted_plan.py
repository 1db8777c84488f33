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

_MOST = 1 << 31  # samples of an epoch
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

    @cached_property
    def samples(self) -> int:
        """Samples of the epoch, each counted as often as it occurs; the same in every epoch."""
        total = float(self.weights.sum())
        if total > _MOST:
            raise PlanError(
                f"the weights add up to {total:g} samples in an epoch; {_MOST} is the limit. "
                f"Divide them by a number."
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
        return self._line[0][self._line_places(lane, places)]

    def draws(self, lane: int, places: Ints, ids: Ints) -> Ints:
        """Numbers of the random bits at these places: another one for each occurrence of a sample."""
        return ids + self._line[1][self._line_places(lane, places)] * len(self.weights)

    def _fixed_weights(self) -> Ints:
        return np.round(self.weights * _ONE).astype(np.int64)

    def _occurrences(self) -> Ints:
        """Return how often each sample occurs in this epoch. int64[n]"""
        whole, rest = np.divmod(self._fixed_weights(), _ONE)
        fractional = np.flatnonzero(rest)
        random = bits(fractional, "occurrences", self.seed, self.epoch)
        order = fractional[np.lexsort((random, self.strata[fractional]))]
        steps = (np.cumsum(rest[order]) + _ONE // 2) // _ONE
        whole[order] += np.diff(steps, prepend=0)
        return whole

    @cached_property
    def _line(self) -> tuple[Ints, Ints]:
        """(ids, occurrences) along the line. int64[samples] each; occurrences count from 0."""
        shards, occurrences = len(self.counts), self._occurrences()
        edges = np.concatenate([[0], np.cumsum(self.counts)])
        by_shard = [
            edges[number] + np.flatnonzero(occurrences[edges[number] : edges[number + 1]])
            for number in self.shard_order.tolist()
        ]
        first = np.concatenate(by_shard)
        further = np.maximum(occurrences - 1, 0)
        if not further.any():
            return first, np.zeros_like(first)
        shard = np.repeat(np.arange(shards), self.counts)
        ids = np.repeat(np.arange(len(further)), further)
        number = np.arange(len(ids)) - np.repeat(np.cumsum(further) - further, further)
        # The epoch has so many rounds; a sample occurs in evenly spaced ones, once in each.
        rounds = max(int(further.max()), -(-len(ids) // (shards * _TOGETHER)))
        turn = (number + self._uniform(ids, "round")) * (rounds / further[ids])
        turn = np.minimum(turn.astype(np.int64), rounds - 1)
        moment = (turn + self._uniform(turn * shards + shard[ids], "moment")) / rounds
        moments = np.concatenate([(np.arange(len(first)) + 0.5) / len(first), moment])
        everything = np.concatenate([first, ids])
        order = np.lexsort((everything, moments))
        numbers = np.concatenate([np.zeros_like(first), number + 1])
        return everything[order], numbers[order]

    def _uniform(self, numbers: Ints, name: str) -> Floats:
        """Return a number in [0, 1) for each of these numbers."""
        random = bits(numbers, name, self.seed, self.epoch)
        return np.asarray((random >> np.uint64(11)) * 2.0**-53)
