"""The rank of a process under torchrun or srun, and environments that are not such a job."""

from __future__ import annotations

from typing import Any

import pytest

from wdstrain.errors import UsageError
from wdstrain.runtime.launch import Launch

STEP: dict[str, Any] = {
    "JOB_ID": 4711,
    "STEP_ID": 2,
    "STEP_NUM_TASKS": 7,
    "NTASKS": 7,
    "PROCID": 5,
    "LOCALID": 1,
    "NODEID": 1,
    "NNODES": 2,
    "STEP_TASKS_PER_NODE": "4,3",
    "STEP_NODELIST": "gpu[07-08]",
    "LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def of_slurm(changes: dict[str, Any], **others: str) -> Launch:
    """Return the rank that a process reads from SLURM's variables; None removes a variable."""
    values = {**STEP, **changes}
    variables = {f"SLURM_{n}": str(value) for n, value in values.items() if value is not None}
    return Launch.of({**variables, **others})


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({}, "tcp://gpu07:19713"),
        ({"STEP_NODELIST": "gpu-a[1,3-4]-ib,gpu-b2"}, "tcp://gpu-a1-ib:19713"),
        ({"STEP_NODELIST": "r[1-2]c[03-04]"}, "tcp://r1c03:19713"),
        ({"STEP_NODELIST": None, "NODELIST": "big9,gpu[1-2]"}, "tcp://big9:19713"),
        ({"STEP_NODELIST": None}, "tcp://10.0.0.1:19713"),
        ({"STEP_NUM_NODES": 1}, "tcp://127.0.0.1:19713"),
        ({"STEP_ID": 3}, "tcp://gpu07:19714"),
    ],
)
def test_tasks_of_srun_use_the_address_of_the_first_machine_of_their_step(
    changes: dict[str, Any], address: str
) -> None:
    launch = of_slurm(changes)
    assert (launch.rank, launch.size, launch.local, launch.address) == (5, 7, 1, address)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 3),
        ({"STEP_TASKS_PER_NODE": "4(x2),3"}, 4),
        ({"STEP_TASKS_PER_NODE": None, "TASKS_PER_NODE": "2(x3),1", "NODEID": 3}, 1),
        ({"NNODES": 1}, 7),
    ],
)
def test_tasks_of_one_machine_are_counted(changes: dict[str, Any], count: int) -> None:
    assert of_slurm(changes).local_size == count


@pytest.mark.parametrize(
    "changes",
    [
        {"STEP_NUM_TASKS": 1, "PROCID": 0},  # srun --ntasks=1 in an allocation of seven
        {"STEP_ID": 4294967290, "STEP_NUM_TASKS": None, "PROCID": 0},  # salloc's shell
        {"STEP_ID": 4294967291, "PROCID": 0},  # the batch script
        {"STEP_ID": None, "STEP_NUM_TASKS": None, "LAUNCH_NODE_IPADDR": None, "PROCID": 0},
        {"PROCID": None},  # salloc on a login node
    ],
)
def test_a_shell_a_batch_script_and_a_single_task_are_one_process(changes: dict[str, Any]) -> None:
    assert of_slurm(changes) == Launch()


def test_variables_of_torchrun_and_of_the_user_override_slurm() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert of_slurm({}, **torchrun, MASTER_ADDR="a") == Launch(3, 4, 1, 2, "env://")
    assert of_slurm({}, RANK="0", WORLD_SIZE="1").size == 1
    launch = of_slurm({}, MASTER_ADDR="10.1.1.1", MASTER_PORT="29500")
    assert launch.address == "tcp://10.1.1.1:29500"


def test_non_numeric_variables_are_an_error() -> None:
    with pytest.raises(UsageError, match="RANK='first' in the environment"):
        Launch.of({"RANK": "first"})
    with pytest.raises(UsageError, match="Set MASTER_ADDR"):
        of_slurm({"STEP_NODELIST": None, "LAUNCH_NODE_IPADDR": None})
