"""How well an order mixes: whether neighbours on disk meet in a batch, and how evenly classes are spread over batches.

Both are measured on the plan's real order and told against the ideal, in which every order of the samples is as likely as any other.
Neighbours catch what classes do not (frames of one film, pages of one book); classes are what a sorted folder spoils. A
single number between 0 and 1 for "the entropy of the shuffle" is the road not taken: nobody knows what 0.93 does to a training run,
while a design effect of 3 says that a batch is as uneven in its classes as an ideal one of a third of its size.

A batch is the global batch here, of all ranks: it is what a step learns from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wdstrain.foresight.itinerary import Seen
from wdstrain.order.plan import Plan
from wdstrain.order.rng import bits
from wdstrain.shards.offsets import Ints

NEAREST = 16  # samples next to one on disk: half of them before it
_PARTS = 8  # of an epoch that is looked at in parts


@dataclass(frozen=True)
class Neighbours:
    """Whether samples that lie together on disk are delivered together.

    touching: probability that two samples which touch on disk share a batch. nearest: how many of the 16 nearest samples on disk
    share a sample's batch. Both beside the ideal. move_mean, move_most: places between where a sample is read and delivered.
    """

    touching: float
    touching_ideal: float
    nearest: float
    nearest_ideal: float
    move_mean: float
    move_most: int


@dataclass(frozen=True)
class ClassMix:
    """How evenly classes are spread over batches.

    design_effect: the variance of a batch's class shares over that of an ideal shuffle (1: ideal; the batch size: every batch is
    of one class); error: its standard error, None where one batch is all there is. classes: expected different classes among
    `among` samples of a batch; classes_ideal: among so many of the whole set.
    """

    design_effect: float
    error: float | None
    classes: float
    classes_ideal: float
    among: int


def parts_of(plan: Plan, most: int) -> list[tuple[int, int]]:
    """Steps [first, stop) that stand for an epoch: all of it, or even parts of it with about `most` samples in all."""
    if plan.samples <= most:
        return [(0, plan.steps)]
    # to enter a lane somewhere, about five blocks of places are sorted, each with a window before and after it
    entry = 15 * min(plan.window, plan.lane_samples(0)) * plan.lane_count
    number = max(1, min(_PARTS, 4 * most // (entry + most // _PARTS)))
    length = min(plan.steps, max(1, most // (number * plan.global_batch)))
    firsts = ((np.arange(number) + 0.5) / number * (plan.steps - length)).astype(int).tolist()
    return [(first, first + length) for first in dict.fromkeys(firsts)]


class NeighbourCount:
    """Adds up what `Neighbours` says, over parts of an epoch and over epochs."""

    def __init__(self, plan: Plan, shard_first: Ints) -> None:
        """shard_first: id of the first sample of each shard, and the number of samples. int64[shards + 1]"""
        self._shard_first = shard_first
        self._met, self._pairs = np.zeros(NEAREST // 2), np.zeros(NEAREST // 2)
        self._moved = self._most = self._samples = 0
        # of an ideal order with the same sizes of batches
        kept, size = plan.samples - plan.left_out, plan.global_batch
        rest = kept - (plan.steps - 1) * size
        self._ideal = ((plan.steps - 1) * size * (size - 1) + rest * (rest - 1)) / max(
            1, kept * (kept - 1)
        )

    def add(self, lanes: Iterable[Seen]) -> None:
        """Places of all lanes in the same steps of one epoch."""
        found = [one for one in lanes if len(one.ids)]
        if not found:
            return
        for one in found:
            moves = np.abs(one.position - np.arange(one.low, one.low + len(one.position)))
            self._moved, self._samples = self._moved + int(moves.sum()), self._samples + len(moves)
            self._most = max(self._most, int(moves.max()))
        ids, step = (
            np.concatenate([one.ids for one in found]),
            np.concatenate([one.step for one in found]),
        )
        order = np.argsort(
            ids, kind="stable"
        )  # lanes come one after another: neighbours of two lanes are neighbours, too
        ids, step = ids[order], step[order]
        shard = np.searchsorted(self._shard_first, ids, side="right")
        for i in range(min(NEAREST // 2, len(ids) - 1)):
            near = (ids[i + 1 :] - ids[: -i - 1] == i + 1) & (shard[i + 1 :] == shard[: -i - 1])
            self._pairs[i] += near.sum()
            self._met[i] += (near & (step[i + 1 :] == step[: -i - 1])).sum()

    def result(self) -> Neighbours | None:
        """None where no shard has two samples."""
        if not self._pairs[0]:
            return None
        there = self._pairs > 0
        share = self._met[there] / self._pairs[there]
        return Neighbours(
            touching=float(share[0]),
            touching_ideal=self._ideal,
            nearest=float(2 * share.sum()),
            nearest_ideal=float(2 * there.sum() * self._ideal),
            move_mean=self._moved / self._samples,
            move_most=self._most,
        )


def batches_drawn(plan: Plan, most: int) -> Ints:
    """Ids of samples of some batches of an epoch, drawn at random: int64[batches, samples of each], at most `most` in all.

    Whole batches if at least 8 of them can be had, else so many samples of each; what fills no whole batch is left away.
    """
    full = (
        plan.steps
        if plan.samples - plan.left_out == plan.steps * plan.global_batch
        else max(1, plan.steps - 2)
    )
    among = max(2, min(most // min(8, full), plan.global_batch))
    number = max(1, min(full, most // among))
    steps = np.sort(
        np.argsort(bits(np.arange(full), "batches", plan.seed, plan.epoch), kind="stable")[:number]
    )
    rows = []
    for step in steps.tolist():
        lanes = [
            plan.ids(lane, plan.order(lane, *plan.span(lane, step)))
            for lane in range(plan.lane_count)
        ]
        batch = np.concatenate(lanes)
        rows.append(
            batch[np.argsort(bits(batch, "members", plan.seed, plan.epoch), kind="stable")[:among]]
        )
    return np.stack(rows)


def class_mix(
    batch: Ints,
    kinds: Ints,
    *,
    size: int,
    samples: int,
    counts: npt.NDArray[np.int64] | None = None,
    steps: int | None = None,
) -> ClassMix | None:
    """How evenly classes are spread over batches of `size`, by the classes of samples of some of the batches of an epoch.

    batch, kinds: int64[n], the batch and the class of each known sample, both numbered from 0. samples: of the epoch. counts: samples
    of each class in the whole set, if all are known; the batches may then be of several epochs of so many steps, one after
    another. None where there are no two classes, or no pairs.

    P is the probability that two samples of a batch are of one class, P0 that of any two samples of the set;
    rho = (P - P0) / (1 - P0) is the intraclass correlation, 1 + (size - 1) * rho the design effect (Kish). Both probabilities are
    means over pairs, so they are unbiased whichever of the batches were drawn, and whichever of a batch's samples. Where only
    a part is known, P0 is taken from pairs within and between the batches drawn, each with the weight it has in the set: a class
    that is frequent in them by chance is so in both P and P0. The standard error is the jackknife's, leaving out a batch at
    a time; of several epochs, an epoch, since with a small buffer they have much the same batches.
    """
    if len(batch) == 0 or kinds.min() == kinds.max():
        return None
    width, most = int(kinds.max()) + 1, int(batch.max()) + 1
    cells, number = np.unique(batch * width + kinds, return_counts=True)
    where, kind, number = (
        cells // width,
        cells % width,
        number.astype(float),
    )  # how many of each class in each batch
    # float[batches] each: samples, ordered pairs of them, ordered pairs of one class
    known, squares = (
        np.bincount(where, weights=one, minlength=most) for one in (number, number**2)
    )
    pairs: npt.NDArray[Any] = known * (known - 1)
    alike: npt.NDArray[Any] = squares - known  # numpy says of both that they are of integers
    if not pairs.sum():
        return None
    several = (pairs > 0).sum() > 1
    if counts is not None and steps is not None and most > steps:
        pairs, alike = (
            np.bincount(np.arange(most) // steps, weights=one) for one in (pairs, alike)
        )
    # the same sums over all batches, first with none, then with each of them left out: float[1 + batches]
    inside = (alike.sum() - np.r_[0, alike]) / np.maximum(pairs.sum() - np.r_[0, pairs], 1e-12)
    if counts is not None:
        ideal = np.full(1, (counts * (counts - 1.0)).sum() / (counts.sum() * (counts.sum() - 1.0)))
    else:
        totals = np.bincount(kind, weights=number)
        own = np.bincount(where, weights=number * totals[kind], minlength=most)
        whole = (totals**2).sum() - np.r_[0, 2 * own - squares]
        between_alike = whole - (squares.sum() - np.r_[0, squares])
        between = (known.sum() - np.r_[0, known]) ** 2 - ((known**2).sum() - np.r_[0, known**2])
        outside = np.where(between > 0, between_alike / np.maximum(between, 1), inside)
        weight = (size - 1) / max(1, samples - 1)
        ideal = weight * inside + (1 - weight) * outside
    effect = 1 + (size - 1) * (inside - ideal) / np.maximum(1 - ideal, 1e-12)
    among = round(float(known[known > 0].mean()))
    found = (
        counts[counts > 0]
        if counts is not None
        else np.bincount(kinds)[np.unique(kinds)] * (samples / len(kinds))
    )
    return ClassMix(
        design_effect=float(effect[0]),
        error=math.sqrt((len(pairs) - 1) * float(effect[1:].var()))
        if several and len(pairs) > 1
        else None,
        classes=len(cells) / int((known > 0).sum()),
        classes_ideal=_distinct(found, among),
        among=among,
    )


def _distinct(counts: npt.NDArray[np.number], draws: int) -> float:
    """Expected different classes among so many samples of a set with these counts, drawn without being put back."""
    values, times = np.unique(counts, return_counts=True)
    whole = float(counts.sum())

    def none_of(count: float) -> float:
        """The probability that no sample of a class of this size is drawn."""
        if whole - count < draws:
            return 0.0
        terms = (whole - count, whole - draws), (whole, whole - count - draws)
        return math.exp(
            sum(math.lgamma(x + 1) for x in terms[0]) - sum(math.lgamma(x + 1) for x in terms[1])
        )

    return float(
        sum(n * (1 - none_of(float(count))) for count, n in zip(values, times, strict=True))
    )
