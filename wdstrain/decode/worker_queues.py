"""What the training process and the worker processes of a DataLoader share: messages, queues, an event.

A `multiprocessing.Queue` leaves every write to a thread. In a worker that thread and the decoder
then compete for the GIL at every image. Its locks also do not survive a Ctrl-C or the death of a
worker: the next process that takes the lock waits forever. The classes here have the methods that
the DataLoader calls, and neither threads nor locks. A message lies in anonymous shared memory, and
only its number goes through a queue.
"""

from __future__ import annotations

import io
import os
import pickle
import weakref
from contextlib import suppress
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd, ForkingPickler
from queue import Empty
from typing import Any

import numpy as np
import torch

from wdstrain.memory import Memory
from wdstrain.runtime.child_process import recording_context

_PLACE_BYTES = 1 << 36  # address space of a message; memory is taken as it is written
_SMALL_BUFFER = 4096  # smaller buffers are pickled by value: each other one is a system call
# A larger tensor is sent by torch, as a file in memory of its own: that takes 0.1 ms, and copies
# nothing in the thread that takes the batches.
_MOST_COPIED = 1 << 20


class MessageMemory:
    """Messages in anonymous memory, one in each place. A place is reused for later messages."""

    def __init__(self, handle: Any = None) -> None:
        """handle: of memory that another process made; None: new memory."""
        self._fd = os.memfd_create("wdstrain-messages") if handle is None else handle.detach()
        weakref.finalize(self, os.close, self._fd)

    def write(self, place: int, message: object) -> int:
        """Write a message, and return its number of parts. Raises what pickling raises."""
        head, buffers = io.BytesIO(), list[memoryview]()

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < _SMALL_BUFFER:
                return True
            buffers.append(buffer.raw())
            return False

        _MessagePickler(head, 5, True, is_small).dump(message)
        parts = [head.getbuffer(), *buffers]
        sizes: Any = np.array([part.nbytes for part in parts])
        offset = place * _PLACE_BYTES
        for part in (memoryview(sizes).cast("B"), *parts):
            while part.nbytes:
                written = os.pwrite(self._fd, part, offset)
                part, offset = part[written:], offset + written
        return len(parts)

    def read(self, place: int, parts: int) -> Any:
        """Return a copy of the message in a place. parts: as `write` returned it."""
        sizes: Any = np.empty(parts, np.int64)
        offset = self._fill(memoryview(sizes).cast("B"), place * _PLACE_BYTES)
        buffers: list[Any] = [np.empty(size, np.uint8) for size in sizes.tolist()]
        for buffer in buffers:
            offset = self._fill(memoryview(buffer), offset)
        return pickle.loads(buffers[0], buffers=buffers[1:])

    def _fill(self, buffer: memoryview, offset: int) -> int:
        """Fill a buffer with the bytes at an offset, and return the offset after them."""
        while buffer.nbytes:
            count = os.preadv(self._fd, [buffer], offset)
            buffer, offset = buffer[count:], offset + count
        return offset

    def __reduce__(self) -> tuple[type[MessageMemory], tuple[Any]]:
        return MessageMemory, (DupFd(self._fd),)


class _MessagePickler(ForkingPickler):
    """Pickler that sends tensors as NumPy arrays, unless they are large or NumPy has no such array."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.nbytes <= _MOST_COPIED:
            with suppress(TypeError, RuntimeError):
                return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


class MessageQueue:
    """Queue from any number of processes to one process, through a pipe.

    Linux writes as a whole what has room in a pipe. The numbers of all messages in flight do, so
    `put` does not wait, and a Ctrl-C or a kill leaves no half of a number.
    """

    def __init__(self, context: BaseContext) -> None:
        self._reader, self._writer = context.Pipe(duplex=False)

    def put(self, item: object) -> None:
        """Send an item.

        The garbage collector may close the pipe before it finalizes the DataLoader's iterator. The
        iterator then asks workers to end that have ended already.
        """
        if not self._writer.closed:
            self._writer.send_bytes(ForkingPickler.dumps(item))

    def get(self, timeout: float) -> Any:
        """Return the next item. Raises queue.Empty if there is none within `timeout` seconds."""
        if not self._reader.poll(timeout):
            raise Empty
        return self._reader.recv()

    def close(self) -> None:
        """Close both ends in this process."""
        self._reader.close()
        self._writer.close()

    def cancel_join_thread(self) -> None:
        """Do nothing. The DataLoader calls this; the exit of a process never waits for items."""


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


def interruptible_context(context: BaseContext, started: list[BaseProcess]) -> BaseContext:
    """Return a copy of a start context for the DataLoader, with the queues and events above.

    started: gets every process that the context starts.
    """
    changed = recording_context(context, started)
    changed.Queue = partial(MessageQueue, context)  # type: ignore[method-assign, assignment]
    changed.Event = EndEvent  # type: ignore[method-assign, assignment]
    return changed
