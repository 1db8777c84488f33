"""User-defined objects in a run: losses, optimizers, metrics, callbacks, and limits."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torchmetrics
from sklearn.metrics import average_precision_score, cohen_kappa_score

import wdstrain as wt
from tests.conftest import picture

VAL = 11  # samples of the validation set
QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 8, "image_size": 16}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """45 images for training and 11 for validation, of three classes."""
    out = tmp_path_factory.mktemp("objects") / "set"
    samples = (
        {"__key__": f"{n:03d}", "png": picture(n), "cls": n % 3, "json": {"tags": tags(n)}}
        for n in range(56)
    )
    labels = [
        wt.Label("cls", "class", "cls", classes=("a", "b", "c")),
        wt.Label("tags", "multi", "json", "tags", ("x", "y", "z")),
    ]
    wt.pack(samples, str(out), labels=labels, split={"train": 40 / 56, "val": 16 / 56}, seed=1)
    return out


def tags(n: int) -> list[str]:
    """Tags of a sample; no sample has "z"."""
    return [name for name, has in (("x", n % 2), ("y", n % 5 == 0)) if has]


class Recorder(wt.Callback):
    """Records the names of the called hooks."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_train_start(self, trainer: Any) -> None:
        self.calls.append("train start")

    def on_step_end(self, trainer: Any) -> None:
        self.calls.append(f"step {trainer.state.step}")

    def on_epoch_end(self, trainer: Any, metrics: dict[str, Any]) -> None:
        self.calls.append(f"epoch {metrics['epoch']}")

    def on_checkpoint(self, trainer: Any, path: str) -> None:
        assert Path(path).is_file()
        self.calls.append("checkpoint")

    def on_train_end(self, trainer: Any) -> None:
        self.calls.append("train end")


def test_callbacks_are_called_in_order(shards: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    options = {**QUICK, "epochs": 1, "label": "cls"}
    wt.train(shards, tmp_path / "run", callbacks=[recorder], **options)
    steps = [f"step {step}" for step in range(1, 6)]
    assert recorder.calls == ["train start", *steps, "epoch 0", "checkpoint", "train end"]


class Fixed(torch.nn.Module):
    """Returns outputs that depend only on the mean of the image."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, outputs))
        self.last = torch.nn.Linear(outputs, outputs)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sin(9 * pixels.mean((1, 2, 3))[:, None] + self.weight))


def test_metrics_equal_scikit_learn_without_empty_classes(shards: Path, tmp_path: Path) -> None:
    options = {**QUICK, "epochs": 1, "label": "cls,tags", "model": Fixed}
    kappa = torchmetrics.CohenKappa(task="multiclass", num_classes=3)
    run = wt.train(shards, tmp_path / "run", metrics={"cls/kappa": kappa}, **options)
    checkpoint = tmp_path / "run" / "checkpoints" / "last.pt"
    table = tmp_path / "p.parquet"
    arguments: dict[str, Any] = {"model": Fixed, "probabilities": True, "embeddings": True}
    done = wt.predict(checkpoint, f"{shards}/val-*.tar", table, **arguments)
    assert (done.rows, done.bad) == (VAL, 0)
    rows = pq.read_table(table).to_pylist()
    assert {len(row["embedding"]) for row in rows} == {6}
    true = [row["cls_true"] for row in rows]
    predicted = [row["cls"] for row in rows]
    val = run.val
    assert val["cls/kappa"] == pytest.approx(cohen_kappa_score(true, predicted), abs=1e-6)
    has = np.array([["x" in row["tags_true"], "y" in row["tags_true"]] for row in rows])
    shares = np.array([[float(row["tags_x"]), float(row["tags_y"])] for row in rows])
    assert val["tags/mAP"] == pytest.approx(
        np.mean([average_precision_score(has[:, i], shares[:, i]) for i in range(2)]), abs=0.01
    )
    assert val["tags/classes_without_positives"] == 1
    best = np.array([[float(row[f"cls_{name}"]) for name in "abc"] for row in rows])
    right = np.array(true) == np.array(predicted)
    bins = np.minimum((best.max(1) * 15).astype(int), 14)
    error = sum(abs(best.max(1)[bins == b].sum() - right[bins == b].sum()) for b in np.unique(bins))
    assert val["cls/ece"] == pytest.approx(error / VAL, abs=1e-5)
    wt.predict(checkpoint, f"{shards}/val-*.tar", tmp_path / "p.csv", **arguments)
    with open(tmp_path / "p.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["cls"] for line in lines] == predicted
    assert json.loads(lines[0]["embedding"]) == pytest.approx(rows[0]["embedding"], rel=1e-6)
    with pytest.raises(wt.UsageError, match=r"must end in \.csv or \.parquet"):
        wt.predict(checkpoint, f"{shards}/val-*.tar", tmp_path / "p.txt", model=Fixed)


def loss(batch: Any, model: Any) -> torch.Tensor:
    return model(batch["image"]).sum()


class Misspelled(wt.Callback):
    def on_epoch_ended(self, trainer: Any) -> None:
        """A name that no run calls."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"criterion": "focal"}, "criterion='focal': must be a function"),
        ({"criterion": {"x": torch.nn.MSELoss()}}, "criterion names 'x', and the labels are cls"),
        (
            {"criterion": torch.nn.CrossEntropyLoss(), "label_smoothing": 0.1},
            "label_smoothing=0.1 has no effect with criterion=",
        ),
        ({"metrics": [torchmetrics.MeanMetric()]}, "metrics=.*must be a dict"),
        ({"training_step": "loss"}, r"must be a function \(batch, model\)"),
        ({"training_step": loss, "label_smoothing": 0.1}, "no effect with training_step="),
        ({"grad_checkpointing": True}, "grad_checkpointing= needs a model that has it.*timm"),
        ({"optimizer": 3}, "optimizer=3: must be a function of parameter groups"),
        ({"callbacks": [Misspelled()]}, "on_epoch_ended is never called. Methods of callbacks are"),
        ({"model": lambda n: torch.nn.Linear(10, n)}, "does not take a batch of uint8"),
    ],
)
def test_objects_of_another_kind_are_refused(
    shards: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(wt.UsageError, match=words):
        wt.train(shards, tmp_path / "run", label="cls", **QUICK, **options)
    assert not (tmp_path / "run").exists()


def test_a_metric_that_no_validation_gives_is_not_monitored(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(wt.UsageError, match="monitor='f2' is not among .*accuracy"):
        wt.train(shards, tmp_path / "known", label="cls", monitor="f2", **QUICK)
    with pytest.raises(wt.UsageError, match="need validation data"):
        wt.train(f"{shards}/train-*.tar", tmp_path / "run", label="cls", monitor="f1", **QUICK)


def test_numbers_of_predictions_are_numbers_in_parquet(shards: Path, tmp_path: Path) -> None:
    wt.train(shards, tmp_path / "run", label="cls", **QUICK)
    checkpoint, table = tmp_path / "run" / "checkpoints" / "last.pt", tmp_path / "p.parquet"
    wt.predict(checkpoint, f"{shards}/val-*.tar", table, probabilities=True)
    read = pq.read_table(table)
    kinds = {field.name: str(field.type) for field in read.schema}
    assert kinds["cls"] == kinds["error"] == "string"
    assert kinds["cls_probability"] == kinds["cls_a"] == "double"
    assert read["error"].null_count == VAL
