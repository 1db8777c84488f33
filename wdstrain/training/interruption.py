"""Being asked to stop: Ctrl-C, and the signals with which schedulers take a machine away (SIGTERM, SIGUSR1).

A step is never cut in two: a signal is noted, the step is finished, a checkpoint is written, and then the run ends with the
signal's own status. While a process that is alone waits for data, nothing is half done, so there it ends at once. A
second Ctrl-C does not wait for anything.
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
    """The run was asked to stop, and a checkpoint is written. `number`: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name}; a checkpoint is written, resume goes on from it"
        )
        self.number = number

    @property
    def status(self) -> int:
        """What a shell command ends with."""
        return 128 + self.number

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name


class Interruption:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.number = 0
        self._may_raise = False
        self._before: dict[int, Any] = {}

    @contextmanager
    def watched(self) -> Iterator[Interruption]:
        """Note signals in here. Only the main thread can; elsewhere they do what they did."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._noted) for number in _SIGNALS}
        try:
            yield self
        finally:
            for number, before in self._before.items():
                if (
                    signal.getsignal(number) == self._noted
                ):  # else somebody inside had a reason to take it
                    signal.signal(number, before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In here nothing is half done, and a signal ends the wait."""
        if self.number:
            raise Stopped(self.number)
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if self.number == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        if self._may_raise:
            self._may_raise = False
            raise Stopped(number)
