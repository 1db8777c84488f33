"""Loaders over selected samples: exactly once, equal ranks, resume, one order, forward reads."""

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
from tests.conftest import quick_and_slow

COUNT = 240


def columns(n: int) -> dict[str, Any]:
    kind, year = "usual" if n % 24 else "rare", 2000 + n if n < 210 else 1
    return {"kind": kind, "year": year, "often": n % 3, "maybe": n if n % 2 else None}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 samples in eight shards. One in 24 is rare; the last shard has no even year."""
    out = tmp_path_factory.mktemp("selection") / "out"
    data = [n.to_bytes(2, "big") * 50 for n in range(COUNT)]
    samples = [{"__key__": f"k{n:03d}", "bin": data[n], "json": columns(n)} for n in range(COUNT)]
    labels = [wt.Label("kind", "class", "json", "kind", ("rare", "usual"))]
    wt.pack(samples, str(out), shuffle=False, labels=labels, max_shard_samples=30)
    return out


def epoch(loader: wt.Loader) -> list[int]:
    """Return the numbers of the samples of an epoch after a check of their bytes."""
    numbers = []
    for batch in loader.epoch(0, until=1):
        for key, data in zip(batch["__key__"], batch["bin"], strict=True):
            numbers.append(int(key[1:]))
            assert bytes(data) == numbers[-1].to_bytes(2, "big") * 50
    return numbers


def test_a_shard_without_selected_samples_is_never_opened(packed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    index = wt.open(copy)
    os.truncate(index.shards[7].path, 10)
    chosen = index.where("year >= 2020 and shard != ''")
    assert len(chosen.shards) == 7
    loader = wt.Loader(chosen, batch_size=10, tail="keep")
    assert sorted(epoch(loader)) == list(range(20, 210))
    loader.close()


@pytest.mark.parametrize("options", [{"where": "often != 1"}, {"weights": "often"}])
def test_a_changed_byte_of_a_selected_sample_is_detected(
    packed: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Reads that pass over samples outside the selection detect it too, up to the last sample."""
    for number in (0, 2, 119, 239):
        copy = tmp_path / str(number)
        shutil.copytree(packed, copy)
        index = wt.open(copy)
        offset = next(offset for name, offset, _ in index.members(number) if name == "bin")
        with open(index.shards[number // 30].path, "r+b") as file:
            file.seek(offset + 1)
            file.write(b"\xff")
        weight = number % 3 if "weights" in options else 1
        with wt.Loader(copy, batch_size=8, tail="keep", on_error="replace", **options) as loader:
            delivered = epoch(loader)
            assert number not in delivered
            assert loader.report()["bad"] == weight
            assert weight or len(delivered) == COUNT


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


def test_samples_outside_where_need_no_weight(packed: Path) -> None:
    loader = wt.Loader(packed, where="maybe is not None", weights="maybe", batch_size=8)
    assert len(loader) == sum(range(1, 240, 2)) // 8


@pytest.mark.parametrize(
    "options",
    quick_and_slow(
        [
            {"weights": [100] * 20 + [0] * 80},
            {"balance": "cls"},
            {"weights": [20] * 100, "shuffle": False, "tail": "keep"},
            {"weights": [20] * 100},
            {"weights": [20] * 100, "shuffle_buffer": 16},
            {"weights": [20] * 100, "lanes": 2},
            {"weights": [20] * 100, "num_workers": 1},
        ],
        3,
    ),
    ids=lambda options: ", ".join(
        f"{name} {value if name != 'weights' else value[0]}" for name, value in options.items()
    ),
)
def test_samples_repeated_often_are_all_delivered(options: dict[str, Any], tmp_path: Path) -> None:
    """Two whole epochs of 2,000 samples; with balance, ten large ones are half of the epoch."""
    if "balance" in options:
        sizes = [200_000 if n % 200 == 0 else 100 for n in range(2000)]
        expected = {"large": 1000, "small": 1000}
    else:
        sizes = [10] * 100
        expected = {"small": 2000}
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
