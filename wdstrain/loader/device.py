"""Batches on a device, copied and augmented while the loop works on the batch before.

On CUDA a thread takes the next batch and copies it on a stream of its own, from page-locked memory.
The device therefore does not wait for the copy, even if the loop reads every loss. One batch is
ahead of the loop, never more. The loader's state and report are those of the delivered batches.

The loop's stream waits for a copy by an event. `record_stream` tells torch's allocator that the
loop's stream uses the memory, which would be reused too early otherwise. The batch in host memory
is kept until its copy is done.

The loop's own thread takes the first batch, because it starts the worker processes: they end with
the thread that started them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from wdstrain.augment.gpu import DRAWS, Augmentation, Draws
from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.loader.epoch import EpochBatches, TakenBatch
from wdstrain.runtime.signals import DeferSignals

Batch = dict[str, Any]

_JOIN_SECONDS = 1.0  # time for the thread to end before its wait for a batch is canceled


def to_device(
    batches: Iterable[Batch], device: str | torch.device, augmentation: Augmentation | None = None
) -> Iterator[Batch]:
    """Yield the batches with their tensors on `device`, also tensors in lists and dicts.

    Other values stay as they are. augmentation: applied on the device to the images of each batch,
    with each sample's own random numbers; batches must then be those of a Loader.
    Raises UsageError.
    """
    target = torch.device(device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={str(device)!r}: torch finds no CUDA device. Use cpu.")
    iterator = iter(batches)
    if augmentation is not None and not isinstance(iterator, EpochBatches):
        raise UsageError(
            f"augmentation needs the random numbers of each sample, which "
            f"{type(batches).__name__} does not have. Give the Loader itself, or loader.epoch(n)."
        )
    if target.type != "cuda":
        return _move_each(iterator, target, augmentation)
    if str(target) == "cuda":  # the current device is a property of the thread
        target = torch.device("cuda", torch.cuda.current_device())
    copier = _CudaCopier(target, augmentation)
    if isinstance(iterator, EpochBatches):
        return copy_ahead(iterator, copier)
    return _copy_each(iterator, copier)


def _move_each(
    batches: Iterator[Batch], device: torch.device, augmentation: Augmentation | None
) -> Iterator[Batch]:
    for batch in batches:
        moved = _moved(batch, device)
        if augmentation is not None and isinstance(batches, EpochBatches):
            moved = augmentation(moved, batches.draws(DRAWS))
        del batch
        yield moved
        del moved


# --- copies ---------------------------------------------------------------------------------------


class Event(Protocol):
    """A point in the work of a device, such as `torch.cuda.Event`."""

    def synchronize(self) -> None: ...


class DeviceCopy(NamedTuple):
    """A batch that is being copied. copied: the copy is done. ready: it is augmented too."""

    batch: Batch
    copied: Event
    ready: Any


class Copier(Protocol):
    """Copies batches to a device."""

    def prepare(self, batches: EpochBatches) -> None:
        """Prepare to copy these batches; the first was taken."""
        ...

    def copy(self, batch: Batch, draws: Callable[[int], Draws] | None) -> DeviceCopy:
        """Begin to copy a batch, which must be kept until the copy is done."""
        ...

    def receive(self, copy: DeviceCopy) -> Batch:
        """Return the batch for work in the calling thread."""
        ...


class _CudaCopier:
    """Copies batches on a CUDA stream of its own."""

    def __init__(self, device: torch.device, augmentation: Augmentation | None) -> None:
        self._device, self._augmentation = device, augmentation
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def prepare(self, batches: EpochBatches) -> None:
        with torch.cuda.device(self._device):
            batches.lock_pages()

    def copy(self, batch: Batch, draws: Callable[[int], Draws] | None) -> DeviceCopy:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            moved = _moved(batch, self._device)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
            if self._augmentation is not None and draws is not None:
                moved = self._augmentation(moved, draws(DRAWS))
            ready.record(self._stream)
        return DeviceCopy(moved, copied, ready)

    def receive(self, copy: DeviceCopy) -> Batch:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copy.ready)
        _record_stream(stream, copy.batch)
        return copy.batch


def _copy_each(batches: Iterator[Batch], copier: Copier) -> Iterator[Batch]:
    """Copy batches of any iterator. Each is taken when the loop requests it."""
    source: tuple[Batch, Event] | None = None  # batch in host memory, and the end of its copy
    try:
        for batch in batches:
            copy = copier.copy(batch, None)
            if source is not None:
                source[1].synchronize()
            source = (batch, copy.copied)
            del batch
            received = copier.receive(copy)
            del copy
            yield received
            del received
    finally:
        if source is not None:
            source[1].synchronize()


# --- one batch ahead ------------------------------------------------------------------------------


class _CopiedBatch(NamedTuple):
    """A batch on the device, and the seconds of its copy."""

    taken: TakenBatch
    copy: DeviceCopy
    seconds: float


def copy_ahead(batches: EpochBatches, copier: Copier) -> Iterator[Batch]:
    """Yield the batches of a loader on the device; the next one is copied meanwhile."""
    # The death of a worker is signaled to this thread, even if the other thread waits for a batch.
    with WorkerDeathsAsErrors():
        yield from _copy_ahead(batches, copier)


def _copy_ahead(batches: EpochBatches, copier: Copier) -> Iterator[Batch]:
    requested, thread = batches.request(), None
    try:
        first = batches.take()
        copier.prepare(batches)
        ready: _CopiedBatch | None = _copied(first, copier)
        with DeferSignals():
            thread = _CopyThread(batches, copier)
        del first
        while ready is not None:
            batch = copier.receive(ready.copy)
            received = batches.deliver(ready.taken, requested, batch, ready.seconds)
            ready = None
            del batch
            yield received
            del received
            requested = batches.request()
            ready = thread.next()
        batches.log_summary()
    except StopIteration:  # there was no batch at all
        return
    except GeneratorExit:
        raise
    except BaseException:
        if thread is not None:
            thread.close()
        batches.close()
        raise
    finally:
        if thread is not None:
            thread.close()


def _copied(taken: TakenBatch, copier: Copier) -> _CopiedBatch:
    """Copy a batch and wait until the copy is done."""
    begun = time.perf_counter()
    copy = copier.copy(taken.batch, taken.draws)
    copy.copied.synchronize()
    return _CopiedBatch(taken._replace(batch={}), copy, time.perf_counter() - begun)


class _CopyThread:
    """Thread that takes and copies the next batch while the loop works on the one before."""

    def __init__(self, batches: EpochBatches, copier: Copier) -> None:
        self._batches, self._copier = batches, copier
        # An item asks the thread for another batch. A Semaphore would stay locked after a Ctrl-C.
        self._requests: SimpleQueue[None] = SimpleQueue()
        self._stopping = False
        self._results: SimpleQueue[_CopiedBatch | BaseException | None] = SimpleQueue()
        self._requests.put(None)
        self._thread = threading.Thread(target=self._run, name="wdstrain-device", daemon=True)
        self._thread.start()

    def next(self) -> _CopiedBatch | None:
        """Return the next batch; None at the end. Raises the error of taking or copying it."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        self._requests.put(None)
        return result

    def close(self) -> None:
        """End the thread. Another pass takes the undelivered batches again."""
        self._stopping = True
        self._requests.put(None)
        self._thread.join(_JOIN_SECONDS)
        # A thread that waits behind a newer pass, perhaps one of the calling thread, is not joined:
        # it ends by itself when it may go on.
        if self._thread.is_alive() and self._batches.cancel():
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._requests.get()
            if self._stopping:
                return
            try:
                result = _copied(self._batches.take(), self._copier)
            except StopIteration:
                self._results.put(None)
                return
            except BaseException as error:  # the loop raises it
                self._results.put(error)
                return
            self._results.put(result)
            del result


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, (list, tuple)) and any(
        isinstance(part, (torch.Tensor, Mapping)) for part in value
    ):
        return [_moved(part, device) for part in value]
    return value


def _record_stream(stream: torch.cuda.Stream, value: Any) -> None:
    """Tell torch's allocator that a stream uses the memory of the tensors in a value."""
    if isinstance(value, torch.Tensor):
        value.record_stream(stream)
    elif isinstance(value, (Mapping, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            if isinstance(part, (torch.Tensor, Mapping, list)):
                _record_stream(stream, part)
