"""Progress of a run: on the terminal or notebook, on an object of the user's, or nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from wdstrain.report.terminal import ProgressReporter


class Reporter(Protocol):
    """Shows progress. `step` replaces what it showed before; a `line` stays.

    unit: of the counts; empty where the text has a rate of its own.
    """

    def step(
        self, title: str, done: int, total: int, text: str = "", unit: str = "steps"
    ) -> None: ...
    def line(self, text: str) -> None: ...


class SilentReporter:
    """Shows nothing."""

    def step(
        self, title: str, done: int, total: int, text: str = "", unit: str = "steps"
    ) -> None: ...
    def line(self, text: str) -> None: ...


@contextmanager
def reporting(reporter: Reporter | None, is_leader: bool) -> Iterator[Reporter]:
    """Yield the given reporter, or that of the terminal or notebook; a silent one on other ranks."""
    if not is_leader:
        yield SilentReporter()
    elif reporter is not None:
        yield reporter
    else:
        with ProgressReporter() as terminal:
            yield terminal
