"""What this machine has for this process: a job's scheduler and a container make it fewer than the machine has."""

from __future__ import annotations

import math
import os
from contextlib import suppress

_GROUPS = "/sys/fs/cgroup"


def cores() -> int:
    """Processors for this process, at least 1: its share of those that it may run on, and of the quota of its container.

    LOCAL_WORLD_SIZE, which torchrun sets, is the number of processes that share them. One that has processors of its own, fewer than
    its parent, shares only the quota.
    """
    usable, local = os.cpu_count() or 1, os.environ.get("LOCAL_WORLD_SIZE", "")
    sharing, bound = int(local) if local.isdecimal() and int(local) else 1, False
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
        with suppress(OSError):  # the parent has ended
            bound = usable < len(os.sched_getaffinity(os.getppid()))
    usable = usable if bound else usable // sharing
    return max(1, math.ceil(min(usable, _quota() / sharing)))


def memory() -> int:
    """Bytes of memory that this process and its neighbours may use."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # not there, or "max"
                found = min(found, int(_read(f"{group}/{name}")))
    return found


def _quota() -> float:
    """Processors whose time the control groups of this process let it use; may be a fraction, and infinite."""
    found = math.inf
    for group in _groups("cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):  # not there, or "max"
            time, period = _read(f"{group}/cpu.max").split()
            found = min(found, int(time) / int(period))
        with suppress(OSError, ValueError, ZeroDivisionError):
            time, period = _read(f"{group}/cpu.cfs_quota_us"), _read(f"{group}/cpu.cfs_period_us")
            found = min(found, int(time) / int(period) if int(time) > 0 else math.inf)  # -1: no quota
    return found


def _groups(controller: str) -> list[str]:
    """Folders of the control groups, version 2 or version 1, that limit this process: its own and those around it."""
    found = [_GROUPS, f"{_GROUPS}/{controller}"]  # in a container these are its own
    with suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers or controller in controllers.split(","):
                mount = f"{_GROUPS}/{controller}" if controllers else _GROUPS
                while path.strip("/"):
                    found.append(mount + path)
                    path = path.rpartition("/")[0]
    return found


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
