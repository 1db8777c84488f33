"""Stall watchdog: a thread that reports while the loop waits long for a batch.

The watchdog ends nothing: a slow decoder goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from wdstrain.errors import logger

_CHECKS = 4  # checks of the watchdog in `patience` seconds
_SHORTEST_CHECK = 0.01  # least seconds between checks


class StallWatchdog:
    """Thread that reports a stall while the loop waits for a batch.

    `start_wait` and `end_wait` cost nothing.
    """

    def __init__(self, patience: float) -> None:
        """patience: seconds of waiting before the first report; 0: no thread and no reports."""
        self._patience = patience
        self._wait_start: float | None = None
        self._running = threading.Lock()  # held from `start` to `close`
        self._thread: threading.Thread | None = None

    def start(self, report: Callable[[float], None]) -> None:
        """Start the thread, unless it was started.

        report: called in the watchdog's thread with the seconds of waiting, after `patience`
        seconds and then each time that the wait has doubled. Only the thread refers to it.
        """
        if self._patience and self._thread is None:
            self._running.acquire()
            self._thread = threading.Thread(
                target=self._run, args=(report,), name="wdstrain-watch", daemon=True
            )
            self._thread.start()

    def start_wait(self) -> None:
        """Note that the loop waits for a batch from now on."""
        self._wait_start = time.monotonic()

    def end_wait(self) -> None:
        """Note that the loop does not wait."""
        self._wait_start = None

    def close(self) -> None:
        """End the thread. May be called several times, from any thread."""
        with suppress(RuntimeError):  # it is closed already, or was not started
            self._running.release()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, report: Callable[[float], None]) -> None:
        reported_wait: float | None = None
        due = self._patience
        while not self._running.acquire(timeout=max(_SHORTEST_CHECK, self._patience / _CHECKS)):
            wait_start = self._wait_start
            if wait_start != reported_wait:
                reported_wait, due = wait_start, self._patience
            seconds = 0.0 if wait_start is None else time.monotonic() - wait_start
            if wait_start is not None and seconds >= due:
                due *= 2
                try:
                    report(seconds)
                except Exception:  # what the report reads may be gone by now
                    logger.warning(
                        "no batch for %.0f s. Its stage is not known.", seconds, exc_info=True
                    )
