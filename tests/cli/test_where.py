"""`--where` and `--balance`: verbs that read samples read only the selected ones."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import picture, write_tar
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


def test_info_show_and_plan_use_the_selection(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = run(capsys, "info", packed, "--where", WHERE)
    assert info["samples"] == len(CHOSEN) == 34
    assert info["shards"] == 3
    all_samples = run(capsys, "info", packed)
    assert info["bytes"] < all_samples["bytes"]
    plan = run(capsys, "plan", packed, "--where", WHERE, "--batch-size", 11)
    assert plan["steps"] == 3
    shown = run(capsys, "show", packed, "--where", WHERE, "-n", 100)
    assert [sample["key"] for sample in shown["samples"]] == [f"k{n:03d}" for n in CHOSEN]
    words = ("--where", WHERE, "--bytes", "--batch-size", 4, "--seconds", 0.1)
    assert run(capsys, "bench", packed, *words)["samples"] == 34


def test_convert_packs_the_selection(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new"
    run(capsys, "convert", "tars", packed, out, "--where", WHERE, "--no-shuffle")
    index = wt.open(out)
    assert [index.key(i) for i in range(len(index))] == [f"k{n:03d}" for n in CHOSEN]
    assert index.table.column("year").to_pylist() == [2000 + n for n in CHOSEN]


def test_convert_keeps_declared_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The input shards are foreign; their index declares the labels."""
    samples = [(f"k{n}", {"txt": b"t", "cls": str(n % 2).encode()}) for n in range(8)]
    write_tar(tmp_path / "old" / "s.tar", samples)
    run(capsys, "index", tmp_path / "old", "--label", "cls", "--classes", "cat,dog")
    words = ["convert", "tars", tmp_path / "old", tmp_path / "new", "--no-shuffle"]
    run(capsys, *words)
    index = wt.open(tmp_path / "new")
    assert index.labels == (wt.Label("label", "class", "cls", None, ("cat", "dog")),)
    assert index.table.column("label").to_pylist() == ["cat", "dog"] * 4
    run(capsys, *words, "--overwrite", "--rename", "cls=kind")
    assert wt.open(tmp_path / "new").labels[0].field == "kind"
    run(capsys, *words, "--overwrite", "--drop", "cls")
    assert wt.open(tmp_path / "new").labels == ()


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


def test_train_and_evaluate_use_the_selection(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = tmp_path / "run"
    options = ["--epochs", 1, "--batch-size", 8, "--image-size", 16, "--device", "cpu"]
    options += ["--label", "label"]
    done = run(
        capsys,
        "train",
        packed,
        "--out",
        run_folder,
        "--where",
        WHERE,
        "--balance",
        "label",
        *options,
    )
    assert done["epochs"][0]["samples"] == 32
    best = run_folder / "checkpoints" / "last.pt"
    scored = run(capsys, "evaluate", best, packed, "--where", "year >= 2050")
    assert scored["samples"] == 10
    table = tmp_path / "table.csv"
    predicted = run(capsys, "predict", best, packed, "--where", "year >= 2050", "-o", table)
    assert predicted["rows"] == 10
    with open(table) as file:
        assert [row["key"] for row in csv.DictReader(file)] == [f"k{n:03d}" for n in range(50, 60)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info", "--where", "colour == 1"], "there is no column 'colour'"),
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
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples with texts, documents and arrays, of which columns hold some."""
    out = tmp_path_factory.mktemp("documents") / "out"
    samples = [
        {"__key__": f"k{n}", "png": picture(n), "txt": "long " * (60 + n), "short.txt": f"t{n}"}
        | {"json": {"story": "once " * (50 + n), "about": {"page": n}, "parts": [n, ["a"]]}}
        for n in range(4)
    ]
    wt.pack(samples, out)
    return out


@pytest.mark.parametrize(
    "condition",
    [
        "len(json.story) > 260",
        "json.about == 1",
        "json.about.page == 1",
        "json.parts == 1",
        "json.absent == 1",
        "json == 1",
        "len(txt) > 310",
        "png == 1",
        "short.txt == 't1'",
        "story == 'x'",
    ],
)
def test_a_command_that_a_refused_condition_names_works(documents: Path, condition: str) -> None:
    hint = ""
    try:
        wt.open(documents).where(condition)
    except wt.UsageError as error:
        hint = str(error)
    named = re.search(r"wdstrain index (?:\S+ )?--columns (\S+)", hint)
    if named:
        assert main(["index", str(documents), "--columns", named[1], "-q"]) == 0


@pytest.mark.parametrize(
    ("condition", "numbers"),
    [
        ("has.txt or cls < 3", [0, 1, 2]),
        ("not cls < 3", [2, 3]),
        ("cls not in [1, 5]", [3]),
        ("1 < cls < 6", [2]),
        ("not (txt == 'a')", [1, 2]),
        ("cls < 3 or has.txt", [0, 1, 2]),
        ("not (cls < 3 and has.txt)", [2, 3, 4]),
        ("size.txt > 0 or cls == 7", [0, 1, 2, 3]),
        ("txt == 'a' or cls == 7", [0, 3]),
        ("cls + 1 > 2 or has.bin", [2, 3, 4]),
    ],
)
@pytest.mark.parametrize("columns", [["cls", "txt"], None])
def test_a_missing_field_makes_only_its_own_comparison_unknown(
    condition: str, numbers: list[int], columns: list[str] | None, tmp_path: Path
) -> None:
    """With columns, and without: `convert tars` then reads the fields that the condition names."""
    fields: list[dict[str, bytes]] = [
        {"cls": b"1", "txt": b"a"},
        {"txt": b"b"},
        {"cls": b"5", "txt": b"c"},
        {"cls": b"7", "bin": b"d"},
        {"bin": b"e"},
    ]
    write_tar(tmp_path / "set" / "a.tar", [(f"k{n}", part) for n, part in enumerate(fields)])
    if columns is not None:
        wt.index(tmp_path / "set", columns=columns)
    words = ["convert", "tars", str(tmp_path / "set"), str(tmp_path / "out"), "--no-shuffle"]
    assert main([*words, "--where", condition, "-q"]) == 0
    assert wt.open(tmp_path / "out").table["key"].to_pylist() == [f"k{n}" for n in numbers]


def test_one_equals_sign_is_explained(packed: Path) -> None:
    with pytest.raises(wt.UsageError, match="Use == to compare"):
        wt.open(packed).where("year = 2010")
    assert len(wt.open(packed).where("kind != 'a=b' and year == 2010")) == 1
