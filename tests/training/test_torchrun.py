"""Several processes share every batch and train as one process, with FSDP too.

With FSDP each process holds a part of the model. A dead process ends the job.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.conftest import ROOT, flags, write_class_folder
from tests.support.children import Program
from tests.support.small_runs import numbers
from tests.training.train_job import run, run_job
from wdstrain.training.checkpoint import read_checkpoint
from wdstrain.training.train import train

# No batch norm, which would see another part of a batch in each process; rank 3 has no sample of
# the 13 for validation.
OPTIONS: dict[str, Any] = {"model": "tests.training.test_torchrun:blocks", "epochs": 2, "lanes": 4}
OPTIONS |= {"batch_size": 16, "accumulate": 2, "image_size": 16, "augment": "flip", "lr": 0.01}
OPTIONS |= {"ema": 0.9, "clip_norm": 1.0, "freeze": "backbone", "unfreeze_epoch": 1}
OPTIONS |= {"deterministic": True}
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


class Recorder(torch.nn.Module):
    """A model that records the size of its batches, and a random number of each."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.last = torch.nn.Linear(3, outputs)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.training:
            with open(f"{os.environ['RECORDS']}/{os.environ['RANK']}", "a") as file:
                file.write(f"{len(pixels)} {torch.rand(1).item()}\n")
        return self.last(pixels.mean((2, 3)))


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


def check_close(out: Path, alone: Path, rtol: float = 1e-3) -> None:
    """Check that weights, averages, optimizer and metrics differ only by rounding."""
    actual, single_process = state_of(out), state_of(alone)
    for name in ("model", "raw", "optimizer"):
        torch.testing.assert_close(actual[name], single_process[name], rtol=rtol, atol=1e-5)
    lines = zip(actual["state"]["history"], single_process["state"]["history"], strict=True)
    for line, expected in lines:
        assert line["loss"] == pytest.approx(expected["loss"], rel=rtol / 10)
        assert line["samples"] == expected["samples"]
        assert line["val"] == pytest.approx(expected["val"], rel=rtol)
        assert line["val"]["samples"] == 13


def started(
    processes: int, *words: str, options: dict[str, Any] = OPTIONS
) -> subprocess.Popen[str]:
    """Start a job with this number of processes."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    run = [sys.executable, "-m", *launcher]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*run, "-m", "wdstrain", "train", *words, *flags(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_have_the_losses_and_metrics_of_one_process(
    pets: str, alone: Path, tmp_path: Path, processes: int
) -> None:
    job = started(processes, pets, "--out", str(tmp_path / "run"), "--json")
    out, stderr = job.communicate(timeout=100)
    assert job.returncode == 0, stderr
    (line,) = out.splitlines()  # only the first process prints
    assert [epoch["samples"] for epoch in json.loads(line)["epochs"]] == [96, 96]
    check_close(tmp_path / "run", alone, rtol=1e-4)


def test_processes_share_a_batch_and_draw_other_random_numbers(
    pets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECORDS", str(tmp_path))
    options = {name: value for name, value in OPTIONS.items() if "freeze" not in name}
    options |= {"model": "tests.training.test_torchrun:Recorder", "epochs": 1}
    job = started(2, pets, "--out", str(tmp_path / "run"), options=options)
    _, stderr = job.communicate(timeout=100)
    assert job.returncode == 0, stderr
    ranks = [(tmp_path / str(rank)).read_text().splitlines()[-6:] for rank in (0, 1)]  # 6 steps
    sizes, numbers = zip(*(line.split() for lines in ranks for line in lines), strict=True)
    assert set(sizes) == {"8"}
    assert len(set(numbers)) == 12


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
def test_the_example_for_slurm_trains_with_srun(pets: str, alone: Path, tmp_path: Path) -> None:
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
    words = [script, pets, str(tmp_path / "run"), *flags(OPTIONS), "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1  # only rank 0 prints
    check_close(tmp_path / "run", alone, rtol=1e-4)


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_with_one_error_and_any_world_size_resumes(
    pets: str, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    options = {
        name: value for name, value in OPTIONS.items() if name != "lanes"
    }  # as many as processes, and kept
    job = started(
        2, pets, "--out", str(out), options={**options, "checkpoint_every": 2, "epochs": 2000}
    )
    first = out / "checkpoints" / "last.pt"
    deadline = time.monotonic() + 60
    while not first.exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(rank_of(job.pid, 1), signal.SIGKILL)
    _, stderr = job.communicate(timeout=60)
    assert job.returncode != 0
    # torchrun may end the other rank before that prints what it saw
    assert "SIGKILL" in stderr or "another process of this job ended" in stderr, stderr
    state = state_of(out)
    assert state["loader"]["lanes"] == 2
    # One process resumes the run of two.
    done = train(pets, out, resume=True, **{**options, "epochs": state["state"]["epoch"] + 1})
    assert done.epochs[-1]["samples"] == 96
    assert done.val["samples"] == 13


def rank_of(agent: int, rank: int) -> int:
    """Return the process id of a rank, from the environment set by torchrun."""
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


def test_a_batch_size_that_ranks_cannot_divide_is_refused(
    pets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    from wdstrain.errors import UsageError

    with pytest.raises(UsageError, match="batch_size=16 cannot be shared by 3 processes"):
        train(pets, tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()


# --- FSDP ---


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


# --- processes that joined a group themselves ---

GROUP = """
import json, os, sys
from datetime import timedelta
import torch.distributed as dist
import wdstrain as wt
from tests.support.small_runs import SMALL, Bias, Constant, Linear, Lines

rank, folder = int(sys.argv[1]), sys.argv[2]
meeting = {"init_method": f"file://{folder}/meet", "timeout": timedelta(seconds=20)}
dist.init_process_group("gloo", rank=rank, world_size=2, **meeting)
shards, out, val = f"{folder}/set", f"{folder}/run", f"{folder}/set"
options = {**SMALL, "model": Linear, "progress": Lines()}
still = {**options, "model": Constant, "lr": 1e-12, "weight_decay": 0.0}
"""

SHARING = """
done = wt.train(shards, out, val=val, **options)
print(done.epochs[0]["samples"], done.val["samples"])
"""

DYING = """
import signal

class Dying(Linear):
    def forward(self, x):
        if rank and self.training:
            os._exit(1)
        return super().forward(x)

try:
    wt.train(shards, out, **{**options, "model": Dying})
except wt.WdstrainError as error:
    print("of this job ended" in str(error), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""

FULL_DISK = """
replace, failures = os.replace, iter([False, True])

def replaced(source, target, **named):  # no best checkpoint of the second epoch on rank 0
    if not rank and str(target).endswith("best.pt") and next(failures, False):
        raise OSError(28, "No space left on device")
    return replace(source, target, **named)

os.replace = replaced
# epochs 2 and 3 improve on the first, and no later one
bias = Bias([3.0, 2.0, 2.0, 2.0, 2.0, 2.0])
done = wt.train(shards, out, val=val, callbacks=[bias], **{**still, "epochs": 6, "patience": 2})
print(len(done.epochs), done.stop_reason)
"""

OTHER_VALIDATION = """
try:
    wt.train(shards, out, val=f"{folder}/other" if rank else val, **still)
except wt.UsageError as error:
    print("refused: shards" if "shards" in str(error) else error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "printed"),
    [
        pytest.param(SHARING, "16 16", id="share the samples"),
        pytest.param(DYING, "True True", id="a lost process leaves the signal handlers"),
        pytest.param(
            FULL_DISK, "4 mse did not improve", id="end at the same epoch after a failed checkpoint"
        ),
        pytest.param(OTHER_VALIDATION, "refused: shards", id="other validation shards"),
    ],
)
def test_processes_of_a_group_train_as_one_job(tmp_path: Path, program: str, printed: str) -> None:
    """A rank fails if it waits for another one for 20 seconds."""
    for name, count in (("set", 16), ("other", 40)):
        numbers(tmp_path / name, [i % 2 for i in range(count)])
    first, second = (
        started.end() for started in [Program(GROUP + program, rank, tmp_path) for rank in (0, 1)]
    )
    assert first.out.startswith(printed), first.err
    assert second.out == first.out or program is DYING, second.err
