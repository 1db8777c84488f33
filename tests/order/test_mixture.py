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
from tests.conftest import keys_of, quick_and_slow, write_tar
from tests.support.orders import batch_of, check_reading
from wdstrain.errors import PlanError, UsageError
from wdstrain.order.mixture import Mixture


def make(counts: list[list[int]], shares: list[Fraction], **options: Any) -> Mixture:
    names = [f"source {i}" for i in range(len(counts))]
    sizes = {"seed": 1, "epoch": 0, "batch_size": 4, "world_size": 1, "lanes": None, "window": 10}
    sizes |= {"shuffle": True, **options}
    return Mixture(counts=[np.array(c) for c in counts], names=names, shares=shares, **sizes)


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
        sizes = {"world_size": world, "lanes": lanes, "batch_size": batch, "window": window}
        try:
            cases.append(Case(make(counts, shares, **sizes), [sum(c) for c in counts], shares))
        except PlanError:
            continue
    return cases


GRID = grid()


@pytest.mark.parametrize("cases", quick_and_slow([GRID[::5], GRID], 1), ids=["some", "all"])
def test_batches_are_full_without_repeats_and_shares_exact_within_a_sample_per_lane(
    cases: list[Case],
) -> None:
    """At any step, and lanes read what is delivered."""
    for plan, samples, fractions in cases:
        shares, edges = np.array(fractions, float), np.cumsum([0, *samples])
        taken, ids = np.zeros(len(shares)), list[int]()
        for step in range(plan.steps):
            for rank in range(plan.world_size):
                batch = batch_of(plan, rank, step)
                assert len(batch) == plan.batch_size
                taken += np.histogram(batch, edges)[0]
                ids += batch
            differences = abs(taken - shares * plan.global_batch * (step + 1))
            assert (differences <= plan.lane_count).all()
        assert len(set(ids)) == len(ids) == plan.samples - plan.left_out
        for rank in range(plan.world_size):
            check_reading(plan, rank)


def turns(shares: list[Fraction], count: int) -> list[int]:
    """Return the source of each of the first `count` turns, a multiple of the denominators."""
    counts = [[int(share * count)] for share in shares]
    plan = make(counts, shares, batch_size=1, shuffle=False)
    assert plan.steps == count
    sources = np.empty(count, np.int64)
    for source, (samples,) in enumerate(counts):
        sources[plan.reading(0, source, 0, samples).step] = source
    return sources.tolist()


@pytest.mark.parametrize("seed", quick_and_slow(range(40), 6))
def test_each_source_has_its_share_of_any_number_of_turns_rounded_down_or_up(seed: int) -> None:
    """This holds also for a source that takes one turn in thousands."""
    bits = random.Random(seed)
    edges = {0, 65536, *(bits.randrange(1, 65536) for _ in range(bits.choice([1, 2, 3, 9])))}
    edges |= set() if seed % 2 else {1, 7, 65535}
    shares = [Fraction(high - low, 65536) for low, high in itertools.pairwise(sorted(edges))]
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
    assert (plan.steps, plan.left_out) == (5, 90)


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    for name, count in (("a", 40), ("b", 25)):
        samples = [(f"{name}{i:03d}", {"cls": b"%d" % i}) for i in range(count)]
        write_tar(tmp_path / name / "x.tar", samples[: count // 2])
        write_tar(tmp_path / name / "y.tar", samples[count // 2 :])
    return {"a": tmp_path / "a", "b": tmp_path / "b"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_mixed_loader_delivers_the_source_of_samples_and_resumes(
    sources: dict[str, Path], num_workers: int
) -> None:
    """A weight belongs to the set of its name, in whatever order they are named."""
    fields = {"label": wt.label()}
    options: dict[str, Any] = {"weights": {"b": 1, "a": 3}, "batch_size": 8, "seed": 4}
    with wt.mix(sources, fields, num_workers=num_workers, **options) as loader:
        batches = [batch for _ in range(2) for batch in loader]
    assert len(batches) == 2 * len(loader) == 12
    for batch in batches:
        assert batch["__source__"] == [key[0] for key in batch["__key__"]]
        assert batch["label"].tolist() == [int(key[1:]) for key in batch["__key__"]]
    first, second = keys_of(batches[:6]), keys_of(batches[6:])
    assert first != second
    for epoch in (first, second):
        assert Counter(key[0] for keys in epoch for key in keys) == {"a": 36, "b": 12}
    stopped, resumed = wt.mix(sources, fields, **options), wt.mix(sources, fields, **options)
    for _ in itertools.islice(stopped, 3):
        pass
    resumed.load_state_dict(stopped.state_dict())
    assert keys_of(resumed) == first[3:]
    with pytest.raises(UsageError, match="shares was"):
        wt.mix(sources, fields, batch_size=8, seed=4).load_state_dict(stopped.state_dict())


def test_by_default_sources_are_mixed_by_their_sizes(sources: dict[str, Path]) -> None:
    batches = wt.mix(sources, batch_size=5)
    assert Counter(n for batch in batches for n in batch["__source__"]) == {"a": 40, "b": 25}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": {"a": 1}}, "for each of the sources a, b"),
        ({"weights": {"a": 1, "b": 0}}, "above 0"),
        ({"weights": {"a": 1e9, "b": 1}}, "must be at least 1/65536"),
        ({"tail": "pad"}, "mixture ends with the first source"),
        ({"batch_size": 100}, "cannot fill one step of 100"),
        ({"sources": {}}, "sources is empty"),
    ],
)
def test_impossible_mixtures_are_refused(
    sources: dict[str, Path], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        wt.mix(**{"sources": sources, "batch_size": 4, **options})
