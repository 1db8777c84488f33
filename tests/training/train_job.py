"""Several training runs in each process of a job: `python -m tests.training.train_job`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

import wdstrain as wt
from tests.support.small_runs import Lines, Stop

Run = tuple[str, dict[str, Any]]  # folder and options; "stop": [epoch, step] of an interruption


def run(shards: str, out: str, options: dict[str, Any]) -> wt.TrainResult:
    """Train in this process, as one process of its job."""
    train_options = {name: value for name, value in options.items() if name != "stop"}
    callbacks = [Stop(*options["stop"])] if "stop" in options else []
    return wt.train(shards, out, callbacks=callbacks, progress=Lines(), **train_options)


def run_job(processes: int, shards: str, runs: list[Run], *, timeout: float = 150) -> None:
    """Start a job of processes that trains these runs, and wait for its end."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = [sys.executable, "-m", *launcher, "-m", __name__, shards, json.dumps(runs)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for out, options in json.loads(sys.argv[2]):
        run(sys.argv[1], out, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
