"""Stall watchdog: finds the thread or process that is stuck, and its Python stack.

Each decoder has a `ProgressCell` of two integers in shared memory: its batch and its row. While the
loop waits for a batch, the thread of a `StallWatchdog` calls a function that reports the cells.
`thread_stack` gives the stack of a thread of this process. `WorkerStacks` gives that of a worker
process: a signal makes the worker's `faulthandler` write its stack to a shared file. That works
even if C code in the worker never releases the GIL.

The watchdog ends nothing: a slow decoder goes on.
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

_CHECKS = 4  # checks of the watchdog in `patience` seconds
_SHORTEST_CHECK = 0.01  # least seconds between checks
_STACK_CALLS = 12  # calls of a stack that are shown; the outer ones only start the thread
_ANSWER_SECONDS = 2.0  # time for a worker process to write its stack
_SIGNAL = getattr(signal, "SIGUSR2", None)  # asks a worker process for its stack

_IDLE, _FIRST_BATCH = 1, 2  # first integer of a cell: 1 without work, n + 2 for batch n; 0 at first


class ProgressCell:
    """Progress of one decoder: current batch and row."""

    def __init__(self, cells: memoryview) -> None:
        """cells: int64[2] in zeroed memory."""
        self._cells = cells

    def begin(self, batch_number: int) -> None:
        """Note that the decoder works on the first row of a batch."""
        self._cells[1] = 0
        self._cells[0] = batch_number + _FIRST_BATCH

    def set_row(self, row: int) -> None:
        """Note the row of the batch that the decoder works on."""
        self._cells[1] = row

    def set_idle(self) -> None:
        """Note that the decoder has no work."""
        self._cells[0] = _IDLE

    @property
    def row_address(self) -> int:
        """Address of the row (int64) in this process, for C code; valid while the cell exists."""
        return ctypes.addressof(ctypes.c_int64.from_buffer(self._cells, 8))

    @classmethod
    def unwatched(cls) -> ProgressCell:
        """Return a cell of its own, which no watchdog reads."""
        return cls(memoryview(bytearray(16)).cast("q"))

    @property
    def state(self) -> tuple[int, int]:
        """Batch number and row. The batch number is -1 without work, -2 before the start."""
        return self._cells[0] - _FIRST_BATCH, self._cells[1]


class ProgressBoard:
    """Progress cells of `count` decoders in shared memory. Can be pickled for worker processes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._memory = Memory(max(1, count) * 16)

    def __getitem__(self, number: int) -> ProgressCell:
        return ProgressCell(self._memory.view[16 * number : 16 * number + 16].cast("q"))


class WorkerStacks:
    """Python stacks of worker processes. Can be pickled for worker processes."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._adopt(os.dup(file.fileno()))

    def _adopt(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    def __reduce__(self) -> tuple[Callable[[Any], WorkerStacks], tuple[Any]]:
        return _attach, (DupFd(self._fd),)

    def answer_signals(self) -> None:
        """In the worker: write the stack when the parent asks for it."""
        if _SIGNAL is not None:
            faulthandler.register(_SIGNAL, self._fd, all_threads=False)

    def read(self, pid: int) -> str:
        """Return the stack of a worker process as text, or the reason why there is none."""
        if _SIGNAL is None:
            return "  (this system has no signal that asks for a stack)"
        if not _catches_signal(pid):
            return "  (no stack: other code in this worker took the signal SIGUSR2)"
        offset = os.fstat(self._fd).st_size
        with suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)
        # the stack is written line by line: read until two reads are equal
        deadline, before, text = time.monotonic() + _ANSWER_SECONDS, b"", b""
        while (not text or text != before) and time.monotonic() < deadline:
            time.sleep(_ANSWER_SECONDS / 50)
            before, text = text, os.pread(self._fd, 1 << 16, offset)
        calls = [
            line.strip()
            for line in text.decode(errors="replace").splitlines()
            if line.lstrip().startswith("File")
        ]
        return (
            _format_stack(calls)
            if calls
            else f"  (no answer from the process: {_process_state(pid)})"
        )


def _attach(handle: Any) -> WorkerStacks:
    """Return the unpickled object in a worker process."""
    stacks = WorkerStacks.__new__(WorkerStacks)
    stacks._adopt(handle.detach())
    return stacks


def thread_stack(thread: int | None) -> str:
    """Return the stack of a thread of this process as text, the most recent call first.

    thread: its identity (`Thread.ident`).
    """
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "  (the thread has ended)"
    calls = [
        f'File "{call.filename}", line {call.lineno} in {call.name}'
        for call in traceback.extract_stack(frame)
    ]
    return _format_stack(calls[::-1])


def _format_stack(calls: list[str]) -> str:
    more = [f"... and {len(calls) - _STACK_CALLS} more"] if len(calls) > _STACK_CALLS else []
    return "\n".join(f"  {call}" for call in calls[:_STACK_CALLS] + more)


def _catches_signal(pid: int) -> bool:
    """Return whether a process has a handler for the signal, which would end it otherwise.

    True if the system does not say.
    """
    with suppress(OSError, ValueError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:") and _SIGNAL is not None:
                return bool(int(line.split()[1], 16) >> (int(_SIGNAL) - 1) & 1)
    return True


def _process_state(pid: int) -> str:
    """Return the state of a process in words."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "it has ended"
    names = {
        "T": "stopped",
        "D": "waiting in the kernel for a disk or a network",
        "Z": "dead",
        "S": "asleep",
        "R": "running",
    }
    return names.get(letter, f"in state {letter}")


class StallWatchdog:
    """Thread that reports a stall while the loop waits for a batch.

    `start_wait` and `end_wait` cost nothing.
    """

    def __init__(self, patience: float, report: Callable[[float], None]) -> None:
        """patience: seconds of waiting before the first report; 0: no thread and no reports.

        report: called in the watchdog's thread with the seconds of waiting, after `patience`
        seconds and then each time that the wait has doubled.
        """
        self._patience, self._report = patience, report
        self._wait_start: float | None = None
        self._running = threading.Lock()  # held until `close`
        self._running.acquire()
        self._thread: threading.Thread | None = None
        if patience:
            self._thread = threading.Thread(target=self._run, name="wdstrain-watch", daemon=True)
            self._thread.start()

    @classmethod
    def disabled(cls) -> StallWatchdog:
        """Return a watchdog without a thread, which never reports."""
        return cls(0, lambda _: None)

    @property
    def is_running(self) -> bool:
        """Whether it has a thread."""
        return self._thread is not None

    def start_wait(self) -> None:
        """Note that the loop waits for a batch from now on."""
        self._wait_start = time.monotonic()

    def end_wait(self) -> None:
        """Note that the loop does not wait."""
        self._wait_start = None

    def close(self) -> None:
        """End the thread. May be called several times, from any thread."""
        with suppress(RuntimeError):  # it is closed already
            self._running.release()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        reported_wait: float | None = None
        due = self._patience
        while not self._running.acquire(timeout=max(_SHORTEST_CHECK, self._patience / _CHECKS)):
            wait_start = self._wait_start
            if wait_start != reported_wait:
                reported_wait, due = wait_start, self._patience
            if wait_start is not None and time.monotonic() - wait_start >= due:
                due *= 2
                try:
                    self._report(time.monotonic() - wait_start)
                except Exception:  # what the report reads may be gone by now
                    _log.warning(
                        "no batch for %.0f s; the search for the stalled stage failed",
                        time.monotonic() - wait_start,
                        exc_info=True,
                    )
