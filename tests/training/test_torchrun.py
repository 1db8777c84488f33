"""Several processes share every batch, and come to what one of them would; one that dies ends the job with a sentence."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, flags, write_class_folder
from wdstrain.cli import main
from wdstrain.training.api import train
from wdstrain.training.checkpoint import read_checkpoint

# no batch norm, which would see another part of a batch in each process; rank 3 gets none of the 13 validation samples at last
OPTIONS: dict[str, Any] = {
    "model": "tests.training.test_torchrun:plain",
    "epochs": 2,
    "batch_size": 16,
    "lanes": 4,
    "image_size": 16,
    "augment": "flip",
    "optimizer": "sgd",
    "lr": 0.02,
    "ema": 0.9,
    "deterministic": True,
}


def plain(outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(392, outputs),
    )


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pets")
    write_class_folder(folder / "png" / "train", {"cat": 50, "dog": 50, "eel": 50})
    write_class_folder(folder / "png" / "val", {"cat": 5, "dog": 5, "eel": 3})
    assert main(["convert", "folder", str(folder / "png"), str(folder / "shards")]) == 0
    return folder / "shards"


@pytest.fixture(scope="module")
def alone(pets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    train(str(pets), out, **OPTIONS)
    return out


def started(
    processes: int, *words: str, options: dict[str, Any] = OPTIONS
) -> subprocess.Popen[str]:
    """A job of so many processes."""
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*run, "-m", "wdstrain", "train", *words, *flags(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def equal_within_noise(out: Path, alone: Path) -> None:
    ours, theirs = (
        read_checkpoint(str(folder / "checkpoints" / "last.pt")) for folder in (out, alone)
    )
    for name, value in theirs["model"].items():
        torch.testing.assert_close(ours["model"][name], value, rtol=1e-4, atol=1e-5)
    for one, other in zip(ours["state"]["history"], theirs["state"]["history"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["samples"] == other["samples"]
        assert one["val"]["samples"] == 13
        assert one["val"] == pytest.approx(other["val"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_come_to_the_losses_and_metrics_of_one(
    pets: Path, alone: Path, tmp_path: Path, processes: int
) -> None:
    job = started(processes, str(pets), "--out", str(tmp_path / "run"), "--json")
    out, said = job.communicate(timeout=100)
    assert job.returncode == 0, said
    (line,) = out.splitlines()  # the first process speaks, and nobody else
    assert [epoch["samples"] for epoch in json.loads(line)["epochs"]] == [144, 144]
    equal_within_noise(tmp_path / "run", alone)


# Starts two tasks on this machine, as SLURM's program does, and ends with the last status.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" &
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
second=$!
wait $second && wait
"""


@pytest.mark.slow
def test_the_example_for_slurm_trains_with_the_tasks_of_srun(
    pets: Path, alone: Path, tmp_path: Path
) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        **{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # of the batch script
        **{"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable},
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    script = str(ROOT / "scripts" / "examples" / "slurm.sh")
    words = [script, str(pets), str(tmp_path / "run"), *flags(OPTIONS), "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1  # rank 0 reports, and no other
    equal_within_noise(tmp_path / "run", alone)


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_with_one_error_and_any_world_size_resumes(
    pets: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    options = {
        name: value for name, value in OPTIONS.items() if name != "lanes"
    }  # as many as processes, and kept
    job = started(
        2, str(pets), "--out", str(out), options={**options, "checkpoint_every": 2, "epochs": 2000}
    )
    first = out / "checkpoints" / "step-00000002.pt"
    deadline = time.monotonic() + 60
    while not first.exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    other = rank_of(job.pid, 0)
    os.kill(rank_of(job.pid, 1), signal.SIGKILL)
    while (
        Path(f"/proc/{other}/status").exists() and job.poll() is None
    ):  # the launcher says it once; more must not hurt
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGTERM)
    _, said = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "another process of this job ended" in said or "stopped by SIGTERM" in said, said
    assert "--resume" in said
    state = read_checkpoint(str(out / "checkpoints" / "last.pt"))
    assert state["loader"]["lanes"] == 2
    # one process goes on where two had been
    done = train(str(pets), out, resume=True, **{**options, "epochs": state["state"]["epoch"] + 1})
    assert done.epochs[-1]["samples"] == 144
    assert done.val["samples"] == 13


def rank_of(agent: int, rank: int) -> int:
    """The process id of a rank, by the environment that torchrun gave it."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if (
                    parent == agent
                    and f"\0RANK={rank}\0".encode() in b"\0" + (folder / "environ").read_bytes()
                ):
                    return int(folder.name)
            except OSError:
                continue
    raise AssertionError(f"torchrun has no rank {rank}")


def test_a_batch_that_cannot_be_shared_is_refused(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    from wdstrain.errors import UsageError

    with pytest.raises(UsageError, match="batch_size=16 cannot be shared by 3 processes"):
        train(str(pets), tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()
