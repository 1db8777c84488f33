"""Signals that stop a run (Ctrl-C, SIGTERM, SIGUSR1), and when checkpoints are due.

Schedulers send SIGTERM or SIGUSR1. A signal is recorded, the step is finished, a checkpoint is
written, and the run ends with the status of the signal. A single process that waits for data ends
at once, because no step is in progress. A second Ctrl-C ends the run immediately.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from wdstrain.training.config import Config
from wdstrain.training.distributed import GO_ON, SAVE, STOP, DistributedContext

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
                if signal.getsignal(number) == self._record:  # other code may have replaced it
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


def raise_stopped(
    signals: SignalHandler, distributed: DistributedContext, wish: int = GO_ON
) -> int:
    """Return the most urgent wish. Raises Stopped if any process got a signal. Collective."""
    wish = distributed.agreed(STOP if signals.number else wish)
    if wish == STOP:
        raise Stopped(signals.number or signal.SIGTERM)
    return wish


class CheckpointSchedule:
    """Decides between two steps whether a checkpoint is due, by count of steps or by the clock."""

    def __init__(self, config: Config, distributed: DistributedContext) -> None:
        self._config, self._distributed = config, distributed
        self._saved_at = time.monotonic()
        self._is_asked = False  # by the clock; all processes write it one step later

    def is_due(self, step: int, signals: SignalHandler) -> bool:
        """Return whether to write a checkpoint. Raises Stopped after a signal. Collective."""
        every = self._config.checkpoint_every
        is_late = self._is_late()
        self._is_asked = self._is_asked or is_late
        wish = raise_stopped(signals, self._distributed, SAVE if is_late else GO_ON)
        # A count of steps is the same on all processes and needs no exchange.
        is_counted = bool(every) and step // every > (step - self._config.accumulate) // every
        return is_counted or wish == SAVE

    def restart(self) -> None:
        """Count the time to the next checkpoint from now on."""
        self._saved_at, self._is_asked = time.monotonic(), False

    def _is_late(self) -> bool:
        """Return whether the clock asks for a checkpoint, and did not do so before."""
        minutes = self._config.checkpoint_minutes
        if not minutes or self._is_asked or not self._distributed.leads:
            return False
        return time.monotonic() - self._saved_at > 60 * minutes
