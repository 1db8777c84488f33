"""Threads that fill places from files, one after another.

A thread of Python's that has read some megabytes waits for Python's lock before it can ask for the next, while the loop takes one batch
after another: with arrays that was a fifth of the time of two cores. So what is to be done lies in a queue in C, from which the hands
take it without that lock, and one thread more tells Python what was done.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import NamedTuple, Protocol

from wdstrain.memory.scatter import ScatterList
from wdstrain.native import kernels
from wdstrain.runtime.signals import DeferSignals


class _Job(NamedTuple):
    """Places to be filled from this offset of a file on, and what is called then."""

    fd: int
    offset: int
    places: ScatterList
    done: Callable[[], None]


class _Queue(Protocol):
    """What is to be filled, and what was."""

    def put(self, number: int, job: _Job) -> bool:
        """Whether it will be done: not after the end."""

    def work(self) -> None:
        """Do what is put, until the end."""

    def next(self, jobs: dict[int, _Job]) -> _Job | None:
        """What was done next; None after the end."""

    def close(self) -> None:
        """The end: what nobody has begun is not done."""


class IOThreadPool:
    """Fills places in `count` threads, and calls what is to be called in one more. They begin with the first places."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._finalizer: weakref.finalize[..., IOThreadPool] | None = None
        self._forget()

    def fill(self, fd: int, offset: int, places: ScatterList, done: Callable[[], None]) -> None:
        """Fill places from this offset of an open file on, after those that were asked for before, and call `done`, which raises nothing.

        Where the file ends before, or cannot be read, places have something left. Raises RuntimeError where a thread cannot begin.
        """
        number, job = next(self._numbers), _Job(fd, offset, places, done)
        self._jobs[number] = job
        if not self._queue.put(number, job):
            del self._jobs[number]
            raise RuntimeError("the hands that read were stopped, or there was no memory")
        if not self._threads:
            queue, jobs = self._queue, self._jobs
            self._begin(
                threading.Thread(
                    target=_tell, args=(queue, jobs), name="wdstrain-hands", daemon=True
                )
            )
            for i in range(self._count):
                self._begin(
                    threading.Thread(target=queue.work, name=f"wdstrain-hand_{i}", daemon=True)
                )

    def _begin(self, thread: threading.Thread) -> None:
        thread.start()
        self._threads.append(thread)

    def stop(self) -> None:
        """Wait for what is being filled; the rest is not, and of neither is anything told after that."""
        queue = self._queue
        _end(os.getpid(), queue, self._threads)
        if self._queue is queue:  # no other thread did the same meanwhile, and began anew
            self._forget()

    def _forget(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._queue: _Queue = _Waiting() if kernels.library is None else _Compiled()
        self._numbers, self._jobs, self._threads = (
            count(),
            dict[int, _Job](),
            list[threading.Thread](),
        )
        # also at the end of the program, before memory goes that they write to
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self._queue, self._threads)


def _end(owner: int, queue: _Queue, threads: list[threading.Thread]) -> None:
    if os.getpid() != owner:  # a forked child, where they are not
        return
    with DeferSignals():  # an interrupt would leave it locked
        queue.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def _tell(queue: _Queue, jobs: dict[int, _Job]) -> None:
    while (job := queue.next(jobs)) is not None:
        job.done()
        del job  # what it refers to goes with its last user


class _Compiled:
    """The queue in C."""

    def __init__(self) -> None:
        self._queue = ctypes.create_string_buffer(kernels.library.queue_size())
        kernels.library.queue_init(self._queue)

    def put(self, number: int, job: _Job) -> bool:
        wanted = job.fd, job.offset, job.places.left, *job.places.c_arguments
        return int(kernels.library.queue_put(self._queue, number, *wanted)) == 0

    def work(self) -> None:
        kernels.library.queue_work(self._queue)

    def next(self, jobs: dict[int, _Job]) -> _Job | None:
        came = ctypes.c_int64()
        number = int(kernels.library.queue_next(self._queue, ctypes.byref(came)))
        job = jobs.pop(number, None)
        if job is not None and came.value > 0:
            job.places.advance_verified(came.value)
        return job

    def close(self) -> None:
        kernels.library.queue_close(self._queue)


class _Waiting:
    """The same in Python."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._todo, self._done, self._closed = deque[tuple[int, _Job]](), deque[int](), False

    def put(self, number: int, job: _Job) -> bool:
        with self._changed:
            if not self._closed:
                self._todo.append((number, job))
                self._changed.notify_all()
            return not self._closed

    def work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or self._closed)
                if self._closed:
                    return
                number, job = self._todo.popleft()
            offset = job.offset - job.places.filled
            with suppress(
                Exception
            ):  # whoever is told finds something left, and what is wrong with it
                while job.places.left and job.places.read(job.fd, offset + job.places.filled):
                    pass
            del job  # what it refers to goes with its last user
            with self._changed:
                if not self._closed:
                    self._done.append(number)
                    self._changed.notify_all()

    def next(self, jobs: dict[int, _Job]) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._closed)
            return jobs.pop(self._done.popleft()) if self._done else None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._todo.clear()
            self._done.clear()
            self._changed.notify_all()
