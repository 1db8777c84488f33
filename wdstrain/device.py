"""Batches on a device, copied and varied beside the work on the batch before.

On CUDA copies run on a stream of their own, from memory that is page-locked (`pinned`), so that a batch is copied while the
device still computes on the one before; the loop's stream waits for the copy by an event, and `record_stream` tells torch's
allocator that it uses the memory, or it would be reused too early. Nothing is taken ahead of the loop, so that a loader's state is
that of the batch the loop was given. The host's batch is held until its copy is done: two batches at most are on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from wdstrain.augmentation import DRAWS, Augmentation
from wdstrain.errors import UsageError
from wdstrain.loader import Batches

Batch = dict[str, Any]


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
    return _streamed(given, where, augmentation) if where.type == "cuda" else _here(given, where, augmentation)


def _here(batches: Iterator[Batch], device: torch.device, augmentation: Augmentation | None) -> Iterator[Batch]:
    for batch in batches:
        yield _varied(_moved(batch, device), batches, augmentation)
        del batch


def _streamed(batches: Iterator[Batch], device: torch.device, augmentation: Augmentation | None) -> Iterator[Batch]:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    held: tuple[Batch, torch.cuda.Event] | None = None  # on the host until its copy is done
    for batch in batches:
        if held is None and isinstance(batches, Batches):
            batches.lock_pages()
        with torch.cuda.stream(side):
            copied, there = _moved(batch, device), torch.cuda.Event()  # type: ignore[no-untyped-call]
            there.record(side)
            varied, done = _varied(copied, batches, augmentation), torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(side)
            del copied
        if held is not None:
            held[1].synchronize()
        held = (batch, there)
        del batch
        current = torch.cuda.current_stream(device)
        current.wait_event(done)
        _used_by(current, varied)
        yield varied
        del varied
    if held is not None:
        held[1].synchronize()


def _varied(batch: Batch, batches: Iterator[Batch], augmentation: Augmentation | None) -> Batch:
    if augmentation is None or not isinstance(batches, Batches):
        return batch
    return augmentation(batch, batches.draws(DRAWS))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, (list, tuple)) and any(isinstance(part, (torch.Tensor, Mapping)) for part in value):
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
