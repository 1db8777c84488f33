"""Mixtures: exact shares at any step. tests/oracle draws what loaders of mixtures deliver."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_tar
from wdstrain.errors import UsageError
from wdstrain.order.mixture import Mixture


def make(counts: list[list[int]], shares: list[Fraction], **options: Any) -> Mixture:
    names = [f"source {i}" for i in range(len(counts))]
    sizes = {"seed": 1, "epoch": 0, "batch_size": 4, "world_size": 1, "lanes": None, "window": 10}
    sizes |= {"shuffle": True, **options}
    return Mixture(counts=[np.array(c) for c in counts], names=names, shares=shares, **sizes)


def turns(shares: list[Fraction], count: int) -> list[int]:
    """Return the source of each of the first `count` turns, a multiple of the denominators."""
    counts = [[int(share * count)] for share in shares]
    plan = make(counts, shares, batch_size=1, shuffle=False)
    assert plan.steps == count
    sources = np.empty(count, np.int64)
    for source, (samples,) in enumerate(counts):
        sources[plan.reading(0, source, 0, samples).step] = source
    return sources.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_each_source_has_its_share_of_any_number_of_turns_rounded_down_or_up(seed: int) -> None:
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


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    for name, count in (("a", 40), ("b", 25)):
        samples = [(f"{name}{i:03d}", {"cls": b"%d" % i}) for i in range(count)]
        write_tar(tmp_path / name / "x.tar", samples[: count // 2])
        write_tar(tmp_path / name / "y.tar", samples[count // 2 :])
    return {"a": tmp_path / "a", "b": tmp_path / "b"}


def test_a_weight_belongs_to_the_source_of_its_name(sources: dict[str, Path]) -> None:
    with wt.mix(sources, weights={"b": 1, "a": 3}, batch_size=8) as loader:
        batches = list(loader)
        state = loader.state_dict()
    assert Counter(name for batch in batches for name in batch["__source__"]) == {"a": 36, "b": 12}
    with pytest.raises(UsageError, match="shares was"):
        wt.mix(sources, batch_size=8).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": {"a": 1}}, "for each of the sources a, b"),
        *(
            ({"weights": weights}, "must have a finite number above 0 for each of the sources a, b")
            for weights in ([1, 2], *({"a": value, "b": 1} for value in (0, math.nan, "1")))
        ),
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
