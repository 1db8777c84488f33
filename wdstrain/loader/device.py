"""Batches on a device, copied and varied beside the work on the batch before.

On CUDA copies run on a stream of their own, from memory that is page-locked (`pinned`), and are begun by a thread: while the loop
works on a batch, the next is taken, copied and varied, so that a loop which looks at every loss does not let the device wait
for the copy either. One batch is ahead of the loop, never more; the loader's state and report are those of the batch that the
loop was given, not of what was taken. The loop's stream waits for a copy by an event, and `record_stream` tells torch's
allocator that it uses the memory, or it would be reused too early. The host's batch is held until its copy is done.

The first batch is taken by the loop's own thread, because it starts the worker processes, which end with who started them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.loader.epoch import Batches, Taken
from wdstrain.loader.gpu_augment import DRAWS, Augmentation, Draws
from wdstrain.runtime.signals import DeferSignals

Batch = dict[str, Any]

_PATIENCE = 1.0  # seconds until a batch that nobody wants any more is not waited for


def to_device(
    batches: Iterable[Batch], device: str | torch.device, augmentation: Augmentation | None = None
) -> Iterator[Batch]:
    """The same batches with their tensors on `device`, also those in lists and dicts; other values stay as they are.

    augmentation: varies the pictures of each batch there, by its samples' own random numbers; batches are those of a Loader.
    """
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={str(device)!r}: torch finds no CUDA device here. Use cpu.")
    given = iter(batches)
    if augmentation is not None and not isinstance(given, Batches):
        raise UsageError(
            f"an augmentation needs each sample's own random numbers, which a Loader has and {type(batches).__name__} has not. "
            f"Give the Loader itself, or loader.epoch(n)."
        )
    if where.type != "cuda":
        return _here(given, where, augmentation)
    if str(where) == "cuda":  # each thread has a current device of its own
        where = torch.device("cuda", torch.cuda.current_device())
    sender = _CudaSender(where, augmentation)
    return ahead(given, sender) if isinstance(given, Batches) else _others(given, sender)


def _here(
    batches: Iterator[Batch], device: torch.device, augmentation: Augmentation | None
) -> Iterator[Batch]:
    for batch in batches:
        moved = _moved(batch, device)
        if augmentation is not None and isinstance(batches, Batches):
            moved = augmentation(moved, batches.draws(DRAWS))
        del batch
        yield moved
        del moved


class Moment(Protocol):
    """A point in the work of a device, as torch's events are."""

    def synchronize(self) -> None: ...


class Brought(NamedTuple):
    """A batch that is on the device, and how long it was on its way."""

    taken: Taken
    sent: Sent
    seconds: float


class Sent(NamedTuple):
    """A batch on its way to the device. there: it is copied; done: it is varied too."""

    batch: Batch
    there: Moment
    done: Any


class Sender(Protocol):
    """Brings batches to a device."""

    def begin(self, batches: Batches) -> None:
        """The first of these was taken, and all of them are to be sent."""
        ...

    def send(self, batch: Batch, draws: Callable[[int], Draws] | None) -> Sent:
        """Begin to copy a batch, which must be held until it is there."""
        ...

    def received(self, sent: Sent) -> Batch:
        """The batch, for whoever asks to work on."""
        ...


class _CudaSender:
    """Copies batches on a stream of its own."""

    def __init__(self, device: torch.device, augmentation: Augmentation | None) -> None:
        self._device, self._augmentation = device, augmentation
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batches: Batches) -> None:
        with torch.cuda.device(self._device):
            batches.lock_pages()

    def send(self, batch: Batch, draws: Callable[[int], Draws] | None) -> Sent:
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            copied, there, done = (
                _moved(batch, self._device),
                torch.cuda.Event(),  # type: ignore[no-untyped-call]
                torch.cuda.Event(),  # type: ignore[no-untyped-call]
            )
            there.record(self._side)
            if self._augmentation is not None and draws is not None:
                copied = self._augmentation(copied, draws(DRAWS))
            done.record(self._side)
        return Sent(copied, there, done)

    def received(self, sent: Sent) -> Batch:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(sent.done)
        _used_by(current, sent.batch)
        return sent.batch


def _others(batches: Iterator[Batch], sender: Sender) -> Iterator[Batch]:
    """Batches that are no loader's: they are taken when the loop asks for them."""
    held: tuple[Batch, Moment] | None = None
    try:
        for batch in batches:
            sent = sender.send(batch, None)
            if held is not None:
                held[1].synchronize()
            held = (batch, sent.there)
            del batch
            received = sender.received(sent)
            del sent
            yield received
            del received
    finally:
        if held is not None:
            held[1].synchronize()


def ahead(batches: Batches, sender: Sender) -> Iterator[Batch]:
    """A loader's batches, one of them ahead."""
    with (
        WorkerDeathsAsErrors()
    ):  # a signal tells this thread of a death, also while the courier waits for the batch
        yield from _ahead(batches, sender)


def _ahead(batches: Batches, sender: Sender) -> Iterator[Batch]:
    asked, courier = batches.asked(), None
    try:
        first = batches.take()
        sender.begin(batches)
        found: Brought | None = _brought(first, sender)
        with DeferSignals():
            courier = _Courier(batches, sender)
        del first
        while found is not None:
            received = batches.give(found.taken, asked, sender.received(found.sent), found.seconds)
            found = None
            yield received
            del received
            asked = batches.asked()
            found = courier.next()
        batches.ended()
    except StopIteration:  # there was no batch at all
        return
    except GeneratorExit:
        raise
    except BaseException:
        if courier is not None:
            courier.close()
        batches.close()
        raise
    finally:
        if courier is not None:
            courier.close()


def _brought(taken: Taken, sender: Sender) -> Brought:
    """A batch that was taken, when it is there."""
    begun = time.perf_counter()
    sent = sender.send(taken.batch, taken.draws)
    sent.there.synchronize()
    return Brought(taken._replace(batch={}), sent, time.perf_counter() - begun)


class _Courier:
    """A thread that takes the next batch and sends it while the loop works on the one before."""

    def __init__(self, batches: Batches, sender: Sender) -> None:
        self._batches, self._sender = batches, sender
        # tells the thread to take another; a Semaphore would stay locked by an interrupt of whoever releases it
        self._room: SimpleQueue[None] = SimpleQueue()
        self._stopping = False
        self._found: SimpleQueue[Brought | BaseException | None] = SimpleQueue()
        self._room.put(None)
        self._thread = threading.Thread(target=self._run, name="wdstrain-device", daemon=True)
        self._thread.start()

    def next(self) -> Brought | None:
        """The next batch; None at the end. Raises what taking it raised."""
        found = self._found.get()
        if isinstance(found, BaseException):
            raise found
        self._room.put(None)
        return found

    def close(self) -> None:
        """End the thread; what it took and nobody was given is taken again by another pass."""
        self._stopping = True
        self._room.put(None)
        self._thread.join(_PATIENCE)
        # one that waits behind another pass, perhaps that of this very thread, ends by itself when its turn comes
        if self._thread.is_alive() and self._batches.abandon():
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._room.get()
            if self._stopping:
                return
            try:
                brought = _brought(self._batches.take(), self._sender)
            except StopIteration:
                self._found.put(None)
                return
            except BaseException as error:  # the loop raises it
                self._found.put(error)
                return
            self._found.put(brought)
            del brought


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, (list, tuple)) and any(
        isinstance(part, (torch.Tensor, Mapping)) for part in value
    ):
        return [_moved(part, device) for part in value]
    return value


def _used_by(stream: torch.cuda.Stream, value: Any) -> None:
    """Memory that was allocated for one stream is used by this one too."""
    if isinstance(value, torch.Tensor):
        value.record_stream(stream)
    elif isinstance(value, (Mapping, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            if isinstance(part, (torch.Tensor, Mapping, list)):
                _used_by(stream, part)
