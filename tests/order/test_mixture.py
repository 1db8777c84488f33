"""Mixtures: exact shares, every sample at most once, and all promises of a plan."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import Sample, quick_and_slow, write_tar
from tests.support.orders import batch_of, check_reading
from wdstrain.errors import PlanError, UsageError
from wdstrain.order.mixture import Mixture


def make(counts: list[list[int]], shares: list[Fraction], **options: Any) -> Mixture:
    names = [f"source {i}" for i in range(len(counts))]
    plan_options = {
        "seed": 1,
        "epoch": 0,
        "batch_size": 4,
        "world_size": 1,
        "lanes": None,
        "window": 10,
        "shuffle": True,
        **options,
    }
    return Mixture(counts=[np.array(c) for c in counts], names=names, shares=shares, **plan_options)


class Case(NamedTuple):
    """A mixture, the samples of each source, and the shares of the sources."""

    plan: Mixture
    samples: list[int]
    shares: list[Fraction]


def grid() -> list[Case]:
    cases = []
    for counts, weights, world, lanes, batch, window in itertools.product(
        [[[30, 7], [50]], [[9], [4, 0, 5], [200]], [[300], [9], [20], [300]]],
        [(1, 1, 1, 1), (5, 2, 1, 3), (77, 2, 5, 80)],
        [1, 2],
        [None, 4],
        [1, 2, 4, 6],
        [1, 8, 100],
    ):
        total = sum(weights[: len(counts)])
        shares = [Fraction(weight, total) for weight in weights[: len(counts)]]
        try:
            plan = make(
                counts, shares, world_size=world, lanes=lanes, batch_size=batch, window=window
            )
        except PlanError:
            continue
        cases.append(Case(plan, [sum(count) for count in counts], shares))
    return cases


GRID = grid()
for_each = pytest.mark.parametrize(
    "cases", quick_and_slow([GRID[::5], GRID], 1), ids=["some", "all"]
)


def turns(shares: list[Fraction], count: int) -> list[int]:
    """Return the source of each of the first `count` turns, a multiple of the denominators."""
    counts = [[int(share * count)] for share in shares]
    plan = make(counts, shares, batch_size=1, shuffle=False)
    assert plan.steps == count
    sources = np.empty(count, np.int64)
    for source, (samples,) in enumerate(counts):
        sources[plan.reading(0, source, 0, samples).step] = source
    return sources.tolist()


@for_each
def test_every_batch_is_full_and_no_sample_is_repeated(cases: list[Case]) -> None:
    for plan, _, _ in cases:
        ids = []
        for rank, step in itertools.product(range(plan.world_size), range(plan.steps)):
            sample_ids = batch_of(plan, rank, step)
            assert len(sample_ids) == plan.batch_size
            ids += sample_ids
        assert len(set(ids)) == len(ids) == plan.samples - plan.left_out


@for_each
def test_shares_are_exact_within_one_sample_per_lane_at_any_step(cases: list[Case]) -> None:
    for plan, samples, fractions in cases:
        shares, edges = np.array(fractions, float), np.cumsum([0, *samples])
        taken = np.zeros(len(shares))
        for step in range(plan.steps):
            for rank in range(plan.world_size):
                taken += np.histogram(batch_of(plan, rank, step), edges)[0]
            differences = abs(taken - shares * plan.global_batch * (step + 1))
            assert (differences <= plan.lane_count).all()


@pytest.mark.parametrize("seed", quick_and_slow(range(40), 6))
def test_each_source_has_its_share_of_any_number_of_turns_rounded_down_or_up(seed: int) -> None:
    """This holds also for a source that takes one turn in thousands."""
    bits = random.Random(seed)
    edges = sorted(
        {0, 65536, *(bits.randrange(1, 65536) for _ in range(bits.choice([1, 2, 3, 9])))}
    )
    edges = edges if seed % 2 else sorted({*edges, 1, 7, 65535})
    shares = [Fraction(high - low, 65536) for low, high in itertools.pairwise(edges)]
    sources, count = np.array(turns(shares, 65536)), np.arange(1, 65537)
    for source, share in enumerate(shares):
        taken, exact = np.cumsum(sources == source), count * int(share * 65536)
        assert (taken >= exact // 65536).all()
        assert (taken <= -(-exact // 65536)).all()


def test_golden_turns_never_change() -> None:
    # Literal numbers: a change here changes every mixture, and needs a new `mixture.TURNS`.
    shares = [Fraction(5, 8), Fraction(1, 8), Fraction(1, 4)]
    assert turns(shares, 8) == [0, 0, 2, 0, 0, 1, 0, 2]


def test_the_epoch_ends_when_a_source_cannot_fill_its_share() -> None:
    plan = make([[100], [10]], [Fraction(1, 2), Fraction(1, 2)])
    assert plan.steps == 5
    assert plan.left_out == 90


@for_each
def test_lanes_read_what_is_delivered(cases: list[Case]) -> None:
    for plan, _, _ in cases:
        for rank in range(plan.world_size):
            check_reading(plan, rank)


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    for name, count in (("a", 40), ("b", 25)):
        samples: list[Sample] = [(f"{name}{i:03d}", {"cls": b"%d" % i}) for i in range(count)]
        write_tar(tmp_path / name / "x.tar", samples[: count // 2])
        write_tar(tmp_path / name / "y.tar", samples[count // 2 :])
    return {"a": tmp_path / "a", "b": tmp_path / "b"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_mixed_loader_delivers_the_source_of_samples_and_resumes(
    sources: dict[str, Path], num_workers: int
) -> None:
    fields = {"label": wt.label()}
    options: dict[str, Any] = {"weights": {"a": 3, "b": 1}, "batch_size": 8, "seed": 4}
    loader = wt.mix(sources, fields, num_workers=num_workers, **options)
    epochs = []
    for _ in range(2):
        delivered = []
        for batch in loader:
            assert batch["__source__"] == [key[0] for key in batch["__key__"]]
            assert batch["label"].tolist() == [int(key[1:]) for key in batch["__key__"]]
            delivered.append(batch["__key__"])
        assert len(delivered) == len(loader) == 6
        assert Counter(key[0] for keys in delivered for key in keys) == {"a": 36, "b": 12}
        epochs.append(delivered)
    assert epochs[0] != epochs[1]
    loader.close()
    first = wt.mix(sources, fields, **options)
    for step, _ in enumerate(first):
        if step == 2:
            break
    second = wt.mix(sources, fields, **options)
    second.load_state_dict(first.state_dict())
    assert [batch["__key__"] for batch in second] == epochs[0][3:]
    with pytest.raises(UsageError, match="shares was"):
        wt.mix(sources, fields, batch_size=8, seed=4).load_state_dict(first.state_dict())


def test_by_default_sources_are_mixed_by_their_sizes(sources: dict[str, Path]) -> None:
    counts = Counter(
        name for batch in wt.mix(sources, batch_size=5) for name in batch["__source__"]
    )
    assert counts == {"a": 40, "b": 25}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": {"a": 1}}, "for each of the sources a, b"),
        ({"weights": {"a": 1, "b": 0}}, "above 0"),
        ({"weights": {"a": 1e9, "b": 1}}, "must be at least 1/65536"),
        ({"tail": "pad"}, "mixture ends with the first source"),
        ({"batch_size": 100}, "cannot fill one step of 100"),
    ],
)
def test_impossible_mixtures_are_refused(
    sources: dict[str, Path], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        wt.mix(sources, **{"batch_size": 4, **options})
    with pytest.raises(UsageError, match="sources is empty"):
        wt.mix({})


def test_a_weight_belongs_to_the_set_of_its_name(tmp_path: Path) -> None:
    """The order in which weights and sets are named makes no difference to the shares."""
    for name in "ab":
        write_tar(tmp_path / name / "a.tar", [(f"{name}{i}", {"txt": b"x"}) for i in range(40)])
    sets = {name: tmp_path / name for name in "ab"}
    with wt.mix(sets, weights={"b": 3, "a": 1}, batch_size=4) as loader:
        batches = list(loader)
    counts = Counter(name for batch in batches for name in batch["__source__"])
    assert counts["b"] == 3 * counts["a"]
