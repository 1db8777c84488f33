"""The processes of a job, as their launcher describes them in the environment: torchrun or srun.

torchrun's variables win. A batch script, an interactive shell and a step of one task are no job of
several processes, although SLURM tells them how many tasks the whole allocation may have.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from wdstrain.errors import UsageError

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# Only srun sets these. A batch script has none of them.
_OF_SRUN = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_LAUNCH_NODE_IPADDR")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # steps of batch scripts and interactive shells count from here
_FIRST_PORT, _PORTS = 15_000, 15_000  # below the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class Launch:
    """This process among those of its job.

    local: rank on this machine, None if unknown. local_size: processes on this machine.
    address: where the processes meet, as torch.distributed takes it; None if unknown.
    """

    rank: int = 0
    size: int = 1
    local: int | None = None
    local_size: int = 1
    address: str | None = None

    @property
    def is_slurm(self) -> bool:
        """Whether srun started this process."""
        return self.address is not None and self.address.startswith("tcp:")

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """Return what the environment says. Raises UsageError for values that are no numbers."""
        if any(name in environment for name in _OF_TORCHRUN):
            return _of_torchrun(environment)
        return _of_slurm(environment) or cls()


def _of_torchrun(environment: Mapping[str, str]) -> Launch:
    has_local = "LOCAL_RANK" in environment
    local_size = environment.get("LOCAL_WORLD_SIZE", "")
    if "RANK" not in environment and _number(environment, "WORLD_SIZE", 1) > 1:
        raise UsageError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} is in the environment and RANK is not: each "
            "process would be rank 0.",
            "Start the processes with torchrun or srun, set RANK, or give {rank} and {world_size}.",
            {"rank": ..., "world_size": ...},
        )
    return Launch(
        _number(environment, "RANK", 0),
        _number(environment, "WORLD_SIZE", 1),
        _number(environment, "LOCAL_RANK", 0) if has_local else None,
        int(local_size) if local_size.isdecimal() else 1,
        "env://" if "MASTER_ADDR" in environment else None,
    )


def _of_slurm(environment: Mapping[str, str]) -> Launch | None:
    """Return the task of a step of several tasks; None if this process is none."""
    step = environment.get("SLURM_STEP_ID", "0")
    is_of_job = "SLURM_JOB_ID" in environment
    if is_of_job and not any(name in environment for name in _OF_SRUN):
        return None
    if step.isdigit() and int(step) >= _FIRST_SPECIAL_STEP:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    size = _number(environment, size_name, 1)
    if "SLURM_PROCID" not in environment or size == 1:
        return None
    is_one_node = _first(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") == "1"
    return Launch(
        _number(environment, "SLURM_PROCID", 0),
        size,
        _number(environment, "SLURM_LOCALID", 0),
        size if is_one_node else _tasks_here(environment),
        f"tcp://{_host(environment, is_one_node)}:{_port(environment)}",
    )


def _host(environment: Mapping[str, str], is_one_node: bool) -> str:
    """Return the machine of rank 0: the first of the step.

    The machine that ran srun comes last, because it may be a login node.
    """
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    if is_one_node:
        return "127.0.0.1"
    nodes = _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    host = first_host(nodes) or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not host:
        raise UsageError(
            "SLURM names no machine where the processes can meet.",
            "Set MASTER_ADDR to that of rank 0.",
        )
    return host


def first_host(nodes: str) -> str:
    """Return the first machine of a list as SLURM writes it, such as node[003-006,9],big1."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group()) if match else ""


def _port(environment: Mapping[str, str]) -> int:
    """Return MASTER_PORT, or a port by the numbers of the job and its step."""
    if "MASTER_PORT" in environment:
        return _number(environment, "MASTER_PORT", 0)
    job, step = (_number(environment, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job + step) % _PORTS


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Return the number of tasks on this machine, of a list such as 4(x2),3."""
    text = _first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    tasks = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(times or 1))
    ]
    node = _number(environment, "SLURM_NODEID", 0)
    return tasks[node] if node < len(tasks) else 1


def _first(environment: Mapping[str, str], *names: str) -> str:
    """Return the value of the first name that is set, or nothing."""
    return next((environment[name] for name in names if name in environment), "")


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdigit():
        raise UsageError(
            f"{name}={text!r} in the environment: must be an integer.",
            "Start the processes with torchrun or srun, or unset it.",
        )
    return int(text)
