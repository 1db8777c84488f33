"""Pools of decoders: batches in flight, their order and their limits; decoder threads.

`worker_processes` has the pool of worker processes. Batches in flight are being decoded, waiting to
be, or ready before their turn. They are bounded by cores and by bytes: many cores or large batches
must not fill the memory.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from wdstrain.decode.batches import ReadBatch, Result
from wdstrain.decode.decoder import Decoder
from wdstrain.runtime.machine import cores, memory, processes
from wdstrain.runtime.workers import DeferSignals

# Number of a message, and its tasks. In an answer, the results; or -1, and the error of a decoder.
_Message = tuple[int, list[Any]]

PREFETCH = 2  # messages that a decoder has at a time
_MEMORY_SHARE = 16  # batches in flight may take 1/16 of the memory
_MIN_BYTES = 256 << 20  # that they may take on any machine
# limits for one message: samples, batches, bytes
_MESSAGE_SAMPLES, _MESSAGE_BATCHES, _MESSAGE_BYTES = 128, 4, 32 << 20
END_SECONDS = 5.0  # `close` waits no longer for threads and workers: a transform may hang


class InFlightLimits(NamedTuple):
    """Limits for batches in flight.

    messages: most messages that were sent, and whose results were not taken. decoders: number of
    threads or processes; 0 for the thread that takes the results. batches_per_message: at most.
    """

    messages: int
    decoders: int
    batches_per_message: int = 1

    @property
    def batches(self) -> int:
        """Most batches in flight: all but one of the last message that was taken are, too."""
        return (self.messages + 1) * self.batches_per_message - 1


def in_flight_limits(
    num_workers: int, batch_size: int, slot_bytes: int, read_bytes: float
) -> InFlightLimits:
    """Return the limits on this machine.

    slot_bytes: bytes of a batch slot. read_bytes: mean bytes of a batch as read from its shards.
    """
    most_bytes = max(_MIN_BYTES, memory() // processes() // _MEMORY_SHARE)
    batches_per_message = min(
        _MESSAGE_SAMPLES // batch_size, _MESSAGE_BATCHES, _MESSAGE_BYTES // max(1, slot_bytes)
    )
    fits = most_bytes // max(1, int(slot_bytes + read_bytes))
    return limits_of(num_workers, cores(), fits, max(1, batches_per_message))


def limits_of(num_workers: int, cores: int, fits: int, batches_per_message: int) -> InFlightLimits:
    """Return the limits for a machine. fits: batches that fit in memory.

    Without workers there is a thread per core, and as many batches as workers would have in their
    messages: while a thread is at a slow sample, the others decode the batches behind it. Each worker
    has a message, each busy core has another that waits. Half a message per busy core is ready
    before its turn: without it a slightly slower worker would hold up the others.
    """
    if not num_workers:
        batches = max(2, min(PREFETCH * cores * batches_per_message, fits))
        return InFlightLimits(batches, min(cores, batches))
    busy = min(num_workers, cores)
    wanted = num_workers + (PREFETCH - 1) * busy + max(2, busy // 2)
    messages = max(num_workers + 1, min(wanted, fits // batches_per_message))
    return InFlightLimits(messages, num_workers, batches_per_message)


class Pool(ABC):
    """Decoders that work at the same time. Idle ones take the next message. count: of decoders."""

    def __init__(self, decoder: Decoder, limits: InFlightLimits) -> None:
        self._decoder, self._limits, self.count = decoder, limits, max(1, limits.decoders)

    def run(self, tasks: Iterator[ReadBatch]) -> Iterator[Result]:
        """Yield the results of a new stream of tasks, in their order.

        `tasks` is advanced in the thread that takes the results. No task of an earlier stream is
        in flight then.
        """
        self._begin()
        sent = taken = 0  # messages
        answers: dict[int, list[Result]] = {}  # that wait for their turn, by number of the message
        most, _, most_batches = self._limits
        at_decoders = PREFETCH * self.count
        while True:
            while sent - taken < most and sent - taken - len(answers) < at_decoders:
                # The loop waits for the first messages, so they have one task each.
                message = list(islice(tasks, 1 if sent < at_decoders else most_batches))
                if not message:
                    break
                self._send(sent, message)
                sent += 1
            if taken in answers:
                taken += 1
                yield from answers.pop(taken - 1)
            elif taken < sent:
                answers.update([self._receive()])
            else:
                return

    def describe(self) -> str:
        """Return what the decoders are, for a message about a stall."""
        return "Decoder threads"

    @abstractmethod
    def _begin(self) -> None:
        """Start the decoders, or wait for the tasks of an earlier stream and drop their results."""

    @abstractmethod
    def _send(self, number: int, tasks: list[ReadBatch]) -> None:
        """Give a message to the decoders, without waiting."""

    @abstractmethod
    def _receive(self) -> _Message:
        """Wait for the next answer. Raises the error of a decoder."""


class DecoderThreads(Pool):
    """Decoder threads, one per core as far as memory allows. For num_workers=0.

    An executor of the standard library will not do: its futures are Conditions, and a Ctrl-C can
    leave a Condition locked.
    """

    def __init__(self, decoder: Decoder, limits: InFlightLimits) -> None:
        super().__init__(decoder, limits)
        self._threads: list[threading.Thread] = []
        self._todo, self._done = SimpleQueue[_Message | None](), SimpleQueue[_Message]()

    def run(self, tasks: Iterator[ReadBatch]) -> Iterator[Result]:
        return super().run(tasks) if self._limits.decoders else map(self._decoder, tasks)

    def interrupt(self, error: Exception) -> None:
        """Raise an error in the loop's thread if it waits for a result: a transform may hang."""
        self._done.put((-1, [error]))

    def close(self) -> None:
        """End the threads. Tasks that no thread has begun are dropped.

        A thread whose transform hangs ends with the transform, or with this process.
        """
        self._is_closed = True
        for _ in self._threads:
            self._todo.put(None)
        end = time.monotonic() + END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _begin(self) -> None:
        """Start new threads, each of which computes on one core.

        `torch.set_num_threads` also sets the default of threads that have not asked for their
        number. It is restored when all threads have set theirs.
        """
        self.close()
        for thread in self._threads:  # they may still write to a slot
            thread.join()
        self._todo, self._done = SimpleQueue[_Message | None](), SimpleQueue[_Message]()
        self._is_closed, default = False, torch.get_num_threads()
        with DeferSignals():
            try:
                for number in range(self.count):
                    name = f"wdstrain-decoder_{number}"
                    thread = threading.Thread(target=self._work, name=name, daemon=True)
                    thread.start()
                    self._threads.append(thread)
                for _ in self._threads:
                    self._done.get()
            finally:
                torch.set_num_threads(default)

    def _send(self, number: int, tasks: list[ReadBatch]) -> None:
        self._todo.put((number, tasks))

    def _receive(self) -> _Message:
        number, results = self._done.get()
        if number < 0:
            raise results.pop()  # no variable: its traceback would refer to itself
        return number, results

    def _work(self) -> None:
        """Decode messages until the end. This is the function of each thread."""
        torch.get_num_threads()  # otherwise the first computation would take the caller's number
        torch.set_num_threads(1)
        self._done.put((0, []))  # ready
        while (message := self._todo.get()) is not None and not self._is_closed:
            try:
                self._done.put((message[0], [self._decoder(task) for task in message[1]]))
            except BaseException as error:  # the loop raises it
                self._done.put((-1, [error]))
            del message
