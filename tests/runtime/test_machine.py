"""Usable processors and memory, from affinity, control groups and torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from wdstrain.runtime.machine import cores

_HERE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def test_ranks_of_one_machine_share_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    all_cores = cores()
    for local, share in (("2", _HERE // 2), (str(8 * _HERE), 1), ("0", _HERE), ("two", _HERE)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert cores() == max(1, min(share, all_cores))


# Runs in a mount namespace of its own with an empty control group folder: the test writes the
# limits there.
_QUOTAS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from wdstrain.runtime.machine import cores, memory

root = "/sys/fs/cgroup"

def print_limits(group, **files):
    os.makedirs(f"{root}{group}", exist_ok=True)
    for name, text in files.items():
        with open(f"{root}{group}/{name.replace('__', '.')}", "w") as file:
            file.write(text)
    print(cores(), memory())
    for name in files:
        os.unlink(f"{root}{group}/{name.replace('__', '.')}")

os.environ.pop("LOCAL_WORLD_SIZE", None)
print_limits("")
print_limits("", cpu__max="max 100000", memory__max="max")
for group in ("", "/a/b", "/a"):
    print_limits(group, cpu__max="100000 100000", memory__max="1048576")
    print_limits("/cpu" + (group and "/c"), cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")
    print_limits("/memory" + (group and "/d"), memory__limit_in_bytes="1048576")
print_limits("/cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
print_limits("/elsewhere", cpu__max="100000 100000", memory__max="1048576")
print_limits("", cpu__max="50000 100000")
print_limits("", cpu__max="nonsense", memory__max="")
os.environ["LOCAL_WORLD_SIZE"] = "3"
print_limits("", cpu__max="100000 100000")
"""


def test_control_groups_limit_processors_and_memory(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/a/b\n4:cpu,cpuacct:/c\n3:memory:/d\n2:pids:/elsewhere\n")
    mount = f"mount -t tmpfs none /sys/fs/cgroup && mount --bind {groups} /proc/$$/cgroup"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount (unshare -rm)")
    program = [sys.executable, "-c", _QUOTAS, str(ROOT)]
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    limits = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    whole, all_, few = limits[0][0], limits[0][1], 1 << 20
    assert whole == _HERE
    version2, of_cpu, of_memory = (1, few), (1, all_), (whole, few)
    unlimited = (whole, all_)
    expected = [unlimited] * 2 + [version2, of_cpu, of_memory] * 3 + [unlimited] * 2
    assert limits == [*expected, (1, all_), unlimited, (1, all_)]
