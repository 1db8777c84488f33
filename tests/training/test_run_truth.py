"""What a run says of itself is true: best epoch, learning rate, small numbers, NaN, checkpoints."""

from __future__ import annotations

import errno
import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import wdstrain as wt
from tests.support.outcomes import result_or_refusal
from tests.support.small_runs import (
    KINDS,
    SMALL,
    Bias,
    Constant,
    Linear,
    Lines,
    last,
    numbers,
    of_kind,
    rows_of,
    saved,
    small_image,
    two_classes,
)
from wdstrain.cli import main


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28 images of two classes for training, and 12 for validation."""
    out = tmp_path_factory.mktemp("small") / "set"
    return two_classes(out, split={"train": 0.6, "val": 0.4}, seed=1)


STILL: dict[str, Any] = {**SMALL, "model": Constant, "lr": 1e-12, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("kind", "words"),
    [("class", "accuracy .*highest"), ("multi", "mAP .*highest"), ("number", "MSE .*lowest")],
)
def test_the_metric_of_a_label_chooses_the_best_epoch(
    tmp_path: Path, kind: str, words: str
) -> None:
    shards, lines = of_kind(tmp_path / "set", kind), Lines()
    wt.train(shards, tmp_path / "run", val=shards, model=Linear, progress=lines, **SMALL)
    assert re.search(f"best.pt is of epoch 1: {words} of all", lines.text)


def fallen(out: Path, *names: str, **options: Any) -> tuple[wt.TrainResult, str]:
    """Return a run whose error of labels falls in each of four epochs, and its log."""
    labels = [wt.Label(own, "number", "json", own) for own in names]
    samples = ({"png": small_image(i), "json": dict.fromkeys(names, i % 2)} for i in range(16))
    wt.pack(samples, out / "set", labels=labels)
    given = {**STILL, "epochs": 4, "callbacks": [Bias((6.0, 3.0, 1.0, 0.0))], **options}
    given |= {"label": ",".join(names), "progress": (lines := Lines()), "val": out / "set"}
    return wt.train(out / "set", out / "run", **given), lines.text


@pytest.mark.parametrize("name", ["rmse", "y/rmse", "r2"])
def test_an_own_metric_chooses_the_best_epoch_and_the_rate_by_its_direction(
    tmp_path: Path, name: str
) -> None:
    root, r2 = torchmetrics.MeanSquaredError(squared=False), torchmetrics.R2Score()
    options = {"metrics": {name: r2 if name == "r2" else root}, "monitor": name}
    options |= {"patience": 1, "schedule": "plateau", "plateau_epochs": 1}
    run, text = fallen(tmp_path, *("yx" if "/" in name else "y"), **options)
    assert [line["lr"] for line in run.epochs] == [1e-12] * 4
    assert run.best == run.epochs[3]["val"]
    assert "best.pt is of epoch 4" in text
    assert ("highest" if name == "r2" else "lowest") in text


class Odd(torchmetrics.MeanSquaredError):
    """A metric that is infinite, and does not say whether more of it is better."""

    higher_is_better = None  # type: ignore[assignment]

    def compute(self) -> torch.Tensor:
        return torch.tensor(torch.inf)


def test_an_unknown_metric_and_a_metric_without_a_direction_are_not_monitored(
    tmp_path: Path,
) -> None:
    with pytest.raises(wt.UsageError, match="odd.*(min|max)"):
        fallen(tmp_path / "odd", "y", metrics={"odd": Odd()}, monitor="odd")
    with pytest.raises(wt.UsageError, match="monitor='f2' is not among .*mse"):
        fallen(tmp_path, "y", monitor="f2")


@pytest.mark.parametrize(("min_delta", "epochs"), [(0.0, 4), (100.0, 3)])
def test_improvements_below_min_delta_count_for_the_best_epoch_and_not_for_patience(
    tmp_path: Path, min_delta: float, epochs: int
) -> None:
    run, text = fallen(tmp_path, "y", min_delta=min_delta, patience=2)
    assert len(run.epochs) == epochs
    assert run.best is not None
    assert run.best["mse"] == min(line["val"]["mse"] for line in run.epochs)
    for shown in (text, (tmp_path / "run" / "report.html").read_text()):
        assert f"best.pt is of epoch {epochs}" in shown


@pytest.mark.parametrize("more", [{}, {"backbone_lr": 0.1, "freeze": "backbone"}], ids=str)
def test_the_learning_rate_in_all_logs_is_the_one_of_the_run(
    shards: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    out = tmp_path / "run"
    run = wt.train(shards, out, lr=0.01, **{**SMALL, **more})
    assert run.epochs[0]["lr"] == pytest.approx(0.01)
    for name in ("metrics.jsonl", "steps.jsonl"):
        for line in (out / name).read_text().splitlines():
            assert json.loads(line)["lr"] == pytest.approx(0.01), name
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert {round(event.value, 6) for event in events.Scalars("step/lr")} == {0.01}


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e9])
def test_errors_are_printed_with_a_few_significant_digits(
    tmp_path: Path, scale: float, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = numbers(tmp_path / "set", [scale * (1 + i % 3) for i in range(16)])
    lines, out = Lines(), tmp_path / "run"
    run = wt.train(shards, out, val=shards, **{**STILL, "progress": lines, "epochs": 2})
    words = ["evaluate", str(last(out)), str(shards), "--device", "cpu"]
    assert main([*words, "--model", "tests.support.small_runs:Constant"]) == 0
    removed = "(?s)<(style|svg).*?</\\1>|<b>2 of 2</b>|<[^>]*>"
    page = re.sub(removed, " ", (out / "report.html").read_text())
    for text in (lines.text, capsys.readouterr().out, page):
        values = re.findall(r"MSE (\d+(?:\.\d+)?(?:e[+-]?\d+)?)", " ".join(text.split()))
        assert values
        assert max(map(len, values)) <= 12
        assert [float(value) for value in values] == pytest.approx(
            [run.val["mse"]] * len(values), rel=0.02, abs=0
        )


class Broken(torch.nn.Module):
    """A linear model whose first output of a batch is NaN outside of training."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(192, outputs)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(image.flatten(1))
        is_first = torch.arange(len(outputs))[:, None] == 0
        return outputs if self.training else torch.where(is_first, torch.nan, outputs)


def is_named(outcome: Any) -> bool:
    """Return whether an error of the package, or a loss, says NaN."""
    reason = outcome if isinstance(outcome, str) else f"loss {outcome['loss']}"
    return re.search("NaN|nan|not finite", reason) is not None


def json_of(text: str) -> Any:
    """Return the value of JSON that every program reads."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_of_a_model_is_a_metric_or_an_error_and_no_class_and_no_json(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, out = of_kind(tmp_path / "set", kind), tmp_path / "run"
    wt.train(shards, out, model=Broken, **SMALL)
    options = {**SMALL, "val": shards, "model": Broken}
    assert is_named(result_or_refusal(lambda: wt.train(shards, tmp_path / "val", **options).val))
    assert is_named(result_or_refusal(lambda: wt.evaluate(last(out), shards, model=Broken)[1]))
    wt.predict(last(out), shards, tmp_path / "p.csv", model=Broken)
    for row in rows_of(tmp_path / "p.csv")[::8]:
        assert row["error"] or row["y"] in ("", "nan")
    words = ["--json", "--device", "cpu", "--model", "tests.training.test_run_truth:Broken"]
    capsys.readouterr()
    main(["evaluate", str(last(out)), str(shards), *words])
    json_of(capsys.readouterr().out)


def test_metrics_are_json_that_every_program_reads(tmp_path: Path) -> None:
    fallen(tmp_path, "y", metrics={"odd": Odd()})
    assert list(map(json_of, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))


def test_a_selection_gives_the_classes_to_learn_and_their_weights(tmp_path: Path) -> None:
    tens, samples = tmp_path / "ten", ({"png": small_image(i), "cls": i % 10} for i in range(60))
    wt.pack(samples, tens, classes=list("abcdefghij"), split={"train": 0.65, "val": 0.35})
    options = {**SMALL, "where": "label in ['a', 'b', 'c']", "class_weights": "balanced"}
    run = wt.train(tens, tmp_path / "run", classes="a,b,c", model=Linear, **options)
    assert len(saved(tmp_path / "run")["1.bias"]) == 3
    run = wt.train(tens, tmp_path / "all", **options)
    assert np.isfinite(run.val["loss"])
    assert run.epochs[0]["samples"] + run.epochs[0]["left_out"] <= 3 * 6
    with pytest.raises(wt.UsageError, match="balance='label' both correct for rare classes"):
        wt.train(tens, tmp_path / "other", balance="label", **options)


def test_rate_and_patience_may_change_when_a_run_is_resumed(shards: Path, tmp_path: Path) -> None:
    options = {**SMALL, "model": Linear}
    first = wt.train(
        shards, tmp_path / "run", **{**options, "lr": 1e-9, "patience": 1, "epochs": 9}
    )
    assert len(first.epochs) < 9
    assert "did not improve" in first.stop_reason
    again = {**options, "lr": 0.01, "patience": 0, "epochs": 5, "resume": True}
    resumed = wt.train(shards, tmp_path / "run", **again)
    assert resumed.stop_reason == "all 5 epochs are done"
    count = len(first.epochs)
    assert [line["lr"] for line in resumed.epochs] == [1e-9] * count + [0.01] * (5 - count)


def flip_bits(path: Path, member: str) -> None:
    """Change ten bytes of the largest member of a checkpoint whose name has this part."""
    with zipfile.ZipFile(path) as file:
        members = [entry for entry in file.infolist() if member in entry.filename]
        entry = max(members, key=lambda one: one.file_size)
    data = bytearray(path.read_bytes())
    lengths = data[entry.header_offset + 26 : entry.header_offset + 30]
    begin = entry.header_offset + 30 + sum(np.frombuffer(lengths, "<u2").tolist())
    for place in range(begin + 3, begin + 43, 4):  # the highest bytes of float32
        data[place] ^= 2
    path.write_bytes(data)


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export", "resume", "weights"])
def test_a_checkpoint_with_changed_bytes_is_refused_by_name(
    shards: Path, tmp_path: Path, verb: str
) -> None:
    out, lines, val = tmp_path / "run", Lines(), f"{shards}/val-*.tar"
    path, again = last(out), {**SMALL, "model": Linear, "epochs": 2, "progress": lines}
    calls: dict[str, Callable[[], Any]] = {
        "evaluate": lambda: wt.evaluate(path, val, model=Linear),
        "predict": lambda: wt.predict(path, val, tmp_path / "p.csv", model=Linear),
        "export": lambda: wt.export(path, tmp_path / "m.pt", model=Linear),
        "resume": lambda: wt.train(shards, out, resume=True, **again),
        "weights": lambda: wt.train(shards, tmp_path / "new", weights=str(path), **again),
    }
    for member in ("/data/", "data.pkl"):  # weights and names
        wt.train(shards, out, model=Linear, overwrite=True, **SMALL)
        for name in {name.resolve() for name in path.parent.iterdir()}:
            flip_bits(name, member)
        refusal = result_or_refusal(calls[verb])
        said = (refusal if isinstance(refusal, str) else "") + lines.text  # which may start anew
        assert re.search(r"(step-\d+|last)\.pt", said)


class Switch(wt.Callback):
    """Callback that makes a fault begin at the end of an epoch, and end an epoch later."""

    def __init__(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        self._acts = {0: begin, 1: end}

    def on_epoch_end(self, trainer: Any, metrics: dict[str, Any]) -> None:
        self._acts.get(metrics["epoch"], lambda: None)()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_and_the_report_go_on_after_a_full_disk(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of events cannot be opened, and the report not written, in the second epoch."""
    out, is_full, original = tmp_path / "run", list[bool](), io.open
    report, lines = out / "report.html", Lines()

    def opened(path: Any, *arguments: Any, **options: Any) -> Any:
        if is_full and "tfevents" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, *arguments, **options)

    def begin() -> None:
        is_full.append(True)
        report.unlink()
        report.mkdir()

    def end() -> None:
        is_full.clear()
        report.rmdir()

    options = {**SMALL, "model": Linear, "epochs": 5, "progress": lines}
    monkeypatch.setattr(io, "open", opened)
    wt.train(shards, out, callbacks=[Switch(begin, end)], **options)
    assert "No space left" in lines.text
    assert re.search(r"report.html cannot be written: Is a directory\..* Training goes", lines.text)
    steps = set[int]()
    for path in (out / "tensorboard").iterdir():  # a directory is read in the order of its names
        events = EventAccumulator(str(path)).Reload()
        if "val/accuracy" in events.Tags()["scalars"]:
            steps |= {event.step for event in events.Scalars("val/accuracy")}
    assert max(steps) == 5 * 3
    assert report.is_file()
