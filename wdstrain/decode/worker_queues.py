"""Between the training process and worker processes: what torch's DataLoader takes for queues and an event, made careful.

A queue of multiprocessing gives all to a thread, which writes when it gets the interpreter's lock. A worker that decodes gives
that lock away and takes it back at each picture, and the two of them wait for each other: a picture of 128x128 took 118 us,
and takes 112 where the worker writes itself, as means of ten starts. So what fits into the pipe, whoever reads, is written at
once; while another writes, and for what is larger, there is the thread. What one process puts comes in its order: while the
thread has something, it has the next, too. The DataLoader needs that: a worker's word that it is done with an older stream
comes after the last answer to that.
"""

from __future__ import annotations

import fcntl
import resource
import struct
import termios
from contextlib import suppress
from copy import copy
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

from wdstrain.memory.shared import Memory
from wdstrain.runtime.signals import DeferSignals

_FREE = 8  # pages that a pipe shall have beside one for each message
_MOST = 256  # pages of a pipe that the system lets everybody have
_PAGE = resource.getpagesize()
_HEAD = 12  # bytes before a message, at most


class _Queue(Queue):  # type: ignore[type-arg]
    """A queue into which a Ctrl-C, or word of a worker's death, comes before or after something is put: between, it would leave it
    locked, and whoever closes it.
    """

    def __init__(self, *, ctx: BaseContext, messages: int) -> None:
        super().__init__(ctx=ctx)
        self._pages = _pages(self._writer.fileno(), messages)  # type: ignore[attr-defined]

    def __getstate__(self) -> Any:
        return (*super().__getstate__(), self._pages)  # type: ignore[misc]

    def __setstate__(self, state: Any) -> None:
        *others, self._pages = state
        super().__setstate__(tuple(others))  # type: ignore[arg-type]

    def _reset(self, after_fork: bool = False) -> None:
        """As a process begins to use it, multiprocessing calls this."""
        super()._reset(after_fork)  # type: ignore[misc]
        self._given = 0  # messages, to the thread
        self._send_bytes = self._thread_sent = _Sent(self._writer)  # type: ignore[attr-defined]

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        # The garbage collector may close the pipe before it finalizes torch's iterator, which then
        # puts None, the end of the work, for workers that are gone.
        if obj is None and self._writer.closed:  # type: ignore[attr-defined]
            return
        with DeferSignals():
            if not self._written(obj):
                super().put(obj, block, timeout)
                self._given += 1

    def _written(self, obj: Any) -> bool:
        """Write it now, if there is room and nobody else writes. The first begins the thread, while there is memory for one."""
        queue: Any = self
        if (
            queue._thread is None
            or queue._closed
            or self._thread_sent.count < self._given
            or self._pages <= 0
        ):
            return False
        message = ForkingPickler.dumps(obj)
        if not queue._wlock.acquire(False):
            return False
        try:
            if (
                len(message) + _HEAD
                > (self._pages - _waiting(queue._writer.fileno()) // _PAGE) * _PAGE
            ):
                return False
            queue._sem.acquire()
            queue._writer.send_bytes(message)
        finally:
            queue._wlock.release()
        return True


def _pages(pipe: int, messages: int) -> int:
    """Pages of a pipe without those that are filled in part, by so many messages and one more; 0 where the system does not say."""
    if not hasattr(fcntl, "F_SETPIPE_SZ"):
        return 0
    if fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) < (messages + _FREE) * _PAGE:
        with suppress(OSError):  # not for this user, who has many
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, min(messages + _FREE, _MOST) * _PAGE)
    return int(fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)) // _PAGE - messages - 1


def _waiting(pipe: int) -> int:
    """Bytes in a pipe that were not read yet."""
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))[0])


class _Sent:
    """What the thread writes with; counts its messages."""

    def __init__(self, writer: Connection) -> None:
        self._writer, self.count = writer, 0

    def __call__(self, message: bytes) -> None:
        self._writer.send_bytes(message)
        self.count += 1


class _Event:
    """What tells workers to end. Without the lock of multiprocessing's, which a worker that is killed while it looks leaves locked:
    whoever sets the event then waits for ever.
    """

    def __init__(self) -> None:
        self._memory = Memory(1)

    def set(self) -> None:
        self._memory.view[0] = 1

    def is_set(self) -> bool:
        return self._memory.view[0] == 1


def careful(context: BaseContext, messages: int) -> BaseContext:
    """What begins worker processes, as torch takes it, with our queues and events. messages: most that are in a queue at one time."""
    ours = copy(context)
    ours.Queue = partial(_Queue, ctx=context, messages=messages)  # type: ignore[method-assign]
    ours.Event = _Event  # type: ignore[method-assign, assignment]
    return ours
