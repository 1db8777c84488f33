"""`train --record`: the losses of each training sample, in a table and in the report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

import wdstrain as wt
from tests.support.small_runs import SMALL, Constant, Linear, Stop, numbers, two_classes
from wdstrain.training.train import train

TABLE = "recorded.parquet"
OPTIONS: dict[str, Any] = {**SMALL, "model": Constant, "record": True}


def rows_of(run: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(run / TABLE).to_pylist()
    return rows


def by_class(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss of 1 for samples of class 0, and of 4 for those of class 1."""
    return 0 * outputs.sum() + 1 + 3 * target.float()


def test_the_table_has_the_training_loss_of_each_sample_and_join_takes_it(tmp_path: Path) -> None:
    """A model with constant outputs predicts one class for all, so half of them are right."""
    shards, run = two_classes(tmp_path / "shards"), tmp_path / "run"
    train(shards, run, criterion=by_class, **{**OPTIONS, "epochs": 3})
    rows = rows_of(run)
    index = wt.open(shards)
    assert [row["key"] for row in rows] == index.keys(np.arange(40))
    numbers_of = [int(row["key"][1:]) for row in rows]
    assert [row["loss"] for row in rows] == [(1.0, 4.0)[number % 2] for number in numbers_of]
    assert {(row["epoch"], row["times"]) for row in rows} == {(2, 3)}
    right = {(number % 2, row["right"]) for number, row in zip(numbers_of, rows, strict=True)}
    assert sorted(right) in ([(0, 0.0), (1, 1.0)], [(0, 1.0), (1, 0.0)])
    assert wt.join(shards, run / TABLE, on="key").matched == 40
    assert len(wt.open(shards).where("loss > 2 and right is not None")) == 20


def test_the_report_shows_the_hardest_samples_with_their_pictures(tmp_path: Path) -> None:
    run = tmp_path / "run"
    two_classes(tmp_path / "shards")
    train(tmp_path / "shards", run, criterion=by_class, **{**OPTIONS, "epochs": 2})
    page = (run / "report.html").read_text()
    card = page.partition("Hardest training samples")[2].partition("</section>")[0]
    shown = re.findall(r"<figure><img[^>]*>.*?loss 4, shown 2 times.*?k(\d{3})<", card)
    assert len(shown) >= 10
    assert all(int(number) % 2 for number in shown)
    train(tmp_path / "shards", tmp_path / "other", **{**OPTIONS, "record": False})
    assert "Hardest" not in (tmp_path / "other" / "report.html").read_text()
    assert not (tmp_path / "other" / TABLE).exists()


@pytest.mark.parametrize("at", [(0, 3), (1, 2)])
def test_a_resumed_run_writes_the_table_of_an_undisturbed_one(
    tmp_path: Path, at: tuple[int, int]
) -> None:
    shards = two_classes(tmp_path / "shards", 44)
    options = {**OPTIONS, "model": Linear, "epochs": 3, "deterministic": True}
    train(shards, tmp_path / "whole", **options)
    train(shards, tmp_path / "run", callbacks=[Stop(*at)], **options)
    train(shards, tmp_path / "run", resume=True, **options)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    assert {row["times"] for row in rows_of(tmp_path / "run")} <= {1, 2, 3}
    train(shards, tmp_path / "run", overwrite=True, **{**options, "record": False})
    assert not (tmp_path / "run" / TABLE).exists()


def test_numbers_have_no_column_right_and_a_loss_of_the_batch_is_that_of_each_sample(
    tmp_path: Path,
) -> None:
    shards = numbers(tmp_path / "shards", [0.5, 1.5] * 8)
    train(shards, tmp_path / "run", **OPTIONS)
    rows = rows_of(tmp_path / "run")
    assert set(rows[0]) == {"key", "epoch", "times", "loss"}
    assert [row["loss"] for row in rows] == [1.0] * 16  # standardized

    def step(batch: Any, model: Any) -> torch.Tensor:
        return model(batch["image"]).sum() * 0 + 2.5

    train(shards, tmp_path / "step", training_step=step, **OPTIONS)
    assert {row["loss"] for row in rows_of(tmp_path / "step")} == {2.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixup": 0.2}, "record=True needs a loss of each sample.*mixup=0.2"),
        ({"cutmix": 1.0}, "record=True.*cutmix=1.0"),
    ],
)
def test_mixed_images_have_no_loss_of_their_own(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    two_classes(tmp_path / "shards")
    with pytest.raises(wt.UsageError, match=message):
        train(tmp_path / "shards", tmp_path / "run", **OPTIONS, **options)
    assert not (tmp_path / "run").exists()


def test_a_set_that_uses_the_name_of_a_column_is_refused_before_a_file_is_written(
    tmp_path: Path,
) -> None:
    numbers(tmp_path / "shards", [0.5, 1.5] * 8, "loss")
    with pytest.raises(wt.UsageError, match="record=True makes the columns 'loss'"):
        train(tmp_path / "shards", tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()
