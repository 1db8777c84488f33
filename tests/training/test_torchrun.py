"""Several processes share every batch and train as one process, with FSDP too."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from torch import nn

import wdstrain as wt
from tests.conftest import ROOT, flags
from tests.support.children import Ended, Program
from tests.support.small_runs import SMALL, Lines, Stop, numbers, two_classes
from wdstrain.training.checkpoint import read_checkpoint
from wdstrain.training.train import train

# No batch norm, which would see another part of a batch in each process; rank 3 has no sample of
# the last batch for validation.
OPTIONS: dict[str, Any] = {"model": "tests.training.test_torchrun:blocks", "epochs": 2, "lanes": 4}
OPTIONS |= {"batch_size": 16, "accumulate": 2, "image_size": 16, "augment": "flip", "lr": 0.01}
OPTIONS |= {"ema": 0.9, "clip_norm": 1.0, "freeze": "backbone", "unfreeze_epoch": 1}
OPTIONS |= {"deterministic": True}
FSDP = {**OPTIONS, "fsdp": True}
STOP = {"stop": [1, 4]}  # epoch and step of an interruption
RESUME = {"resume": True}
RECORDED = {**SMALL, "model": "tests.support.small_runs:Constant", "lanes": 2, "lr": 1e-30}
RECORDED |= {"record": True, "epochs": 2, "optimizer": "sgd"}

# Joins a group of processes. A rank fails if it waits for another one for 20 seconds.
JOIN = """
import json, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
import wdstrain as wt
from tests.support.small_runs import SMALL, Bias, Constant, Linear, Lines
from tests.training.test_torchrun import run

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
meeting = {"init_method": f"file://{sys.argv[4]}/meet", "timeout": timedelta(seconds=20)}
dist.init_process_group("gloo", rank=rank, world_size=size, **meeting)
"""

RUNS = """
for words in json.loads(sys.argv[5]):
    run(*words)
dist.destroy_process_group()
"""


def job(text: str, folder: Path, *words: object, processes: int = 2) -> list[Ended]:
    """Return how the processes of a job ended, which run a program as one group."""
    join = tempfile.mkdtemp(dir=folder)
    programs = [
        Program(JOIN + text, rank, processes, folder, join, *words) for rank in range(processes)
    ]
    return [program.end() for program in programs]


def run_job(processes: int, folder: Path, runs: list[tuple[str, Path, dict[str, Any]]]) -> None:
    """Train several runs, one after another, in each process of a job."""
    words = json.dumps([(shards, str(out), options) for shards, out, options in runs])
    for ended in job(RUNS, folder, words, processes=processes):
        assert ended.status == 0, ended.err


def run(shards: str, out: str | Path, options: dict[str, Any]) -> wt.TrainResult:
    """Train in this process, alone or as one process of its job."""
    train_options = {name: value for name, value in options.items() if name != "stop"}
    callbacks = [Stop(*options["stop"])] if "stop" in options else []
    return wt.train(shards, out, callbacks=callbacks, progress=Lines(), **train_options)


def blocks(outputs: int) -> nn.Module:
    """A model with one layer that is large enough to be split by itself."""
    first = (nn.Conv2d(3, 7, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(343, 300), nn.ReLU())
    return nn.Sequential(*first, nn.Linear(300, outputs))


class Recorder(nn.Module):
    """A model that records its process, and the size and a random number of each batch."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.last = nn.Linear(3, outputs)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.training:
            rank = dist.get_rank() if dist.is_initialized() else 0
            with open(f"{os.environ['RECORDS']}/{rank}", "a") as file:
                file.write(f"{os.getpid()} {len(pixels)} {torch.rand(1).item()}\n")
        return self.last(pixels.mean((2, 3)))


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> str:
    """100 images for training and 22 for validation: the last of four ranks lacks a batch."""
    out = tmp_path_factory.mktemp("pets") / "shards"
    return str(two_classes(out, 122, split={"train": 0.85, "val": 0.15}))


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
        assert line["val"]["samples"] == 22


def test_processes_share_a_batch_and_draw_other_random_numbers(
    pets: str, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They train as one process does, and record the same losses, also after a resume."""
    monkeypatch.setenv("RECORDS", str(tmp_path))
    shards = str(two_classes(tmp_path / "shards"))
    options = {name: value for name, value in OPTIONS.items() if "freeze" not in name}
    options |= {"model": "tests.training.test_torchrun:Recorder", "epochs": 1}
    runs = [(pets, tmp_path / "equal", OPTIONS), (pets, tmp_path / "run", options)]
    for name, more in (("two", {}), ("cut", {"stop": [1, 2]}), ("cut", RESUME)):
        runs.append((shards, tmp_path / name, {**RECORDED, **more}))
    run_job(2, tmp_path, runs)
    check_close(tmp_path / "equal", alone, rtol=1e-4)
    ranks = [(tmp_path / str(rank)).read_text().splitlines()[-6:] for rank in (0, 1)]  # 6 steps
    pids, sizes, random = zip(*(line.split() for lines in ranks for line in lines), strict=True)
    assert (len(set(pids)), set(sizes), len(set(random))) == (2, {"8"}, 12)
    run(shards, tmp_path / "one", RECORDED)
    tables = [
        pyarrow.parquet.read_table(tmp_path / name / "recorded.parquet").to_pylist()
        for name in ("one", "two", "cut")
    ]
    assert len(tables[0]) == 40
    assert tables[0] == tables[1] == tables[2]


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
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MASTER_PORT": str(port),
    }
    environment |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}  # of the script
    environment |= {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    script = str(ROOT / "scripts" / "examples" / "slurm.sh")
    words = [script, pets, str(tmp_path / "run"), *flags(OPTIONS), "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1  # only rank 0 prints
    check_close(tmp_path / "run", alone, rtol=1e-4)


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_with_one_error_and_any_world_size_resumes(
    pets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECORDS", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "run"
    unset = ("lanes", "freeze", "unfreeze_epoch")  # as many lanes as processes, and kept
    options = {name: value for name, value in OPTIONS.items() if name not in unset}
    options |= {"model": "tests.training.test_torchrun:Recorder"}
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "wdstrain"]
    words = ["train", pets, "--out", str(out), *flags({**options, "epochs": 2000})]
    job = subprocess.Popen(
        [sys.executable, "-m", *launcher, *words, "--checkpoint-every", "2"],
        stderr=subprocess.PIPE,
        text=True,
    )
    first = out / "checkpoints" / "last.pt"
    deadline = time.monotonic() + 60
    while not first.exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(int((tmp_path / "1").read_text().split()[0]), signal.SIGKILL)
    _, stderr = job.communicate(timeout=60)
    assert job.returncode != 0
    # torchrun may end the other rank before that prints what it saw
    assert "SIGKILL" in stderr or "another process of this job ended" in stderr, stderr
    state = state_of(out)
    assert state["loader"]["lanes"] == 2
    # One process resumes the run of two.
    done = train(pets, out, resume=True, **{**options, "epochs": state["state"]["epoch"] + 1})
    assert done.epochs[-1]["samples"] == 96
    assert done.val["samples"] == 22


def test_a_batch_size_that_ranks_cannot_divide_is_refused(
    pets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(wt.UsageError, match="batch_size=16 cannot be shared by 3 processes"):
        train(pets, tmp_path / "run", **OPTIONS)
    assert not (tmp_path / "run").exists()


# --- FSDP ---


@pytest.mark.slow
def test_processes_with_fsdp_resume_to_the_same_bits_and_any_number_resumes_them(
    pets: str, alone: Path, tmp_path: Path
) -> None:
    run(pets, tmp_path / "plain", {**OPTIONS, **STOP})
    run(pets, tmp_path / "more", {**OPTIONS, "stop": [0, 4]})
    stopped, resumed = {**FSDP, **STOP}, {**FSDP, **RESUME}
    parts = {"whole": [FSDP], "resumed": [stopped, resumed], "plain": [resumed], "split": [stopped]}
    runs = [(pets, tmp_path / name, options) for name in parts for options in parts[name]]
    run_job(2, tmp_path, runs)
    run_job(4, tmp_path, [(pets, tmp_path / "more", {**FSDP, **RESUME})])
    whole, again = state_of(tmp_path / "whole"), state_of(tmp_path / "resumed")
    for name in ("model", "raw", "optimizer"):
        torch.testing.assert_close(again[name], whole[name], rtol=0, atol=0)
    assert again["sums"] == whole["sums"]
    run(pets, tmp_path / "split", {**OPTIONS, **RESUME})
    for name in ("whole", "plain", "split", "more"):
        check_close(tmp_path / name, alone)
    best = tmp_path / "whole" / "checkpoints" / "best.pt"
    _, metrics = wt.evaluate(best, f"{pets}/val-*.tar", model=blocks)
    losses = [line["val"]["loss"] for line in whole["state"]["history"]]
    assert metrics["loss"] in [pytest.approx(loss, rel=1e-4) for loss in losses]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_model_is_split_and_learns_as_without_it(pets: str, tmp_path: Path) -> None:
    """Blocks run the same code with other shapes, and dynamic shapes make the compiler fail."""
    options = {**FSDP, "model": "small", "epochs": 1, "freeze": None, "unfreeze_epoch": None}
    compiled, plain = tmp_path / "compiled", tmp_path / "plain"
    run_job(2, tmp_path, [(pets, compiled, {**options, "compile": True}), (pets, plain, options)])
    losses = [state_of(out)["state"]["history"][0]["loss"] for out in (compiled, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


# --- faults of one process ---

DYING = """
import signal

class Dying(Linear):
    def forward(self, x):
        if rank and self.training:
            os._exit(1)
        return super().forward(x)

try:
    wt.train(f"{folder}/set", f"{folder}/run", **{**SMALL, "model": Dying, "progress": Lines()})
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
options = {**SMALL, "model": Constant, "lr": 1e-12, "weight_decay": 0.0, "val": f"{folder}/set"}
options |= {"callbacks": [bias], "epochs": 6, "patience": 2, "progress": Lines()}
done = wt.train(f"{folder}/set", f"{folder}/run", **options)
print(len(done.epochs), done.stop_reason)
"""

REFUSED = """
for more in ({"val": f"{folder}/other" if rank else f"{folder}/set"}, {"sync_batchnorm": True}):
    try:
        wt.train(f"{folder}/set", f"{folder}/run", progress=Lines(), **SMALL, **more)
    except wt.UsageError as error:
        print(*(words for words in ("shards", "on GPUs only") if words in str(error)))
assert not os.path.exists(f"{folder}/run")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "printed"),
    [
        pytest.param(DYING, "True True", id="a lost process leaves the signal handlers"),
        pytest.param(
            FULL_DISK, "4 mse did not improve", id="end at the same epoch after a failed checkpoint"
        ),
        pytest.param(REFUSED, "shards\non GPUs only", id="refuse other validation shards"),
    ],
)
def test_processes_of_a_group_end_as_one_job(tmp_path: Path, program: str, printed: str) -> None:
    for name, count in (("set", 16), ("other", 40)):
        numbers(tmp_path / name, [i % 2 for i in range(count)])
    first, second = job(program, tmp_path)
    assert first.out.startswith(printed), first.err
    assert second.out == first.out or program is DYING, second.err
