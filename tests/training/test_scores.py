"""Metrics equal those of scikit-learn, choose the best epoch, and are shown as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torchmetrics
from sklearn import metrics as reference

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
)
from wdstrain.cli import main

Array = npt.NDArray[Any]
CLASSES = ("a", "b", "c", "d")
QUIET: dict[str, Any] = {"epochs": 1, "batch_size": 16, "lr": 1e-30}  # the model does not change


class Same(torch.nn.Module):
    """A model whose outputs are its input arrays."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(outputs))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.scale


def packed(out: Path, outputs: Array, labels: list[wt.Label], values: dict[str, Any]) -> Path:
    """Write a set whose arrays are the outputs of `Same`. values: of each label."""
    rows = zip(outputs, *values.values(), strict=True)
    samples = (
        {
            "__key__": f"k{i:04d}",
            "x.npy": row.astype(np.float32),
            "json": dict(zip(values, own, strict=True)),
        }
        for i, (row, *own) in enumerate(rows)
    )
    wt.pack(samples, out, labels=labels)
    return out


def given(outputs: int) -> dict[str, Any]:
    field = wt.array("x.npy", shape=(outputs,), dtype="float32")
    return {"model": Same, "fields": {"image": field}}


def scored(
    folder: Path, outputs: Array, values: list[Any], kind: str, classes: tuple[str, ...] = CLASSES
) -> dict[str, float]:
    """Return the metrics of a model with these outputs, and write its predictions to p.csv."""
    label = wt.Label("y", kind, "json", "y", classes if kind != "number" else ())
    shards, checkpoint = folder / "set", last(folder / "run")
    packed(shards, outputs, [label], {"y": values})
    options = given(outputs.shape[1])
    wt.train(shards, folder / "run", **options, **QUIET)
    wt.predict(
        checkpoint, shards, folder / "p.csv", **options, probabilities=kind in ("class", "multi")
    )
    return wt.evaluate(checkpoint, shards, **options)[1]


@pytest.mark.parametrize("there", [("a", "c", "d"), ("c",)])
def test_classes_without_samples_are_in_no_mean(tmp_path: Path, there: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    true = np.array([there[i] for i in rng.integers(0, len(there), 90)])
    outputs = rng.normal(size=(90, 4)) + 1.5 * (true[:, None] == CLASSES)
    scores = scored(tmp_path, outputs, true.tolist(), "class")
    shares = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    accuracy = reference.accuracy_score(true, np.array(CLASSES)[outputs.argmax(1)])
    assert scores["accuracy"] == pytest.approx(accuracy)
    if len(there) == 1:
        assert "auroc" not in scores
        return
    each = [reference.roc_auc_score(true == name, shares[:, CLASSES.index(name)]) for name in there]
    assert scores["auroc"] == pytest.approx(np.mean(each), abs=0.001)


@pytest.mark.parametrize(("tags", "there"), [(4, 3), (4, 0), (1, 1)])
def test_tags_without_samples_are_excluded_from_means(
    tmp_path: Path, tags: int, there: int
) -> None:
    rng, names = np.random.default_rng(1), np.array(CLASSES[:tags])
    true = rng.random((90, tags)) < 0.3
    true[:, there:] = False
    outputs = rng.normal(size=(90, tags)) + 1.5 * true
    values = [names[row].tolist() for row in true]
    scores = scored(tmp_path, outputs, values, "multi", CLASSES[:tags])
    assert scores["accuracy"] == pytest.approx(((outputs > 0) == true).mean())
    if not there:
        assert not {"auroc", "f1"} & set(scores)
        return
    true, outputs = true[:, :there], outputs[:, :there]
    assert scores["auroc"] == pytest.approx(reference.roc_auc_score(true, outputs), abs=0.001)
    each = [reference.f1_score(true[:, i], outputs[:, i] > 0) for i in range(there)]
    assert scores["f1"] == pytest.approx(np.mean(each))


@pytest.mark.parametrize("scale", [0.05, 200.0])
@pytest.mark.parametrize("kind", ["binary", "class", "multi"])
def test_auroc_is_right_for_any_certainty(tmp_path: Path, kind: str, scale: float) -> None:
    """The outputs of a batch may all lie in 0 to 1, as probabilities do."""
    rng, is_binary = np.random.default_rng(2), kind == "binary"
    true = rng.integers(0, 2 if is_binary else 4, 120)
    is_there = np.eye(4, dtype=bool)[true]
    outputs = scale * (0.5 + 0.15 * (rng.normal(size=(120, 4)) + 1.5 * is_there))
    values: list[Any] = [[CLASSES[i]] if kind == "multi" else CLASSES[i] for i in true]
    if is_binary:
        outputs, is_there = outputs[:, 1:2], is_there[:, 1:2]
    classes = CLASSES[:2] if is_binary else CLASSES
    scores = scored(tmp_path, outputs, values, "class" if is_binary else kind, classes)
    if kind == "class":
        others = [np.log(np.exp(np.delete(outputs, i, 1)).sum(1)) for i in range(4)]
        outputs = outputs - np.stack(others, 1)
    areas = [reference.roc_auc_score(*both) for both in zip(is_there.T, outputs.T, strict=True)]
    assert scores["auroc"] == pytest.approx(np.mean(areas), abs=0.001)


def test_sets_with_the_same_keys_are_validated_together(tmp_path: Path) -> None:
    outputs, label = np.eye(4)[np.arange(30) % 4], wt.Label("y", "class", "json", "y", CLASSES)
    values = {"y": [CLASSES[i % 4] for i in range(30)]}
    train, *val = (packed(tmp_path / name, outputs, [label], values) for name in "abc")
    done = wt.train(train, tmp_path / "run", val=val, **given(4), **QUIET)
    assert done.val["samples"] == 60
    assert wt.evaluate(last(tmp_path / "run"), val, **given(4))[1]["samples"] == 60


@pytest.mark.parametrize("mean", [0.0, 1.7e9])
def test_numbers_far_from_0_are_scored_by_their_differences(tmp_path: Path, mean: float) -> None:
    """Times, ids and coordinates: near 1.7e9, float32 has steps of 128."""
    rng = np.random.default_rng(0)
    outputs = rng.normal(size=(64, 1)).astype(np.float32)
    values = [mean + round(float(output), 2) for output in 3 * outputs[:, 0] + rng.normal(size=64)]
    scores, rows = scored(tmp_path, outputs, values, "number"), rows_of(tmp_path / "p.csv")
    guess, true = (np.array([float(row[name]) for row in rows]) for name in ("y", "y_true"))
    assert sorted(true) == sorted(values)
    assert scores["mse"] == pytest.approx(reference.mean_squared_error(true, guess), rel=1e-5)
    assert scores["mae"] == pytest.approx(reference.mean_absolute_error(true, guess), rel=1e-5)
    assert scores["r2"] == pytest.approx(reference.r2_score(true, guess), rel=1e-5)
    large = wt.open(tmp_path / "set").where(f"y > {mean}")  # their mean is not that of training
    part, is_large = wt.evaluate(last(tmp_path / "run"), large, **given(1))[1], true > mean
    assert part["r2"] == pytest.approx(
        reference.r2_score(true[is_large], guess[is_large]), rel=1e-5
    )
    assert scores["mse_of_mean"] == pytest.approx(np.var(true), rel=1e-3)


def test_numbers_that_are_all_equal_have_a_loss_of_their_size(tmp_path: Path) -> None:
    """The standard deviation of many 0.1 is only rounding error."""
    assert scored(tmp_path, np.zeros((30, 1)), [0.1] * 30, "number")["loss"] < 1


def test_precision_calibration_and_own_metrics_are_those_of_several_labels(tmp_path: Path) -> None:
    """No sample has the last tag."""
    rng = np.random.default_rng(3)
    outputs, true = rng.normal(size=(60, 6)), rng.integers(0, 3, 60)
    has = rng.random((60, 3)) < [0.4, 0.2, 0]
    labels = [
        wt.Label("y", "class", "json", "y", CLASSES[:3]),
        wt.Label("tags", "multi", "json", "tags", CLASSES[:3]),
    ]
    tags = [np.array(CLASSES[:3])[own].tolist() for own in has]
    packed(tmp_path / "set", outputs, labels, {"y": [CLASSES[y] for y in true], "tags": tags})
    wt.train(tmp_path / "set", tmp_path / "run", label="y,tags", **given(6), **QUIET)
    own = {"y/kappa": torchmetrics.CohenKappa(task="multiclass", num_classes=3)}
    scores = wt.evaluate(last(tmp_path / "run"), tmp_path / "set", metrics=own, **given(6))[1]
    guess, shares = outputs[:, :3].argmax(1), np.exp(outputs[:, :3])
    assert scores["y/kappa"] == pytest.approx(reference.cohen_kappa_score(true, guess), abs=1e-6)
    precision = [reference.average_precision_score(has[:, i], outputs[:, 3 + i]) for i in range(2)]
    assert scores["tags/mAP"] == pytest.approx(np.mean(precision), abs=0.003)
    assert scores["tags/classes_without_positives"] == 1
    best = (shares / shares.sum(1, keepdims=True)).max(1)
    bins = np.minimum((best * 15).astype(int), 14)
    error = sum(abs(best[bins == b].sum() - (guess == true)[bins == b].sum()) for b in set(bins))
    assert scores["y/ece"] == pytest.approx(error / 60, abs=1e-5)


# --- the best epoch, and odd numbers ---

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
    options: dict[str, Any] = {"metrics": {name: r2 if name == "r2" else root}, "monitor": name}
    options |= {"patience": 1, "schedule": "plateau", "plateau_epochs": 1}
    run, text = fallen(tmp_path, *("yx" if "/" in name else "y"), **options)
    assert [line["lr"] for line in run.epochs] == [1e-12] * 4
    assert run.best == run.epochs[3]["val"]
    assert "best.pt is of epoch 4" in text
    assert ("highest" if name == "r2" else "lowest") in text


def test_a_plateau_lowers_the_rate(tmp_path: Path) -> None:
    options = {"schedule": "plateau", "plateau_epochs": 2, "callbacks": [Bias([0.0] * 6)]}
    run, _ = fallen(tmp_path, "y", **options, lr=1e-3, epochs=6)
    assert [line["lr"] for line in run.epochs] == pytest.approx([1e-3] * 3 + [1e-4] * 2 + [1e-5])


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
    words = ["--json", "--device", "cpu", "--model", "tests.training.test_scores:Broken"]
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
