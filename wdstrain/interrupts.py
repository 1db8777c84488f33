"""Ctrl-C, which waits while a thread or process is half begun.

Python raises KeyboardInterrupt between any two steps of the main thread, also between that which starts a thread and that which notes that it
is there: nobody would end it. A notebook's cells are interrupted often, and its kernel lives on. So what is begun is begun whole, and
the interrupt comes right after.
"""

from __future__ import annotations

import signal
import threading
from typing import Any


class Held:
    """Lets Ctrl-C wait within `with`. Elsewhere than in the main thread, where it never comes, nothing is done."""

    def __init__(self) -> None:
        self._arrived = False
        self._former: Any = None

    def __enter__(self) -> Held:
        former = signal.getsignal(signal.SIGINT)
        if former is not None and threading.current_thread() is threading.main_thread():
            self._former = former
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        if self._arrived:
            signal.raise_signal(signal.SIGINT)

    def let_go(self) -> None:
        """From here on Ctrl-C works again, before the end."""
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)
            self._former = None

    def _note(self, *_: object) -> None:
        self._arrived = True
