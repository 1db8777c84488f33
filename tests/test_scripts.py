"""The scripts in scripts/ convert their kind of source and print results."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import ROOT, write_class_folder, write_shards


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., str]:
    """Return a function that runs a script with these words and returns what it prints."""

    def run(name: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
        text: str = capsys.readouterr().out
        return text

    return run


@pytest.mark.parametrize(
    "kind", ["folder", "table", "hdf5", "arrays", "tars", "custom", "torchvision"]
)
def test_a_script_converts_its_kind_of_source(
    kind: str, tmp_path: Path, run: Callable[..., str]
) -> None:
    out, photos = tmp_path / "out", write_class_folder(tmp_path / "photos", {"cat": 10, "dog": 10})
    rows = [f"{path},{path.parent.name}" for path in sorted(photos.glob("*/*"))]
    (tmp_path / "t.csv").write_text("\n".join(["file,kind", *rows]))
    images, labels = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 2
    np.save(tmp_path / "i.npy", images)
    np.save(tmp_path / "l.npy", labels)
    write_shards(tmp_path / "old", [20])
    write_class_folder(tmp_path / "root" / "eurosat" / "2750", {"Forest": 10, "River": 10})
    words: dict[str, list[object]] = {
        "folder": [photos, out],
        "table": [tmp_path / "t.csv", out, "--image", "file", "--label", "kind"],
        "hdf5": [tmp_path / "d.h5", out, "--image", "/x", "--label", "/y"],
        "arrays": [out, "--images", tmp_path / "i.npy", "--labels", tmp_path / "l.npy"],
        "tars": [tmp_path / "old", out],
        "custom": [out, "--count", 20],
        "torchvision": ["EuroSAT", out, "--root", tmp_path / "root"],
    }
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["x"], file["y"] = images, labels
    printed = run(f"convert_{kind}", *words[kind])
    assert re.search(r"^20 (images|rows|samples) in \d shards", printed, re.MULTILINE)
    assert wt.verify(out).samples == 20
    if kind == "torchvision":
        assert printed.endswith("train: 20 samples of 2 classes\n")


def test_the_training_script_trains_and_prints_each_epoch(
    tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, shards = write_class_folder(tmp_path / "in", {"a": 20, "b": 20}), tmp_path / "shards"
    wt.convert_folder(photos, shards, split={"train": 0.8, "val": 0.2}, stratify="label")
    words = [shards, "--out", tmp_path / "run", "--model", "small", "--epochs", 2]
    words += ["--batch-size", 8, "--image-size", 16]
    printed = run("train", *words)
    assert re.search(r"^epoch 2: \d+ samples/s, .*accuracy", printed, re.MULTILINE)
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()


def test_the_detector_is_trained_on_drawn_boxes_and_on_given_shards(
    tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script, options = "examples/train_detector", ["--batch-size", 4, "--steps", 10]
    for words in (options, ["shards/drawn", *options]):
        printed = run(script, *words)
        assert re.search(r"^step 10: loss \d+\.\d+\ndone; red, green; ", printed, re.MULTILINE)
    result = wt.verify("shards/drawn", decode=True)
    assert result.ok
    assert result.samples == 64


def test_results_page_and_chart_are_generated_from_the_measured_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script, run on a copy of its folder, writes the files of the repository."""
    source, chart = ROOT / "scripts" / "benchmarks", ROOT / "docs" / "images" / "benchmark.svg"
    copy = tmp_path / "scripts" / "benchmarks"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("RESULTS.md", "__pycache__"))
    (tmp_path / "docs" / "images").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(copy))
    runpy.run_path(str(copy / "results_page.py"), run_name="__main__")
    assert (copy / "RESULTS.md").read_text() == (source / "RESULTS.md").read_text()
    assert (tmp_path / "docs" / "images" / "benchmark.svg").read_text() == chart.read_text()
    table = runpy.run_path(str(copy / "results_page.py"))["resume_table"]
    measured = json.loads((source / "results" / "resume.json").read_text())
    assert table(measured) in (ROOT / "docs" / "exact-resume.md").read_text()
