"""What a person sees in a terminal: progress and tables there, plain lines where the output is no terminal.

On a terminal one line is redrawn with rate and time left; elsewhere a plain line appears every few seconds. No thread
redraws: a thread of ours in the parent and a fork of worker processes do not go together.

In a notebook progress is one output of plain text, which is replaced: that is kept, exported and read aloud like any text, where a
widget is gone when the notebook is opened again. Lines go to stdout there, as notebooks paint stderr in the colour of errors.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from wdstrain.errors import StorageError
from wdstrain.report.printing import printable

_EVERY = 5.0  # seconds between plain lines
_REDRAW = 0.1  # seconds between redrawings
_REPLACE = 0.5  # the same in a notebook, to which each is a message


class ProgressReporter:
    """Tells on stderr, or in the notebook, how work goes on. `step` for what passes, `line` for what stays."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        # FORCE_COLOR, which a notebook's kernel sets for all that it starts, makes no terminal of a pipe
        self._redraws = self._console.is_terminal and sys.stderr.isatty()
        self._every = _REDRAW if self._redraws else _REPLACE if self._console.is_jupyter else _EVERY
        self._live: Progress | None = None
        self._place: Any = None  # in a notebook: the output that is replaced, and what stands there
        self._passing = ""
        self._title = ""
        self._begun = self._shown = 0.0
        self._first = 0

    def step(self, title: str, done: int, total: int | None, text: str = "", unit: str = "steps") -> None:
        """`done` of `total` units of what `title` names, None if nobody knows how many; `text` adds figures.

        unit: empty where the text has a rate of its own.
        """
        now = time.monotonic()
        if title != self._title:
            self.close()
            self._title, self._begun, self._shown, self._first = title, now, now, done
        if now - self._shown < self._every:
            return
        self._shown = now
        rate = (done - self._first) / max(1e-9, now - self._begun)  # what was done before is no part of the pace
        if total is None:
            figures = f"{done} {unit}, {rate:.0f}/s"
        else:
            each = f" {unit}, {rate:.0f}/s" if unit else ""
            figures = f"{done}/{total}{each}, {(total - done) / rate if rate else 0.0:.0f} s left"
        figures += f", {text}" if text else ""
        if self._console.is_jupyter:
            self._replace(f"{title}: {figures}")
            return
        if not self._redraws:
            say(f"{title}: {figures}")
            return
        if self._live is None:
            self._bar = BarColumn(16)
            columns = TextColumn("{task.description}"), self._bar, TextColumn("{task.fields[figures]}")
            self._live = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
            self._task = self._live.add_task(title, total=total, figures=figures)
            self._live.start()
        self._bar.bar_width = max(3, min(16, self._console.width - len(title) - len(figures) - 3))  # figures matter more
        self._live.update(self._task, completed=done, figures=figures)
        self._live.refresh()

    def line(self, text: str) -> None:
        """A line that stays."""
        self.close()
        if self._console.is_jupyter:
            show(text)
        else:
            say(text)

    def close(self) -> None:
        """Take the progress line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._passing:
            self._replace("")
        self._title = ""

    def _replace(self, text: str) -> None:
        """What a notebook shows as passing."""
        from IPython.display import display

        if self._place is None:
            self._place = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._place.update({"text/plain": text}, raw=True)
        self._passing = text

    def __enter__(self) -> ProgressReporter:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def say(text: str) -> None:
    """A line for people, on stderr, so that stdout holds results alone."""
    sys.stderr.write(f"{_lines(text)}\n")
    sys.stderr.flush()


def show(text: str) -> None:
    """A line of the result, on stdout."""
    with _stdout():
        sys.stdout.write(f"{_lines(text)}\n")


def flush() -> None:
    """See that all of the result has arrived."""
    with _stdout():
        sys.stdout.flush()


@contextmanager
def _stdout() -> Iterator[None]:
    """Raises StorageError where the result cannot be written, such as into a file on a full disk."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        with suppress(OSError):  # what is buffered would fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise StorageError(f"the work is done, and its result cannot be written to stdout: {error.strerror}.") from error


def _lines(text: str) -> str:
    """The same lines without what steers a terminal: keys and names come from shards, and shards from strangers."""
    return "\n".join(map(printable, text.split("\n")))


def table(rows: Iterable[tuple[str, str]], title: str = "") -> None:
    """Names and values, on stdout."""
    drawn = Table(title=title or None, show_header=False, title_justify="left")
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in rows:
        drawn.add_row(_lines(name), _lines(value))
    with _stdout():
        _Stdout().print(drawn)


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table with a line of names above its columns, on stdout; all columns but the first hold figures."""
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for number, name in enumerate(head):
        drawn.add_column(name, overflow="fold", justify="right" if number else "left", no_wrap=number > 0)
    for row in rows:
        drawn.add_row(*map(_lines, row))
    with _stdout():
        _Stdout().print(drawn)


class _Stdout(Console):
    """Tables are text, in a notebook too."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, force_jupyter=False)

    def on_broken_pipe(self) -> None:
        """Whoever read our output has gone; the caller ends quietly, where rich would end the process as failed."""
        raise BrokenPipeError
