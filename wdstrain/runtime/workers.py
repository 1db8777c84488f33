"""Starts of threads and worker processes: signals are deferred meanwhile, and a worker is set up.

Python raises KeyboardInterrupt between any two steps of the main thread. If it comes between the
start of a thread and the line that stores the thread, nobody ends that thread. Torch raises the
death of a worker process in the same way. During a fork or a finalizer, Python prints and drops
such an exception. Starts are therefore made within `DeferSignals`, which delivers the signals at
its end.

Worker processes ignore Ctrl-C, end with their parent and share its memory. A pool's workers would
wait for ever after their parent was killed, and those of a DataLoader notice it only after seconds.
The set-up ends them at once.
"""

from __future__ import annotations

# `signal.signal` looks handlers up in enumerations, which takes ten times as long as `_signal`
import _signal  # type: ignore[import-not-found]
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

WORKER_DEATH = "SIGCHLD"  # torch's handler raises if a worker process has died


class DeferSignals:
    """Context manager that defers signals to its end. Does nothing outside the main thread."""

    def __init__(self, *names: str) -> None:
        """names: the signals to defer; default: SIGINT and WORKER_DEATH."""
        self._numbers = [getattr(signal, name) for name in names or ("SIGINT", WORKER_DEATH)]
        self._arrived = set[int]()
        self._handlers = dict[int, Any]()  # the handlers that were set before, by signal
        self._deferring = False

    def __enter__(self) -> DeferSignals:
        if threading.current_thread() is threading.main_thread():
            self._deferring = True
            for number in self._numbers:
                handler = _signal.getsignal(number)
                if callable(handler):  # only a Python function can raise an exception
                    self._handlers[number] = handler
                    _signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        for number in sorted(self._arrived):
            signal.raise_signal(number)

    def release(self) -> None:
        """Stop deferring now. Signals that have arrived are still delivered at the end."""
        self._deferring = False
        for number in reversed(self._handlers):  # SIGINT last: its handler may raise at once
            self._restore(number)

    def _restore(self, number: int) -> None:
        if _signal.getsignal(number) == self._on_signal:  # else torch has set a handler meanwhile
            _signal.signal(number, self._handlers[number])

    def _on_signal(self, number: int, frame: object) -> None:
        if self._deferring:
            self._arrived.add(number)
        else:  # it came during `_restore`, or from a handler of torch that replaced this one
            self._restore(number)
            self._handlers[number](number, frame)


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
