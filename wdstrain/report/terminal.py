"""Terminal output: results and tables on stdout, progress and messages on stderr.

In a terminal, progress is one line that is redrawn. In a file or pipe, it is a plain line every few
seconds. In a notebook, it is one plain-text output that is replaced. A widget would be missing when
the notebook is opened again. Lines go to stdout there, because notebooks show stderr like errors.

No thread redraws the line: worker processes are forked, and a fork is safe only without threads.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from io import StringIO
from shutil import get_terminal_size
from typing import Any, cast

from wdstrain.errors import StorageError, UsageError
from wdstrain.report.printing import printable

_PLAIN_SECONDS = 5.0  # between plain lines
_REDRAW_SECONDS = 0.4  # between lines that replace each other, in a terminal or notebook
_MOST_SECONDS = 1e9  # that are left
_quiet = False  # with --quiet, nothing but results and errors is printed


class Reporter(AbstractContextManager["Reporter"]):
    """Progress of work on stderr, or in the output of a notebook cell.

    is_silent: show nothing. Functions that take a reporter call `step` and `line` only.
    """

    def __init__(self, *, is_silent: bool = False) -> None:
        ipython = sys.modules.get("IPython")  # which a program may import outside of a notebook
        self._in_notebook = hasattr(ipython and ipython.get_ipython(), "kernel")
        self._replaces = self._in_notebook or sys.stderr.isatty()
        self._is_silent = is_silent
        self._cell: Any = None  # the output in a notebook
        self._title, self._is_shown = "", False
        self._first, self._start, self._reported = 0, 0.0, 0.0

    def step(
        self, title: str, done: int, total: int | None, text: str = "", unit: str = "steps"
    ) -> None:
        """Report progress; a report too soon after the last is skipped.

        title: name of the work; a new title starts a new line and a new rate.
        done, total: finished units and all units; None if their number is unknown.
        text: more figures. unit: name of the units; empty if `text` contains a rate.
        """
        now = time.monotonic()
        if title != self._title:
            self.close()
            self._title, self._first, self._start, self._reported = title, done, now, now
        interval = _REDRAW_SECONDS if self._replaces else _PLAIN_SECONDS
        if _quiet or self._is_silent or now - self._reported < interval:
            return
        self._reported = now
        rate = (done - self._first) / max(1e-9, now - self._start)
        count = str(done) if total is None else f"{done}/{total}"
        figures = [f"{count} {unit}", f"{rate:.0f}/s"] if unit else [f"{done / (total or 1):.0%}"]
        if total is not None:
            seconds = min(_MOST_SECONDS, (total - done) / max(1e-9, rate))
            figures.append(f"{timedelta(seconds=round(seconds))} left")
        line = f"{title}: {', '.join([*figures, *filter(None, [text])])}"
        (self._show if self._replaces else print_message)(printable(line))

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self.close()
        if not self._is_silent:
            (print_result if self._in_notebook else print_message)(text)

    def close(self) -> None:
        """Remove the progress line."""
        if self._is_shown:
            self._show("")
        self._title = ""

    def _show(self, line: str) -> None:
        """Replace the line in the terminal, or the output of the notebook cell."""
        self._is_shown = bool(line)
        if not self._in_notebook:
            sys.stderr.write(f"\r\x1b[2K{line[: get_terminal_size().columns - 1]}")
            sys.stderr.flush()
        elif self._cell is not None:
            self._cell.update({"text/plain": line}, raw=True)
        else:
            from IPython.display import display

            self._cell = display({"text/plain": line}, raw=True, display_id=True)

    def __exit__(self, *_: Any) -> None:
        self.close()


@contextmanager
def reporting(reporter: Reporter | bool | None, is_leader: bool) -> Iterator[Reporter]:
    """Yield the given reporter, or that of the terminal or notebook; a silent one on other ranks.

    False: a silent one. Raises UsageError for a value that shows no progress.
    """
    is_own = reporter is None or isinstance(reporter, bool)
    if not is_own and not (hasattr(reporter, "step") and hasattr(reporter, "line")):
        raise UsageError(
            "must be an object with step() and line().",
            option="progress",
            value=reporter,
        )
    with Reporter(is_silent=reporter is False or not is_leader) as own:
        yield own if is_own or not is_leader else cast(Reporter, reporter)


@contextmanager
def quiet(enabled: bool = True) -> Iterator[None]:
    """Print no progress and no messages meanwhile; results and errors are printed."""
    global _quiet
    before, _quiet = _quiet, enabled
    try:
        yield
    finally:
        _quiet = before


def print_message(text: str) -> None:
    """Print lines to stderr: messages for people. Results go to stdout."""
    if not _quiet:
        print_error(text)


def print_error(text: str) -> None:
    """Print lines to stderr, also where only results and errors are wanted."""
    sys.stderr.write(f"{_printable_lines(text)}\n")
    sys.stderr.flush()


def print_result(text: str) -> None:
    """Print lines of the result to stdout. Raises StorageError if they cannot be written.

    Characters that the encoding of stdout lacks are written as escapes.
    """
    try:
        # It writes the buffered text, so it can fail like any write.
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout.write(f"{_printable_lines(text)}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        with suppress(OSError):  # Python flushes stdout at its end, and would fail once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise StorageError(
            f"the work is done, but its result cannot be written to stdout: {error.strerror}.",
            "Write it elsewhere.",
        ) from error


def _printable_lines(text: str) -> str:
    """Return the lines without control characters: names in shards may come from anybody."""
    return "\n".join(map(printable, text.split("\n")))


def table_text(rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Return rows as aligned columns of plain text. The last column is folded to lines.

    width: of the text; default: of the terminal, else 80. With a width each row is one line, and
    what is too long is cut.
    """
    from rich.console import Console
    from rich.table import Table

    is_cut = width is not None
    table, text = Table.grid(padding=(0, 2), expand=is_cut), StringIO()
    for _ in range(max(map(len, rows), default=1) - 1):
        table.add_column(no_wrap=True, overflow="crop")
    table.add_column(no_wrap=is_cut, overflow="crop" if is_cut else "fold", ratio=int(is_cut))
    for row in rows:
        table.add_row(*map(_printable_lines, row))
    Console(
        file=text,
        width=width,
        highlight=False,
        markup=False,
        color_system=None,
        force_jupyter=False,
        force_terminal=False,
    ).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
