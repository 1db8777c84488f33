"""Decoders in worker processes, those of a torch DataLoader.

The tasks are the DataLoader's sampler, which runs in this process. The decoder is its data set.
Torch therefore handles dead workers, start methods and shutdown.

By default torch gives tasks to the workers by turns. A worker on a busy core then holds all others
back. Here the next idle worker gets the next task (`in_order=False`, from torch 2.7 on), and this
module restores the order.
"""

from __future__ import annotations

import faulthandler
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import weakref
from collections.abc import Iterator
from contextlib import ContextDecorator
from itertools import islice
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from wdstrain.decode.decoder import Decoder
from wdstrain.decode.task import BadSample, Result, Task
from wdstrain.decode.worker_queues import interruptible_context
from wdstrain.decode.workers import PREFETCH, InFlightLimits
from wdstrain.errors import WdstrainError
from wdstrain.runtime import child_process
from wdstrain.runtime.signals import WORKER_DEATH, DeferSignals

_SMALL = 256 << 10  # most bytes of a tensor that is pickled by value
_NUMPY_DTYPES = (
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

_Message = tuple[int, tuple[Task, ...]]  # number of the message, and its tasks
_Answer = tuple[int, list[bytes]]  # number of the message, and the pickled results


class WorkerProcesses:
    """Worker processes that decode. They start with the first task and live until `close`.

    Three private attributes of the DataLoader's iterator are used, and one of multiprocessing: there
    is no public method to shut down, to leave workers alone in a forked child, or to ask the sampler
    again. A comment at each says which wait would never end without it.
    """

    def __init__(self, decoder: Decoder, limits: InFlightLimits, context: str | None) -> None:
        """context: start method; None: Python's default."""
        self.count = limits.decoders
        self._decoder, self._context = decoder, context
        self._sampler = _MessageSampler(limits)
        self._processes: list[BaseProcess] = []  # by number; all of them once they have started
        self._loader: DataLoader[Any] | None = None
        self._iterator: Any = None  # of the DataLoader
        _instances.add(self)

    def run(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """Yield the results of a new stream of tasks.

        The DataLoader first waits for the tasks in flight of an earlier stream, and drops them.
        """
        with WorkerDeathsAsErrors():
            self._iterator = iterator = self._start(tasks)
            early: dict[int, list[bytes]] = {}  # answers that came before their turn
            for number in itertools.count():
                while number not in early:
                    answer = next(iterator, None)
                    if answer is None:
                        return
                    early[answer[0]] = answer[1]
                if self._sampler.take():
                    # The sampler refused a message, and the DataLoader asks again only after a
                    # further answer. If none is under way, the loop would wait forever.
                    iterator._try_put_index()
                yield from map(pickle.loads, early.pop(number))

    def describe(self) -> str:
        """Return the process ids of the workers, and how to get their stacks."""
        pids = " ".join(str(process.pid) for process in self._processes)
        return f"worker processes {pids}. To print their Python stacks: kill -USR2 {pids}"

    def leave(self) -> None:
        """Leave the workers alone in a forked child: they belong to the parent.

        Torch would end them when the child drops its iterator, and multiprocessing when the child
        exits. The parent's loop would then wait forever.
        """
        if hasattr(self._iterator, "_shutdown"):
            self._iterator._shutdown = True
        process_module: Any = multiprocessing.process
        process_module._children.difference_update(self._processes)

    def close(self) -> None:
        """End the workers; a worker that does not answer is killed."""
        # A traceback may hold the iterator. Dropping it would then not end the workers: they would
        # wait for tasks, and the exit of this process for them.
        iterator, self._iterator, self._loader = self._iterator, None, None
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        # A worker that is stopped or hangs ignores torch's request and its SIGTERM. The exit of
        # this process would wait for it.
        self._kill()
        self._sampler.tasks = iter(())  # they refer to the pipeline

    def _start(self, tasks: Iterator[Task]) -> Any:
        """Start the workers, unless they run, and return the DataLoader's iterator.

        The iterator asks for its first tasks, which may take long.
        """
        try:
            # Hooks of Python around a fork would swallow a Ctrl-C.
            with DeferSignals() as deferred:
                if self._loader is None:
                    self._loader = self._new_loader()
                self._sampler.tasks = _release_signals(deferred, tasks)
                return iter(self._loader)
        except BaseException:
            if self._iterator is None:  # only the iterator, which was not returned, ends workers
                with DeferSignals(WORKER_DEATH):  # the death of these workers is no error
                    self._kill()
            raise

    def _new_loader(self) -> DataLoader[Any]:
        """Return a DataLoader whose workers decode messages. They start with its iterator."""
        context = interruptible_context(
            multiprocessing.get_context(self._context), (PREFETCH + 1) * self.count + 1
        )
        return DataLoader(
            _DecodingDataset(self._decoder),
            batch_size=None,  # a message has whole batches
            sampler=self._sampler,
            num_workers=self.count,
            prefetch_factor=PREFETCH,
            persistent_workers=True,
            in_order=torch.__version__ < "2.7",
            collate_fn=_unchanged,
            worker_init_fn=_begin_worker,
            multiprocessing_context=child_process.recording_context(context, self._processes),
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


def _release_signals(deferred: DeferSignals, tasks: Iterator[Task]) -> Iterator[Task]:
    """Yield the tasks. When the first is requested the workers run, and Ctrl-C works again."""
    deferred.release()
    yield from tasks


class _MessageSampler(Iterator[_Message]):
    """Sampler of the DataLoader: messages with the next tasks of the current stream.

    tasks: the current stream. The first messages have one task each, because the loop waits for
    them; later ones have several.

    Each worker first gets a message without tasks. Its answer starts the thread that sends answers
    while there is memory. Later a thread may not start for want of memory: multiprocessing would
    wait forever for it, and the loop for the worker.

    Raises StopIteration at the end of the tasks, and also when the most messages are under way.
    The DataLoader then sends nothing, and may ask again.
    """

    tasks: Iterator[Task]

    def __init__(self, limits: InFlightLimits) -> None:
        self._workers, self._most, self._together = (
            limits.decoders,
            limits.messages,
            limits.batches_per_message,
        )

    def __iter__(self) -> _MessageSampler:
        self._sent = self._taken = self._refused = 0
        return self

    def __next__(self) -> _Message:
        number = self._sent
        if number - self._taken == self._most:
            self._refused += 1
            raise StopIteration
        tasks = tuple[Task, ...]()
        if number >= self._workers:
            count = 1 if number < (1 + PREFETCH) * self._workers else self._together
            tasks = tuple(islice(self.tasks, count))
            if not tasks:
                raise StopIteration
        self._sent += 1
        return number, tasks

    def take(self) -> bool:
        """Note that the next answer was taken. Returns whether a refused message can go now."""
        self._taken += 1
        can_send = self._refused > 0
        self._refused -= can_send
        return can_send


class _DecodingDataset(Dataset[_Answer]):
    """Data set of the DataLoader: `dataset[message]` decodes its tasks.

    Results are pickled here. The thread of a queue would drop a result that cannot be pickled, and
    the loop would wait forever.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getitem__(self, message: _Message) -> _Answer:
        number, tasks = message
        return number, [_pickled(self._decoder(task, own_process=True)) for task in tasks]


def _pickled(result: Result) -> bytes:
    """Return a result as bytes; if it cannot be pickled, a result that says so."""
    try:
        return _ResultPickler.bytes_of(result)
    except Exception as error:  # any type, depending on the object
        reason = f"its example cannot be sent from a worker process ({error}). Use num_workers=0"
        return _ResultPickler.bytes_of(result._replace(values={}, bad=[BadSample(0, "", reason)]))


class _ResultPickler(ForkingPickler):
    """Pickler that sends small tensors by value.

    Torch sends each tensor as a file in memory, over a socket of its own, which takes longer. A
    worker that is doing so when a Ctrl-C ends the loop also prints a traceback.
    """

    @classmethod
    def bytes_of(cls, result: Result) -> bytes:
        """Return the pickled result."""
        buffer = io.BytesIO()
        cls(buffer).dump(result)
        return buffer.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        is_plain = type(obj) is torch.Tensor and obj.is_cpu and obj.layout == torch.strided
        if (
            is_plain
            and not obj.requires_grad
            and not obj.is_neg()
            and obj.dtype in _NUMPY_DTYPES
            and obj.nbytes <= _SMALL
        ):
            return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def _unchanged(value: Any) -> Any:
    """Return the value. As collate_fn it keeps torch from converting answers."""
    return value


def _begin_worker(_: int) -> None:
    """Set up a worker process. SIGUSR2 prints its Python stack, also while C code keeps the GIL."""
    child_process.set_up_worker()
    faulthandler.register(
        signal.SIGUSR2, file=2, all_threads=False
    )  # not sys.stderr: a notebook's has no descriptor
