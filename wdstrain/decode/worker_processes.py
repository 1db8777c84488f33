"""The pool of worker processes, those of a torch DataLoader, and what they share with this process.

Messages are the DataLoader's sampler, which runs in this process. The decoder is its data set.
Torch therefore handles dead workers, start methods and shutdown. By default it gives tasks to the
workers by turns: a worker on a busy core holds all others back. Here the next idle worker gets the
next message (`in_order=False`, from torch 2.7 on), and `Pool` restores the order.

A `multiprocessing.Queue` leaves every write to a thread, which competes with the decoder for the GIL.
Its locks do not survive a Ctrl-C or the death of a worker: the next process that takes the lock waits
forever. The queue and the event here have the methods that the DataLoader calls, and neither threads
nor locks. A message lies in anonymous shared memory, and only its number goes through a queue.
"""

from __future__ import annotations

import faulthandler
import functools
import io
import mmap
import multiprocessing
import os
import pickle
import signal
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import ContextDecorator, suppress
from itertools import accumulate, chain, islice
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from queue import Empty
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from wdstrain.decode.batches import BadSample, Places, ReadBatch, Result
from wdstrain.decode.decoder import Decoder
from wdstrain.decode.workers import END_SECONDS, PREFETCH, InFlightLimits, Pool
from wdstrain.errors import UsageError, WdstrainError
from wdstrain.memory import Memory, SharedFile, populate
from wdstrain.runtime.workers import (
    WORKER_DEATH,
    DeferSignals,
    recording_context,
    set_up_worker,
)
from wdstrain.shards.kinds import Array

_Extent = tuple[int, int, int]  # place of a message in the memory, number of its parts, its bytes
_Item = tuple[int, _Extent]  # number of a message, and where it lies

_PLACE_BYTES = 1 << 36  # address space of a message; memory is taken as it is written
_MOST_BUFFERS = 1024  # of one system call
_ALIGN = 64  # bytes, for arrays of any dtype
# Messages with values that the user keeps. Those of further messages are copies, so their number is
# not limited.
_KEPT_MESSAGES = 4


class WorkerProcesses(Pool):
    """Worker processes that decode. They start with the first task and live until `close`.

    Six private attributes of the DataLoader's iterator are used, and one of multiprocessing: there
    is no public method to shut down, to leave workers alone in a forked child, or to ask the sampler
    again. A comment at each says which wait would never end without it.
    """

    def __init__(self, decoder: Decoder, limits: InFlightLimits, context: str | None) -> None:
        """context: start method; None: Python's default."""
        super().__init__(decoder, limits)
        self._context, self._sampler = context, _NextItem()
        self._memory = MessageMemory()
        self._places = Places(limits.messages, _KEPT_MESSAGES)
        self._processes: list[BaseProcess] = []  # by number; all of them once they have started
        self._loader: DataLoader[Any] | None = None
        self._iterator: Any = None  # of the DataLoader
        _instances.add(self)

    def describe(self) -> str:
        """Return the process ids of the workers, and how to get their stacks."""
        pids = " ".join(str(process.pid) for process in self._processes)
        return f"Worker processes {pids}. To print their Python stacks: kill -USR2 {pids}"

    def interrupt(self, error: Exception) -> None:
        """Raise an error in the loop's thread if it waits for a result: a transform may hang."""
        if (iterator := self._iterator) is not None:
            iterator._data_queue.interrupt(error)

    def close(self) -> None:
        """End the workers; a worker that does not answer is killed."""
        # A traceback may hold the iterator. Dropping it would then not end the workers: they would
        # wait for tasks, and the exit of this process for them.
        iterator, self._iterator, self._loader = self._iterator, None, None
        # Torch waits 5 s for one worker after another, if their transforms hang.
        end = time.monotonic() + (END_SECONDS if iterator is not None else 0.0)
        with DeferSignals(WORKER_DEATH):  # the death of these workers is no error
            if iterator is not None:
                iterator._workers_done_event.set()
                for queue in iterator._index_queues:
                    queue.put(None)
            for worker in self._processes:
                if worker.pid is not None:
                    worker.join(max(0.0, end - time.monotonic()))
                    # A worker that is stopped or hangs ignores torch's request and its SIGTERM, for
                    # which it may have a handler. The exit of this process would wait for it.
                    worker.kill()
                    worker.join()
            self._processes.clear()
            if iterator is not None:
                iterator._shutdown_workers()

    def _begin(self) -> None:
        """Start the workers. If they run, wait for their tasks, and drop the results."""
        self._places.reset()
        if self._loader is not None:
            iter(self._loader)
            return
        with DeferSignals():  # hooks of Python around a fork would swallow a Ctrl-C
            context = multiprocessing.get_context(self._context)
            loader = DataLoader(
                _DecodingDataset(self._decoder, self._memory),
                batch_size=None,  # a message has whole batches
                sampler=self._sampler,
                num_workers=self.count,
                prefetch_factor=PREFETCH,
                persistent_workers=True,
                in_order=torch.__version__ < "2.7",
                worker_init_fn=_begin_worker,
                multiprocessing_context=interruptible_context(context, self._processes),
                generator=torch.Generator(),  # so that torch's global one does not advance
            )
            # Workers inherit the block, spawned ones too: a request for stacks would kill a worker
            # that has no handler yet.
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
            try:
                self._iterator, self._loader = iter(loader), loader
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise UsageError(
                    "fields and functions cannot be sent to worker processes, which "
                    f"{context.get_start_method()} starts: {error}.",
                    "Use {num_workers}, a function or class at the top of a .py file that you "
                    "import, or multiprocessing_context='fork'.",
                    {"num_workers": 0},
                ) from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    def _send(self, number: int, tasks: list[ReadBatch]) -> None:
        self._sampler.item = number, self._memory.write(self._places.take(), tasks)
        # The DataLoader asks the sampler again only after a further answer. If none is under way,
        # the loop would wait forever.
        self._iterator._try_put_index()

    def _receive(self) -> tuple[int, list[Result]]:
        number, extent = next(self._iterator)
        data = self._memory.map(extent)
        results = message_in(data, extent, copy=not self._places.has_spare)
        self._places.lease(extent[0], data)
        return number, results


_instances: weakref.WeakSet[WorkerProcesses] = weakref.WeakSet()


def _leave_workers() -> None:
    """Leave the workers alone in a forked child: they belong to the parent.

    Torch would end them when the child drops its iterator, and multiprocessing when the child exits.
    The parent's loop would then wait forever.
    """
    for pool in list(_instances):
        if pool._iterator is not None:
            pool._iterator._shutdown = True
        multiprocessing.process._children.difference_update(  # type: ignore[attr-defined]
            pool._processes
        )


os.register_at_fork(after_in_child=_leave_workers)


class WorkerDeathsAsErrors(ContextDecorator):
    """Context manager and decorator that explains the death of a worker process: a WdstrainError.

    Torch raises a RuntimeError from a signal handler, wherever the main thread is. Mostly that is
    while it waits for a batch, but it can also be the loop's own code.

    Not a generator: through a generator, Python 3.10 keeps an exception with all frames that it
    passed until the garbage collector runs.
    """

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
            raise WdstrainError(
                f"a worker process of the loader died ({str(error).splitlines()[0].rstrip('. ')}).",
                "Its own traceback, if there is one, says why. If the system killed it for memory, "
                "lower {num_workers} or {batch_size}; the output of dmesg says so.",
                {"num_workers": ..., "batch_size": ...},
            ) from error


class _NextItem(Iterator[_Item]):
    """Sampler of the DataLoader: the next item, if there is one. Torch asks again after each answer."""

    item: _Item | None = None

    def __next__(self) -> _Item:
        if self.item is None:
            raise StopIteration
        item, self.item = self.item, None
        return item


class _DecodingDataset(Dataset[_Item]):
    """Data set of the DataLoader: `dataset[item]` decodes the tasks of a message.

    The results replace the tasks in the memory.
    """

    def __init__(self, decoder: Decoder, memory: MessageMemory) -> None:
        self._decoder, self._memory = decoder, memory

    def __getitem__(self, item: _Item) -> _Item:
        number, extent = item
        tasks = message_in(self._memory.map(extent), extent, copy=True)
        results = [self._decoder(task, own_process=True) for task in tasks]
        try:
            return number, self._memory.write(extent[0], results)
        except Exception as error:  # any type, depending on the object that cannot be pickled
            reason = f"an example cannot be sent from a worker process ({error}). Use num_workers=0"
            bad = [BadSample(0, "", reason)]
            results = [result._replace(values={}, bad=bad) for result in results]
            return number, self._memory.write(extent[0], results)


def _begin_worker(_: int) -> None:
    """Set up a worker process. SIGUSR2 prints its Python stack, also while C code keeps the GIL."""
    set_up_worker()
    # not sys.stderr: a notebook's has no descriptor
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


class MessageMemory:
    """Messages in anonymous memory, each in a place with a number that later messages use again."""

    def __init__(self) -> None:
        self._file = SharedFile()

    def write(self, place: int, message: object) -> _Extent:
        """Write a message to a place, and return where it lies.

        Raises what pickling raises.
        """
        head, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        _MessagePickler(head, 5, True, buffers.append).dump(message)
        parts = [head.getbuffer(), *(buffer.raw() for buffer in buffers)]
        parts.insert(0, memoryview(array("q", [part.nbytes for part in parts])).cast("B"))
        gaps = (memoryview(bytes(-part.nbytes % _ALIGN)) for part in parts)
        rest = deque(chain(*zip(parts, gaps, strict=True)))
        nbytes = sum(piece.nbytes for piece in rest)
        offset = place * _PLACE_BYTES
        while rest:
            count = os.pwritev(self._file.fd, list(islice(rest, _MOST_BUFFERS)), offset)
            offset += count
            while rest and count >= rest[0].nbytes:
                count -= rest.popleft().nbytes
            if count:
                rest[0] = rest[0][count:]
        return place, len(parts) - 1, nbytes

    def map(self, extent: _Extent) -> mmap.mmap:
        """Return the bytes of a message where they lie."""
        place, _, nbytes = extent
        data = mmap.mmap(self._file.fd, nbytes, offset=place * _PLACE_BYTES)
        populate(data, 0, nbytes)
        return data


def message_in(data: mmap.mmap, extent: _Extent, *, copy: bool) -> Any:
    """Return the message in these bytes. copy: its arrays are copies, else they lie in `data`."""
    view = memoryview(data)
    sizes = view[: 8 * extent[1]].cast("q").tolist()
    starts = accumulate(size + -size % _ALIGN for size in (8 * len(sizes), *sizes))
    parts = [view[start : start + n] for start, n in zip(starts, sizes, strict=False)]
    buffers = map(np.array, parts[1:]) if copy else parts[1:]
    return pickle.loads(parts[0], buffers=buffers)


class _MessagePickler(ForkingPickler):
    """Pickler that sends tensors as NumPy arrays, unless NumPy has no such array."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            with suppress(TypeError, RuntimeError):
                if obj.ndim == 4 and obj.is_contiguous(memory_format=torch.channels_last):
                    return _channels_last, (obj.permute(0, 2, 3, 1).numpy(),)
                return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def _channels_last(array: Array) -> torch.Tensor:
    """Return images [b, height, width, channels] as a tensor [b, channels, height, width]."""
    return torch.from_numpy(array).permute(0, 3, 1, 2)


class MessageQueue:
    """Queue from any number of processes to one process, through a pipe.

    Linux writes as a whole what has room in a pipe. The numbers of all messages in flight do, so
    `put` does not wait, and a Ctrl-C or a kill leaves no half of a number.
    """

    def __init__(self, context: BaseContext) -> None:
        self._reader, self._writer = context.Pipe(duplex=False)
        self._error: Exception | None = None

    def put(self, item: object) -> None:
        """Send an item.

        The garbage collector may close the pipe before it finalizes the DataLoader's iterator. The
        iterator then asks workers to end that have ended already.
        """
        if not self._writer.closed:
            self._writer.send_bytes(ForkingPickler.dumps(item))

    def get(self, timeout: float) -> Any:
        """Return the next item. Raises queue.Empty if there is none within `timeout` seconds."""
        if not self._reader.poll(timeout):
            raise Empty
        item = self._reader.recv()
        if self._error is not None:
            raise self._error
        return item

    def interrupt(self, error: Exception) -> None:
        """Raise an error in the thread that waits in `get`, or will."""
        self._error = error
        self.put(None)

    def close(self) -> None:
        """Do nothing. The DataLoader calls this; the pipe is closed when the queue is freed."""

    def cancel_join_thread(self) -> None:
        """Do nothing. The DataLoader calls this; the exit of a process never waits for items."""


class EndEvent:
    """Event that tells workers to end.

    The event of multiprocessing has a lock. A worker that is killed while it checks the event
    leaves the lock locked, and the process that sets the event then waits forever.
    """

    def __init__(self) -> None:
        self._memory = Memory(1)

    def set(self) -> None:
        """Set the event."""
        self._memory.view[0] = 1

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._memory.view[0] == 1


def interruptible_context(context: BaseContext, started: list[BaseProcess]) -> BaseContext:
    """Return a copy of a start context for the DataLoader, with the queues and events above.

    started: gets every process that the context starts.
    """
    changed = recording_context(context, started)
    changed.Queue = functools.partial(MessageQueue, context)  # type: ignore[method-assign, assignment]
    changed.Event = EndEvent  # type: ignore[method-assign, assignment]
    return changed
