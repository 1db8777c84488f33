"""Steps of an epoch on one rank, planned in blocks of about a thousand samples.

Planning one step takes some twenty numpy calls on short arrays, and the calls cost more than their
work. A block is planned at once, and a batch is a slice of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wdstrain.order.order import Order

Ints = npt.NDArray[np.int64]

_SAMPLES = 1024  # approximate size of a block


class LaneSteps(NamedTuple):
    """Samples of one lane in k steps.

    places: int64[n], in order of delivery. firsts: k + 1 positions in `places`, where each step
    begins and the last ends. needed: for each step, the number of places of the lane that must have
    been read.
    """

    places: Ints
    firsts: list[int]
    needed: list[int]


@dataclass(frozen=True, eq=False)
class StepBlock:
    """Steps [first, first + k) of an epoch on one rank, with n samples ordered by step and lane.

    ids: int64[n]. draws: int64[n], see `Plan.draws`; `ids` itself if they are equal.
    firsts: k + 1 positions in `ids`, where each step begins and the last ends. valid: bool[n], False for padding. lanes: in the order in which a step takes from them.
    """

    epoch: int
    first: int
    ids: Ints
    draws: Ints
    firsts: list[int]
    valid: npt.NDArray[np.bool_]
    lanes: list[LaneSteps]

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.firsts) - 1


def step_blocks(plan: Order, rank: int, step: int = 0) -> Iterator[StepBlock]:
    """Yield the steps of an epoch from `step` on, in blocks. rank: whose lanes to take."""
    lanes = plan.lanes_of(rank)
    steps_per_block = max(1, _SAMPLES // (plan.global_batch // plan.lane_count * len(lanes)))
    for first in range(step, plan.steps, steps_per_block):
        yield _step_block(plan, lanes, first, min(first + steps_per_block, plan.steps))


def _step_block(plan: Order, lanes: Sequence[int], first: int, stop: int) -> StepBlock:
    """Return the block of the steps [first, stop)."""
    lane_steps, ids, draws = list[LaneSteps](), list[Ints](), list[Ints]()
    valid, steps = list[npt.NDArray[np.bool_]](), list[Ints]()
    for lane in lanes:
        spans = [plan.span(lane, step) for step in range(first, stop)]  # contiguous
        begin, end = spans[0][0], spans[-1][1]
        places = plan.order(lane, begin, end)
        firsts = [0, *(span_end - begin for _, span_end in spans)]
        highest = [0, *(np.maximum.accumulate(places) + 1).tolist()]
        lane_steps.append(LaneSteps(places, firsts, [highest[count] for count in firsts[1:]]))
        ids.append(plan.ids(lane, places))
        draws.append(plan.draws(lane, places, ids[-1]))
        valid.append(np.arange(begin, end) < plan.lane_samples(lane))
        steps.append(np.repeat(np.arange(len(spans)), np.diff(firsts)))
    sizes = [
        sum(end - begin for begin, end in spans_of_step)
        for spans_of_step in zip(*(pairwise(lane.firsts) for lane in lane_steps), strict=True)
    ]
    by_step = np.argsort(np.concatenate(steps), kind="stable")
    are_ids = all(own is lane_ids for own, lane_ids in zip(draws, ids, strict=True))
    ordered = np.concatenate(ids)[by_step]
    return StepBlock(
        plan.epoch,
        first,
        ordered,
        ordered if are_ids else np.concatenate(draws)[by_step],
        [0, *accumulate(sizes)],
        np.concatenate(valid)[by_step] if plan.tail != "drop" else np.ones(sum(sizes), bool),
        lane_steps,
    )
