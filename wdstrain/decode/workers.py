"""Decoder threads, and the limits for batches in flight.

`worker_processes` has the decoders that run in worker processes. Batches in flight are being
decoded, waiting to be, or ready before their turn. They are bounded by cores and by bytes: many
cores or large batches must not fill the memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

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
END_SECONDS = 5.0  # `close` waits no longer for threads and workers: a transform may hang


class InFlightLimits(NamedTuple):
    """Limits for batches in flight.

    batches: most batches in flight. decoders: number of threads or processes; 0 for the thread that
    takes the results. messages: most messages in flight to and from worker processes; 0 for threads.
    batches_per_message: most batches in one message.
    """

    batches: int
    decoders: int
    messages: int = 0
    batches_per_message: int = 1


def in_flight_limits(
    num_workers: int, batch_size: int, slot_bytes: int, read_bytes: float
) -> InFlightLimits:
    """Return the limits on this machine.

    slot_bytes: bytes of a batch slot. read_bytes: mean bytes of a batch as read from its shards.
    """
    limit = max(_MIN_BYTES, memory() // processes() // _MEMORY_SHARE)
    fits = limit // max(1, int(slot_bytes + read_bytes))
    if not num_workers:
        return of_threads(cores(), fits)
    batches_per_message = min(
        _MESSAGE_SAMPLES // batch_size, _MESSAGE_BATCHES, _MESSAGE_BYTES // max(1, slot_bytes)
    )
    return of_processes(num_workers, cores(), fits, max(1, batches_per_message))


def of_threads(cores: int, fits: int) -> InFlightLimits:
    """Return the limits for a thread per core. fits: batches that fit in memory."""
    batches = max(2, min(PREFETCH * cores, fits))
    return InFlightLimits(batches, min(cores, batches))


def of_processes(count: int, cores: int, fits: int, batches_per_message: int) -> InFlightLimits:
    """Return the limits for `count` worker processes. fits: batches that fit in memory.

    Each worker has a message, each busy core has another that waits. Half a message per busy core
    is ready before its turn: without it a slightly slower worker would hold up the others.
    """
    busy = min(count, cores)
    wanted = count + (PREFETCH - 1) * busy + max(2, busy // 2)
    messages = max(count + 1, min(wanted, fits // batches_per_message))
    batches = (messages + 1) * batches_per_message - 1
    return InFlightLimits(batches, count, messages, batches_per_message)


class DecoderThreads:
    """Decoder threads, one per core as far as memory allows. For num_workers=0.

    An executor of the standard library will not do: its futures are Conditions, and a Ctrl-C can
    leave a Condition locked.
    """

    def __init__(self, decoder: Decoder, limits: InFlightLimits) -> None:
        self._decoder, self._limits = decoder, limits
        self.count = max(1, limits.decoders)
        self._threads: list[threading.Thread] = []
        self._todo: SimpleQueue[tuple[Task, _ResultBox] | None] = SimpleQueue()
        self._boxes: deque[_ResultBox] = deque()  # of the tasks in flight, in order

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """Yield the results of a new stream of tasks, in their order.

        `tasks` is advanced in the thread that takes the results. The threads are new, so nothing of
        an earlier stream is in flight.
        """
        if not self._limits.decoders:
            yield from map(self._decoder, tasks)
            return
        self.close()
        for thread in self._threads:  # they may still write to a slot
            thread.join()
        self._start()
        for task in tasks:
            box = _ResultBox()
            self._boxes.append(box)
            self._todo.put((task, box))
            if len(self._boxes) == self._limits.batches:
                yield self._next_result()
        while self._boxes:
            yield self._next_result()

    def describe(self) -> str:
        """Return the stacks of the threads."""
        return "\n".join(
            f"decoder thread {number}:\n{thread_stack(thread.ident)}"
            for number, thread in enumerate(self._threads)
        )

    def close(self) -> None:
        """End the threads. Tasks that no thread has begun are dropped.

        A thread whose transform hangs ends with the transform, or with this process.
        """
        with suppress(Empty):
            while True:
                self._todo.get_nowait()
        for _ in self._threads:
            self._todo.put(None)
        end = time.monotonic() + END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._boxes.clear()

    def _next_result(self) -> Result:
        """Return the next result, or raise the exception of its decoder."""
        result = self._boxes.popleft().get()
        if isinstance(result, BaseException):
            try:
                raise result
            finally:
                del result  # it refers to this frame
        return result

    def _start(self) -> None:
        """Start the threads, each of which computes on one core.

        `torch.set_num_threads` also sets the default of threads that have not asked for their
        number. It is restored when all threads have set theirs.
        """
        self._todo, ready, default = SimpleQueue(), SimpleQueue[None](), torch.get_num_threads()
        with DeferSignals():
            try:
                for number in range(self.count):
                    arguments, name = (self._todo, ready), f"wdstrain-decoder_{number}"
                    thread = threading.Thread(
                        target=self._work, args=arguments, name=name, daemon=True
                    )
                    thread.start()
                    self._threads.append(thread)
                for _ in self._threads:
                    ready.get()
            finally:
                torch.set_num_threads(default)

    def _work(
        self, todo: SimpleQueue[tuple[Task, _ResultBox] | None], ready: SimpleQueue[None]
    ) -> None:
        """Decode tasks until the end. This is the function of each thread."""
        torch.get_num_threads()  # otherwise the first computation would take the caller's number
        torch.set_num_threads(1)
        ready.put(None)
        while (job := todo.get()) is not None:
            task, box = job
            result: Result | BaseException
            try:
                result = self._decoder(task)
            except BaseException as error:  # the loop raises it
                result = error
            box.put(result)
            del job, task, box, result  # the loop alone may keep the memory of a batch
