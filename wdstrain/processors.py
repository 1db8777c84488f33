"""How many processors there are for this process: those it may use, which a job's scheduler makes fewer than the machine has."""

from __future__ import annotations

import os


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
