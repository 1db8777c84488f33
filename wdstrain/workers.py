"""Who runs the decoder: threads of this process, or torch's DataLoader worker processes.

Both take an endless iterator of tasks and give results in the order of the tasks, with a bounded number in flight. The
DataLoader is used as it is meant: our tasks are its sampler, which runs in this process, and the decoder its data set. So
its care for dead workers, start methods and shutdown is torch's, well kept.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from itertools import count, islice, repeat
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from wdstrain import children
from wdstrain.decoder import Bad, Decoder, Result, Task
from wdstrain.errors import WdstrainError
from wdstrain.interrupts import DEATH, Held
from wdstrain.machine import cores
from wdstrain.memory import Memory
from wdstrain.watching import Desk, Desks, Stacks, stack_of

PREFETCH = 2  # messages in flight per worker
_SMALL = 256 << 10  # bytes of a tensor that is sent as it is
_KNOWN_TO_NUMPY = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bool,
)
_TOGETHER, _MOST = 100, 4  # samples of one message to a worker process, about, where batches are small; batches of one


def in_flight(num_workers: int, batch_size: int) -> int:
    """Batches that are being decoded, wait to be, or came with one that was waited for, at one time."""
    together = _together(batch_size)
    return PREFETCH * num_workers * together + together - 1 if num_workers else PREFETCH * cores()


def _together(batch_size: int) -> int:
    """Batches of one message to a worker process: a message costs as much time as several small pictures."""
    return min(max(1, _TOGETHER // batch_size), _MOST)


_Box = SimpleQueue["Result | BaseException"]  # for one result


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
    """Decodes in threads, one per core; for num_workers=0.

    Not an executor of the standard library: its futures are Conditions, which a Ctrl-C can leave locked for ever.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.count = cores()
        self.desks = Desks(self.count)
        self._threads: list[threading.Thread] = []
        self._todo: SimpleQueue[tuple[Task, _Box] | None] = SimpleQueue()
        self._boxes: deque[_Box] = deque()  # into which the results of what is in flight are put, in order

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """Results of a new stream of tasks, in new threads: so nothing is in flight of an earlier one."""
        self.close()
        with Held():
            self._begin()
        while True:
            while len(self._boxes) < PREFETCH * self.count:
                task, box = next(tasks), _Box()
                self._boxes.append(box)
                self._todo.put((task, box))
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
            threading.Thread(target=self._work, args=(number, one_each), name=f"wdstrain-decoder_{number}", daemon=True)
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
        return f"decoder thread {number}", stack_of(self._threads[number].ident if self._threads else None)

    def close(self) -> None:
        with Held():
            with suppress(Empty):  # what nobody began is not decoded any more
                while True:
                    self._todo.get_nowait()
            for _ in self._threads:
                self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._boxes.clear()


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
            multiprocessing_context=_careful(multiprocessing.get_context(context)),
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
        iterator, self._iterator, self._loader._iterator = self._iterator, None, None
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
            for worker in getattr(iterator, "_workers", ()):
                if worker.is_alive():  # it was asked to end and told to; one that is stopped or hangs hears neither
                    worker.kill()
                    worker.join()
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


class _Queue(Queue):  # type: ignore[type-arg]
    """A queue into which a Ctrl-C comes before or after something is put: between, it would leave it locked, and whoever closes it."""

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        with Held("SIGINT"):
            super().put(obj, block, timeout)


class _Event:
    """What tells workers to end. Without the lock of multiprocessing's, which a worker that is killed while it looks leaves locked:
    whoever sets the event then waits for ever.
    """

    def __init__(self) -> None:
        self._memory = Memory(1)

    def set(self) -> None:
        self._memory.view[0] = 1

    def is_set(self) -> bool:
        return self._memory.view[0] == 1


def _careful(context: BaseContext) -> BaseContext:
    """What begins worker processes, as torch takes it, with our queues and events."""
    careful = copy(context)
    careful.Queue = partial(_Queue, ctx=context)  # type: ignore[method-assign]
    careful.Event = _Event  # type: ignore[method-assign, assignment]
    return careful


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
        return _Pickler.of(result)
    except Exception as error:  # what pickling raises depends on the object
        reason = f"what became of it cannot be sent from a worker process ({error}). Use num_workers=0"
        return _Pickler.of(result._replace(values={}, bad=[Bad(0, "", reason)]))


class _Pickler(ForkingPickler):
    """Sends small tensors, such as the labels of a batch, as they are.

    Torch sends each by a file in memory, which is fetched over a socket of its own: 1.2 ms each, half of it here; a copy of 256 bytes
    takes 0.2 ms, of 256 KB 0.7. And a worker that is in the midst of it when Ctrl-C ends the loop prints a traceback.
    """

    @classmethod
    def of(cls, result: Result) -> bytes:
        into = io.BytesIO()
        cls(into).dump(result)
        return into.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        plain = type(obj) is torch.Tensor and obj.is_cpu and obj.layout == torch.strided
        if plain and not obj.requires_grad and not obj.is_neg() and obj.dtype in _KNOWN_TO_NUMPY and obj.nbytes <= _SMALL:
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def _as_it_is(value: Any) -> Any:
    return value


def _begin_worker(stacks: Stacks, desks: Desks, worker: int) -> None:
    children.begin()
    stacks.answer()
    desks[worker].leave()


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
