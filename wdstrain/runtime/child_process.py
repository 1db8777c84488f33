"""How a worker process of ours begins: it leaves Ctrl-C to its parent, it ends when its parent ends, and it shares its memory.

Neither a pool nor a DataLoader sees to the second at once: the one lets its workers wait for ever when the parent was
killed, the other looks every five seconds. And a collection of Python's writes to all there is: in a fork that copies 35 MB
of what torch brought.
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


def begin() -> None:
    """To be called first in a worker process."""
    gc.freeze()  # what is there now stays, and is the parent's
    # a group of its own: a signal that takes the job away (SIGTERM of a scheduler, of torchrun) is for the parent, who may need its
    # workers for as long as it takes to write a checkpoint, and ends them
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches every process of a terminal; only the parent answers it
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _end_with(parent: int) -> None:
    wait([parent])
    os._exit(1)


def recording(context: BaseContext, started: list[BaseProcess]) -> BaseContext:
    """Return a copy of the context that appends each process it makes to `started`.

    The children of this process may also belong to other threads, so `active_children` is no list of a caller's workers.
    """
    ours = copy(context)

    def process(*arguments: Any, **options: Any) -> BaseProcess:
        started.append(context.Process(*arguments, **options))  # type: ignore[attr-defined]
        return started[-1]

    ours.Process = process  # type: ignore[attr-defined]
    return ours
