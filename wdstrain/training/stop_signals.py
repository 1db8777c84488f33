"""Signals that stop a run: Ctrl-C, and those of schedulers (SIGTERM, SIGUSR1).

A signal is recorded, the step is finished, a checkpoint is written, and the run ends with the
status of the signal. A single process that waits for data ends at once, because no step is in
progress. A second Ctrl-C ends the run immediately.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(KeyboardInterrupt):
    """A signal stopped the run, and a checkpoint was written. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name}; a checkpoint was written, resume continues from it"
        )
        self.number = number

    @property
    def status(self) -> int:
        """Exit status of a shell command."""
        return 128 + self.number

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


class SignalHandler:
    """Records signals. number: of the last one, 0 if there was none."""

    def __init__(self) -> None:
        self.number = 0
        self._may_raise = False
        self._before: dict[int, Any] = {}

    @contextmanager
    def watched(self) -> Iterator[SignalHandler]:
        """Record signals in this context. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._record) for number in _SIGNALS}
        try:
            yield self
        finally:
            for number, before in self._before.items():
                if (
                    signal.getsignal(number) == self._record
                ):  # else other code has replaced the handler
                    signal.signal(number, before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let a signal raise Stopped in this context, where no step is in progress."""
        if self.number:
            raise Stopped(self.number)
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.number == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        if self._may_raise:
            self._may_raise = False
            raise Stopped(number)
