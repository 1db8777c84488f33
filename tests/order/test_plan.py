"""Windows and reads of a plan, over a grid of sizes. tests/oracle draws what loaders deliver."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest

from tests.conftest import quick_and_slow
from wdstrain.errors import PlanError
from wdstrain.order.plan import Plan

# Options of the grid. Impossible combinations are left out.
SIZES: dict[str, list[Any]] = {
    "counts": [[1], [7, 13, 1], [5, 0, 3], [40, 40, 40], [100, 3, 57]],
    "world_size": [1, 2, 4],
    "lanes": [None, 4, 8],
    "batch_size": [1, 2, 3, 8],
    "tail": ["drop", "pad", "keep"],
    "window": [1, 7, 1000],
    "shuffle": [True, False],
}


def make(counts: list[int], **options: Any) -> Plan:
    return Plan(counts=np.array(counts), **{"seed": 1, "epoch": 0, "batch_size": 4, **options})


def grid() -> list[Plan]:
    plans = []
    for values in itertools.product(*SIZES.values()):
        try:
            plans.append(make(**dict(zip(SIZES, values, strict=True)), epoch=2))
        except PlanError:
            continue
    return plans


GRID = grid()
for_each = pytest.mark.parametrize(
    "plans", quick_and_slow([GRID[::7], GRID], 1), ids=["some", "all"]
)


def batch(plan: Plan, rank: int, step: int) -> tuple[list[int], list[bool]]:
    """Return (ids, valid) of a batch."""
    ids, _, _, valid = plan.delivery(rank, step, step + 1)
    return ids.tolist(), valid.tolist()


def cut(plan: Plan, lane: int, step: int) -> int:
    """Return the delivery position of a lane at which a step begins."""
    return int(plan.cuts(lane, np.array([step]))[0])


def delivered(plan: Plan) -> list[int]:
    """Return the ids of an epoch over all ranks, without padding."""
    batches = [
        batch(plan, rank, step)
        for rank, step in itertools.product(range(plan.world_size), range(plan.steps))
    ]
    return [i for ids, valid in batches for i, ok in zip(ids, valid, strict=True) if ok]


@for_each
def test_a_sample_leaves_within_one_window_of_its_place(plans: list[Plan]) -> None:
    for plan in plans:
        for lane in range(plan.lane_count):
            count = plan.lane_samples(lane)
            order = plan.order(lane, 0, count)
            assert sorted(order.tolist()) == list(range(count))
            assert count == 0 or abs(order - np.arange(count)).max() < plan.window, plan
            for start in range(0, count, 5):
                assert (plan.order(lane, start, count) == order[start:]).all(), plan


@for_each
def test_a_resume_reads_at_most_one_window_before_its_step(plans: list[Plan]) -> None:
    for plan in plans:
        for lane, step in itertools.product(range(plan.lane_count), range(plan.steps)):
            first = plan.first_place(*divmod(lane, plan.lanes_per_rank), step)
            # Padding repeats the last sample of a lane.
            start = min(cut(plan, lane, step), max(0, plan.lane_samples(lane) - 1))
            assert start - first < plan.window


def test_the_dropped_samples_change_in_every_epoch() -> None:
    for counts in ([103], [50, 53]):
        dropped = [
            frozenset(range(103)) - set(delivered(make(counts, epoch=epoch, window=10)))
            for epoch in range(8)
        ]
        assert all(len(ids) == 3 for ids in dropped)
        assert len(set(dropped)) > 4


def test_the_window_mixes_like_a_reservoir_of_the_same_memory() -> None:
    """Disk neighbors share a batch of 64 as often, within 10 %, as with an equal reservoir."""
    count, window = 30_000, 2048
    place = np.empty(count, np.int64)

    def shares_of_neighbors(order: Any) -> float:
        place[order] = np.arange(count)
        return float(np.mean(place[:-1] // 64 == place[1:] // 64))

    order = make([count], batch_size=64, window=window, tail="keep").order(0, 0, count)
    # Held after each delivery: places below the furthest read so far that were not delivered.
    held = np.maximum.accumulate(order) + 1 - np.arange(1, count + 1)
    rng = np.random.default_rng(0)
    size = int(held.mean())
    reservoir, out = list(range(size)), list[int]()
    for i in range(size, count):
        k = int(rng.integers(size))
        out.append(reservoir[k])
        reservoir[k] = i
    assert held.mean() < 0.55 * window
    assert shares_of_neighbors(order) < 1.1 * shares_of_neighbors(out + reservoir)


@for_each
def test_the_first_batch_is_due_after_a_batch_and_a_tenth_of_the_window(plans: list[Plan]) -> None:
    sizes = itertools.product((1, 64, 5000), (100, 3000, 50_000))
    for plan in plans + [make([100_000], batch_size=size, window=w) for size, w in sizes]:
        for lane in range(plan.lane_count):
            first = plan.order(lane, cut(plan, lane, 0), cut(plan, lane, 1))
            most = plan.samples_per_step_per_lane + max(1, plan.window / 10)
            assert len(first) == 0 or first.max() < most, plan


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 64}, "21 samples cannot give 1 rank.*64 needed.*pad"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"lanes": 6, "world_size": 4}, r"6 lanes cannot be shared by 4 ranks.*\[1, 2, 3, 6\]"),
        ({"lanes": 3}, "4 cannot be taken equally from 3 lanes"),
        ({"tail": "repeat"}, "tail='repeat': must be one of drop, pad, keep"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        make([7, 13, 1], **options)


def test_a_plan_costs_the_same_at_any_step() -> None:
    peaks, steps = [], make([1_000_000_000], batch_size=64, window=5000).steps
    for step in (0, steps // 2, steps - 1):
        fresh = make([1_000_000_000], batch_size=64, window=5000)
        tracemalloc.start()
        assert len(batch(fresh, 0, step)[0]) == 64
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks[1:]) < 3 * peaks[0], peaks
