"""The order of one epoch: which samples are read, and which are delivered, at each step.

`Plan`, `WeightedPlan` and `Mixture` are orders. Another shuffle policy is another class that answers
the same questions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Tail = Literal["drop", "pad", "keep"]


class Steps(NamedTuple):
    """The n samples of k steps of a rank, in order of delivery.

    ids: sample ids, int64[n]. rng_ids: numbers of the random bits of each sample, int64[n]; the
    same object as `ids` if they are equal. firsts: k + 1 positions in `ids`: where each step begins
    and the last ends. valid: bool[n], False for padding.
    """

    ids: Ints
    rng_ids: Ints
    firsts: list[int]
    valid: npt.NDArray[np.bool_]


class Places(NamedTuple):
    """Samples in the order in which a lane reads them, with the row of each: int64[n] each.

    A sample that padding repeats has an entry for each of its rows, one after another.
    """

    ids: Ints
    step: Ints
    row: Ints


class Order(ABC):
    """The order of one epoch.

    steps: batches per rank. batch_size: of a rank. global_batch: samples of one step over all
    ranks. samples: of all shards, each as often as it occurs. left_out: those that the epoch does
    not deliver. lanes: runs of samples that a rank reads forward, `lanes_per_rank` for each rank,
    `lane_count` in all. window: reach of the shuffle in samples of a lane. max_delay: a rank
    delivers each sample before it has read this many samples more. weights: how often each sample
    occurs on average, float64[ids] or one number.
    """

    seed: int
    epoch: int
    steps: int
    batch_size: int
    world_size: int
    samples: int
    lane_count: int
    lanes_per_rank: int
    window: int
    max_delay: int
    shuffle: bool
    tail: Tail
    weights: npt.NDArray[np.float64] | float = 1.0

    @property
    def global_batch(self) -> int:
        """Samples of one step over all ranks."""
        return self.batch_size * self.world_size

    @property
    def left_out(self) -> int:
        """Samples that this epoch does not deliver: none unless tail="drop"."""
        return max(0, self.samples - self.steps * self.global_batch) if self.tail == "drop" else 0

    @abstractmethod
    def delivery(self, rank: int, first: int, stop: int) -> Steps:
        """Return the samples that a rank delivers in the steps [first, stop)."""

    @abstractmethod
    def reading(self, rank: int, lane: int, start: int, stop: int) -> Places:
        """Return the samples at the places [start, stop) of a lane; none after its last place.

        lane: number among the lanes of the rank. The cost is that of stop - start places and three
        windows, for any start.
        """

    @abstractmethod
    def first_place(self, rank: int, lane: int, step: int) -> int:
        """Return the first place of a lane that is read if the epoch starts at `step`.

        It is at most one window before the step.
        """

    def rows_before(self, rank: int, step: int) -> int:
        """Return how many rows a rank delivers before a step, padding included."""
        return step * self.batch_size
