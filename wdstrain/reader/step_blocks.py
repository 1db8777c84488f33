"""The steps of an epoch on one rank, planned many at a time.

A step by itself is some twenty operations on arrays of a few dozen integers, and nearly all of what they cost is beginning them; for
small samples that was half of the loop's own time. So what follows from the plan alone is computed for a stretch of steps at once,
about a thousand samples; a batch is then a slice of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.order.plan import Order

Ints = npt.NDArray[np.int64]

_SAMPLES = 1024  # of a stretch, about


class LaneSteps(NamedTuple):
    """What a lane gives to k steps: places: int64[n]; firsts: where each step's begin and the last's end, k + 1 of them; needed: so
    many places of the lane must be read for each."""

    places: Ints
    firsts: list[int]
    needed: list[int]


@dataclass(frozen=True, eq=False)
class StepBlock:
    """Steps [first, first + k) of an epoch on one rank: n samples, step by step, in each lane after lane.

    ids: int64[n]; firsts: where the samples of each step begin and those of the last end, k + 1 of them; valid: bool[n], False is
    padding; lanes: in the order in which a step takes from them.
    """

    epoch: int
    first: int
    ids: Ints
    firsts: list[int]
    valid: npt.NDArray[np.bool_]
    lanes: list[LaneSteps]

    def __len__(self) -> int:
        """Steps."""
        return len(self.firsts) - 1


def step_blocks(plan: Order, rank: int, step: int = 0) -> Iterator[StepBlock]:
    """The steps of an epoch from this one on."""
    lanes = plan.lanes_of(rank)
    many = max(1, _SAMPLES // (plan.global_batch // plan.lane_count * len(lanes)))
    for first in range(step, plan.steps, many):
        yield _step_block(plan, lanes, first, min(first + many, plan.steps))


def _step_block(plan: Order, lanes: Sequence[int], first: int, stop: int) -> StepBlock:
    found, ids, valid, steps = list[LaneSteps](), list[Ints](), list[npt.NDArray[np.bool_]](), list[Ints]()
    for lane in lanes:
        spans = [plan.span(lane, step) for step in range(first, stop)]  # each begins where the one before ends
        begin, end = spans[0][0], spans[-1][1]
        places = plan.order(lane, begin, end)
        firsts = [0, *(after - begin for _, after in spans)]
        most = [0, *(np.maximum.accumulate(places) + 1).tolist()]
        found.append(LaneSteps(places, firsts, [most[upto] for upto in firsts[1:]]))
        ids.append(plan.ids(lane, places))
        valid.append(np.arange(begin, end) < plan.lane_samples(lane))
        steps.append(np.repeat(np.arange(len(spans)), np.diff(firsts)))
    sizes = [
        sum(after - before for before, after in each) for each in zip(*(pairwise(one.firsts) for one in found), strict=True)
    ]
    by_step = np.argsort(np.concatenate(steps), kind="stable")
    return StepBlock(
        plan.epoch,
        first,
        np.concatenate(ids)[by_step],
        [0, *accumulate(sizes)],
        np.concatenate(valid)[by_step] if plan.tail != "drop" else np.ones(sum(sizes), bool),
        found,
    )
