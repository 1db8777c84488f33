"""How well an order is shuffled: neighbors on disk in a batch, and classes over batches.

Both are measured on the plan's real order, and compared with a perfectly random order. Neighbors
reveal what classes do not: frames of one video, pages of one book. A batch is the global batch of
all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wdstrain.inspection.epoch_preview.simulate import LanePlaces
from wdstrain.order.plan import Plan
from wdstrain.shards.offsets import Ints

NEAREST = 16  # nearest samples on disk: half of them before a sample, half after it
_GOOD_NEIGHBORS = 0.1  # by so many more than ideal of the nearest samples may share a batch
_GOOD_EFFECT = 1.1  # batches are as even as ideal ones that are a tenth smaller
_MAX_CHANCE = 0.9  # of a design effect that chance excuses
_PARTS = 8  # of an epoch that is measured in parts


@dataclass(frozen=True)
class Neighbors:
    """How often samples that are neighbors on disk are delivered in one batch.

    touching: probability that two adjacent samples share a batch. nearest: how many of the 16
    nearest samples share a sample's batch. mean_move, max_move: places between reading and delivery.
    """

    touching: float
    touching_ideal: float
    nearest: float
    nearest_ideal: float
    mean_move: float
    max_move: int

    @property
    def limit(self) -> float:
        """The largest good value of `nearest`; in small sets twice the ideal."""
        return self.nearest_ideal + max(_GOOD_NEIGHBORS, self.nearest_ideal)


@dataclass(frozen=True)
class ClassMix:
    """How evenly classes are spread over batches.

    design_effect: variance of the class shares of batches / that of a random order. 1 is ideal; the
    batch size means that every batch has one class. chance: two standard deviations of it in a
    random order. classes: mean number of different classes in `among` samples of a batch;
    classes_ideal: the same of a random order.
    """

    design_effect: float
    chance: float
    classes: float
    classes_ideal: float
    among: int

    @property
    def limit(self) -> float:
        """The largest good value of `design_effect`."""
        return _GOOD_EFFECT + min(self.chance, _MAX_CHANCE)


def parts_of(plan: Plan, most: int) -> list[tuple[int, int]]:
    """Return ranges of steps: all, or evenly spread parts with about `most` samples in all."""
    if plan.samples <= most:
        return [(0, plan.steps)]
    # To enter a lane, about five blocks of places are sorted, each with a window on both sides.
    entry = 15 * min(plan.window, plan.lane_samples(0)) * plan.lane_count
    number = max(1, min(_PARTS, 4 * most // (entry + most // _PARTS)))
    length = min(plan.steps, max(1, most // (number * plan.global_batch)))
    firsts = ((np.arange(number) + 0.5) / number * (plan.steps - length)).astype(int).tolist()
    return [(first, first + length) for first in dict.fromkeys(firsts)]


def neighbors(
    plan: Plan, shard_first: Ints, parts: Sequence[Sequence[LanePlaces]]
) -> Neighbors | None:
    """Return how neighbors meet; None if no shard has two samples.

    shard_first: int64[shards + 1], id of the first sample of each shard, and the number of samples.
    parts: places of all lanes, for each part of an epoch.
    """
    met, pairs = np.zeros(NEAREST // 2), np.zeros(NEAREST // 2)
    moved = most = samples = 0
    for lanes in parts:
        lanes = [places for places in lanes if len(places.ids)]
        if not lanes:
            continue
        for places in lanes:
            moves = np.abs(places.position - np.arange(len(places.position)) - places.low)
            moved, samples = moved + int(moves.sum()), samples + len(moves)
            most = max(most, int(moves.max()))
        ids = np.concatenate([places.ids for places in lanes])
        order = np.argsort(ids, kind="stable")
        ids, step = ids[order], np.concatenate([places.step for places in lanes])[order]
        shard = np.searchsorted(shard_first, ids, side="right")
        for i in range(min(NEAREST // 2, len(ids) - 1)):
            near = (ids[i + 1 :] - ids[: -i - 1] == i + 1) & (shard[i + 1 :] == shard[: -i - 1])
            pairs[i] += near.sum()
            met[i] += (near & (step[i + 1 :] == step[: -i - 1])).sum()
    if not pairs[0]:
        return None
    kept, size = plan.samples - plan.left_out, plan.global_batch
    rest = kept - (plan.steps - 1) * size  # samples of the last batch
    ideal = ((plan.steps - 1) * size * (size - 1) + rest * (rest - 1)) / max(1, kept * (kept - 1))
    share = met[pairs > 0] / pairs[pairs > 0]
    return Neighbors(
        touching=float(share[0]),
        touching_ideal=ideal,
        nearest=float(2 * share.sum()),
        nearest_ideal=float(2 * len(share) * ideal),
        mean_move=moved / samples,
        max_move=most,
    )


def class_mix(
    batch: Ints, classes: Ints, *, size: int, counts: npt.NDArray[np.int64]
) -> ClassMix | None:
    """Return how evenly classes are spread over batches; None if there are not two classes.

    batch, classes: int64[n], batch and class of each sample, from 0. size: of a batch. counts:
    samples of each class in the whole set.

    P is the probability that two samples of a batch have one class, P0 that of two samples of the
    set. rho = (P - P0) / (1 - P0) is the intraclass correlation, 1 + (size - 1) * rho the design
    effect (Kish).
    """
    counts = counts[counts > 0]
    if not len(batch) or len(counts) < 2:
        return None
    width = int(classes.max()) + 1
    cells, number = np.unique(batch * width + classes, return_counts=True)
    where = cells // width
    known = np.bincount(where, weights=number)  # samples of each batch
    alike = np.bincount(where, weights=number.astype(float) ** 2) - known
    pairs = known * (known - 1)
    if not pairs.sum():
        return None
    total = float(counts.sum())
    ideal = float((counts * (counts - 1.0)).sum()) / (total * (total - 1))
    rho = (alike.sum() / pairs.sum() - ideal) / max(1 - ideal, 1e-12)
    among = round(float(known[known > 0].mean()))
    return ClassMix(
        design_effect=float(1 + (size - 1) * rho),
        chance=2 * math.sqrt(2 / (int((pairs > 0).sum()) * (len(counts) - 1))),
        classes=len(cells) / int((known > 0).sum()),
        classes_ideal=_distinct(counts, among),
        among=among,
    )


def _distinct(counts: npt.NDArray[np.int64], draws: int) -> float:
    """Return the expected number of different classes among samples drawn without replacement."""
    values, times = np.unique(counts, return_counts=True)
    whole = float(counts.sum())

    def is_missed(count: float) -> float:
        """Return the probability that no sample of a class of this size is drawn."""
        if whole - count < draws:
            return 0.0
        ways = (whole - count, whole - draws), (whole, whole - count - draws)
        logs = [sum(math.lgamma(x + 1) for x in terms) for terms in ways]
        return math.exp(logs[0] - logs[1])

    misses = [is_missed(float(count)) for count in values]
    return float(sum(n * (1 - missed) for missed, n in zip(misses, times, strict=True)))
