"""Batches on a device, copied and augmented while the loop works on the batch before.

A thread takes the next batch and copies it, on CUDA by a stream of its own from page-locked memory.
The device therefore does not wait for the copy, even if the loop reads every loss. One batch is
ahead of the loop, never more. The loader's state and report are those of the delivered batches.

The loop's stream waits for a copy by an event. `record_stream` tells torch's allocator that the
loop's stream uses the memory, which would be reused too early otherwise. The batch in host memory
is kept until its copy is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from queue import SimpleQueue

import torch

from wdstrain.augment.gpu import Augmentation
from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.loader.batch_assembly import Batch, TakenBatch, map_tensors
from wdstrain.loader.epoch import EpochBatches
from wdstrain.runtime.workers import DeferSignals

_JOIN_SECONDS = 1.0  # time for the thread to end before its wait for a batch is ended


def to_device(
    batches: Iterable[Batch], device: str | torch.device, augmentation: Augmentation | None = None
) -> Iterator[Batch]:
    """Yield the batches with their tensors on `device`, also tensors in lists, tuples and dicts.

    Other values stay as they are. augmentation: applied on the device to the images of each batch,
    with the random numbers that came with it from a Loader.
    Raises UsageError.
    """
    target = torch.device(device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "torch finds no CUDA device.",
            "Use cpu.",
            option="device",
            value=str(device),
        )
    iterator = iter(batches)
    if str(target) == "cuda":  # the current device is a property of the thread
        target = torch.device("cuda", torch.cuda.current_device())
    copier = _Copier(target, augmentation)
    if isinstance(iterator, EpochBatches) and target.type != "cpu":
        return _copy_ahead(iterator, copier)
    return _copy_each(iterator, copier)


class _Copier:
    """Copies batches to a device, on CUDA by a stream of its own."""

    def __init__(self, device: torch.device, augmentation: Augmentation | None) -> None:
        self._device, self._augmentation = device, augmentation
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """Return the copy of a batch, whose own memory is not needed any more, for `receive`.

        Also returns when the copy may be used; None: at once.
        """
        if self._augmentation is not None:  # a wrong label would end the CUDA context
            self._augmentation.check(batch)
        with torch.cuda.stream(self.stream):  # does nothing without a stream
            moved = map_tensors(
                lambda tensor: tensor.to(self._device, non_blocking=self.stream is not None), batch
            )
            if self.stream is not None:
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(self.stream)
                copied.synchronize()
            if self._augmentation is not None:
                moved = self._augmentation(moved)
            return moved, self.stream.record_event() if self.stream is not None else None

    def receive(self, batch: Batch, ready: torch.cuda.Event | None) -> Batch:
        """Return a copied batch for work in the calling thread."""
        if ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ready)
            map_tensors(lambda tensor: tensor.record_stream(stream), batch)
        return batch


def _copy_each(batches: Iterator[Batch], copier: _Copier) -> Iterator[Batch]:
    """Yield the batches of any iterator on the device. Each is taken when the loop requests it."""
    for batch in batches:
        copy = copier.copy(batch)
        del batch  # the loop alone keeps the memory of a batch
        received = copier.receive(*copy)
        del copy
        yield received
        del received


def _copy_ahead(batches: EpochBatches, copier: _Copier) -> Iterator[Batch]:
    """Yield the batches of a loader on the device; the next one is copied meanwhile."""
    # The death of a worker is signaled to this thread, even if the other thread waits for a batch.
    with WorkerDeathsAsErrors(), _CopyThread(batches, copier) as thread:
        requested = batches.request()
        while (ahead := thread.next()) is not None:
            taken, ready, seconds = ahead
            copier.receive(taken.values, ready)
            received = batches.deliver(taken, requested, seconds)
            del ahead, taken
            yield received
            del received
            requested = batches.request()


# A taken batch whose values are copies, when they may be used, and the seconds of the copy.
_Ahead = tuple[TakenBatch, torch.cuda.Event | None, float]


class _CopyThread:
    """Thread that takes and copies the next batch while the loop works on the one before."""

    def __init__(self, batches: EpochBatches, copier: _Copier) -> None:
        self._batches, self._copier = batches, copier
        # An item asks the thread for another batch. A Semaphore would stay locked after a Ctrl-C.
        self._requests: SimpleQueue[None] = SimpleQueue()
        self._results: SimpleQueue[_Ahead | BaseException | None] = SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> _CopyThread:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """End the thread, and after an error the pass. Another pass takes undelivered batches."""
        self._stopping = True
        self._requests.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
            # A thread that waits behind a newer pass, perhaps one of the calling thread, is not
            # joined: it ends by itself when it may go on.
            if self._thread.is_alive() and self._batches.close():
                self._thread.join()
        if error not in (None, GeneratorExit):
            self._batches.close()

    def next(self) -> _Ahead | None:
        """Return the next batch; None at the end. Raises the error of taking or copying it."""
        if self._thread is None:
            # The loop's own thread takes the first batch, because it starts the worker processes:
            # they end with the thread that started them.
            result = self._take()
            if isinstance(result, tuple):
                with DeferSignals():
                    thread = threading.Thread(target=self._run, name="wdstrain-device", daemon=True)
                    thread.start()  # may raise: then `__exit__` must not join it
                    self._thread = thread
        else:
            result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        self._requests.put(None)
        return result

    def _take(self) -> _Ahead | BaseException | None:
        """Return the next batch, None at the end, or the error that the loop raises."""
        try:
            taken = self._batches.take()
            begun = time.perf_counter()
            if self._copier.stream is not None:
                with torch.cuda.stream(self._copier.stream):  # on its device
                    self._batches.lock_pages()
            copy, ready = self._copier.copy(taken.values)
            return taken._replace(values=copy), ready, time.perf_counter() - begun
        except StopIteration:
            return None
        except BaseException as error:
            return error

    def _run(self) -> None:
        """Take a batch for each request until the end. This is the function of the thread."""
        while True:
            self._requests.get()
            if self._stopping:
                return
            result = self._take()
            self._results.put(result)
            if not isinstance(result, tuple):
                return
            del result
