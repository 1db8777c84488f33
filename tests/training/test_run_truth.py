"""What a run says of itself is true: best epoch, learning rate, small numbers, NaN, checkpoints."""

from __future__ import annotations

import csv
import errno
import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
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


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 images with the number 0 or 1 as label y."""
    return numbers(tmp_path_factory.mktemp("numbers") / "set", [i % 2 for i in range(16)])


STILL: dict[str, Any] = {**SMALL, "model": Constant, "lr": 1e-12, "weight_decay": 0.0}

# --- the best epoch -------------------------------------------------------------------------------

FALLING = (6.0, 3.0, 1.0, 0.0)  # outputs whose error falls in each epoch


def fallen(halves: Path, out: Path, **options: Any) -> wt.TrainResult:
    """Return a run whose error falls in each of four epochs."""
    given = {**STILL, "epochs": 4, "callbacks": [Bias(FALLING)], **options}
    return wt.train(halves, out, val=halves, **given)


def rmse() -> dict[str, Any]:
    return {"metrics": {"rmse": torchmetrics.MeanSquaredError(squared=False)}, "monitor": "rmse"}


@pytest.mark.parametrize(
    ("name", "direction"), [("rmse", "lowest"), ("y/rmse", "lowest"), ("r2", "highest")]
)
def test_the_best_epoch_by_an_own_metric_follows_its_direction(
    tmp_path: Path, name: str, direction: str
) -> None:
    """Also for one of several labels."""
    names = ["y", "x"] if "/" in name else ["y"]
    labels = [wt.Label(own, "number", "json", own) for own in names]
    samples = ({"png": small_image(i), "json": dict.fromkeys(names, i % 2)} for i in range(16))
    wt.pack(samples, tmp_path / "set", labels=labels)
    metric = torchmetrics.R2Score() if name == "r2" else rmse()["metrics"]["rmse"]
    options = {"label": ",".join(names), "metrics": {name: metric}, "monitor": name}
    run = fallen(tmp_path / "set", tmp_path / "run", progress=(lines := Lines()), **options)
    seen = [line["val"][name] for line in run.epochs]
    assert run.best is not None
    assert run.best[name] == {"lowest": min, "highest": max}[direction](seen) == seen[-1]
    assert "best.pt is of epoch 4" in lines.text
    assert direction in lines.text


@pytest.mark.parametrize(
    "option", [{"patience": 1}, {"schedule": "plateau", "plateau_epochs": 1}], ids=str
)
def test_a_falling_error_improves(halves: Path, tmp_path: Path, option: dict[str, Any]) -> None:
    run = fallen(halves, tmp_path / "run", **rmse(), **option)
    assert [line["lr"] for line in run.epochs] == [1e-12] * 4


class Undirected(torchmetrics.MeanSquaredError):
    """A metric that does not say whether more of it is better."""

    higher_is_better = None  # type: ignore[assignment]


def test_a_metric_without_a_direction_is_not_monitored(halves: Path, tmp_path: Path) -> None:
    with pytest.raises(wt.UsageError, match="odd.*(min|max)"):
        fallen(halves, tmp_path / "run", metrics={"odd": Undirected()}, monitor="odd")


@pytest.mark.parametrize(("min_delta", "epochs"), [(0.0, 4), (100.0, 3)])
def test_improvements_below_min_delta_count_for_the_best_epoch_and_not_for_patience(
    halves: Path, tmp_path: Path, min_delta: float, epochs: int
) -> None:
    lines, out = Lines(), tmp_path / "run"
    run = fallen(halves, out, min_delta=min_delta, patience=2, progress=lines)
    assert len(run.epochs) == epochs
    assert run.best is not None
    assert run.best["mse"] == min(line["val"]["mse"] for line in run.epochs)
    for text in (lines.text, (out / "report.html").read_text()):
        assert f"best.pt is of epoch {epochs}" in text


# --- the learning rate ----------------------------------------------------------------------------


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


# --- numbers in words -----------------------------------------------------------------------------

FIGURE = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-12, 1e9])
def test_errors_are_printed_with_a_few_significant_digits(
    tmp_path: Path, scale: float, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = numbers(tmp_path / "set", [scale * (1 + i % 3) for i in range(16)])
    lines, out = Lines(), tmp_path / "run"
    run = wt.train(shards, out, val=shards, **{**STILL, "progress": lines, "epochs": 2})
    mse = run.val["mse"]
    words = ["evaluate", str(last(out)), str(shards), "--device", "cpu"]
    assert main([*words, "--model", "tests.support.small_runs:Constant"]) == 0
    page = re.sub(
        "(?s)<(style|svg).*?</\\1>|<b>2 of 2</b>|<[^>]*>", " ", (out / "report.html").read_text()
    )
    for text in (lines.text, capsys.readouterr().out, page):
        values = re.findall(rf"MSE {FIGURE}", " ".join(text.split()))
        assert values
        for value in values:
            assert float(value) == pytest.approx(mse, rel=0.02, abs=0)
            assert len(value) <= 12


# --- NaN ------------------------------------------------------------------------------------------


class Broken(torch.nn.Module):
    """A linear model whose first output of a batch is NaN outside of training."""

    def __init__(self, outputs: int, value: float = torch.nan) -> None:
        super().__init__()
        self.layer, self.value = torch.nn.Linear(192, outputs), value

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(image.flatten(1))
        if self.training:
            return outputs
        is_first = torch.arange(len(outputs), device=outputs.device)[:, None] == 0
        return torch.where(is_first, self.value, outputs)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that returns a set of a kind, and a run of `Broken` without validation."""
    folder = tmp_path_factory.mktemp("broken")

    def find(kind: str) -> tuple[Path, Path]:
        shards, out = of_kind(folder / kind, kind), folder / f"{kind} run"
        if not out.exists():
            wt.train(shards, out, model=Broken, **SMALL)
        return shards, out

    return find


def is_named(call: Callable[[], Any]) -> bool:
    """Return whether a call ends with an error of the package, or returns a loss, that says NaN."""
    outcome = result_or_refusal(call)
    reason = outcome if isinstance(outcome, str) else f"loss {outcome['loss']}"
    return re.search("NaN|nan|not finite", reason) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_validation_is_an_error_of_the_package_or_a_metric(
    broken: Callable[[str], tuple[Path, Path]], tmp_path: Path, kind: str
) -> None:
    shards, out = broken(kind)
    options = {**SMALL, "val": shards, "model": Broken}
    assert is_named(lambda: wt.train(shards, tmp_path / "run", **options).val)
    assert is_named(lambda: wt.evaluate(last(out), shards, model=Broken)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_a_prediction_is_not_written_as_a_class(
    broken: Callable[[str], tuple[Path, Path]], tmp_path: Path, kind: str
) -> None:
    shards, out = broken(kind)
    wt.predict(last(out), shards, tmp_path / "p.csv", model=Broken)
    for row in list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))[::8]:
        assert row["error"] or row["y"] in ("", "nan")


class Odd(torchmetrics.MeanSquaredError):
    """A metric that is no finite number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.value)


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize(
    ("model", "metrics"),
    [(Constant, {"odd": torch.nan}), (Constant, {"odd": torch.inf}), (Broken, {})],
    ids=["NaN", "infinity", "NaN of the model"],
)
def test_metrics_are_json_that_every_program_reads(
    halves: Path, tmp_path: Path, model: Any, metrics: dict[str, float]
) -> None:
    out = tmp_path / "run"
    given = {name: Odd(value) for name, value in metrics.items()}
    wt.train(halves, out, val=halves, model=model, metrics=given, **SMALL)
    for line in (out / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=no_constant)


def test_the_output_of_evaluate_is_json_that_every_program_reads(
    broken: Callable[[str], tuple[Path, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    shards, out = broken("number")
    words = ["--json", "--device", "cpu", "--model", "tests.training.test_run_truth:Broken"]
    main(["evaluate", str(last(out)), str(shards), *words])
    json.loads(capsys.readouterr().out, parse_constant=no_constant)


def test_a_condition_on_the_label_chooses_the_classes_to_learn(tens: Path, tmp_path: Path) -> None:
    options = {**SMALL, "where": "label in ['a', 'b', 'c']", "model": Linear}
    wt.train(tens, tmp_path / "run", classes="a,b,c", **options)
    assert len(saved(tmp_path / "run")["1.bias"]) == 3


# --- selections -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images for training and 20 for validation, of ten classes."""
    out = tmp_path_factory.mktemp("ten") / "set"
    samples = (
        {"__key__": f"k{i:02d}", "png": small_image(i), "cls": i % 10, "json": {"n": i}}
        for i in range(60)
    )
    wt.pack(samples, out, classes=list("abcdefghij"), split={"train": 0.65, "val": 0.35})
    return out


def test_weights_of_classes_come_from_the_selected_samples(tens: Path, tmp_path: Path) -> None:
    options = {**SMALL, "where": "label in ['a', 'b', 'c']", "class_weights": "balanced"}
    run = wt.train(tens, tmp_path / "run", **options)
    assert np.isfinite(run.val["loss"])
    assert run.epochs[0]["samples"] + run.epochs[0]["left_out"] <= 3 * 6
    with pytest.raises(wt.UsageError, match="balance='label' both correct for rare classes"):
        wt.train(tens, tmp_path / "other", balance="label", **options)


# --- a resume with other options ------------------------------------------------------------------


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


# --- files of a run -------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def undamaged(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undamaged") / "run"
    wt.train(shards, out, model=Linear, **SMALL)
    return out


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export", "resume", "weights"])
@pytest.mark.parametrize("member", ["/data/", "data.pkl"], ids=["weights", "names"])
def test_a_checkpoint_with_changed_bytes_is_refused_by_name(
    shards: Path, undamaged: Path, tmp_path: Path, member: str, verb: str
) -> None:
    out, lines = tmp_path / "run", Lines()
    shutil.copytree(undamaged, out, symlinks=True)
    path = last(out)
    for name in path.parent.iterdir():  # a copy has no links
        flip_bits(name, member)
    val, again = f"{shards}/val-*.tar", {**SMALL, "model": Linear, "epochs": 2, "progress": lines}
    calls: dict[str, Callable[[], Any]] = {
        "evaluate": lambda: wt.evaluate(path, val, model=Linear),
        "predict": lambda: wt.predict(path, val, tmp_path / "p.csv", model=Linear),
        "export": lambda: wt.export(path, tmp_path / "m.pt", model=Linear),
        "resume": lambda: wt.train(shards, out, resume=True, **again),
        "weights": lambda: wt.train(shards, tmp_path / "new", weights=str(path), **again),
    }
    refusal = result_or_refusal(calls[verb])
    said = (refusal if isinstance(refusal, str) else "") + lines.text  # which may start anew
    assert re.search(r"(step-\d+|last)\.pt", said)


class Switch(wt.Callback):
    """Callback that makes a fault begin at the end of an epoch, and end an epoch later."""

    def __init__(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        self._acts = {0: begin, 1: end}

    def on_epoch_end(self, trainer: Any, metrics: dict[str, Any]) -> None:
        self._acts.get(metrics["epoch"], lambda: None)()


def test_a_report_is_written_again_when_it_can_be(shards: Path, tmp_path: Path) -> None:
    report, lines = tmp_path / "run" / "report.html", Lines()

    def block() -> None:
        report.unlink()
        report.mkdir()

    options = {**SMALL, "epochs": 3, "progress": lines, "callbacks": [Switch(block, report.rmdir)]}
    wt.train(shards, tmp_path / "run", **options)
    assert re.search(r"report.html cannot be written: Is a directory\..* Training goes", lines.text)
    assert report.is_file()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_events_and_the_report_go_on_after_a_full_disk(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of events cannot be opened in the second epoch."""
    out, is_full, original = tmp_path / "run", list[bool](), io.open

    def opened(path: Any, *arguments: Any, **options: Any) -> Any:
        if is_full and "tfevents" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, *arguments, **options)

    def end() -> None:
        is_full.clear()
        (out / "report.html").unlink()

    lines = Lines()
    options = {**SMALL, "model": Linear, "epochs": 5, "progress": lines}
    callbacks = [Switch(lambda: is_full.append(True), end)]
    monkeypatch.setattr(io, "open", opened)
    wt.train(shards, out, callbacks=callbacks, **options)
    assert "No space left" in lines.text
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert events.Scalars("val/accuracy")[-1].step == 5 * 3
    assert (out / "report.html").exists()


def test_a_run_goes_on_after_a_full_disk(shards: Path, small_disk: Path) -> None:
    """The disk is full in the second epoch, for checkpoints too."""
    out, filler = small_disk / "run", small_disk / "filler"

    def fill() -> None:
        with open(filler, "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def end() -> None:
        filler.unlink()
        (out / "report.html").unlink()

    lines = Lines()
    options = {**SMALL, "model": Linear, "epochs": 4, "keep": 1, "progress": lines}
    run = wt.train(shards, out, callbacks=[Switch(fill, end)], **options)
    assert "No space left" in lines.text
    assert [line["epoch"] for line in run.epochs] == [0, 1, 2, 3]
    assert (out / "report.html").exists()
    assert wt.evaluate(last(out), f"{shards}/val-*.tar", model=Linear)[1]["loss"] == run.val["loss"]
