"""I/O thread pool that runs scatter reads without holding the GIL.

A Python thread that has read some megabytes must wait for the GIL before it can start the next
read, while the training loop takes batch after batch. The pending reads therefore lie in a queue in
C (`native/kernels.c`), from which the I/O threads take them without the GIL. One more thread
calls the callbacks.

It needs the C library: without it, arrays are not read straight into batches.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from wdstrain.memory.scatter import ScatterList
from wdstrain.native import kernels
from wdstrain.runtime.signals import DeferSignals


class _Read(NamedTuple):
    """A scatter read from this offset of a file on, and its callback."""

    fd: int
    offset: int
    target: ScatterList
    on_done: Callable[[], None]


class IOThreadPool:
    """Pool of `threads` I/O threads and one callback thread. They start with the first read."""

    def __init__(self, threads: int) -> None:
        self._thread_count = threads
        self._finalizer: weakref.finalize[..., IOThreadPool] | None = None
        self._reset()

    def fill(self, fd: int, offset: int, target: ScatterList, on_done: Callable[[], None]) -> None:
        """Start to fill the target from this offset of an open file on.

        on_done: called from the callback thread at the end of the read; it must not raise. If the
        file ended or failed, the target is not full then.
        Raises RuntimeError if the pool is stopped or a thread cannot start.
        """
        number, read = next(self._numbers), _Read(fd, offset, target, on_done)
        self._reads[number] = read
        if not self._queue.put(number, read):
            del self._reads[number]
            raise RuntimeError("the I/O thread pool was stopped or is out of memory")
        if not self._threads:
            self._start_thread("wdstrain-io-done", _run_callbacks, self._queue, self._reads)
            for i in range(self._thread_count):
                self._start_thread(f"wdstrain-io-{i}", self._queue.run)

    def stop(self) -> None:
        """Wait for running reads and drop the others. No callback is called afterwards.

        The next `fill` starts new threads.
        """
        queue = self._queue
        _stop(os.getpid(), queue, self._threads)
        if self._queue is queue:  # otherwise another thread stopped the pool at the same time
            self._reset()

    def _start_thread(self, name: str, function: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _reset(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._queue = _Queue()
        self._numbers, self._reads = count(), dict[int, _Read]()
        self._threads: list[threading.Thread] = []
        # Also at the end of the program: the threads write to memory that would be freed.
        self._finalizer = weakref.finalize(self, _stop, os.getpid(), self._queue, self._threads)


def _stop(process: int, queue: _Queue, threads: list[threading.Thread]) -> None:
    if os.getpid() != process:  # a forked child, which does not have the threads
        return
    with DeferSignals():  # a Ctrl-C would leave the queue locked
        queue.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def _run_callbacks(queue: _Queue, reads: dict[int, _Read]) -> None:
    while (read := queue.next(reads)) is not None:
        read.on_done()
        del read  # while this thread waits it must not keep the target's memory


class _Queue:
    """Queue in C of pending reads, by number, and of completed ones. Its threads take no GIL."""

    def __init__(self) -> None:
        self._queue = ctypes.create_string_buffer(kernels.library.queue_size())
        kernels.library.queue_init(self._queue)

    def put(self, number: int, read: _Read) -> bool:
        """Append a read. Returns False if the queue is closed or has no memory."""
        request = read.target.fill_request(read.fd, read.offset, read.target.left)
        return int(kernels.library.queue_put(self._queue, number, ctypes.byref(request))) == 0

    def run(self) -> None:
        """Run pending reads until the queue is closed."""
        kernels.library.queue_work(self._queue)

    def next(self, reads: dict[int, _Read]) -> _Read | None:
        """Wait for a completed read, remove it from `reads` and return it; None once closed."""
        size = ctypes.c_int64()
        number = int(kernels.library.queue_next(self._queue, ctypes.byref(size)))
        read = reads.pop(number, None)
        if read is not None and size.value > 0:
            read.target.advance_verified(size.value)
        return read

    def close(self) -> None:
        """Drop pending and completed reads. Running ones end normally."""
        kernels.library.queue_close(self._queue)
