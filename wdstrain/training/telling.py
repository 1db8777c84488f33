"""Who is told how the work goes on: the terminal or notebook it is called from, somebody else, or nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from wdstrain.report.terminal import ProgressReporter


class Tell(Protocol):
    """Who is told how the work goes on. `step` passes, `line` stays; unit is empty where the text has a rate of its own."""

    def step(
        self, title: str, done: int, total: int, text: str = "", unit: str = "steps"
    ) -> None: ...
    def line(self, text: str) -> None: ...


class Silence:
    """Is told how work goes on, and says nothing."""

    def step(
        self, title: str, done: int, total: int, text: str = "", unit: str = "steps"
    ) -> None: ...
    def line(self, text: str) -> None: ...


@contextmanager
def told(asked: Tell | None, leads: bool) -> Iterator[Tell]:
    """Who was asked for, else stderr or the notebook; of several processes, the first alone speaks."""
    if not leads:
        yield Silence()
    elif asked is not None:
        yield asked
    else:
        with ProgressReporter() as teller:
            yield teller
