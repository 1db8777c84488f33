"""Who runs the decoder: threads of this process, or torch's DataLoader worker processes.

Both take an endless iterator of tasks and give results in the order of the tasks, with a bounded number in flight. The
DataLoader is used as it is meant: our tasks are its sampler, which runs in this process, and the decoder its data set. So
its care for dead workers, start methods and shutdown is torch's, well kept.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count, islice, repeat
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from wdstrain import children
from wdstrain.decoder import Bad, Decoder, Result, Task
from wdstrain.errors import WdstrainError
from wdstrain.interrupts import DEATH, Held
from wdstrain.machine import cores
from wdstrain.watching import Desk, Desks, Stacks, stack_of

PREFETCH = 2  # messages in flight per worker
_TOGETHER, _MOST = 100, 4  # samples of one message to a worker process, about, where batches are small; batches of one


def in_flight(num_workers: int, batch_size: int) -> int:
    """Batches that are being decoded, wait to be, or came with one that was waited for, at one time."""
    together = _together(batch_size)
    return PREFETCH * num_workers * together + together - 1 if num_workers else PREFETCH * cores()


def _together(batch_size: int) -> int:
    """Batches of one message to a worker process: a message costs as much time as several small pictures."""
    return min(max(1, _TOGETHER // batch_size), _MOST)


class Inline:
    """Decodes when the result is asked for; where decoding is nothing but taking bytes."""

    count = 1

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._desk, self.desks = decoder, Desk.apart(), Desks(0)

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        return (self._decoder(task, self._desk) for task in tasks)

    def stack(self, number: int) -> tuple[str, str]:
        """There is no decoder but the loop itself."""
        raise IndexError(number)

    def close(self) -> None:
        """There is nothing to end."""


class Threads:
    """Decodes in threads, one per core; for num_workers=0."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.count = cores()
        self.desks = Desks(self.count)
        self._names: dict[int, int] = {}  # number of a decoder by the identity of its thread
        self._next = count()
        self._pool: ThreadPoolExecutor | None = None
        self._futures: deque[Future[Result]] = deque()

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """Results of a new stream of tasks; what an earlier stream left in flight is waited for and dropped."""
        self._drop()
        with Held():
            self._pool = self._pool or decoder_threads(self.count)
        while True:
            while len(self._futures) < PREFETCH * self.count:
                self._futures.append(self._pool.submit(self._decode, next(tasks)))
            yield self._futures.popleft().result()

    def _decode(self, task: Task) -> Result:
        number = self._names.get(threading.get_ident())
        if number is None:
            number = self._names[threading.get_ident()] = next(self._next) % self.count
        return self._decoder(task, self.desks[number])

    def stack(self, number: int) -> tuple[str, str]:
        """(name, Python stack) of a decoder."""
        thread = next((ident for ident, one in list(self._names.items()) if one == number), None)
        return f"decoder thread {number}", stack_of(thread)

    def _drop(self) -> None:
        for future in self._futures:
            future.cancel()
        for future in self._futures:
            if not future.cancelled():
                future.exception()
        self._futures.clear()

    def close(self) -> None:
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
            self._names.clear()


class Processes:
    """Decodes in `count` worker processes of a DataLoader, which live until `close`."""

    def __init__(self, decoder: Decoder, count: int, batch_size: int, context: str | None) -> None:
        self.count, self.desks, self._stacks = count, Desks(count), Stacks()
        self._stream = _Stream(count, _together(batch_size))
        self._loader: DataLoader[Any] = DataLoader(
            _Remote(decoder, self.desks),
            batch_size=None,  # a task is a batch already, or some
            sampler=self._stream,
            num_workers=count,
            prefetch_factor=PREFETCH,
            persistent_workers=True,
            collate_fn=_as_it_is,
            worker_init_fn=partial(_begin_worker, self._stacks, self.desks),
            multiprocessing_context=context,
            generator=torch.Generator(),  # the training process's own random numbers stay as they are
        )
        self._iterator: Iterator[list[bytes]] | None = None

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """Results of a new stream of tasks; the DataLoader waits for what is in flight of an earlier one and drops it."""
        with deaths_told():
            self._iterator = self._start(tasks)
            for results in self._iterator:
                yield from map(pickle.loads, results)

    def _start(self, tasks: Iterator[Task]) -> Iterator[list[bytes]]:
        """The DataLoader's iterator. It starts the workers and then asks for its first tasks, which may take long."""
        others = set(multiprocessing.active_children())
        try:
            with Held() as held:  # Ctrl-C would be swallowed by Python's own hooks around a fork
                self._stream.tasks = _begun(held, tasks)
                return iter(self._loader)
        except BaseException:  # the iterator that would end them was never given to us
            with Held(DEATH):  # of these, nobody needs to hear
                for worker in set(multiprocessing.active_children()) - others:
                    worker.kill()  # a program's own answer to SIGTERM is theirs too
                    worker.join()
            raise

    def stack(self, number: int) -> tuple[str, str]:
        """(name, Python stack) of a worker process."""
        process = getattr(self._loader._iterator, "_workers", {number: None})[number]
        if process is None or process.pid is None or self.desks[number].state[0] == -2:  # a signal would end it
            return f"worker process {number}", "  (it has not begun yet)"
        return f"worker process {number} (pid {process.pid})", self._stacks.ask(process.pid)

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
            for worker in getattr(iterator, "_workers", ()):
                if worker.is_alive():  # it was asked to end and told to; one that is stopped or hangs hears neither
                    worker.kill()
                    worker.join()
        self._loader._iterator = None
        self._stream.tasks = iter(())  # they refer to whoever uses these workers


def death_of_a_worker(error: RuntimeError) -> WdstrainError | None:
    """What torch's error says of a worker process that died, as a sentence; None of another error.

    Torch tells of it by a signal, wherever the program is: mostly while it waits for a batch, but also in the loop's own code.
    """
    if "DataLoader worker" not in str(error):
        return None
    return WdstrainError(
        f"a worker process of the loader died ({str(error).splitlines()[0].rstrip('. ')}). If the system killed it for memory, lower "
        f"num_workers or batch_size; dmesg tells."
    )


@contextmanager
def deaths_told() -> Iterator[None]:
    """In here the death of a worker process is an error in words. Also a decorator."""
    try:
        yield
    except RuntimeError as error:
        if (death := death_of_a_worker(error)) is None:
            raise
        raise death from error


def _begun(held: Held, tasks: Iterator[Task]) -> Iterator[Task]:
    """The tasks; when the first is asked for, the workers run and Ctrl-C works again."""
    held.let_go()
    yield from tasks


class _Stream:
    """The DataLoader's sampler: whatever stream of tasks is current, some at a time but for the first, which are waited for.

    Before all each worker has a message without a task. With its answer it starts the thread that sends answers, while there is memory:
    where there is none, Python waits for ever for a thread that could not begin, and the loop for the worker.
    """

    tasks: Iterator[Task]

    def __init__(self, workers: int, together: int) -> None:
        self._workers, self._together = workers, together

    def __iter__(self) -> Iterator[tuple[Task, ...]]:
        tasks = self.tasks
        yield from repeat((), self._workers)
        for message in count():
            yield tuple(islice(tasks, 1 if message < PREFETCH * self._workers else self._together))


class _Remote(Dataset[list[bytes]]):
    """The DataLoader's data set: `remote[tasks]` decodes them.

    Results are pickled here and not by the queue, whose thread would drop what cannot be pickled and let the loop wait.
    """

    def __init__(self, decoder: Decoder, desks: Desks) -> None:
        self._decoder, self._desks = decoder, desks

    def __getitem__(self, tasks: tuple[Task, ...]) -> list[bytes]:
        worker = get_worker_info()
        assert worker is not None
        desk = self._desks[worker.id]
        return [_pickled(self._decoder(task, desk, own_process=True)) for task in tasks]


def _pickled(result: Result) -> bytes:
    try:
        return bytes(ForkingPickler.dumps(result))
    except Exception as error:  # what pickling raises depends on the object
        reason = f"what became of it cannot be sent from a worker process ({error}). Use num_workers=0"
        return bytes(ForkingPickler.dumps(result._replace(values={}, bad=[Bad(0, "", reason)])))


def _as_it_is(value: Any) -> Any:
    return value


def _begin_worker(stacks: Stacks, desks: Desks, worker: int) -> None:
    children.begin()
    stacks.answer()
    desks[worker].leave()


def _on_one_core() -> None:
    torch.get_num_threads()
    torch.set_num_threads(1)


def decoder_threads(count: int) -> ThreadPoolExecutor:
    """Threads in which torch computes on one core, theirs.

    torch.set_num_threads is for the calling thread, and for all that have not asked for their number yet: so each of ours asks before
    it sets its own, or its first computation would take the caller's; that is put back for later threads when all of ours have theirs.
    """
    threads = torch.get_num_threads()
    ready = threading.Barrier(count + 1)
    pool = ThreadPoolExecutor(count, "wdstrain-decoder", initializer=_on_one_core)
    for _ in range(count):
        pool.submit(ready.wait)
    ready.wait()
    torch.set_num_threads(threads)
    return pool
