"""Loaders over selected or repeated samples: refusals, unread shards and memory."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt

COUNT = 240


def columns(n: int) -> dict[str, Any]:
    kind, year = "usual" if n % 24 else "rare", 2000 + n if n < 210 else 1
    return {"kind": kind, "year": year, "often": n % 3, "maybe": n if n % 2 else None}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 samples in eight shards. One in 24 is rare; the last shard has no even year."""
    out = tmp_path_factory.mktemp("selection") / "out"
    samples = [{"__key__": f"k{n:03d}", "bin": b"x", "json": columns(n)} for n in range(COUNT)]
    wt.pack(samples, str(out), shuffle=False, max_shard_samples=30)
    return out


def test_a_shard_without_selected_samples_is_never_opened(packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    index = wt.open(copy)
    os.truncate(index.shards[7].path, 10)
    chosen = index.where("year >= 2020 and shard != ''")
    assert len(chosen.shards) == 7
    with wt.Loader(chosen, batch_size=10, tail="keep") as loader:
        keys = [key for batch in loader for key in batch["__key__"]]
    assert sorted(keys) == [f"k{n:03d}" for n in range(20, 210)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "year > 9999"}, "holds for none of 240"),
        ({"where": "kind == 'rare'", "batch_size": 64}, "cannot give"),
        ({"where": 3}, "must be a condition"),
        ({"weights": [1.0] * 239}, "must be 240 numbers"),
        ({"weights": "bin"}, "there is no column 'bin'"),
        ({"weights": "kind"}, "must be a column of numbers"),
        ({"weights": "maybe"}, "120 of 240 samples have no value"),
        ({"weights": [1.0] * 239 + [-1]}, "-1.0 for sample 'k239'"),
        ({"weights": [float("nan")] + [1.0] * 239}, "nan for sample 'k000'"),
        ({"weights": [float("inf")] * 240}, "240 such weights"),
        ({"weights": np.zeros(240)}, "gives no sample"),
        ({"weights": {"a": 1}}, "must be 240 numbers"),
        ({"weights": "often", "balance": "kind"}, "both given"),
        ({"balance": "maybe"}, "120 of 240 samples have no value"),
        ({"balance": 3}, "not the name of a column"),
    ],
)
def test_wrong_selections_are_refused(packed: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(wt.WdstrainError, match=message):
        wt.Loader(packed, **({"batch_size": 8} | options))


@pytest.mark.parametrize(
    "options",
    [
        {"weights": [100] * 20 + [0] * 80, "shuffle_buffer": 16},
        {"balance": "cls"},
        {"weights": [20] * 100, "shuffle": False, "lanes": 2},
    ],
    ids=["few", "balance", "all"],
)
def test_samples_repeated_often_are_all_delivered(options: dict[str, Any], tmp_path: Path) -> None:
    """Two whole epochs of 2,000 samples; with balance, ten large ones are half of the epoch."""
    sizes, expected = [10] * 100, {"small": 2000}
    if "balance" in options:
        sizes = [200_000 if n % 200 == 0 else 100 for n in range(2000)]
        expected = {"large": 1000, "small": 1000}
    rows = (
        {"__key__": f"k{n:04d}", "txt": "x" * s, "cls": int(s > 1000)} for n, s in enumerate(sizes)
    )
    wt.pack(rows, tmp_path / "out")
    fields = {"txt": wt.text()}
    with wt.Loader(tmp_path / "out", fields, batch_size=20, **options) as loader:
        for number in range(2):
            counts = Counter[str]()
            for batch in loader.epoch(number, until=number + 1):
                counts.update("large" if len(text) > 1000 else "small" for text in batch["txt"])
                time.sleep(0.004)  # the step of a model, during which the reader runs ahead
            assert counts == expected


@pytest.mark.parametrize("way", ["folder", "index", "mixture"])
def test_one_split_of_several_is_read_by_its_name(tmp_path: Path, way: str) -> None:
    samples = ({"__key__": f"k{n:02d}", "cls": n} for n in range(40))
    wt.pack(samples, tmp_path, split={"train": 0.75, "val": 0.25})

    def keys(split: str) -> list[str]:
        source: Any = {"a": tmp_path} if way == "mixture" else tmp_path
        source = wt.open(tmp_path) if way == "index" else source
        make = wt.mix if way == "mixture" else wt.Loader
        with make(source, split=split, batch_size=1) as loader:
            return sorted(key for batch in loader for key in batch["__key__"])

    for name in ("train", "val"):
        index = wt.open(f"{tmp_path}/{name}-*.tar")
        assert keys(name) == sorted(index.keys(range(len(index))))
    with pytest.raises(wt.UsageError, match="split='test': the splits of these .* train, val"):
        keys("test")
