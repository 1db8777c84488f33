"""`--where` and `--balance`: verbs that read samples read only the selected ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import picture
from wdstrain.cli.main import main

WHERE = "kind != 'Other' and year >= 2010"
CHOSEN = [n for n in range(60) if n % 3 and n >= 10]  # 34 samples


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of three kinds."""
    out = tmp_path_factory.mktemp("where") / "out"
    kinds = ["Other", "Pants", "Shirts"]
    samples = [
        {"__key__": f"k{n:03d}", "png": picture(n), "cls": n % 3}
        | {"json": {"kind": kinds[n % 3], "year": 2000 + n}}
        for n in range(60)
    ]
    labels = [wt.Label("label", "class", "cls", None, tuple(kinds))]
    wt.pack(samples, str(out), shuffle=False, labels=labels, max_shard_samples=20)
    return out


def run(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_info_show_plan_bench_and_convert_use_the_selection(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"k{n:03d}" for n in CHOSEN]
    info = run(capsys, "info", packed, "--where", WHERE)
    assert (info["samples"], info["shards"]) == (34, 3)
    assert info["bytes"] < run(capsys, "info", packed)["bytes"]
    plan = run(capsys, "plan", packed, "--where", WHERE, "--batch-size", 11)
    assert plan["steps"] == 3
    shown = run(capsys, "show", packed, "--where", WHERE, "-n", 100)
    assert [sample["key"] for sample in shown["samples"]] == keys
    words = ("--where", WHERE, "--bytes", "--batch-size", 4, "--seconds", 0.1)
    assert run(capsys, "bench", packed, *words)["samples"] == 34
    run(capsys, "convert", "tars", packed, tmp_path / "new", "--where", WHERE, "--no-shuffle")
    assert wt.open(tmp_path / "new").keys(range(34)) == keys


def test_a_selection_over_several_splits_is_refused(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training samples must not be scored as validation, with or without a condition."""
    both = tmp_path / "both"
    wt.convert_tars(packed, both, split={"train": 0.5, "val": 0.5})
    (model := tmp_path / "x.pt").write_bytes(b"x")
    for words in (["plan", both], ["bench", both], ["predict", model, both, "-o", "x.csv"]):
        assert main([*map(str, words), "--where", "year > 2000"]) == 2
        assert "several splits" in capsys.readouterr().err
    assert run(capsys, "info", both, "--where", "year > 2000")["samples"] == 59


def test_train_evaluate_and_predict_use_the_selection(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, table = tmp_path / "run", tmp_path / "table.csv"
    options = "--balance label --epochs 1 --batch-size 8 --image-size 16 --device cpu --model small"
    words = [packed, "--out", out, "--where", WHERE, "--label", "label", *options.split()]
    assert run(capsys, "train", *words)["epochs"][0]["samples"] == 32
    words = [out / "checkpoints" / "last.pt", packed, "--where", "year >= 2050"]
    assert run(capsys, "evaluate", *words)["samples"] == 10
    assert run(capsys, "predict", *words, "-o", table)["rows"] == 10
    with open(table) as file:
        assert [row["key"] for row in csv.DictReader(file)] == [f"k{n:03d}" for n in range(50, 60)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info", "--where", "colour == 1"], "there is no column 'colour'"),
        (["info", "--where", "year = 2010"], "Use == to compare"),
        (["show", "--where", "year > 9999"], "holds for none of 60 samples"),
        (["plan", "--where", "year <"], "is no condition"),
        (["plan", "--where", "year >= 2058", "--batch-size", "8"], "cannot give"),
        (["bench", "--where", "kind < 3"], "cannot be compared"),
    ],
)
def test_a_wrong_condition_is_wrong_usage(
    packed: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([words[0], str(packed), *words[1:]]) == 2
    assert message in capsys.readouterr().err
