"""Ctrl-C, and word of a worker that died, which wait while a thread or process is half begun.

Python raises KeyboardInterrupt between any two steps of the main thread, also between that which starts a thread and that which notes that it
is there: nobody would end it. A notebook's cells are interrupted often, and its kernel lives on. So what is begun is begun whole, and
the interrupt comes right after. Torch raises the death of a worker in the same way; within a fork, and while the end of an object
is seen to, Python would print and drop it.
"""

from __future__ import annotations

# what signal's functions call: they look each answer up among their enumerations, which takes ten times as long
import _signal  # type: ignore[import-not-found]
import signal
import threading
from typing import Any

DEATH = "SIGCHLD"  # of a worker process


class DeferSignals:
    """Lets them wait within `with`. Elsewhere than in the main thread, where they never come, nothing is done."""

    def __init__(self, *names: str) -> None:
        """names: of the signals that wait, where it is not both."""
        self._numbers = [getattr(signal, name) for name in names or ("SIGINT", DEATH) if hasattr(signal, name)]
        self._arrived = set[int]()
        self._former = dict[int, Any]()
        self._holding = False

    def __enter__(self) -> DeferSignals:
        if threading.current_thread() is threading.main_thread():
            self._holding = True
            for number in self._numbers:
                former = _signal.getsignal(number)
                if callable(former):  # somebody answers it by an exception, perhaps
                    self._former[number] = former
                    _signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        for number in sorted(self._arrived):
            signal.raise_signal(number)

    def let_go(self) -> None:
        """From here on they come as they did, before the end."""
        self._holding = False
        for number in reversed(self._former):  # with SIGINT as the last, which may come at once
            self._put_back(number)

    def _put_back(self, number: int) -> None:
        if _signal.getsignal(number) == self._note:  # torch puts its own before what it finds
            _signal.signal(number, self._former[number])

    def _note(self, number: int, frame: object) -> None:
        if self._holding:
            self._arrived.add(number)
        else:  # torch's handler calls what it found when it was set, while we held; or Ctrl-C came while it was put back
            self._put_back(number)
            self._former[number](number, frame)
