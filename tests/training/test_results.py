"""Results of a checkpoint for people and programs: tables, JSON, exported models, report pages."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
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
    last,
    numbers,
    of_kind,
    rows_of,
    small_image,
    two_classes,
)
from wdstrain.cli import main

MODEL = ["--model", "tests.support.small_runs:Linear", "--device", "cpu"]

# --- names and types ------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_columns_of_predictions_are_plain_names(
    labeled: Callable[[str], tuple[Path, Path]], tmp_path: Path, kind: str, ending: str
) -> None:
    """Names that SQL and data frames take without quotes."""
    shards, run = labeled(kind)
    table = tmp_path / f"p.{ending}"
    wt.predict(last(run), shards, table, model=Linear, probabilities=kind != "number")
    is_csv = ending == "csv"
    head = table.read_bytes().partition(b"\n")[0].decode(errors="replace")
    names = head.split(",") if is_csv else pq.read_schema(table).names
    assert len(set(names)) == len(names)
    assert [name for name in names if not re.fullmatch(r"[A-Za-z_]\w*", name)] == []


def test_a_table_has_equal_rows_and_embeddings_as_parquet_and_as_csv(
    labeled: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    shards, run = labeled("class")
    given: dict[str, Any] = {"model": Linear, "probabilities": True, "embeddings": True}
    for name in ("p.csv", "p.parquet"):
        assert wt.predict(last(run), shards, tmp_path / name, **given).rows == 16
    lines, table = rows_of(tmp_path / "p.csv"), pq.read_table(tmp_path / "p.parquet")
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
def test_evaluate_writes_its_page_and_a_table_of_predictions(
    labeled: Callable[[str], tuple[Path, Path]], tmp_path: Path, kind: str, capsys: Any
) -> None:
    shards, run = labeled(kind)
    files = ["--report", str(tmp_path / "test.html"), "--predictions", str(tmp_path / "p.csv")]
    words = ["evaluate", str(last(run)), str(shards), *MODEL]
    assert main([*words, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert {type(metrics[name]) for name in ("samples", "bad")} == {int}
    assert set(metrics.get("classes", {}).get("y", ())) == set(KINDS[kind][0].classes)
    assert main([*words, *files]) == 0
    shown = {line.rpartition("  ")[0].strip() for line in capsys.readouterr().out.splitlines()}
    assert len(shown - {""}) == len(metrics.keys() - {"classes"}) + 2  # all, and the two files
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


def test_a_matrix_hides_classes_that_do_not_occur(tmp_path: Path) -> None:
    """60 classes: of more than 50 the worst pairs are listed, first the most frequent."""
    for classes, there in ((12, 4), (60, 60)):
        shards, run = tmp_path / f"set{classes}", tmp_path / f"run{classes}"
        names = [f"kind {number:02d}" for number in range(classes)]
        samples = ({"png": small_image(i), "cls": i % there} for i in range(2 * classes))
        wt.pack(samples, shards, classes=names)
        wt.train(shards, run, model=Linear, **SMALL)
        page = tmp_path / f"{classes}.html"
        wt.evaluate(last(run), shards, model=Linear, report=page)
        card = re.search(
            "(?s)<h2>(Confusion matrix|Most frequent mistakes)(.*?)</section>", page.read_text()
        )
        assert card is not None
        if classes == 12:
            assert card[1] == "Confusion matrix"
            predicted = {name for name in names if f"taken for {name}:" in card[2]}
            assert set(names[:4]) <= predicted < set(names)
        else:
            counts = [int(count) for count in re.findall(r"<td>(\d+) of \d+</td>", card[2])]
            assert card[1] == "Most frequent mistakes"
            assert counts == sorted(counts, reverse=True)
            assert counts


# --- several runs ---------------------------------------------------------------------------------


def test_runs_are_compared_in_a_table_and_on_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best epoch, not the last, and only options that differ."""
    shards = two_classes(tmp_path / "set")
    options: dict[str, Any] = {**SMALL, "model": Constant, "epochs": 3, "lr": 1e-30}
    for name, values, seed in (("one", [-1, 1, -1], 0), ("two", [-1, -1, -1], 5)):
        bias = [Bias([value * 3.0 for value in values])]
        labels = tmp_path / f"val {name}"
        wt.pack(({"png": small_image(i), "cls": 1} for i in range(8)), labels, classes=["a", "b"])
        wt.train(shards, tmp_path / name, val=labels, callbacks=bias, seed=seed, **options)
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
    times = {n: (out / f"fold-{n}" / "checkpoints" / "last.pt").stat().st_mtime_ns for n in (1, 2)}
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


# --- the same from shards and from files ----------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images of two classes."""
    return two_classes(tmp_path_factory.mktemp("small") / "set")


class Corner:
    """A field that writes one value of its array, after it filled the arrays of the first rows."""

    names = ("png",)
    example = wt.Example((3, 8, 8), "float32")

    def __init__(self, filled: int = 0) -> None:
        self.filled, self.dirty = filled, 0

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> None:
        if self.filled:
            self.filled -= 1
            out[...] = 7
        else:
            self.dirty += bool(out.any())
            out[0, 0, 0] = 1


@pytest.mark.parametrize("source", ["shards", "files"])
def test_the_array_of_an_own_field_starts_as_zeros(
    shards: Path, tmp_path: Path, source: str
) -> None:
    wt.train(shards, tmp_path / "run", model=Linear, fields={"image": Corner()}, **PLAIN)
    urls, field = shards, Corner(filled=24)
    if source == "files":
        urls = tmp_path / "images"
        urls.mkdir()
        for number in range(40):
            (urls / f"{number:02d}.png").write_bytes(small_image(3))
    options = {"model": Linear, "fields": {"image": field}, "batch_size": 8}
    wt.predict(last(tmp_path / "run"), urls, tmp_path / "p.csv", **options)
    assert field.dirty == 0


# --- exported models ------------------------------------------------------------------------------


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


# --- the report -----------------------------------------------------------------------------------

GARMENTS = "dress hat longsleeve outwear pants shirt shoes shorts skirt t-shirt scarf gloves"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a run with twelve classes, of about 100 validation images each."""
    folder = tmp_path_factory.mktemp("garments")
    image = small_image(0)
    samples = ({"png": image if i % 7 else small_image(i), "cls": i % 12} for i in range(12 * 110))
    wt.pack(samples, folder / "set", classes=GARMENTS.split())
    options = {**SMALL, "batch_size": 120, "model": Linear}
    wt.train(folder / "set", folder / "run", val=folder / "set", **options)
    return (folder / "run" / "report.html").read_text()


def test_numbers_of_a_confusion_matrix_do_not_break_over_lines(report: str) -> None:
    """Cells of tables may break anywhere, so those of the matrix need a rule of their own."""
    assert "Confusion matrix" in report
    style = report[: report.index("</style>")].rpartition("<style>")[2]
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", style)
    breaks = [selector for selector, rule in rules if "anywhere" in rule]
    whole = [selector for selector, rule in rules if "nowrap" in rule or "wrap:normal" in rule]
    is_table = "<table class=matrix" in report.replace('"', "")
    may_break = is_table and any(selector.strip() == "td" for selector in breaks)
    assert not may_break or any("matrix" in selector for selector in whole)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 1920])
def test_a_matrix_of_twelve_classes_is_not_cut(report: str, tmp_path: Path, width: int) -> None:
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip(f"no browser is installed: {', '.join(names)}")
    script = (
        "<script>addEventListener('load', () => {const cut = [];"
        "document.querySelectorAll('section').forEach(part => {"
        "if (part.scrollWidth > part.clientWidth + 4) cut.push(part.scrollWidth)});"
        "document.title = 'cut: ' + cut.length})</script>"
    )
    (tmp_path / "report.html").write_text(report + script)
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},1500"]
    done = subprocess.run(
        [browser, *words, "--dump-dom", f"file://{tmp_path}/report.html"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    counted = re.search(r"<title>cut: (\d+)</title>", done.stdout)
    if counted is None:
        pytest.skip(f"the browser does not draw pages here: {done.stderr[-200:]}")
    assert counted[1] == "0"
