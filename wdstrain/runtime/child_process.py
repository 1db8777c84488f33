"""Set-up of worker processes: they ignore Ctrl-C, end with their parent and share its memory.

A pool's workers wait for ever after their parent was killed, and those of a DataLoader notice it
only after seconds. The set-up ends them at once.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from copy import copy
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any


def set_up_worker() -> None:
    """Set up this worker process. Call it first in every worker."""
    gc.freeze()  # a collection would write to inherited objects, and so copy the pages they are on
    # A group of its own: a scheduler's SIGTERM to the job must not end the workers. The parent
    # needs them until it has written its checkpoint, and then ends them.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends the workers
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(
            target=_exit_with, args=(parent.sentinel,), name="parent-watch", daemon=True
        ).start()


def _exit_with(parent_sentinel: int) -> None:
    """Wait for the parent process to end, and end this process."""
    wait([parent_sentinel])
    os._exit(1)


def recording_context(context: BaseContext, started: list[BaseProcess]) -> BaseContext:
    """Return a copy of the context that appends every process it creates to `started`.

    `multiprocessing.active_children` cannot replace it: other threads may have children too.
    """
    recorder = copy(context)

    def process(*arguments: Any, **options: Any) -> BaseProcess:
        started.append(context.Process(*arguments, **options))  # type: ignore[attr-defined]
        return started[-1]

    recorder.Process = process  # type: ignore[attr-defined]
    return recorder
