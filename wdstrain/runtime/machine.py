"""Cores and memory that this process may use.

A scheduler or a container may allow fewer than the machine has, by CPU affinity or control groups.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from wdstrain.runtime.launch import Launch

_CGROUPS = "/sys/fs/cgroup"


def cores() -> int:
    """Return the number of cores of this process, at least 1.

    It is limited by CPU affinity and by the CPU quota of the container. The processes that
    torchrun or srun started on this machine share them. A process whose affinity is narrower
    than its parent's has its cores for itself, and shares only the quota.
    """
    usable, sharing, has_own_cores = len(os.sched_getaffinity(0)), processes(), False
    with suppress(OSError):  # the parent has ended
        has_own_cores = usable < len(os.sched_getaffinity(os.getppid()))
    usable = usable if has_own_cores else usable // sharing
    return max(1, math.ceil(min(usable, _cpu_quota() / sharing)))


def processes() -> int:
    """Return the number of processes of this job on this machine, as its launcher says."""
    return max(1, Launch.of().local_size)


def memory() -> int:
    """Return the bytes of memory that this process and others of its control group may use."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # the file is missing, or says "max"
                limit = min(limit, int(_read(f"{group}/{name}")))
    return limit


def _cpu_quota() -> float:
    """Return the number of cores that the control groups allow; a fraction, or infinite."""
    quota = math.inf
    for group in _cgroup_folders("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            # The file is missing, or says "max".
            with suppress(OSError, ValueError, ZeroDivisionError):
                time, period = " ".join(_read(f"{group}/{name}") for name in names).split()
                if int(time) > 0:  # -1: no quota
                    quota = min(quota, int(time) / int(period))
    return quota


def _cgroup_folders(controller: str) -> list[str]:
    """Return the folders of the control groups (version 1 or 2) that limit this process.

    They are its own group and all groups around it.
    """
    folders = [_CGROUPS, f"{_CGROUPS}/{controller}"]  # inside a container these are its own group
    with suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers or controller in controllers.split(","):
                mount = f"{_CGROUPS}/{controller}" if controllers else _CGROUPS
                while path.strip("/"):
                    folders.append(mount + path)
                    path = path.rpartition("/")[0]
    return folders


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's collector of reference cycles, which slows down making millions of objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
