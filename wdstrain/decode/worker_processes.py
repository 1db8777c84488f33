"""Decoders in worker processes, those of a torch DataLoader.

The tasks are the DataLoader's sampler, which runs in this process. The decoder is its data set.
Torch therefore handles dead workers, start methods and shutdown.

By default torch gives tasks to the workers by turns. A worker on a busy core then holds all others
back. Here the next idle worker gets the next task (`in_order=False`, from torch 2.7 on), and this
module restores the order.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Iterator
from contextlib import ContextDecorator
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from wdstrain.decode.decoder import Decoder
from wdstrain.decode.task import BadSample, Result, Task
from wdstrain.decode.worker_queues import MessageMemory, interruptible_context
from wdstrain.decode.workers import END_SECONDS, PREFETCH, InFlightLimits
from wdstrain.errors import WdstrainError
from wdstrain.runtime import child_process
from wdstrain.runtime.signals import WORKER_DEATH, DeferSignals

_Item = tuple[int, int]  # number of a message, and its parts in the memory


class WorkerProcesses:
    """Worker processes that decode. They start with the first task and live until `close`.

    Five private attributes of the DataLoader's iterator are used, and one of multiprocessing: there
    is no public method to shut down, to leave workers alone in a forked child, or to ask the sampler
    again. A comment at each says which wait would never end without it.
    """

    def __init__(self, decoder: Decoder, limits: InFlightLimits, context: str | None) -> None:
        """context: start method; None: Python's default."""
        self.count = limits.decoders
        self._decoder, self._limits, self._context = decoder, limits, context
        self._sampler, self._memory = _NextItem(), MessageMemory()
        self._processes: list[BaseProcess] = []  # by number; all of them once they have started
        self._loader: DataLoader[Any] | None = None
        self._iterator: Any = None  # of the DataLoader
        _instances.add(self)

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """Yield the results of a new stream of tasks, in their order.

        The DataLoader first waits for the tasks in flight of an earlier stream, and drops them.
        `tasks` is advanced in the thread that takes the results.
        """
        sent = taken = 0  # messages
        answers: dict[int, int] = {}  # parts of the results that wait for their turn, by message
        with WorkerDeathsAsErrors():
            iterator, most = self._begin(), self._limits.messages
            while True:
                while sent - taken < most and sent - taken - len(answers) < PREFETCH * self.count:
                    # The loop waits for the first messages, so they have one task each.
                    is_first = sent < PREFETCH * self.count
                    count = 1 if is_first else self._limits.batches_per_message
                    message = list(islice(tasks, count))
                    if not message:
                        break
                    self._sampler.item = sent, self._memory.write(sent % most, message)
                    # The DataLoader asks the sampler again only after a further answer. If none is
                    # under way, the loop would wait forever.
                    iterator._try_put_index()
                    sent += 1
                if taken in answers:
                    results = self._memory.read(taken % most, answers.pop(taken))
                    taken += 1
                    yield from results
                elif taken < sent:
                    number, parts = next(iterator)
                    answers[number] = parts
                else:
                    return

    def describe(self) -> str:
        """Return the process ids of the workers, and how to get their stacks."""
        pids = " ".join(str(process.pid) for process in self._processes)
        return f"worker processes {pids}. To print their Python stacks: kill -USR2 {pids}"

    def leave(self) -> None:
        """Leave the workers alone in a forked child: they belong to the parent.

        Torch would end them when the child drops its iterator, and multiprocessing when the child
        exits. The parent's loop would then wait forever.
        """
        if self._iterator is not None:
            self._iterator._shutdown = True
        process_module: Any = multiprocessing.process
        process_module._children.difference_update(self._processes)

    def close(self) -> None:
        """End the workers; a worker that does not answer is killed."""
        # A traceback may hold the iterator. Dropping it would then not end the workers: they would
        # wait for tasks, and the exit of this process for them.
        iterator, self._iterator, self._loader = self._iterator, None, None
        with DeferSignals(WORKER_DEATH):  # the death of these workers is no error
            if iterator is not None:
                # Torch waits 5 s for one worker after another, if their transforms hang.
                iterator._workers_done_event.set()
                for queue in iterator._index_queues:
                    queue.put(None)
                end = time.monotonic() + END_SECONDS
                for worker in self._processes:
                    worker.join(max(0.0, end - time.monotonic()))
            # A worker that is stopped or hangs ignores torch's request and its SIGTERM. The exit of
            # this process would wait for it.
            self._kill()
            if iterator is not None:
                iterator._shutdown_workers()

    def _begin(self) -> Any:
        """Start the workers, unless they run, and return the DataLoader's iterator."""
        if self._loader is not None:
            return iter(self._loader)
        try:
            with DeferSignals():  # hooks of Python around a fork would swallow a Ctrl-C
                self._loader = self._new_loader()
                self._iterator = iter(self._loader)
        except BaseException:
            if self._iterator is None:  # only the iterator, which was not returned, ends workers
                self.close()
            raise
        return self._iterator

    def _new_loader(self) -> DataLoader[Any]:
        """Return a DataLoader whose workers decode messages. They start with its iterator."""
        context = multiprocessing.get_context(self._context)
        return DataLoader(
            _DecodingDataset(self._decoder, self._memory, self._limits.messages),
            batch_size=None,  # a message has whole batches
            sampler=self._sampler,
            num_workers=self.count,
            prefetch_factor=PREFETCH,
            persistent_workers=True,
            in_order=torch.__version__ < "2.7",
            worker_init_fn=_begin_worker,
            multiprocessing_context=interruptible_context(context, self._processes),
            generator=torch.Generator(),  # so that torch's global generator does not advance
        )

    def _kill(self) -> None:
        """Kill the workers that are alive. Not by SIGTERM: workers inherit a program's handler."""
        for worker in self._processes:
            if worker.pid is not None and worker.is_alive():
                worker.kill()
                worker.join()
        self._processes.clear()


_instances: weakref.WeakSet[WorkerProcesses] = weakref.WeakSet()


def _leave_all() -> None:
    for processes in list(_instances):
        processes.leave()


os.register_at_fork(after_in_child=_leave_all)


def worker_death_error(error: RuntimeError) -> WdstrainError | None:
    """Return an error that explains the death of a worker process; None for any other error.

    Torch raises it from a signal handler, wherever the main thread is. Mostly that is while it
    waits for a batch, but it can also be the loop's own code.
    """
    if "DataLoader worker" not in str(error):
        return None
    reason = str(error).splitlines()[0].rstrip(". ")
    return WdstrainError(
        f"a worker process of the loader died ({reason}). If the system killed it for memory, "
        f"lower num_workers or batch_size; the output of dmesg says so."
    )


class WorkerDeathsAsErrors(ContextDecorator):
    """Context manager and decorator that explains the death of a worker process.

    Not a generator: through a generator, Python 3.10 keeps an exception with all frames that it
    passed until the garbage collector runs.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError) and (death := worker_death_error(error)) is not None:
            raise death from error


class _NextItem(Iterator[_Item]):
    """Sampler of the DataLoader: the next item, if there is one. Torch asks again after each answer."""

    item: _Item | None = None

    def __next__(self) -> _Item:
        item, self.item = self.item, None
        if item is None:
            raise StopIteration
        return item


class _DecodingDataset(Dataset[_Item]):
    """Data set of the DataLoader: `dataset[item]` decodes the tasks of a message.

    The results replace the tasks in the memory.
    """

    def __init__(self, decoder: Decoder, memory: MessageMemory, places: int) -> None:
        self._decoder, self._memory, self._places = decoder, memory, places

    def __getitem__(self, item: _Item) -> _Item:
        number, parts = item
        place = number % self._places
        tasks: list[Task] = self._memory.read(place, parts)
        results = [self._decoder(task, own_process=True) for task in tasks]
        try:
            return number, self._memory.write(place, results)
        except Exception as error:  # any type, depending on the object that cannot be pickled
            reason = f"an example cannot be sent from a worker process ({error}). Use num_workers=0"
            bad = [BadSample(0, "", reason)]
            failed = [result._replace(values={}, bad=bad) for result in results]
            return number, self._memory.write(place, failed)


def _begin_worker(_: int) -> None:
    """Set up a worker process. SIGUSR2 prints its Python stack, also while C code keeps the GIL."""
    child_process.set_up_worker()
    faulthandler.register(
        signal.SIGUSR2, file=2, all_threads=False
    )  # not sys.stderr: a notebook's has no descriptor
