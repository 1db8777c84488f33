"""Epochs with weights: spread over the epoch, and fair over many epochs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.orders import batch_of
from wdstrain.errors import PlanError
from wdstrain.order.weighted_plan import WeightedPlan


def plan(weights: np.ndarray, strata: np.ndarray | None = None, **sizes: int) -> WeightedPlan:
    """Return a plan over shards of ten samples."""
    counts = np.full(-(-len(weights) // 10), 10)
    counts[-1] = len(weights) - counts[:-1].sum()
    strata = np.zeros(len(weights), np.int64) if strata is None else strata
    plan_options = {"seed": 0, "epoch": 0, "batch_size": 4, "window": 30} | sizes
    return WeightedPlan(counts=counts, weights=weights, strata=strata, **plan_options)


def delivered(weighted: WeightedPlan, step: int) -> list[int]:
    """Return the ids of a global batch."""
    return [i for rank in range(weighted.world_size) for i in batch_of(weighted, rank, step)]


def epoch(weighted: WeightedPlan) -> list[int]:
    return [i for step in range(weighted.steps) for i in delivered(weighted, step)]


@pytest.mark.parametrize("same", [1, 2, 7])
def test_weights_of_few_samples_each_select_other_samples_in_each_epoch(same: int) -> None:
    weights = np.repeat(np.linspace(0.2, 0.8, 140 // same), same)
    strata, epochs = np.unique(weights, return_inverse=True)[1].reshape(-1), 600
    counts = np.zeros(len(weights))
    for number in range(epochs):
        made = epoch(plan(weights, strata, epoch=number, batch_size=1))
        counts += np.bincount(made, minlength=len(weights))
    error = np.sqrt(weights * (1 - weights) / epochs)  # of independent draws
    assert (abs(counts / epochs - weights) < 5 * error).all()


def test_rare_classes_are_in_every_part_of_the_epoch() -> None:
    """1 sample in 100 has class 1; with weights it is every second sample, from begin to end."""
    classes = np.arange(5000) % 100 == 0
    counts = np.bincount(classes)
    weights = (2500 / counts)[classes.astype(int)]
    weighted = plan(weights, classes.astype(np.int64), batch_size=50, window=200)
    assert weighted.samples == 5000
    shares = [classes[delivered(weighted, step)].mean() for step in range(weighted.steps)]
    assert np.mean(shares) == pytest.approx(0.5)
    assert 0.2 < min(shares) <= max(shares) < 0.8


def test_occurrences_of_a_sample_are_spread_and_get_other_random_numbers() -> None:
    weights = np.ones(400)
    weights[7] = 20
    weighted = plan(weights, batch_size=1, window=10)
    places = np.arange(weighted.lane_samples(0))
    where = np.flatnonzero(weighted.ids(0, places) == 7)
    assert len(where) == 20
    assert np.diff(where).max() < 3 * len(places) / 20
    assert len(set(weighted.rng_ids(0, places, weighted.ids(0, places)).tolist())) == len(places)
    once = weights < 2
    first = weighted.ids(0, places)
    assert (
        weighted.rng_ids(0, places, weighted.ids(0, places))[once[first]] == first[once[first]]
    ).all()


def test_reads_of_a_shard_go_forward() -> None:
    """Of two samples of one shard, the later one nearly always has the higher offset."""
    classes = np.arange(5000) % 100 == 0
    weights = np.where(classes, 50.0, 0.5)
    weighted = plan(weights, batch_size=1)
    ids = weighted.ids(0, np.arange(weighted.lane_samples(0)))
    same = ids[:-1] // 10 == ids[1:] // 10
    assert (np.diff(ids)[same] > 0).mean() > 0.95


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros(20), "gives no sample"),
        (np.full(20, 0.01), "gives no sample"),
        (np.full(20, 1e9), "is the limit"),
        (np.full(20, 0.1), "4 needed"),
    ],
)
def test_weights_without_an_epoch_are_refused(weights: np.ndarray, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(weights)
