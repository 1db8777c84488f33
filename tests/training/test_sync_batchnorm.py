"""Synchronized batch norms: what cannot have them is refused before a file is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.conftest import write_class_folder
from tests.training.train_job import run_job

OPTIONS: dict[str, Any] = {
    "model": "tests.training.test_sync_batchnorm:normalized",
    "epochs": 1,
    "batch_size": 16,
    "lanes": 4,
    "image_size": 8,
    "optimizer": "sgd",
    "lr": 0.05,
    "sync_batchnorm": True,
    "deterministic": True,
}


def normalized(outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3, 2),
        torch.nn.BatchNorm2d(6),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(54, 8),
        torch.nn.BatchNorm1d(8, momentum=None),
        torch.nn.Linear(8, outputs),
    )


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pets")
    write_class_folder(folder / "png" / "train", {"cat": 50, "dog": 50})
    write_class_folder(folder / "png" / "val", {"cat": 6, "dog": 7})
    wt.convert_folder(folder / "png", folder / "shards")
    return str(folder / "shards")


@pytest.mark.slow
def test_processes_on_a_cpu_are_refused(pets: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="synchronizes batch norms on GPUs only"):
        run_job(2, pets, [(str(tmp_path / "run"), OPTIONS)])
    assert not (tmp_path / "run").exists()
