"""With FSDP each process holds a part of the model, and the run equals that of one process.

Batch norms are synchronized on GPUs only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.conftest import write_class_folder
from tests.training.train_job import run, run_job
from wdstrain.training.checkpoint import read_checkpoint

OPTIONS: dict[str, Any] = {
    "model": "tests.training.test_fsdp:blocks",
    "epochs": 2,
    "batch_size": 16,
    "accumulate": 2,
    "lanes": 4,
    "image_size": 16,
    "augment": "flip",
    "lr": 0.01,
    "ema": 0.9,
    "clip_norm": 1.0,
    "freeze": "backbone",
    "unfreeze_epoch": 1,
    "deterministic": True,
}
FSDP = {**OPTIONS, "fsdp": True}
STOP = {"stop": [1, 4]}
RESUME = {"resume": True}


def blocks(outputs: int) -> torch.nn.Module:
    """A model with one layer that is large enough to be split by itself."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 7, 3, 2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(343, 300),
        torch.nn.ReLU(),
        torch.nn.Linear(300, outputs),
    )


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> str:
    """100 training images and 13 validation images: the last of four ranks lacks a batch."""
    folder = tmp_path_factory.mktemp("pets")
    write_class_folder(folder / "png" / "train", {"cat": 50, "dog": 50})
    write_class_folder(folder / "png" / "val", {"cat": 6, "dog": 7})
    wt.convert_folder(folder / "png", folder / "shards")
    return str(folder / "shards")


@pytest.fixture(scope="module")
def alone(pets: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    run(pets, str(out), OPTIONS)
    return out


def state_of(out: Path) -> dict[str, Any]:
    return read_checkpoint(str(out / "checkpoints" / "last.pt"))


def check_close(out: Path, alone: Path) -> None:
    """Check that weights, averages, optimizer and metrics differ only by rounding."""
    actual, single_process = state_of(out), state_of(alone)
    for name in ("model", "raw", "optimizer"):
        torch.testing.assert_close(actual[name], single_process[name], rtol=1e-3, atol=1e-5)
    lines = zip(actual["state"]["history"], single_process["state"]["history"], strict=True)
    for line, expected in lines:
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert line["val"] == pytest.approx(expected["val"], rel=1e-3)
        assert line["val"]["samples"] == 13


@pytest.mark.slow
def test_two_processes_with_fsdp_resume_to_the_same_bits_and_one_process_resumes_them(
    pets: str, alone: Path, tmp_path: Path
) -> None:
    run(pets, str(tmp_path / "plain"), {**OPTIONS, **STOP})
    runs: dict[str, list[dict[str, Any]]] = {
        "whole": [FSDP],
        "resumed": [{**FSDP, **STOP}, {**FSDP, **RESUME}],
        "plain": [{**FSDP, **RESUME}],
        "split": [{**FSDP, **STOP}],
    }
    job = [(str(tmp_path / name), options) for name, parts in runs.items() for options in parts]
    run_job(2, pets, job)
    whole, resumed = state_of(tmp_path / "whole"), state_of(tmp_path / "resumed")
    for name in ("model", "raw", "optimizer"):
        torch.testing.assert_close(resumed[name], whole[name], rtol=0, atol=0)
    assert resumed["sums"] == whole["sums"]
    run(pets, str(tmp_path / "split"), {**OPTIONS, **RESUME})
    for name in ("whole", "plain", "split"):
        check_close(tmp_path / name, alone)
    best = tmp_path / "whole" / "checkpoints" / "best.pt"
    _, metrics = wt.evaluate(best, f"{pets}/val-*.tar", model=blocks)
    losses = [line["val"]["loss"] for line in whole["state"]["history"]]
    assert metrics["loss"] in [pytest.approx(loss, rel=1e-4) for loss in losses]


@pytest.mark.slow
def test_four_processes_resume_a_run_of_one_process(pets: str, alone: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    run(pets, out, {**OPTIONS, "stop": [0, 4]})
    run_job(4, pets, [(out, {**FSDP, **RESUME})])
    check_close(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_model_is_split_and_learns_as_without_it(pets: str, tmp_path: Path) -> None:
    """Blocks run the same code with other shapes, and dynamic shapes make the compiler fail."""
    options = {**FSDP, "model": "small", "epochs": 1, "freeze": None, "unfreeze_epoch": None}
    compiled, plain = tmp_path / "compiled", tmp_path / "plain"
    job = [(str(compiled), {**options, "compile": True}), (str(plain), options)]
    run_job(2, pets, job, timeout=280)
    compiled_history, plain_history = (
        state_of(out)["state"]["history"] for out in (compiled, plain)
    )
    assert compiled_history[0]["loss"] == pytest.approx(plain_history[0]["loss"], rel=1e-3)


@pytest.mark.slow
def test_synchronized_batch_norms_are_refused_on_a_cpu(pets: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "model": "small", "freeze": None, "sync_batchnorm": True}
    with pytest.raises(AssertionError, match="synchronizes batch norms on GPUs only"):
        run_job(2, pets, [(str(tmp_path / "run"), {**options, "unfreeze_epoch": None})])
    assert not (tmp_path / "run").exists()
