"""Deferral of Ctrl-C and of torch's error about a dead worker, while threads or processes start.

Python raises KeyboardInterrupt between any two steps of the main thread. If it comes between the
start of a thread and the line that stores the thread, nobody ends that thread. Torch raises the
death of a worker process in the same way. During a fork or a finalizer, Python prints and drops
such an exception. Starts are therefore made within `DeferSignals`, which delivers the signals at
its end.
"""

from __future__ import annotations

# `signal.signal` looks handlers up in enumerations, which takes ten times as long as `_signal`
import _signal  # type: ignore[import-not-found]
import signal
import threading
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
