"""What this machine has for this process: a job's scheduler and a container make it fewer than the machine has."""

from __future__ import annotations

import os
from contextlib import suppress

_GROUPS = "/sys/fs/cgroup"
_LIMITS = (f"{_GROUPS}/memory.max", f"{_GROUPS}/memory/memory.limit_in_bytes")  # of a container


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> int:
    """Bytes of memory that this process and its neighbours may use."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    paths = list(_LIMITS)
    with suppress(OSError), open("/proc/self/cgroup") as file:  # a job's own group, and those it is in
        for line in file:
            group = line.rstrip("\n").rpartition(":")[2] if line.startswith("0::") else ""
            while group.strip("/"):
                paths.append(f"{_GROUPS}{group}/memory.max")
                group = group.rpartition("/")[0]
    for path in paths:
        with suppress(OSError, ValueError), open(path) as file:  # not there, or "max"
            found = min(found, int(file.read()))
    return found
