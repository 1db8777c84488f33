"""Results of a checkpoint for people and programs: tables, JSON, exported models, report pages."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import wdstrain as wt
from tests.support.small_runs import (
    KINDS,
    PLAIN,
    SMALL,
    Bias,
    Constant,
    Linear,
    Stop,
    last,
    numbers,
    of_kind,
    rows_of,
    small_image,
    two_classes,
)
from wdstrain.cli import main

MODEL = ["--model", "tests.support.small_runs:Linear", "--device", "cpu"]


@pytest.fixture(scope="module")
def labeled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that returns a set of 16 images with a label y of a kind, and a run."""
    folder = tmp_path_factory.mktemp("kinds")

    def find(kind: str) -> tuple[Path, Path]:
        shards, out = of_kind(folder / kind, kind), folder / f"{kind} run"
        if not out.exists():
            wt.train(shards, out, val=shards, model=Linear, **SMALL)
        return shards, out

    return find


def test_a_table_has_equal_rows_and_embeddings_as_parquet_and_as_csv(
    labeled: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    shards, run = labeled("class")
    given: dict[str, Any] = {"model": Linear, "probabilities": True, "embeddings": True}
    for name in ("p.csv", "p.parquet"):
        assert wt.predict(last(run), shards, tmp_path / name, **given).rows == 16
    lines, table = rows_of(tmp_path / "p.csv"), pq.read_table(tmp_path / "p.parquet")
    assert list(lines[0]) == table.column_names
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds["y"] == kinds["error"] == "string"
    assert kinds["y_probability"] == kinds["y_heron"] == "double"
    assert table["error"].null_count == 16
    for line, row in zip(lines, table.to_pylist(), strict=True):
        assert (line["key"], line["y"]) == (row["key"], row["y"])
        assert json.loads(line["embedding"]) == pytest.approx(row["embedding"], rel=1e-6)
        assert len(row["embedding"]) == 192
    with pytest.raises(wt.UsageError, match=r"must end in \.csv or \.parquet"):
        wt.predict(last(run), shards, tmp_path / "p.txt", model=Linear)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_writes_its_page_and_a_table_with_plain_names(
    labeled: Callable[[str], tuple[Path, Path]], tmp_path: Path, kind: str, capsys: Any
) -> None:
    (shards, run), table = labeled(kind), tmp_path / "all.csv"
    files = ["--report", str(tmp_path / "test.html"), "--predictions", str(tmp_path / "p.csv")]
    words = ["evaluate", str(last(run)), str(shards), *MODEL]
    assert main([*words, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert {type(metrics[name]) for name in ("samples", "bad")} == {int}
    assert set(metrics.get("classes", {}).get("y", ())) == set(KINDS[kind][0].classes)
    assert main([*words, *files]) == 0
    page = (tmp_path / "test.html").read_text()
    titles = re.findall("<h2>([^<]*)</h2>", page)
    expected = ["Metrics", "Calibration", "Confusion matrix", "Classes"]
    expected = {"multi": ["Metrics", "Classes"], "number": ["Metrics"]}.get(kind, expected)
    assert [title for title in titles if title in expected] == expected
    assert "Worst predictions" in titles
    assert page.count("<img") == 16
    assert all(f"<td>{name}</td>" in page for name in KINDS[kind][0].classes)
    wt.predict(last(run), shards, tmp_path / "other.csv", model=Linear)
    assert (tmp_path / "p.csv").read_text() == (tmp_path / "other.csv").read_text()
    wt.predict(last(run), shards, table, model=Linear, probabilities=kind != "number")
    names = table.read_text().partition("\n")[0].split(",")  # which SQL takes without quotes
    assert [name for name in names if not re.fullmatch(r"[A-Za-z_]\w*", name)] == []
    assert len(set(names)) == len(names)


def report_of(folder: Path, classes: int, there: int) -> str:
    """Return the page of a run with this many classes, of which the first ones occur."""
    names = [f"kind {number:02d}" for number in range(classes)]
    samples = ({"png": small_image(i), "cls": i % there} for i in range(2 * classes))
    wt.pack(samples, folder / "set", classes=names)
    wt.train(folder / "set", folder / "run", model=Linear, **SMALL)
    wt.evaluate(last(folder / "run"), folder / "set", model=Linear, report=folder / "page.html")
    return (folder / "page.html").read_text()


def test_a_matrix_hides_classes_that_do_not_occur_and_breaks_no_number(tmp_path: Path) -> None:
    text = report_of(tmp_path, 12, 4)
    card = text.partition("<h2>Confusion matrix")[2].partition("</section>")[0]
    predicted = {number for number in range(12) if f"taken for kind {number:02d}:" in card}
    assert {0, 1, 2, 3} <= predicted < set(range(12))
    # Cells of tables may break anywhere, so those of the matrix need a rule of their own.
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", text[: text.index("</style>")])
    assert "anywhere" not in dict(rules).get("td", "") or any(
        "matrix" in name and re.search("nowrap|wrap:normal", rule) for name, rule in rules
    )


def test_of_more_than_50_classes_the_worst_pairs_are_listed(tmp_path: Path) -> None:
    card = report_of(tmp_path, 60, 60).partition("<h2>Most frequent mistakes")[2]
    found = re.findall(r"<td>(\d+) of \d+</td>", card.partition("</section>")[0])
    assert found
    assert found == sorted(found, key=int, reverse=True)


def test_runs_are_compared_in_a_table_and_on_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best epoch, not the last, and only options that differ."""
    shards = two_classes(tmp_path / "set")
    options: dict[str, Any] = {**SMALL, "model": Constant, "epochs": 3, "lr": 1e-30}
    ones = [{"png": small_image(i), "cls": 1} for i in range(8)]
    for name, values, seed in (("one", [-3, 3, -3], 0), ("two", [-3, -3, -3], 5)):
        wt.pack(ones, tmp_path / f"val {name}", classes=["a", "b"])
        given = {**options, "val": tmp_path / f"val {name}", "callbacks": [Bias(values)]}
        wt.train(shards, tmp_path / name, seed=seed, **given)
    (tmp_path / "no run").mkdir()
    runs, page = [str(tmp_path / "one"), str(tmp_path / "two")], tmp_path / "runs.html"
    assert main(["compare", *runs, "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["runs"]
    assert (one["best_epoch"], one["epochs"], one["metrics"]["accuracy"]) == (2, 3, 1.0)
    assert (two["best_epoch"], two["epochs"], two["metrics"]["accuracy"]) == (1, 3, 0.0)
    assert set(one["options"]) == {"seed", "val"}
    assert (one["options"]["seed"], two["options"]["seed"]) == (0, 5)
    assert main(["compare", *runs, "--report", str(page)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "accuracy", "loss", "best"]
    assert "100.00%" in "".join(rows)
    assert "2 of 3" in "".join(rows)
    text = page.read_text()
    assert re.findall("<h2>([^<]*)</h2>", text) == ["Accuracy", "Loss"]
    assert text.count("<polyline") == 4
    assert main(["compare", str(tmp_path / "no run")]) == 2
    assert "no run holds no run." in capsys.readouterr().err


def test_folds_are_trained_one_after_another_and_never_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, out = two_classes(tmp_path / "set"), tmp_path / "run"
    words = ["train", str(shards), "--out", str(out), "--folds", "3", "--epochs", "2", *MODEL]
    words += ["--image-size", "8", "--batch-size", "8"]
    assert main([*words, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    scores = [fold["metrics"]["loss"] for fold in done["folds"]]
    assert [fold["options"]["fold"] for fold in done["folds"]] == ["1/3", "2/3", "3/3"]
    assert done["mean"]["loss"] == pytest.approx(np.mean(scores))
    assert done["deviation"]["loss"] == pytest.approx(np.std(scores, ddof=1))
    assert sum(fold["metrics"]["samples"] for fold in done["folds"]) == 40
    times = {n: last(out / f"fold-{n}").stat().st_mtime_ns for n in (1, 2)}
    shutil.rmtree(out / "fold-3")
    assert main(words) == 2  # the first fold is there
    capsys.readouterr()
    assert main(["train", "--out", str(out), "--folds", "3", "--resume", "--json", *MODEL]) == 0
    again = json.loads(capsys.readouterr().out)
    for fold, former in zip(again["folds"], done["folds"], strict=True):
        assert fold["metrics"] == pytest.approx(former["metrics"])
    assert all(last(out / f"fold-{n}").stat().st_mtime_ns == time for n, time in times.items())
    assert main([*words[:-8], "--folds", "1"]) == 2
    assert "--folds 1: must be 2 or more" in capsys.readouterr().err


class Corner:
    """A field that writes one value of its array, after it filled the arrays of the first rows."""

    names, example = ("png",), wt.Example((3, 8, 8), "float32")

    def __init__(self, filled: int = 0) -> None:
        self.filled, self.dirty = filled, 0

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> None:
        self.filled -= 1
        if self.filled >= 0:
            out[...] = 7
        else:
            self.dirty += bool(out.any())
            out[0, 0, 0] = 1


def test_the_array_of_an_own_field_starts_as_zeros(tmp_path: Path) -> None:
    shards, images = two_classes(tmp_path / "set"), tmp_path / "images"
    wt.train(shards, tmp_path / "run", model=Linear, fields={"image": Corner()}, **PLAIN)
    images.mkdir()
    for number in range(40):
        (images / f"{number:02d}.png").write_bytes(small_image(3))
    for urls in (shards, images):
        options = {"model": Linear, "fields": {"image": Corner(filled=24)}, "batch_size": 8}
        wt.predict(last(tmp_path / "run"), urls, tmp_path / "p.csv", **options)
        assert options["fields"]["image"].dirty == 0


@pytest.mark.parametrize(
    ("mean", "scale"),
    [(0.0, 1.0), (1_700_000_000, 1.0), (4e6, 1e-3)],
    ids=["near 0", "times", "coordinates"],
)
def test_an_exported_model_gives_the_numbers_of_predict(
    tmp_path: Path, mean: float, scale: float
) -> None:
    """Within a hundredth of the difference of two labels."""
    shards = numbers(tmp_path / "set", [mean + scale * (i % 5) for i in range(16)])
    wt.train(shards, tmp_path / "run", model=Linear, **SMALL)
    checkpoint = last(tmp_path / "run")
    wt.predict(checkpoint, shards, tmp_path / "p.parquet", model=Linear)
    wt.export(checkpoint, tmp_path / "m.pt2", model=Linear)
    table = pq.read_table(tmp_path / "p.parquet").to_pylist()
    files = [io.BytesIO(small_image(int(row["key"][1:]))) for row in table]
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    program: Any = torch.export.load(tmp_path / "m.pt2").module()
    exported = program(torch.from_numpy(pixels).permute(0, 3, 1, 2).float())[:, 0].detach().numpy()
    (about,) = json.loads((tmp_path / "m.pt2.json").read_text())["outputs"]
    assert "deviation" not in about  # outputs are on the scale of the labels
    assert np.abs(exported - [row["y"] for row in table]).max() < scale / 100


# --- losses of each training sample ---

RECORDED: dict[str, Any] = {**SMALL, "model": Constant, "record": True}


def recorded(run: Path) -> list[dict[str, Any]]:
    return pq.read_table(run / "recorded.parquet").to_pylist()


def by_class(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss of 1 for samples of class 0, and of 4 for those of class 1."""
    return 0 * outputs.sum() + 1 + 3 * target.float()


def test_the_table_has_the_training_loss_of_each_sample_and_the_report_the_hardest(
    tmp_path: Path,
) -> None:
    """A model with constant outputs predicts one class for all, so half of them are right."""
    shards, run = two_classes(tmp_path / "shards"), tmp_path / "run"
    wt.train(shards, run, criterion=by_class, **{**RECORDED, "epochs": 3})
    rows = recorded(run)
    assert [row["key"] for row in rows] == wt.open(shards).keys(np.arange(40))
    classes = [int(row["key"][1:]) % 2 for row in rows]
    assert [row["loss"] for row in rows] == [(1.0, 4.0)[number] for number in classes]
    assert {(row["epoch"], row["times"]) for row in rows} == {(2, 3)}
    right = {(number, row["right"]) for number, row in zip(classes, rows, strict=True)}
    assert sorted(right) in ([(0, 0.0), (1, 1.0)], [(0, 1.0), (1, 0.0)])
    page = (run / "report.html").read_text()
    card = page.partition("Hardest training samples")[2].partition("</section>")[0]
    shown = re.findall(r"<figure><img[^>]*>.*?loss 4, shown 3 times.*?k(\d{3})<", card)
    assert len(shown) >= 10
    assert all(int(number) % 2 for number in shown)
    assert wt.join(shards, run / "recorded.parquet", on="key").matched == 40
    assert len(wt.open(shards).where("loss > 2 and right is not None")) == 20


def test_a_resumed_run_writes_the_table_of_an_undisturbed_one(tmp_path: Path) -> None:
    shards = two_classes(tmp_path / "shards", 44)
    options = {**RECORDED, "model": Linear, "epochs": 3, "deterministic": True}
    wt.train(shards, tmp_path / "whole", **options)
    wt.train(shards, tmp_path / "run", callbacks=[Stop(1, 2)], **options)
    wt.train(shards, tmp_path / "run", resume=True, **options)
    assert recorded(tmp_path / "run") == recorded(tmp_path / "whole")
    assert {row["times"] for row in recorded(tmp_path / "run")} <= {1, 2, 3}
    wt.train(shards, tmp_path / "run", overwrite=True, **{**options, "record": False})
    assert not (tmp_path / "run" / "recorded.parquet").exists()
    assert "Hardest" not in (tmp_path / "run" / "report.html").read_text()


def test_numbers_have_no_column_right_and_a_loss_of_the_batch_is_that_of_each_sample(
    tmp_path: Path,
) -> None:
    shards = numbers(tmp_path / "shards", [0.5, 1.5] * 8)
    wt.train(shards, tmp_path / "run", **RECORDED)
    losses = [
        {name: row[name] for name in row if name != "key"} for row in recorded(tmp_path / "run")
    ]
    assert losses == [{"epoch": 0, "times": 1, "loss": 1.0}] * 16  # standardized
    step = lambda batch, model: model(batch["image"]).sum() * 0 + 2.5  # noqa: E731
    wt.train(shards, tmp_path / "step", training_step=step, **RECORDED)
    assert {row["loss"] for row in recorded(tmp_path / "step")} == {2.5}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("y", {"mixup": 0.2}, "record=True needs a loss of each sample.*mixup=0.2"),
        ("loss", {}, "record=True makes the columns 'loss'"),
    ],
)
def test_mixed_images_and_a_used_name_are_refused_before_a_file_is_written(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    shards = numbers(tmp_path / "shards", [0.5, 1.5] * 8, name)
    with pytest.raises(wt.UsageError, match=message):
        wt.train(shards, tmp_path / "run", **RECORDED, **options)
    assert not (tmp_path / "run").exists()
