"""Results of runs for people and programs: tables, JSON, exports, events, pages, bottleneck."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import wdstrain as wt
from tests.support.servers import serving
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
from wdstrain.augment.gpu import IMAGENET
from wdstrain.cli import main
from wdstrain.loader.stats import EpochStats
from wdstrain.training.checkpoint import load_checkpoint
from wdstrain.training.config import STAGES
from wdstrain.training.run_dir import verdict
from wdstrain.training.train import train

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


def test_a_matrix_hides_classes_that_do_not_occur(tmp_path: Path) -> None:
    text = report_of(tmp_path, 12, 4)
    card = text.partition("<h2>Confusion matrix")[2].partition("</section>")[0]
    predicted = {number for number in range(12) if f"taken for kind {number:02d}:" in card}
    assert {0, 1, 2, 3} <= predicted < set(range(12))


def test_of_more_than_50_classes_the_worst_pairs_are_listed(tmp_path: Path) -> None:
    card = report_of(tmp_path, 60, 60).partition("<h2>Most frequent mistakes")[2]
    found = re.findall(r"<td>(\d+) of \d+</td>", card.partition("</section>")[0])
    assert found
    assert found == sorted(found, key=int, reverse=True)


def test_runs_are_compared_in_a_table_and_on_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
        options = {"model": Linear, "fields": {"image": (field := Corner(24))}, "batch_size": 8}
        wt.predict(last(tmp_path / "run"), urls, tmp_path / "p.csv", **options)
        assert field.dirty == 0


@pytest.mark.parametrize(("mean", "scale"), [(0.0, 1.0), (1_700_000_000, 1.0), (4e6, 1e-3)])
def test_an_exported_model_gives_the_numbers_of_predict(
    tmp_path: Path, mean: float, scale: float
) -> None:
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


@pytest.mark.parametrize("more", [{}, {"backbone_lr": 0.1, "freeze": "backbone"}], ids=str)
def test_the_learning_rate_in_all_logs_is_the_one_of_the_run(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    out = tmp_path / "run"
    run = wt.train(two_classes(tmp_path / "set"), out, lr=0.01, **{**SMALL, **more})
    assert run.epochs[0]["lr"] == pytest.approx(0.01)
    for name in ("metrics.jsonl", "steps.jsonl"):
        for line in (out / name).read_text().splitlines():
            assert json.loads(line)["lr"] == pytest.approx(0.01), name
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert {round(event.value, 6) for event in events.Scalars("step/lr")} == {0.01}


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


OPTIONS: dict[str, Any] = {"epochs": 8, "batch_size": 16, "image_size": 16, "lr": 0.01}
SHADES = ("dark", "<grey>", "light")


@pytest.fixture(scope="module")
def bright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of images with four labels: 2 classes, 3 classes, several of 3 tags, a number."""
    folder, rows, rng = tmp_path_factory.mktemp("bright"), [], np.random.default_rng(0)
    for light in rng.random(200).tolist():
        pixels = np.clip(rng.normal(40 + 170 * light, 10, (16, 16, 3)), 0, 255).astype(np.uint8)
        tags = {"dim": light < 0.7, "lit": light > 0.3, "white": light > 0.8}
        kind, shade = ("no", "yes")[light > 0.5], SHADES[int(light * 3)]
        own = {"kind": kind, "shade": shade, "light": light}
        rows.append({"png": pixels, "json": {**own, "tags": [n for n in tags if tags[n]]}})
    labels = [
        wt.Label("kind", "class", "json", "kind", ("no", "yes")),
        wt.Label("shade", "class", "json", "shade", SHADES),
        wt.Label("tags", "multi", "json", "tags", ("dim", "lit", "white")),
        wt.Label("light", "number", "json", "light"),
    ]
    wt.pack(rows, folder / "out", labels=labels, split={"train": 0.8, "val": 0.2})
    return folder


@pytest.fixture(scope="module")
def run(bright: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "four labels"
    train(str(bright / "out"), out, label="kind,shade,tags,light", checkpoint_every=4, **OPTIONS)
    return out


def test_predictions_have_a_row_for_every_image_and_count_other_files(
    run: Path, tmp_path: Path, capsys: Any
) -> None:
    new, table = tmp_path / "new", tmp_path / "p.csv"
    (new / "sub").mkdir(parents=True)
    words = ["predict", str(run / "checkpoints" / "last.pt"), str(new), "-o", str(table)]
    for name in ("notes.txt", "more.txt", "phone.HEIC"):
        (new / name).write_bytes(b"...")
    assert main(words) == 1
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error == f"error: {new} holds no images (found: 1 x *.heic, 2 x *.txt)."
    assert hint.startswith("hint: Check the path. Images end in jpg, jpeg, png, ")
    assert not table.exists()
    Image.new("RGB", (40, 30), (250, 250, 250)).save(new / "white, large.png")
    Image.new("RGB", (16, 16), (20, 20, 20)).save(new / "sub" / "black.jpg")
    (new / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    os.mkfifo(new / "pipe.png")  # which nobody writes to
    assert main([*words, "--batch-size", "2", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"rows": 4, "bad": 2, "out": str(table)}
    assert captured.err.count("files passed over: 3 (1 x *.heic, 2 x *.txt). Images end in") == 1
    assert [(row["key"], row["kind"], bool(row["error"])) for row in rows_of(table)] == [
        ("broken.jpg", "", True),
        ("pipe.png", "", True),
        ("sub/black.jpg", "no", False),
        ("white, large.png", "yes", False),
    ]
    assert "kind_true" not in rows_of(table)[2]
    words[2] = str(new / "sub" / "black.jpg")  # one image file
    assert main(words) == 0
    assert [(row["key"], row["kind"]) for row in rows_of(table)] == [("black.jpg", "no")]


def test_an_onnx_program_predicts_as_a_checkpoint_and_other_formats_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript", reason="not installed: pip install onnx onnxscript")
    from onnx.reference import ReferenceEvaluator

    path, best = tmp_path / "model.onnx", run / "checkpoints" / "best.pt"
    assert main(["export", str(best), str(path)]) == 0
    columns = [("kind", 1), ("shade", 3), ("tags", 3), ("light", 1)]
    about = json.loads((tmp_path / "model.onnx.json").read_text())["outputs"]
    assert [(output["label"], output["columns"]) for output in about] == columns
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, 16, 16)).astype(np.float32)
    mean, std = (255 * np.array(values).reshape(3, 1, 1) for values in IMAGENET)
    model, setup = load_checkpoint(best)
    with torch.no_grad():
        expected = model(torch.from_numpy((pixels - mean) / std).float())
    expected[:, 7] = setup.task.heads[3].decided(expected[:, 7])  # in the unit of the labels
    (outputs,) = ReferenceEvaluator(str(path)).run(None, {"image": pixels})
    np.testing.assert_allclose(outputs, expected.numpy(), rtol=1e-3, atol=1e-3)
    with pytest.raises(wt.UsageError, match=r"model.bin.: must end in \.pt, \.pt2, \.onnx"):
        wt.export(best, tmp_path / "model.bin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(wt.UsageError, match="ONNX needs onnx and onnxscript. Run: pip install"):
        wt.export(best, path)


def test_the_report_is_complete_and_fetches_no_address(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=(?![\"']?data:)", text)
    for tag in ("section", "table", "figure", "svg", "h2"):
        assert len(re.findall(rf"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag
    assert text.count("<img") == 24
    curves = {"Loss", "kind: Accuracy", "light: MSE", "Seconds by stage", "Samples per second"}
    cards = {"Learning rate", "kind: Confusion matrix", "kind: Calibration", "Options"}
    assert {*curves, *cards, "Worst predictions"} <= set(re.findall("<h2>([^<]*)</h2>", text))
    for words in ("total time", "balanced accuracy", "Predicting always", "&lt;grey&gt;"):
        assert words in text
    assert "<grey>" not in text
    assert "nan" not in re.sub(r"[\w/+]{60,}", "", text)


def test_tensorboard_events_equal_the_metrics_whose_stages_add_up_to_the_epoch(run: Path) -> None:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    names = "train/loss val/loss val/kind/accuracy step/loss step/lr time/data time/compute"
    assert set(names.split()) <= set(events.Tags()["scalars"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["val"]["loss"] for line in lines]
    assert [event.value for event in events.Scalars("val/loss")] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("val/loss")] == [9 * (i + 1) for i in range(8)]
    for line in lines:
        parts = [line[f"{stage}_seconds"] for stage in STAGES]
        assert sum(parts) == pytest.approx(line["seconds"])
        assert line["stall"] == pytest.approx(parts[0] / line["seconds"])


# --- bottleneck ---


class Slow:
    names, example = ("png",), wt.image(size=16).example

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        time.sleep(0.02)
        return wt.image(size=16).read(name, data, out, draws)


def linear(outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, outputs))


@pytest.mark.parametrize("slow", ["field", "disk"])
def test_a_slow_stage_is_named(bright: Path, tmp_path: Path, slow: str) -> None:
    options: dict[str, Any] = {**OPTIONS, "epochs": 1, "label": "kind", "model": linear}
    with serving(bright / "out", delay=0.3) as server:
        urls, stage = server.url, r"read \d+%, storage gives \d+ MB/s;"
        if slow == "field":
            urls, stage = f"{bright}/out/train-*.tar", r"decode \d+%;"
            options["fields"] = {"image": Slow()}
        verdict = train(urls, tmp_path / "run", **options).epochs[0]["verdict"]
    assert re.match(rf"input bound: {stage} the model waited for data \d+\.\d% of the", verdict)


def test_a_verdict_estimates_the_gain_of_more_workers_and_names_nothing_after_a_short_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    # 1000 samples in 10 s: a decoder takes 10 ms per sample, and the model alone could do 500 per
    # second.
    seconds = {"decode_seconds": 10.0, "wait_seconds": 8.0, "loop_seconds": 2.0}
    meter = EpochStats(batches=10, samples=1000, decoders=1, read_seconds=1.0, **seconds)
    assert meter.verdict_of("GPU", 2.0) == (
        "input bound: decode 100%; the GPU waited for data 80.0% of the time. 4 more workers would give about 500 samples/s"
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2)))
    assert meter.verdict_of("GPU", 2.0).endswith("1 more worker would give about 200 samples/s")
    meter.wait_seconds, meter.loop_seconds = 0.1, 9.9
    assert meter.verdict_of("GPU", 9.5).startswith("GPU bound: it was busy 95% of the time")
    short = EpochStats(batches=44, samples=1400, decode_seconds=2.0).report()
    spent = {"data": 0.4, "copy": 0.0, "compute": 2.0, "optimizer": 0.6}
    assert verdict(short, spent, "model").startswith("no bottleneck is named")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "nothing.at:all"}, "No module named 'nothing'"),
        ({"model": lambda outputs: 3}, "returned int: must be a torch.nn.Module"),
        ({"model": lambda: None}, "called with the number of outputs, and that failed"),
        ({"model": linear(7)}, r"returns \[2, 7\] for two samples: must be \[2, 1\]"),
        ({"model": "broken_syntax:net"}, "broken_syntax:net: SyntaxError"),
        ({"model": "alexnet"}, r"not take a batch of uint8\[3, 16, 16\].*image_size=224"),
        ({"model": "resnet19"}, "model='resnet19'.*resnet101"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"label": None}, "several labels: kind, shade, tags, light"),
        ({"label": "age"}, "no label 'age'"),
        ({"label": "shade:binary"}, "learned as 'binary': it is one of 3 classes. Use class"),
        ({"label": "light:ordinal"}, "Kinds are class, binary, multi, number"),
        ({"label": "light,light"}, "names a label twice"),
        ({"label": "tags", "mixup": 0.2}, "they mix the classes of one label"),
    ],
)
def test_unusable_options_are_refused_before_any_write(
    bright: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, words: str
) -> None:
    (tmp_path / "broken_syntax.py").write_text("x = = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(wt.UsageError, match=words):
        wt.train(bright / "out", "run", **{"label": "light", "image_size": 16, **options})
    assert not (tmp_path / "run").exists()


def test_flags_override_options_of_a_file_and_all_are_saved(
    bright: Path, tmp_path: Path, capsys: Any
) -> None:
    recipe, other = tmp_path / "recipe.toml", str(tmp_path / "other")
    options = 'label = "kind"\nepochs = 7\nbatch_size = 16\nimage_size = 8\nscale = [0.35, 1]\n'
    recipe.write_text(f'{options}[data]\ntrain = "{bright}/out"\n')
    words = ["train", "--config", str(recipe), "--out", str(tmp_path / "run"), "--epochs", "1"]
    words += ["--augment", "rrc+flip", "--channels-last", "--color-jitter", "0.4", "--json"]
    assert main(words) == 0
    assert len(json.loads(capsys.readouterr().out)["epochs"]) == 1
    saved = (tmp_path / "run" / "config.toml").read_text().splitlines()
    lines = {"scale = [0.35, 1.0]", "color_jitter = [0.4]", "channels_last = true"}
    assert lines | {'augment = "rrc+flip"', 'label = "kind"'} <= set(saved)
    assert main(words) == 2
    assert "holds a run already" in capsys.readouterr().err
    for flags, message in (
        (["--scale", "a,b"], "--scale"),
        (["--label", "kind"], "no shards to train on"),
        (["--resume"], "other holds no run to continue"),
    ):
        assert main(["train", "--out", other, *flags]) == 2
        assert message in capsys.readouterr().err
