"""Decoders that run in the loop's own thread or in threads of this process, and their limits.

`worker_processes` has those that run in worker processes. All of them are `Workers`. Batches in
flight are being decoded, waiting to be, or ready before their turn. They are bounded by cores and
by bytes: many cores or large batches must not fill the memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import torch

from wdstrain.decode.decoder import Decoder
from wdstrain.decode.task import Result, Task
from wdstrain.runtime.machine import cores, memory, processes
from wdstrain.runtime.signals import DeferSignals
from wdstrain.runtime.watchdog import thread_stack

_ResultBox = SimpleQueue["Result | BaseException"]  # of one task

PREFETCH = 2  # messages that a worker process has at a time; batches in flight per thread
_MEMORY_SHARE = 16  # batches in flight may take 1/16 of the memory
_MIN_BYTES = 256 << 20  # that they may take on any machine
# limits for one message: samples, batches, bytes
_MESSAGE_SAMPLES, _MESSAGE_BATCHES, _MESSAGE_BYTES = 128, 4, 32 << 20


class Flight(NamedTuple):
    """Limits for batches in flight.

    batches: most batches in flight. decoders: number of threads or processes.
    messages: most messages in flight to and from worker processes; 0 for threads.
    together: batches in one message.
    """

    batches: int
    decoders: int
    messages: int = 0
    together: int = 1


def flight_of(num_workers: int, batch_size: int, slot_bytes: int, read_bytes: float) -> Flight:
    """Return the limits on this machine.

    slot_bytes: bytes of a batch slot. read_bytes: mean bytes of a batch as read from its shards.
    """
    limit = max(_MIN_BYTES, memory() // processes() // _MEMORY_SHARE)
    room = limit // max(1, int(slot_bytes + read_bytes))
    if not num_workers:
        return of_threads(cores(), room)
    together = min(
        _MESSAGE_SAMPLES // batch_size, _MESSAGE_BATCHES, _MESSAGE_BYTES // max(1, slot_bytes)
    )
    return of_processes(num_workers, cores(), room, max(1, together))


def of_threads(cores: int, room: int) -> Flight:
    """Return the limits for a thread per core. room: batches that fit in memory."""
    batches = max(2, min(PREFETCH * cores, room))
    return Flight(batches, min(cores, batches))


def of_processes(count: int, cores: int, room: int, together: int) -> Flight:
    """Return the limits for `count` worker processes. room: batches that fit in memory.

    Each worker has a message, each busy core has another that waits. Half a message per busy core
    is ready before its turn: without it a slightly slower worker would hold up the others.
    """
    busy = min(count, cores)
    wanted = count + (PREFETCH - 1) * busy + max(2, busy // 2)
    messages = max(count + 1, min(wanted, room // together))
    return Flight((messages + 1) * together - 1, count, messages, together)


class Workers(Protocol):
    """Decoders of a pipeline. Results come in the order of the tasks, few of them in flight."""

    @property
    def count(self) -> int:
        """Number of decoders."""
        ...

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """Yield the results of a new stream of tasks. An older stream has ended before its start.

        `tasks` is advanced in the thread that takes the results.
        """
        ...

    def describe(self) -> str:
        """Return the decoders, and the Python stacks of those that are threads."""
        ...

    def close(self) -> None:
        """End threads and processes. `run` starts new ones."""
        ...


class InlineDecoder:
    """Decoder in the thread that takes the results. For tasks that only copy bytes."""

    count = 1

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """Yield the results of the tasks."""
        return map(self._decoder, tasks)

    def describe(self) -> str:
        """Return who decodes."""
        return "the loop's own thread decodes"

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


class DecoderThreads:
    """Decoder threads, one per core as far as memory allows. For num_workers=0.

    An executor of the standard library will not do: its futures are Conditions, and a Ctrl-C can
    leave a Condition locked.
    """

    def __init__(self, decoder: Decoder, flight: Flight) -> None:
        self._decoder, self._flight = decoder, flight
        self.count = flight.decoders
        self._threads: list[threading.Thread] = []
        self._todo: SimpleQueue[tuple[Task, _ResultBox] | None] = SimpleQueue()
        self._boxes: deque[_ResultBox] = deque()  # of the tasks in flight, in order

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """Yield the results of a new stream of tasks.

        The threads are new, so nothing of an earlier stream is in flight.
        """
        self.close()
        with DeferSignals():
            self._start()
        for task in tasks:
            box = _ResultBox()
            self._boxes.append(box)
            self._todo.put((task, box))
            if len(self._boxes) == self._flight.batches:
                yield self._result()
        while self._boxes:
            yield self._result()

    def describe(self) -> str:
        """Return the stacks of the threads."""
        return "\n".join(
            f"decoder thread {number}:\n{thread_stack(thread.ident)}"
            for number, thread in enumerate(self._threads)
        )

    def close(self) -> None:
        """End the threads. Tasks that no thread has begun are dropped."""
        with DeferSignals():
            with suppress(Empty):
                while True:
                    self._todo.get_nowait()
            for _ in self._threads:
                self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._boxes.clear()

    def _result(self) -> Result:
        """Return the next result, or raise the exception of its decoder."""
        result = self._boxes.popleft().get()
        if isinstance(result, BaseException):
            try:
                raise result
            finally:
                del result  # it refers to this frame
        return result

    def _start(self) -> None:
        self._todo, one_core = SimpleQueue(), OneCorePerThread(self.count)
        threads = [
            threading.Thread(
                target=self._work,
                args=(one_core,),
                name=f"wdstrain-decoder_{number}",
                daemon=True,
            )
            for number in range(self.count)
        ]
        with one_core:
            for thread in threads:
                thread.start()
        self._threads = threads

    def _work(self, one_core: OneCorePerThread) -> None:
        """Decode tasks until the end. This is the function of each thread."""
        one_core()
        while (job := self._todo.get()) is not None:
            task, box = job
            result: Result | BaseException
            try:
                result = self._decoder(task)
            except BaseException as error:  # the loop raises it
                result = error
            box.put(result)
            del job, task, box, result  # the loop alone may keep the memory of a batch


class OneCorePerThread:
    """Limits torch to one core in each of `count` threads. Start the threads within it.

    Each thread calls the object first. `torch.set_num_threads` sets the number of the calling
    thread, and the default of all threads that have not asked for their number. Each thread
    therefore asks first: otherwise its first computation would take the caller's number. When all
    threads have set theirs, the default is restored for later threads.
    """

    def __init__(self, count: int) -> None:
        self._default, self._ready = torch.get_num_threads(), threading.Barrier(count + 1)

    def __call__(self) -> None:
        """Limit the calling thread."""
        torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._ready.wait()
        except threading.BrokenBarrierError:  # another thread did not start
            raise SystemExit from None

    def __enter__(self) -> None:
        pass

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None:
            self._ready.abort()
            return
        self._ready.wait()
        torch.set_num_threads(self._default)
