"""Programs in forked children: torch and the package are imported there already.

A child has its own standard streams and `sys.argv`. At its end it waits for its threads. Then it
calls its functions of `atexit`, as Python does. Use `subprocess` for a program that must begin
without these imports.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import textwrap
import threading
import traceback
import warnings
import weakref
from typing import NamedTuple, NoReturn


class Ended(NamedTuple):
    """How a program ended. status: negative for a signal, as in subprocess."""

    status: int
    out: str
    err: str


class Program:
    """A running program, given as its text. words: its arguments."""

    def __init__(self, text: str, *words: object) -> None:
        reading, writing = os.pipe()
        self._err = tempfile.TemporaryFile()  # noqa: SIM115  closed at the end
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
            self.pid = os.fork()
        if self.pid == 0:
            os.dup2(writing, 1)
            os.dup2(self._err.fileno(), 2)
            _run(textwrap.dedent(text), [str(word) for word in words])
        os.close(writing)
        self.out = os.fdopen(reading)

    def end(self) -> Ended:
        """Wait for its end."""
        with self.out, self._err:
            out = self.out.read()
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._err.seek(0)
            return Ended(status, out, self._err.read().decode(errors="replace"))


def ended(text: str, *words: object) -> Ended:
    """Run a program to its end."""
    return Program(text, *words).end()


def _run(text: str, words: list[str]) -> NoReturn:
    status = 1
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # of the parent
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.argv = ["-c", *words]
        exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
