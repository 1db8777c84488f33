"""Results of a run: metrics, predictions, exports, events, report, bottleneck."""

from __future__ import annotations

import csv
import json
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import wdstrain as wt
from tests.conftest import write_tar
from tests.support.servers import serving
from wdstrain.cli import main
from wdstrain.loader.stats import EpochStats
from wdstrain.report import charts, pages
from wdstrain.training.run_log import verdict
from wdstrain.training.train import train
from wdstrain.training.weights import LoadedCheckpoint, read_checkpoint

SAYS = ["kind", "shade", "tags", "light"]
OPTIONS: dict[str, Any] = {
    "label": ",".join(SAYS),
    "epochs": 8,
    "batch_size": 16,
    "image_size": 16,
    "lr": 0.01,
}


@pytest.fixture(scope="module")
def bright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of images with four labels: 2 classes, 3 classes, several of 3 tags, a number."""
    folder = tmp_path_factory.mktemp("bright")
    rng = np.random.default_rng(0)
    (folder / "img").mkdir()
    rows = []
    for i in range(200):
        light = float(rng.random())
        pixels = np.clip(rng.normal(40 + 170 * light, 10, (16, 16, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "img" / f"{i:03d}.png")
        tags = [
            name
            for name, edge in (("dim", light < 0.7), ("lit", light > 0.3), ("white", light > 0.8))
            if edge
        ]
        shade = ["dark", "<grey>", "light"][int(light * 3)]
        rows.append(
            {
                "file": f"img/{i:03d}.png",
                "kind": "yes" if light > 0.5 else "no",
                "shade": shade,
                "tags": tags,
                "light": light,
            }
        )
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["convert", "table", str(folder / "log.jsonl"), str(folder / "out"), "--image", "file"]
    assert (
        main([*words, "--label", "kind,shade,tags:multi,light", "--split", "train=0.8,val=0.2"])
        == 0
    )
    return folder


@pytest.fixture(scope="module")
def run(bright: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "four labels"
    train(str(bright / "out"), out, checkpoint_every=4, **OPTIONS)
    return out


def test_several_labels_are_learned_together_with_a_head_each(run: Path, bright: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = lines[-1]["val"]
    assert last["kind/accuracy"] > 0.8
    assert last["kind/auroc"] > 0.9
    assert last["shade/accuracy"] > 0.6
    assert last["tags/accuracy"] > 0.7
    assert last["light/mse"] < 0.5 * last["light/mse_of_mean"]
    assert {
        "light/r2",
        "light/mae",
        "tags/f1",
        "tags/exact",
        "kind/precision",
        "shade/balanced_accuracy",
    } <= set(last)
    assert lines[-1]["loss"] < lines[0]["loss"]
    state = read_checkpoint(str(run / "checkpoints" / "best.pt"))
    assert [head["kind"] for head in state["task"]] == [
        "binary",
        "class",
        "multi",
        "number",
    ]
    numbers = wt.open(f"{bright}/out/train-*.tar").table["light"].to_numpy()
    assert state["task"][3]["mean"] == pytest.approx(numbers.mean())


def test_predictions_of_shards_contain_prediction_and_true_label(
    bright: Path, run: Path, tmp_path: Path
) -> None:
    table = tmp_path / "predictions.csv"
    best, val = str(run / "checkpoints" / "best.pt"), f"{bright}/out/val-*.tar"
    assert main(["predict", best, val, "-o", str(table), "--probabilities"]) == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    index = wt.Loader(val, batch_size=1).index
    assert [row["key"] for row in rows] == [index.key(i) for i in range(len(index))]
    metrics = wt.evaluate(best, val)[1]
    for name in ("kind", "shade"):
        assert np.mean([row[name] == row[f"{name}_true"] for row in rows]) == pytest.approx(
            metrics[f"{name}/accuracy"]
        )
    assert np.mean(
        [(float(row["light"]) - float(row["light_true"])) ** 2 for row in rows]
    ) == pytest.approx(metrics["light/mse"], rel=1e-3)
    assert all(float(row["kind_probability"]) >= 0.5 for row in rows)
    assert all(
        sum(float(row[f"shade_{name}"]) for name in ("dark", "_grey_", "light"))
        == pytest.approx(1, abs=1e-4)
        for row in rows
    )
    predicted = [
        {name for name in ("dim", "lit", "white") if float(row[f"tags_{name}"]) > 0.5}
        for row in rows
    ]
    assert predicted == [set(filter(None, row["tags"].split("|"))) for row in rows]


def test_predictions_of_a_folder_have_a_row_for_every_image(
    bright: Path, run: Path, tmp_path: Path, capsys: Any
) -> None:
    new = tmp_path / "new"
    (new / "sub").mkdir(parents=True)
    Image.new("RGB", (40, 30), (250, 250, 250)).save(new / "white, large.png")
    Image.new("RGB", (16, 16), (20, 20, 20)).save(new / "sub" / "black.jpg")
    (new / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    words = [
        "predict",
        str(run / "checkpoints" / "last.pt"),
        str(new),
        "-o",
        str(tmp_path / "p.csv"),
        "--batch-size",
        "2",
    ]
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "rows": 3,
        "bad": 1,
        "out": str(tmp_path / "p.csv"),
    }
    rows = {
        row["key"]: row for row in csv.DictReader((tmp_path / "p.csv").read_text().splitlines())
    }
    assert list(rows) == ["broken.jpg", "sub/black.jpg", "white, large.png"]
    assert rows["broken.jpg"]["error"]
    assert rows["broken.jpg"]["kind"] == ""
    assert rows["sub/black.jpg"]["kind"] == "no"
    assert rows["white, large.png"]["kind"] == "yes"
    assert "kind_true" not in rows["sub/black.jpg"]
    # one image file
    words[2] = str(new / "sub" / "black.jpg")
    assert main(words) == 0
    (row,) = csv.DictReader((tmp_path / "p.csv").read_text().splitlines())
    assert (row["key"], row["kind"]) == ("black.jpg", "no")


def test_files_that_are_not_images_are_skipped_and_counted(
    run: Path, tmp_path: Path, capsys: Any
) -> None:
    folder, table = tmp_path / "new", tmp_path / "p.csv"
    folder.mkdir()
    for name in ("notes.txt", "more.txt", "phone.HEIC"):
        (folder / name).write_bytes(b"...")
    words = ["predict", str(run / "checkpoints" / "last.pt"), str(folder), "-o", str(table)]
    assert main(words) == 1
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error == f"error: {folder} holds no images (found: 1 x *.heic, 2 x *.txt)."
    assert hint.startswith("hint: Check the path. Images end in jpg, jpeg, png, ")
    assert not table.exists()
    Image.new("RGB", (16, 16)).save(folder / "black.png")
    assert main(words) == 0
    passed_over = "files passed over: 3 (1 x *.heic, 2 x *.txt). Images end in jpg, jpeg, png, "
    assert capsys.readouterr().err.count(passed_over) == 1
    assert [row["key"] for row in csv.DictReader(table.read_text().splitlines())] == ["black.png"]


def test_substitutes_of_bad_samples_are_not_scored(bright: Path, run: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (bright / "log.jsonl").read_text().splitlines()]
    labels = wt.Loader(f"{bright}/out/val-*.tar", batch_size=1).index.labels
    samples = [
        {
            "__key__": f"s{i}",
            "png": (bright / row["file"]).read_bytes(),
            "json": json.dumps(row).encode(),
        }
        for i, row in enumerate(rows[:120])
    ]
    wt.pack(samples[:5] + samples[6:], tmp_path / "good", labels=labels, shuffle=False)
    samples[5]["png"] = b"\x89PNG\r\n\x1a\n nothing"
    wt.pack(samples, tmp_path / "bad", labels=labels, shuffle=False)
    best = run / "checkpoints" / "best.pt"
    bad, good = (
        wt.evaluate(best, tmp_path / name, on_error="replace", batch_size=8)[1]
        for name in ("bad", "good")
    )
    assert (bad.pop("bad"), good.pop("bad")) == (1, 0)
    assert bad.pop("classes") == good.pop("classes")
    assert bad == pytest.approx(good)


def test_a_bad_sample_has_a_row_with_its_error(bright: Path, run: Path, tmp_path: Path) -> None:
    pictures = [(bright / "img" / f"{i:03d}.png").read_bytes() for i in range(7)]
    pictures[3] = b"\x89PNG nothing"
    write_tar(tmp_path / "x.tar", [(f"s{i}", {"png": data}) for i, data in enumerate(pictures)])
    done = wt.predict(
        run / "checkpoints" / "last.pt", tmp_path / "x.tar", tmp_path / "p.csv", batch_size=4
    )
    assert (done.rows, done.bad) == (7, 1)
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [row["key"] for row in rows] == [f"s{i}" for i in range(7)]
    assert [bool(row["error"]) for row in rows] == [i == 3 for i in range(7)]
    assert all(bool(row["kind"]) == (i != 3) for i, row in enumerate(rows))


@pytest.mark.parametrize("ending", ["pt", "pt2", "onnx"])
def test_an_exported_model_predicts_as_the_checkpoint(
    run: Path, tmp_path: Path, ending: str, bright: Path
) -> None:
    if ending == "onnx":
        pytest.importorskip(
            "onnxscript", reason="ONNX is not installed: pip install onnx onnxscript"
        )
        from onnx.reference import ReferenceEvaluator
    path = tmp_path / f"model.{ending}"
    assert main(["export", str(run / "checkpoints" / "best.pt"), str(path)]) == 0
    about = json.loads((tmp_path / f"model.{ending}.json").read_text())
    assert [
        (normalization["label"], normalization["columns"]) for normalization in about["outputs"]
    ] == [
        ("kind", 1),
        ("shade", 3),
        ("tags", 3),
        ("light", 1),
    ]
    opened = LoadedCheckpoint.of(run / "checkpoints" / "best.pt")
    pixels = (
        torch.from_numpy(np.array(Image.open(bright / "img" / "000.png")))
        .permute(2, 0, 1)[None]
        .repeat(3, 1, 1, 1)
    )
    mean, std = (
        torch.tensor(normalization).view(3, 1, 1) * 255
        for normalization in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    with torch.no_grad():
        expected = opened.model((pixels.float() - mean) / std)
        if ending == "pt":
            assert list(torch.load(path, weights_only=True)) == list(opened.model.state_dict())
            return
        number = opened.task.heads[3]
        expected[:, 7] = number.decided(expected[:, 7])  # it has the unit of the labels
        if ending == "onnx":
            outputs = ReferenceEvaluator(str(path)).run(None, {"image": pixels.float().numpy()})[0]
            np.testing.assert_allclose(outputs, expected.numpy(), rtol=1e-3, atol=1e-3)
            return
        loaded: Any = torch.export.load(path).module()
        torch.testing.assert_close(loaded(pixels.float()), expected.double(), rtol=1e-4, atol=1e-4)


def test_unknown_export_formats_and_a_missing_exporter_are_errors(
    run: Path, tmp_path: Path
) -> None:
    with pytest.raises(wt.UsageError, match=r"model.bin.: must end in \.pt, \.pt2, \.onnx"):
        wt.export(run / "checkpoints" / "best.pt", tmp_path / "model.bin")
    try:
        import onnx  # noqa: F401
    except ImportError:
        with pytest.raises(wt.UsageError, match="pip install onnx"):
            wt.export(run / "checkpoints" / "best.pt", tmp_path / "model.onnx")


class _Page(HTMLParser):
    """Parsed HTML page: open tags, fetched addresses, headings."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.titles: list[str] = []
        self.pictures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br", "line", "polyline", "polygon", "circle"):
            self.open.append(tag)
        self.pictures += tag == "img"
        self.fetched += [
            str(value)
            for name, value in attrs
            if name in ("src", "href") and not str(value).startswith("data:")
        ]

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


def test_the_report_is_complete_and_fetches_no_address(run: Path) -> None:
    text = (run / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert page.pictures == 24
    assert {
        "Loss",
        "kind: Accuracy",
        "light: MSE",
        "Seconds by stage",
        "Samples per second",
        "Learning rate",
        "kind: Confusion matrix",
        "kind: Calibration",
    } <= set(page.titles)
    for words in ("total time", "balanced accuracy", "Predicting always"):
        assert words in text
    assert {
        "Worst predictions",
        "Options",
    } <= set(page.titles)
    assert "&lt;grey&gt;" in text
    assert "<grey>" not in text
    assert "nan" not in re.sub(r"[\w/+]{60,}", "", text)


def test_tensorboard_events_equal_the_metrics(run: Path) -> None:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert {
        "train/loss",
        "val/loss",
        "val/kind/accuracy",
        "step/loss",
        "step/lr",
        "time/data",
        "time/compute",
    } <= set(events.Tags()["scalars"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [event.value for event in events.Scalars("val/loss")] == pytest.approx(
        [line["val"]["loss"] for line in lines]
    )
    assert [event.step for event in events.Scalars("val/loss")] == [9 * (i + 1) for i in range(8)]


def test_seconds_of_stages_add_up_to_the_epoch(run: Path) -> None:
    for line in (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()):
        parts = [
            line[f"{stage}_seconds"] for stage in ("data", "copy", "compute", "optimizer", "other")
        ]
        assert sum(parts) == pytest.approx(line["seconds"])
        assert line["stall"] == pytest.approx(parts[0] / line["seconds"])


# --- bottleneck ---


def linear(outputs: int) -> torch.nn.Module:
    """A model that takes no time."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, outputs))


class Slow:
    """An image field that takes long to decode."""

    def __init__(self) -> None:
        self._image = wt.image(size=16)

    @property
    def names(self) -> tuple[str, ...]:
        return self._image.names

    @property
    def example(self) -> wt.Example | None:
        return self._image.example

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        time.sleep(0.02)
        return self._image.read(name, data, out, draws)


def test_a_slow_field_is_named(bright: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "epochs": 1, "label": "kind"}
    done = train(
        f"{bright}/out/train-*.tar",
        tmp_path / "run",
        fields={"image": Slow()},
        model=linear,
        **options,
    )
    assert re.match(
        r"input bound: decode \d+%; the model waited for data \d+\.\d% of the time\.",
        done.epochs[0]["verdict"],
    )


def test_a_slow_disk_is_named(
    bright: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(bright / "out", delay=0.3) as server:
        done = train(
            server.url, tmp_path / "run", model=linear, **{**OPTIONS, "epochs": 1, "label": "kind"}
        )
    assert re.match(
        r"input bound: read \d+%, storage gives \d+ MB/s; the model waited",
        done.epochs[0]["verdict"],
    )


def test_a_short_epoch_has_a_bottleneck_only_if_it_mostly_waited() -> None:
    spent = {"data": 0.4, "copy": 0.0, "compute": 2.0, "optimizer": 0.6}
    stats = EpochStats(batches=44, samples=1400, decode_seconds=2.0)
    assert verdict(stats.report(), spent, "model").startswith("no bottleneck is named")
    slow = {**spent, "data": 9.0}
    stats.decode_seconds = 10.0
    assert verdict(stats.report(), slow, "model").startswith("input bound: decode")
    stats.batches = 400
    assert verdict(stats.report(), {**spent, "data": 0.1}, "model").startswith("model bound")


def test_the_verdict_estimates_the_gain_of_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    # 1000 samples in 10 s: a decoder takes 10 ms per sample, and the model alone could do 500 per
    # second.
    meter = EpochStats(
        batches=10,
        samples=1000,
        decoders=1,
        decode_seconds=10.0,
        wait_seconds=8.0,
        loop_seconds=2.0,
        read_seconds=1.0,
    )
    assert meter.verdict_of("GPU", 2.0) == (
        "input bound: decode 100%; the GPU waited for data 80.0% of the time. 4 more workers would give about 500 samples/s"
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2)))
    assert meter.verdict_of("GPU", 2.0).endswith("1 more worker would give about 200 samples/s")
    meter.decoders, meter.decode_seconds = 2, 20.0
    assert "All 2 cores are taken" in meter.verdict_of("GPU", 2.0)
    meter.wait_seconds, meter.loop_seconds = 0.1, 9.9
    assert (
        meter.verdict_of("GPU", 9.5)
        == "GPU bound: it was busy 95% of the time and waited for data 1.0%"
    )


# --- from Python ---


def test_a_user_defined_model_is_trained_and_scored_from_python(
    bright: Path, tmp_path: Path
) -> None:
    def tiny(outputs: int) -> torch.nn.Module:
        return linear(outputs)

    run = wt.train(
        bright / "out",
        tmp_path / "run",
        model=tiny,
        label="light",
        epochs=2,
        batch_size=16,
        image_size=16,
        lr=1e-3,
    )
    assert len(run.epochs) == 2
    assert run.val == run.epochs[-1]["val"]
    assert isinstance(run.model, torch.nn.Sequential)
    best = tmp_path / "run" / "checkpoints" / "last.pt"
    with pytest.raises(
        wt.UsageError, match="holds a model that a function made .*model='module:function'"
    ):
        wt.evaluate(best, f"{bright}/out/val-*.tar")
    _, metrics = wt.evaluate(best, f"{bright}/out/val-*.tar", model=tiny)
    assert metrics["mse"] == pytest.approx(run.val["mse"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nothing.at:all", "No module named 'nothing'"),
        ("tests.training.test_outcomes:nobody", "has no attribute 'nobody'"),
        (lambda outputs: 3, "returned int: must be a torch.nn.Module"),
        (lambda: None, "called with the number of outputs, and that failed"),
        (
            lambda outputs: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 7)),
            r"returns \[2, 7\] for two samples: must be \[2, 1\]",
        ),
    ],
)
def test_an_invalid_model_is_refused_before_any_write(
    bright: Path, tmp_path: Path, model: Any, words: str
) -> None:
    with pytest.raises(wt.UsageError, match=words):
        wt.train(bright / "out", tmp_path / "run", model=model, label="light", image_size=16)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options",
    [
        {
            "label": "shade",
            "mixup": 0.2,
            "cutmix": 1.0,
            "label_smoothing": 0.1,
            "class_weights": "balanced",
        },
        {
            "label": "kind",
            "mixup": 0.4,
            "optimizer": "sgd",
            "schedule": "step",
            "class_weights": "balanced",
        },
        {
            "label": "tags",
            "class_weights": "balanced",
            "label_smoothing": 0.1,
            "amp": "bf16",
            "channels_last": True,
        },
        {
            "label": "light",
            "augment": "rrc+flip+randaugment",
            "ema": 0.9,
            "clip_norm": 1.0,
            "accumulate": 3,
            "num_workers": 1,
        },
        {"label": "kind,tags", "deterministic": True, "clip_norm": 1.0},
        pytest.param(
            {"label": "kind", "amp": "fp16", "clip_norm": 1.0}, marks=pytest.mark.slow
        ),  # emulated on a CPU
    ],
)
def test_common_recipes_run_and_are_saved_with_the_run(
    bright: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    done = train(bright / "out", tmp_path / "run", **{**OPTIONS, "epochs": 1, **options})
    assert np.isfinite(done.val["loss"])
    saved = (tmp_path / "run" / "config.toml").read_text()
    for name, value in options.items():
        assert f"{name} = {json.dumps(value)}" in saved


def test_mixup_needs_one_class_per_sample(bright: Path, tmp_path: Path) -> None:
    for label in ("light", "kind,shade", "tags"):
        with pytest.raises(wt.UsageError, match="they mix the classes of one label"):
            train(bright / "out", tmp_path / "run", **{**OPTIONS, "label": label, "mixup": 0.2})
    assert not (tmp_path / "run").exists()


def test_training_stops_early_without_improvement_in_validation(
    bright: Path, tmp_path: Path
) -> None:
    done = train(
        bright / "out",
        tmp_path / "run",
        **{**OPTIONS, "label": "kind", "epochs": 30, "lr": 1e-9, "patience": 2},
    )
    assert len(done.epochs) < 30
    values = [line["val"]["accuracy"] for line in done.epochs]
    assert max(values[-2:]) <= max(values[:-2])


def test_flags_override_options_of_a_file(bright: Path, tmp_path: Path, capsys: Any) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'label = "kind"\nepochs = 7\nbatch_size = 16\nimage_size = 8\n[data]\ntrain = "{bright}/out"\n'
    )
    assert (
        main(
            [
                "train",
                "--config",
                str(recipe),
                "--out",
                str(tmp_path / "run"),
                "--epochs",
                "1",
                "--json",
            ]
        )
        == 0
    )
    assert len(json.loads(capsys.readouterr().out)["epochs"]) == 1
    assert main(["train", "--out", str(tmp_path / "other"), "--label", "kind"]) == 2
    assert "no shards to train on" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path / "other"), "--resume"]) == 2
    assert "other holds no run to continue" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_a_warning(
    bright: Path, tmp_path: Path, capsys: Any
) -> None:
    train(bright / "out", tmp_path / "run", **{**OPTIONS, "label": "kind", "epochs": 1})
    (tmp_path / "run" / "report.html").unlink()
    (tmp_path / "run" / "report.html").mkdir()
    done = train(
        bright / "out", tmp_path / "run", resume=True, **{**OPTIONS, "label": "kind", "epochs": 2}
    )
    assert len(done.epochs) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert re.search(r"report.html cannot be written: Is a directory\..* Training goes on\.", text)


def test_axis_ticks_are_round_numbers_that_span_the_data() -> None:
    for low, high in ((0.0, 1.0), (0.013, 0.027), (-3.0, 12345.0), (5.0, 5.0), (0.0, 0.0)):
        marks = charts.ticks(low, high)
        assert marks[0] <= low <= high <= marks[-1]
        assert 3 <= len(marks) <= 8


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (1e5, 2e5),
        (0, 1e-3),
        (2e-4, 9e-4),
        (1e10, 5e10),
        (5e4, 50001),
        (1e-15, 5e-15),
        (1.00001, 1.00005),
        (-0.3, 0.1),
    ],
)
@pytest.mark.parametrize("share", [False, True])
def test_axis_tick_labels_are_distinct(low: float, high: float, share: bool) -> None:
    drawn = charts.lines(
        [charts.Line("loss", [low, high], [low, high])], across="step", share=share
    )
    marks = re.findall(r'text-anchor="(end|middle)">([^<]+)<', drawn)
    for side in ("end", "middle"):
        texts = [text for place, text in marks if place == side and text != "step"]
        values = [float(text.rstrip("%")) for text in texts]
        assert len(texts) >= 3
        assert values == sorted(set(values), reverse=values[0] > values[-1])
        assert max(map(len, texts)) <= 10


def test_matrices_show_whole_counts() -> None:
    assert ": 1234567 of 1234569" in pages.matrix(["a", "b"], [[1234567, 2], [3, 4]])
