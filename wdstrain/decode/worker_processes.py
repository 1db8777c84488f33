"""Worker processes: those of torch's DataLoader, used as it is meant. Our tasks are its sampler, which runs in this process, and the
decoder is its data set. So its care for dead workers, start methods and shutdown is torch's, well kept.

Torch gives tasks in turn and results in order, and a worker on a core that others use too holds all of them back: of sixteen,
one that is half as fast takes half of the speed, by simulation. So whoever is done has the next task (`in_order=False`, from
torch 2.7 on), and the order is made here.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import weakref
from collections.abc import Iterator
from contextlib import ContextDecorator
from functools import partial
from itertools import count as upwards
from itertools import islice
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from wdstrain.decode.bad_samples import BadSample
from wdstrain.decode.decoder import Decoder
from wdstrain.decode.flight import PREFETCH, Flight
from wdstrain.decode.task import Result, Task
from wdstrain.decode.worker_queues import careful
from wdstrain.errors import WdstrainError
from wdstrain.memory.shared import Memory
from wdstrain.runtime import child_process
from wdstrain.runtime.signals import WORKER_DEATH, DeferSignals
from wdstrain.runtime.watchdog import ProgressBoard, WorkerStacks

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

Message = tuple[int, tuple[Task, ...]]  # its number, and some tasks
Answer = tuple[int, list[bytes]]  # of that number: results, pickled


class WorkerProcesses:
    """Decodes in worker processes of a DataLoader, which live until `close`."""

    def __init__(self, decoder: Decoder, flight: Flight, context: str | None) -> None:
        self.count = count = flight.decoders
        self.desks, self._stacks = ProgressBoard(count), WorkerStacks()
        self._stream = _Stream(flight)
        self._made: list[BaseProcess] = []  # by a start that is under way
        own_context = careful(multiprocessing.get_context(context), (PREFETCH + 1) * count + 1)
        self._loader: DataLoader[Any] = DataLoader(
            _Remote(decoder, self.desks),
            batch_size=None,  # a task is a batch already, or some
            sampler=self._stream,
            num_workers=count,
            prefetch_factor=PREFETCH,
            persistent_workers=True,
            in_order=torch.__version__
            < "2.7",  # which gives to whoever is next in turn, whatever he has
            collate_fn=_as_it_is,
            worker_init_fn=partial(_begin_worker, self._stacks, self.desks, decoder.slots),
            multiprocessing_context=child_process.recording_context(own_context, self._made),
            generator=torch.Generator(),  # the training process's own random numbers stay as they are
        )
        self._iterator: Any = None
        _living.add(self)

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """Results of a new stream of tasks; the DataLoader waits for what is in flight of an earlier one and drops it."""
        with WorkerDeathsAsErrors():
            self._iterator = iterator = self._start(tasks)
            early: dict[int, list[bytes]] = {}
            for turn in upwards():
                while turn not in early:
                    answer = next(iterator, None)
                    if answer is None:  # the tasks are at their end
                        return
                    early[answer[0]] = answer[1]
                if self._stream.take():
                    iterator._try_put_index()
                yield from map(pickle.loads, early.pop(turn))

    def _start(self, tasks: Iterator[Task]) -> Any:
        """The DataLoader's iterator. It starts the workers and then asks for its first tasks, which may take long."""
        try:
            with (
                DeferSignals() as held
            ):  # Ctrl-C would be swallowed by Python's own hooks around a fork
                self._stream.tasks = _begun(held, tasks)
                return iter(self._loader)
        except BaseException:  # the iterator that would end them was never given to us
            with DeferSignals(WORKER_DEATH):  # of these, nobody needs to hear
                for worker in self._made:
                    if worker.pid is not None:  # it was started
                        worker.kill()  # a program's own answer to SIGTERM is theirs too
                        worker.join()
            raise
        finally:
            self._made.clear()

    def stack(self, number: int) -> tuple[str, str]:
        """(name, Python stack) of a worker process."""
        process = getattr(self._loader._iterator, "_workers", {number: None})[number]
        if (
            process is None or process.pid is None or self.desks[number].state[0] == -2
        ):  # a signal would end it
            return f"worker process {number}", "  (it has not begun yet)"
        return f"worker process {number} (pid {process.pid})", self._stacks.read(process.pid)

    def leave(self) -> None:
        """In a forked child: the workers are the parent's, and go on.

        Torch would end them when its iterator is dropped here, multiprocessing when this process ends.
        """
        iterator: Any = self._loader._iterator
        if hasattr(iterator, "_shutdown"):
            iterator._shutdown = True
            multiprocessing.process._children.difference_update(iterator._workers)  # type: ignore[attr-defined]

    def close(self) -> None:
        iterator, self._iterator, self._loader._iterator = self._iterator, None, None
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
            for worker in getattr(iterator, "_workers", ()):
                if (
                    worker.is_alive()
                ):  # it was asked to end and told to; one that is stopped or hangs hears neither
                    worker.kill()
                    worker.join()
        self._stream.tasks = iter(())  # they refer to whoever uses these workers


_living: weakref.WeakSet[WorkerProcesses] = weakref.WeakSet()


def _leave_all() -> None:
    for processes in list(_living):
        processes.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


def worker_death_error(error: RuntimeError) -> WdstrainError | None:
    """What torch's error says of a worker process that died, as a sentence; None of another error.

    Torch tells of it by a signal, wherever the program is: mostly while it waits for a batch, but also in the loop's own code.
    """
    if "DataLoader worker" not in str(error):
        return None
    return WdstrainError(
        f"a worker process of the loader died ({str(error).splitlines()[0].rstrip('. ')}). If the system killed it for memory, lower "
        f"num_workers or batch_size; dmesg tells."
    )


class WorkerDeathsAsErrors(ContextDecorator):
    """In here the death of a worker process is an error in words. Also a decorator.

    No generator: through one, Python 3.10 keeps an exception together with all frames that it passed until the collector comes.
    """

    def __enter__(self) -> None:
        """Nothing begins."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError) and (death := worker_death_error(error)) is not None:
            raise death from error


def _begun(held: DeferSignals, tasks: Iterator[Task]) -> Iterator[Task]:
    """The tasks; when the first is asked for, the workers run and Ctrl-C works again."""
    held.release()
    yield from tasks


class _Stream(Iterator[Message]):
    """The DataLoader's sampler: whatever stream of tasks is current, some at a time but for the first, which are waited for.

    Before all each worker has a message without a task. With its answer it starts the thread that sends answers, while there is memory:
    where there is none, Python waits for ever for a thread that could not begin, and the loop for the worker.

    It ends with the tasks. It also raises StopIteration where as many messages are under way as may be: the DataLoader then sends
    nothing, and may ask again.
    """

    tasks: Iterator[Task]

    def __init__(self, flight: Flight) -> None:
        self._workers, self._messages, self._together = (
            flight.decoders,
            flight.messages,
            flight.together,
        )

    def __iter__(self) -> _Stream:
        self._sent = self._taken = self._refused = 0
        return self

    def __next__(self) -> Message:
        number = self._sent
        if number - self._taken == self._messages:
            self._refused += 1
            raise StopIteration
        tasks = tuple[Task, ...]()
        if number >= self._workers:
            tasks = tuple(
                islice(self.tasks, 1 if number < (1 + PREFETCH) * self._workers else self._together)
            )
            if not tasks:
                raise StopIteration
        self._sent += 1
        return number, tasks

    def take(self) -> bool:
        """The answer to the next message has been taken. Whether one that was refused can be sent now."""
        self._taken += 1
        self._refused -= (again := self._refused > 0)
        return again


class _Remote(Dataset[Answer]):
    """The DataLoader's data set: `remote[message]` decodes its tasks.

    Results are pickled here and not by the queue, whose thread would drop what cannot be pickled and let the loop wait.
    """

    def __init__(self, decoder: Decoder, desks: ProgressBoard) -> None:
        self._decoder, self._desks = decoder, desks

    def __getitem__(self, message: Message) -> Answer:
        number, tasks = message
        worker = get_worker_info()
        assert worker is not None
        desk = self._desks[worker.id]
        return number, [_pickled(self._decoder(task, desk, own_process=True)) for task in tasks]


def _pickled(result: Result) -> bytes:
    try:
        return _Pickler.of(result)
    except Exception as error:  # what pickling raises depends on the object
        reason = (
            f"what became of it cannot be sent from a worker process ({error}). Use num_workers=0"
        )
        return _Pickler.of(result._replace(values={}, bad=[BadSample(0, "", reason)]))


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
        if (
            plain
            and not obj.requires_grad
            and not obj.is_neg()
            and obj.dtype in _KNOWN_TO_NUMPY
            and obj.nbytes <= _SMALL
        ):
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def _as_it_is(value: Any) -> Any:
    return value


def _begin_worker(stacks: WorkerStacks, desks: ProgressBoard, slots: Memory, worker: int) -> None:
    child_process.set_up_worker()
    slots.map_shared()
    stacks.answer_signals()
    desks[worker].set_idle()
