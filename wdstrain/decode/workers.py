"""Who runs the decoder: the loop itself, threads of this process, or worker processes (`processes`).

All take an iterator of tasks and give results in the order of the tasks, with a bounded number in flight.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch

from wdstrain.decode.decoder import Decoder
from wdstrain.decode.flight import Flight
from wdstrain.decode.task import Result, Task
from wdstrain.runtime.signals import DeferSignals
from wdstrain.runtime.watchdog import ProgressBoard, ProgressCell, thread_stack

_Box = SimpleQueue["Result | BaseException"]  # for one result


class InlineDecoder:
    """Decodes when the result is asked for; where decoding is nothing but taking bytes."""

    count = 1

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._desk, self.desks = decoder, ProgressCell.unwatched(), ProgressBoard(0)

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        return (self._decoder(task, self._desk) for task in tasks)

    def stack(self, number: int) -> tuple[str, str]:
        """There is no decoder but the loop itself."""
        raise IndexError(number)

    def close(self) -> None:
        """There is nothing to end."""


class DecoderThreads:
    """Decodes in threads, one per core as far as memory allows; for num_workers=0.

    Not an executor of the standard library: its futures are Conditions, which a Ctrl-C can leave locked for ever.
    """

    def __init__(self, decoder: Decoder, flight: Flight) -> None:
        self._decoder, self._flight = decoder, flight
        self.count = flight.decoders
        self.desks = ProgressBoard(self.count)
        self._threads: list[threading.Thread] = []
        self._todo: SimpleQueue[tuple[Task, _Box] | None] = SimpleQueue()
        self._boxes: deque[_Box] = (
            deque()
        )  # into which the results of what is in flight are put, in order

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """Results of a new stream of tasks, in new threads: so nothing is in flight of an earlier one."""
        self.close()
        with DeferSignals():
            self._begin()
        for task in tasks:
            box = _Box()
            self._boxes.append(box)
            self._todo.put((task, box))
            if len(self._boxes) == self._flight.batches:
                yield self._result()
        while self._boxes:
            yield self._result()

    def _result(self) -> Result:
        result = self._boxes.popleft().get()
        if isinstance(result, BaseException):
            try:
                raise result
            finally:
                del result  # which refers to this frame
        return result

    def _begin(self) -> None:
        self._todo, one_each = SimpleQueue(), OneCoreEach(self.count)
        threads = [
            threading.Thread(
                target=self._work,
                args=(number, one_each),
                name=f"wdstrain-decoder_{number}",
                daemon=True,
            )
            for number in range(self.count)
        ]
        with one_each:
            for thread in threads:
                thread.start()
        self._threads = threads

    def _work(self, number: int, one_each: OneCoreEach) -> None:
        one_each()
        desk = self.desks[number]
        while (given := self._todo.get()) is not None:
            task, box = given
            result: Result | BaseException
            try:
                result = self._decoder(task, desk)
            except BaseException as error:  # the loop raises it
                result = error
            box.put(result)
            del given, task, box, result  # the memory of a batch is the loop's alone

    def stack(self, number: int) -> tuple[str, str]:
        """(name, Python stack) of a decoder."""
        return f"decoder thread {number}", thread_stack(
            self._threads[number].ident if self._threads else None
        )

    def close(self) -> None:
        with DeferSignals():
            with suppress(Empty):  # what nobody began is not decoded any more
                while True:
                    self._todo.get_nowait()
            for _ in self._threads:
                self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._boxes.clear()


class OneCoreEach:
    """Called in each of `count` threads as it begins: torch computes on one core there, its own. They are begun `with` this.

    torch.set_num_threads is for the calling thread, and for all that have not asked for their number yet: so each of ours asks before
    it sets its own, or its first computation would take the caller's; that is put back for later threads when all of ours have theirs.
    """

    def __init__(self, count: int) -> None:
        self._threads, self._ready = torch.get_num_threads(), threading.Barrier(count + 1)

    def __call__(self) -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._ready.wait()
        except threading.BrokenBarrierError:  # another could not begin
            raise SystemExit from None

    def __enter__(self) -> None:
        pass

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None:
            self._ready.abort()
            return
        self._ready.wait()
        torch.set_num_threads(self._threads)
