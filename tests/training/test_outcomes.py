"""Results of a run: metrics, predictions, exports, events, report, bottleneck."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import wdstrain as wt
from tests.support.servers import serving
from tests.support.small_runs import rows_of
from wdstrain.augment.gpu import IMAGENET
from wdstrain.cli import main
from wdstrain.loader.stats import EpochStats
from wdstrain.report import charts
from wdstrain.training.checkpoint import load_checkpoint
from wdstrain.training.config import STAGES
from wdstrain.training.run_dir import verdict
from wdstrain.training.train import train

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
        labels = {"kind": kind, "shade": shade, "light": light}
        rows.append({"png": pixels, "json": {**labels, "tags": [n for n in tags if tags[n]]}})
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
    assert main([*words, "--batch-size", "2", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"rows": 3, "bad": 1, "out": str(table)}
    assert captured.err.count("files passed over: 3 (1 x *.heic, 2 x *.txt). Images end in") == 1
    assert [(row["key"], row["kind"], bool(row["error"])) for row in rows_of(table)] == [
        ("broken.jpg", "", True),
        ("sub/black.jpg", "no", False),
        ("white, large.png", "yes", False),
    ]
    assert "kind_true" not in rows_of(table)[1]
    words[2] = str(new / "sub" / "black.jpg")  # one image file
    assert main(words) == 0
    assert [(row["key"], row["kind"]) for row in rows_of(table)] == [("black.jpg", "no")]


def test_an_onnx_program_predicts_as_a_checkpoint(run: Path, tmp_path: Path) -> None:
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


def test_unknown_export_formats_and_a_missing_exporter_are_errors(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, words in (
        ("model.bin", r"model.bin.: must end in \.pt, \.pt2, \.onnx"),
        ("model.onnx", "ONNX needs onnx and onnxscript. Run: pip install"),
    ):
        with pytest.raises(wt.UsageError, match=words):
            wt.export(run / "checkpoints" / "best.pt", tmp_path / name)


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
    """An image field that takes long to decode."""

    names, example = ("png",), wt.image(size=16).example

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        time.sleep(0.02)
        return wt.image(size=16).read(name, data, out, draws)


def linear(outputs: int) -> torch.nn.Module:
    """A model that takes no time."""
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
        ({"model": ".mine:net"}, "Use module:function"),
        ({"model": "broken_syntax:net"}, "broken_syntax:net: SyntaxError"),
        ({"model": "alexnet"}, r"not take a batch of uint8\[3, 16, 16\].*image_size=224"),
        ({"model": "resnet19"}, "model='resnet19'.*resnet101"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"label": None}, "several labels: kind, shade, tags, light"),
        ({"label": "age"}, "no label 'age'"),
        ({"label": "shade:binary"}, "learned as 'binary': it is one of 3 classes. Use class"),
        ({"label": "light:ordinal"}, "Kinds are class, binary, multi, number"),
        ({"label": "light:class"}, "it is of kind number. Use number"),
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


@pytest.mark.parametrize(
    ("low", "high"),
    [(1e5, 2e5), (0, 1e-3), (1e10, 5e10), (5e4, 50001), (1e-15, 5e-15), (-0.3, 0.1), (5.0, 5.0)],
)
@pytest.mark.parametrize("share", [False, True])
def test_labels_of_axis_ticks_are_distinct_and_short(low: float, high: float, share: bool) -> None:
    line = charts.Line("loss", [low, high], [low, high])
    drawn = charts.lines([line], across="step", share=share)
    marks = re.findall(r'text-anchor="(end|middle)">([^<]+)<', drawn)
    for side in ("end", "middle"):
        texts = [text for place, text in marks if place == side and text != "step"]
        values = [float(text.rstrip("%")) for text in texts]
        assert len(texts) >= 3
        assert values == sorted(set(values), reverse=values[0] > values[-1])
        assert max(map(len, texts)) <= 10
