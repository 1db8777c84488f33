"""Who is told how the work goes on: a terminal, a notebook, or nobody."""

from __future__ import annotations

from typing import Protocol


class Tell(Protocol):
    """Who is told how the work goes on."""

    def step(self, title: str, done: int, total: int, text: str = "") -> None: ...
    def line(self, text: str) -> None: ...


class Silence:
    """Is told how work goes on, and says nothing."""

    def step(self, title: str, done: int, total: int, text: str = "") -> None: ...
    def line(self, text: str) -> None: ...
