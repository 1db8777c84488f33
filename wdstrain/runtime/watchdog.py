"""Who is stuck: found when nothing came for a while, and told with the Python stack, in threads and in other processes.

Whoever decodes has a desk, two integers in shared memory: which batch it is at and which row of it; writing them costs less than a
thousandth of decoding a picture. A thread looks at the desks a few times in the time after which silence is told. Of a thread
of this process the interpreter knows the stack. A worker process is asked by a signal, and `faulthandler` writes the stack to a file
without a name that both know: that works where the worker holds the interpreter's lock in a library's code for ever, as a debugger
or a thread of its own in the worker would not. Nothing is ended: what is slow and not dead goes on when it is done.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any

from wdstrain.memory.shared import Memory

_log = logging.getLogger("wdstrain")

_LOOKS = 4  # times that somebody looks in the time after which silence is told
_SOON = 0.01  # seconds between looks at least
_CALLS = 12  # of a stack that are shown: the rest is how a thread or process of ours begins
_ANSWER = 2.0  # seconds in which a worker that is asked for its stack answers
_ASK = getattr(signal, "SIGUSR2", None)  # nothing else in a worker of ours listens to it


class ProgressCell:
    """What one decoder is at."""

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells  # 0: nobody came yet; 1: no work; else the batch number of a task and 2. Then the row of its batch

    def begin(self, batch_number: int) -> None:
        self._cells[1] = 0
        self._cells[0] = batch_number + 2

    def at(self, row: int) -> None:
        self._cells[1] = row

    def leave(self) -> None:
        self._cells[0] = 1

    @property
    def row_address(self) -> int:
        """Where the row is, in this process, as long as the desk is: for code in C that goes from row to row."""
        return ctypes.addressof(ctypes.c_int64.from_buffer(self._cells, 8))

    @classmethod
    def apart(cls) -> ProgressCell:
        """One that nobody looks at."""
        return cls(memoryview(bytearray(16)).cast("q"))

    @property
    def state(self) -> tuple[int, int]:
        """(batch number of the task, row of its batch); -1 for the batch number where there is no work, -2 where nobody came yet."""
        return self._cells[0] - 2, self._cells[1]


class ProgressBoard:
    """The desks of some decoders, of which each process takes those it needs. Travels to worker processes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._memory = Memory(max(1, count) * 16)

    def __getitem__(self, number: int) -> ProgressCell:
        return ProgressCell(self._memory.view[16 * number : 16 * number + 16].cast("q"))


class Stacks:
    """The Python stacks of worker processes, which answer to a signal. Travels to them as a descriptor."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._adopt(os.dup(file.fileno()))

    def _adopt(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    def __reduce__(self) -> tuple[Callable[[Any], Stacks], tuple[Any]]:
        return _stacks_at, (DupFd(self._fd),)

    def answer(self) -> None:
        """To be called in the worker: from now on it answers."""
        if _ASK is not None:
            faulthandler.register(_ASK, self._fd, all_threads=False)

    def ask(self, process: int) -> str:
        """The stack of a worker, as text; of one that does not answer, what the system says of it."""
        if _ASK is None:
            return "  (this system has no signal to ask it with)"
        if not _listens(process):
            return "  (it does not listen: the signal SIGUSR2 is in other hands in this worker)"
        begun = os.fstat(self._fd).st_size
        with suppress(ProcessLookupError):
            os.kill(process, _ASK)
        until, before, found = time.monotonic() + _ANSWER, b"", b""
        while (not found or found != before) and time.monotonic() < until:  # it is written line by line
            time.sleep(_ANSWER / 50)
            before, found = found, os.pread(self._fd, 1 << 16, begun)
        calls = [line.strip() for line in found.decode(errors="replace").splitlines() if line.lstrip().startswith("File")]
        return _shown(calls) if calls else f"  (it does not answer: {_state(process)})"


def _stacks_at(handle: Any) -> Stacks:
    stacks = Stacks.__new__(Stacks)
    stacks._adopt(handle.detach())
    return stacks


def stack_of(thread: int | None) -> str:
    """The stack of a thread of this process by its identity, as text, the most recent call first."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "  (the thread has ended)"
    calls = [f'File "{call.filename}", line {call.lineno} in {call.name}' for call in traceback.extract_stack(frame)]
    return _shown(calls[::-1])


def _shown(calls: list[str]) -> str:
    more = [f"... and {len(calls) - _CALLS} more"] if len(calls) > _CALLS else []
    return "\n".join(f"  {call}" for call in calls[:_CALLS] + more)


def _listens(process: int) -> bool:
    """Whether a process catches the signal, which would end it otherwise; True where the system does not say."""
    with suppress(OSError, ValueError), open(f"/proc/{process}/status") as file:
        for line in file:
            if line.startswith("SigCgt:") and _ASK is not None:
                return bool(int(line.split()[1], 16) >> (int(_ASK) - 1) & 1)
    return True


def _state(process: int) -> str:
    try:
        with open(f"/proc/{process}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "it is not there any more"
    words = {"T": "stopped", "D": "waiting in the kernel, for a disk or a network", "Z": "dead", "S": "asleep", "R": "running"}
    return words.get(letter, f"in state {letter}")


class StallWatchdog:
    """A thread that tells of silence: while somebody waits for longer than `patience` seconds, `look` is called for what to tell.

    It is told again after twice the time, and so on. `waiting` and `done` are for whoever waits, and cost nothing.
    """

    def __init__(self, patience: float, look: Callable[[float], None]) -> None:
        self._patience, self._look = patience, look
        self._since: float | None = None
        self._running = threading.Lock()  # until the end
        self._running.acquire()
        self._thread: threading.Thread | None = None
        if patience:
            self._thread = threading.Thread(target=self._run, name="wdstrain-watch", daemon=True)
            self._thread.start()

    @classmethod
    def idle(cls) -> StallWatchdog:
        """One that never tells anything, without a thread."""
        return cls(0, lambda _: None)

    @property
    def runs(self) -> bool:
        return self._thread is not None

    def waiting(self) -> None:
        self._since = time.monotonic()

    def done(self) -> None:
        self._since = None

    def close(self) -> None:
        with suppress(RuntimeError):  # another thread closes it too
            self._running.release()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        told: float | None = None
        due = self._patience
        while not self._running.acquire(timeout=max(_SOON, self._patience / _LOOKS)):
            since = self._since
            if since != told:
                told, due = since, self._patience
            if since is not None and time.monotonic() - since >= due:
                due *= 2
                try:
                    self._look(time.monotonic() - since)
                except Exception:  # what is looked at goes on meanwhile, and may be gone; the next look may tell
                    _log.warning(
                        "no batch for %.0f s; looking for who is stuck failed", time.monotonic() - since, exc_info=True
                    )
