"""Queues and an event between the training process and worker processes, for torch's DataLoader.

A `multiprocessing.Queue` leaves every write to a thread. In a worker that thread and the decoder
then compete for the GIL at every image. Its locks also do not survive a Ctrl-C or the death of a
worker: the next process that takes the lock waits forever. The classes here have the methods that
the DataLoader calls, and neither problem.
"""

from __future__ import annotations

import fcntl
import resource
import struct
import termios
import threading
from contextlib import suppress
from copy import copy
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import Lock
from queue import Empty, SimpleQueue
from typing import Any

from wdstrain.memory.shared import Memory
from wdstrain.runtime.signals import DeferSignals

_SPARE_PAGES = 8  # pages of a pipe beside a page for each message
_MOST_PAGES = 256  # of a pipe; the system's default limit for users
_PAGE = resource.getpagesize()
_HEADER = 12  # most bytes that a connection sends before a message


class MessageQueue:
    """Queue from any number of processes to one process, through a pipe.

    A message that fits in the pipe is written by the caller. A thread writes messages that do not
    fit, and those that come while another process writes, so `put` never waits for the reader. It
    keeps the order of a process: while the thread has messages, it gets the next ones too. The
    DataLoader needs that order: a worker's answer that an older stream is over must come last.
    """

    _sender: _Sender | None = None  # of this process, from its first `put` on
    _is_closed = False

    def __init__(self, context: BaseContext, messages: int) -> None:
        """messages: most messages that are in the queue at a time."""
        self._reader, self._writer = context.Pipe(duplex=False)
        self._write_lock = context.Lock()  # across processes
        self._pages = _usable_pages(self._writer.fileno(), messages)

    @property
    def unsent(self) -> int:
        """Messages of this process that wait for room in the pipe."""
        return 0 if self._sender is None else self._sender.given - self._sender.sent

    def put(self, message: object) -> None:
        """Send a message. Raises ValueError after `close`, and what pickling raises."""
        # The garbage collector may close the pipe before it finalizes the DataLoader's iterator.
        # The iterator then sends None, the request to end, to workers that have already ended.
        if message is None and (self._is_closed or self._writer.closed):
            return
        if self._is_closed:
            raise ValueError("the queue is closed")
        with DeferSignals():  # an exception between two steps could leave the lock locked
            if self._sender is None:
                self._sender = _Sender(self._writer, self._write_lock)
            pickled = ForkingPickler.dumps(message)
            if self.unsent or not self._write(pickled):
                self._sender.send(pickled)

    def get(self, timeout: float) -> Any:
        """Return the next message. Raises queue.Empty if there is none within `timeout` seconds."""
        if not self._reader.poll(timeout):
            raise Empty
        return self._reader.recv()

    def close(self) -> None:
        """Close both ends in this process, the writer's once all messages are sent."""
        self._is_closed = True
        self._reader.close()
        if self._sender is None:
            self._writer.close()
        else:
            self._sender.end()

    def __del__(self) -> None:
        if self._sender is not None:  # its thread would keep the pipe
            self.close()

    def cancel_join_thread(self) -> None:
        """Do nothing. The DataLoader calls this; the exit of a process never waits for messages."""

    def _write(self, pickled: memoryview) -> bool:
        """Write a message if no other process writes and there is room. Returns whether it did."""
        if not self._write_lock.acquire(block=False):
            return False
        try:
            free = self._pages - _unread_bytes(self._writer.fileno()) // _PAGE
            if len(pickled) + _HEADER > free * _PAGE:
                return False
            self._writer.send_bytes(pickled)
        finally:
            self._write_lock.release()
        return True


class _Sender:
    """Thread that writes messages to a pipe. It does not keep its queue alive.

    given, sent: numbers of messages. Each is changed by one thread, so neither needs a lock.
    """

    def __init__(self, writer: Connection, lock: Lock) -> None:
        self._writer, self._lock = writer, lock
        self._messages: SimpleQueue[memoryview | None] = SimpleQueue()
        self.given = self.sent = 0
        threading.Thread(target=self._run, name="message-sender", daemon=True).start()

    def send(self, message: memoryview) -> None:
        """Write a message later."""
        self.given += 1
        self._messages.put(message)

    def end(self) -> None:
        """Close the pipe after the messages, and end the thread."""
        self._messages.put(None)

    def _run(self) -> None:
        with suppress(OSError), self._writer:  # nobody reads any more
            while (message := self._messages.get()) is not None:
                with self._lock:
                    self._writer.send_bytes(message)
                self.sent += 1


class EndEvent:
    """Event that tells workers to end.

    The event of multiprocessing has a lock. A worker that is killed while it checks the event
    leaves the lock locked, and the process that sets the event then waits forever.
    """

    def __init__(self) -> None:
        self._memory = Memory(1)

    def set(self) -> None:
        """Set the event."""
        self._memory.view[0] = 1

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._memory.view[0] == 1


def interruptible_context(context: BaseContext, messages: int) -> BaseContext:
    """Return a copy of a start context for the DataLoader, with the queues and events above.

    messages: most messages that are in a queue at a time.
    """
    changed = copy(context)
    changed.Queue = partial(MessageQueue, context, messages)  # type: ignore[method-assign, assignment]
    changed.Event = EndEvent  # type: ignore[method-assign, assignment]
    return changed


def _usable_pages(pipe: int, messages: int) -> int:
    """Return the pages of a pipe that can be filled; 0 if the system does not say.

    Each message may leave one page partly filled, and so may the message that is being written.
    """
    if not hasattr(fcntl, "F_SETPIPE_SZ"):
        return 0
    if fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) < (messages + _SPARE_PAGES) * _PAGE:
        with suppress(OSError):  # the pages of all pipes of a user are limited
            pages = min(messages + _SPARE_PAGES, _MOST_PAGES)
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, pages * _PAGE)
    return int(fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)) // _PAGE - messages - 1


def _unread_bytes(pipe: int) -> int:
    """Return the bytes in a pipe that are not read yet."""
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))[0])
