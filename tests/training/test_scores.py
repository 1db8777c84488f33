"""What evaluation says of a model is what scikit-learn says of its outputs, whatever labels a set lacks or repeats."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    mean_absolute_error,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)

import wdstrain as wt

Array = npt.NDArray[Any]
CLASSES = ("a", "b", "c", "d")
QUIET: dict[str, Any] = {
    "epochs": 1,
    "batch_size": 16,
    "lr": 1e-30,
}  # so small that nothing is learnt


class Same(torch.nn.Module):
    """Says the array that it is given."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(outputs))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.scale


def packed(
    out: Path,
    outputs: Array,
    values: list[Any],
    kind: str,
    classes: tuple[str, ...] = CLASSES,
    **options: Any,
) -> Path:
    """A set whose arrays are what `Same` says of them. values: the label of each sample, by the kind."""
    labels = [wt.Label("y", kind, "json", "y", classes if kind != "number" else ())]
    samples = (
        {"__key__": f"k{i:04d}", "x.npy": row.astype(np.float32), "json": {"y": y}}
        for i, (row, y) in enumerate(zip(outputs, values, strict=True))
    )
    wt.pack(samples, str(out), labels=labels, **options)
    return out


def image(outputs: int) -> wt.Field:
    return wt.array("x.npy", shape=(outputs,), dtype="float32")


def scored(
    tmp_path: Path, outputs: Array, values: list[Any], kind: str, classes: tuple[str, ...] = CLASSES
) -> dict[str, float]:
    """Metrics of a model with these outputs."""
    width = outputs.shape[1]
    packed(tmp_path / "set", outputs, values, kind, classes)
    wt.train(
        tmp_path / "set", tmp_path / "run", model=Same, fields={"image": image(width)}, **QUIET
    )
    checkpoint = tmp_path / "run" / "checkpoints" / "last.pt"
    return wt.evaluate(checkpoint, tmp_path / "set", model=Same, fields={"image": image(width)})[1]


@pytest.mark.parametrize("there", [("a", "b", "c", "d"), ("a", "c", "d"), ("a", "b"), ("c",)])
def test_classes_that_no_sample_has_are_left_out_of_means(
    tmp_path: Path, there: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(0)
    true = [there[i] for i in rng.integers(0, len(there), 90)]
    outputs = rng.normal(size=(90, 4)) + 1.5 * np.array(
        [[name == y for name in CLASSES] for y in true]
    )
    found = scored(tmp_path, outputs, true, "class")
    said = [CLASSES[i] for i in outputs.argmax(1)]
    shares = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    assert found["accuracy"] == pytest.approx(accuracy_score(true, said))
    if len(there) == 1:
        assert "auroc" not in found
    else:
        each = [
            roc_auc_score([y == name for y in true], shares[:, CLASSES.index(name)])
            for name in there
        ]
        assert found["auroc"] == pytest.approx(np.mean(each), abs=0.001)


@pytest.mark.parametrize("there", [4, 3, 1, 0])
def test_tags_that_no_sample_has_are_left_out_of_means(tmp_path: Path, there: int) -> None:
    rng = np.random.default_rng(1)
    true = rng.random((90, 4)) < 0.3
    true[:, there:] = False
    outputs = rng.normal(size=(90, 4)) + 1.5 * true
    values = [[name for name, has in zip(CLASSES, row, strict=True) if has] for row in true]
    found = scored(tmp_path, outputs, values, "multi")
    assert found["accuracy"] == pytest.approx(((outputs > 0) == true).mean())
    if there:
        part = slice(0, there)
        assert found["auroc"] == pytest.approx(
            roc_auc_score(true[:, part], outputs[:, part]), abs=0.001
        )
        assert found["f1"] == pytest.approx(
            np.mean([f1_score(true[:, i], outputs[:, i] > 0) for i in range(there)])
        )
    else:
        assert not {"auroc", "f1"} & set(found)


@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0, 200.0])
@pytest.mark.parametrize("kind", ["binary", "class", "multi"])
def test_auroc_is_right_for_models_that_are_unsure_and_for_those_that_are_certain(
    tmp_path: Path, kind: str, scale: float
) -> None:
    """Also where all outputs of a batch lie in 0 to 1, as probabilities do."""
    rng = np.random.default_rng(2)
    true = rng.integers(0, 2 if kind == "binary" else 4, 120)
    is_there = np.eye(4, dtype=bool)[true]
    outputs = scale * (0.5 + 0.15 * (rng.normal(size=(120, 4)) + 1.5 * is_there))
    values: list[Any] = [[CLASSES[i]] if kind == "multi" else CLASSES[i] for i in true]
    if kind == "binary":
        outputs = outputs[:, 1:2]
    found = scored(
        tmp_path,
        outputs,
        values,
        "class" if kind == "binary" else kind,
        CLASSES[:2] if kind == "binary" else CLASSES,
    )
    if kind == "class":
        others = [np.log(np.exp(np.delete(outputs, i, 1)).sum(1)) for i in range(4)]
        outputs = outputs - np.stack(others, 1)
    columns = [1] if kind == "binary" else list(range(4))
    areas = [
        roc_auc_score(is_there[:, i], outputs[:, 0 if kind == "binary" else i]) for i in columns
    ]
    assert found["auroc"] == pytest.approx(np.mean(areas), abs=0.001)


@pytest.mark.parametrize(("weights", "low", "high"), [("none", 0.0, 0.2), ("balanced", 0.4, 0.6)])
def test_balanced_weights_of_tags_let_few_samples_with_a_tag_count_as_many_without(
    tmp_path: Path, weights: str, low: float, high: float
) -> None:
    """A model that sees nothing says how much those with a tag count among all."""
    values = [["a"] if i % 20 else ["a", "b"] for i in range(100)]
    packed(tmp_path / "set", np.ones((100, 4)), values, "multi")

    class Blind(Same):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.scale.expand(len(pixels), -1)

    options: dict[str, Any] = {
        "epochs": 8,
        "batch_size": 10,
        "lr": 0.3,
        "class_weights": weights,
        "model": Blind,
    }
    wt.train(tmp_path / "set", tmp_path / "run", fields={"image": image(4)}, **options)
    checkpoint = tmp_path / "run" / "checkpoints" / "last.pt"
    options = {"model": Blind, "fields": {"image": image(4)}, "probabilities": True}
    wt.predict(checkpoint, tmp_path / "set", tmp_path / "p.csv", **options)
    row = next(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert low <= float(row["y=b"]) <= high


def test_sets_with_the_same_keys_are_validated_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("train", "one", "other"):
        packed(
            tmp_path / name, rng.normal(size=(30, 4)), [CLASSES[i % 4] for i in range(30)], "class"
        )
    val = [tmp_path / "one", tmp_path / "other"]
    done = wt.train(
        tmp_path / "train",
        tmp_path / "run",
        val=val,
        model=Same,
        fields={"image": image(4)},
        **QUIET,
    )
    assert done.val["samples"] == 60
    assert (
        wt.evaluate(
            tmp_path / "run/checkpoints/last.pt", val, model=Same, fields={"image": image(4)}
        )[1]["samples"]
        == 60
    )


def test_only_class_predictions_are_marked_wrong(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    for name, kind, values in (
        ("number", "number", rng.normal(size=40).tolist()),
        ("right", "class", ["a"] * 40),
        ("other", "class", ["b"] * 40),
    ):
        outputs = np.eye(4)[np.zeros(40, int)] if kind == "class" else rng.normal(size=(40, 1))
        packed(tmp_path / name, outputs, values, kind)
        options = {"model": Same, "fields": {"image": image(outputs.shape[1])}, **QUIET}
        wt.train(tmp_path / name, tmp_path / f"run {name}", val=tmp_path / name, **options)
        page = (tmp_path / f"run {name}" / "report.html").read_text()
        assert bool(re.search("<span class=wrong>", page)) == (name == "other")


@pytest.mark.parametrize("mean", [0.0, 1.7e9])
def test_numbers_far_from_0_are_scored_by_their_differences(tmp_path: Path, mean: float) -> None:
    """Times, ids and coordinates: a float32 holds 1.7e9 to 128."""
    rng = np.random.default_rng(0)
    outputs = rng.normal(size=(60, 1)).astype(np.float32)
    values = [mean + round(float(one), 2) for one in 3 * outputs[:, 0] + rng.normal(size=60)]
    found = scored(tmp_path, outputs, values, "number", ())
    checkpoint = tmp_path / "run" / "checkpoints" / "last.pt"
    wt.predict(
        checkpoint, tmp_path / "set", tmp_path / "p.csv", model=Same, fields={"image": image(1)}
    )
    with open(tmp_path / "p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    said, true = (np.array([float(row[name]) for row in rows]) for name in ("y", "y true"))
    assert sorted(true) == sorted(values)
    assert found["mse"] == pytest.approx(mean_squared_error(true, said), rel=1e-5)
    assert found["mae"] == pytest.approx(mean_absolute_error(true, said), rel=1e-5)
    assert found["r2"] == pytest.approx(r2_score(true, said), rel=1e-5)
    run = wt.train(
        tmp_path / "set",
        tmp_path / "two",
        val=tmp_path / "set",
        model=Same,
        fields={"image": image(1)},
        **QUIET,
    )
    assert run.val["mse_of_mean"] == pytest.approx(
        np.var(true), rel=0.02
    )  # of the 48 that made batches


def test_numbers_that_are_all_equal_have_a_loss_of_their_size(tmp_path: Path) -> None:
    """The deviation of many 0.1 is what rounding left of it."""
    assert scored(tmp_path, np.zeros((30, 1)), [0.1] * 30, "number", ())["loss"] < 1


def test_a_table_of_predictions_ranks_as_the_metrics_do(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    true = rng.integers(0, 3, 90)
    outputs = 8 * (rng.normal(size=(90, 3)) + np.eye(3)[true] - [0.0, 1.5, 3.0])
    found = scored(tmp_path, outputs, [CLASSES[i] for i in true], "class", CLASSES[:3])
    options: dict[str, Any] = {"model": Same, "fields": {"image": image(3)}, "probabilities": True}
    wt.predict(
        tmp_path / "run" / "checkpoints" / "last.pt",
        tmp_path / "set",
        tmp_path / "p.csv",
        **options,
    )
    with open(tmp_path / "p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    areas = [
        roc_auc_score([row["y true"] == c for row in rows], [float(row[f"y={c}"]) for row in rows])
        for c in CLASSES[:3]
    ]
    assert found["auroc"] == pytest.approx(np.mean(areas), abs=0.002)


def test_one_tag_alone_is_learnt_and_scored(tmp_path: Path) -> None:
    true = np.arange(40) % 3 == 0
    outputs = (
        np.where(np.arange(40) % 5 == 0, -1.0, 1.0)[:, None] * np.where(true, 1.0, -1.0)[:, None]
    )
    found = scored(tmp_path, outputs, [["a"] if one else [] for one in true], "multi", ("a",))
    assert found["accuracy"] == found["exact"] == pytest.approx(0.8)
    assert found["f1"] == pytest.approx(f1_score(true, outputs[:, 0] > 0))
    assert found["auroc"] == pytest.approx(roc_auc_score(true, outputs[:, 0]))
