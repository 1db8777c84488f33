"""Batches on a device, copied beside the work on the batch before.

On CUDA copies run on a stream of their own, so that a batch is copied while the device still computes on the one before; the
loop's stream waits for the copy by an event, and `record_stream` tells torch's allocator that it uses the memory, or it would
be reused too early. Nothing is taken ahead of the loop, so that a loader's state is that of the batch the loop was given. The
host's batch is held until its copy is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from wdstrain.errors import UsageError

Batch = dict[str, Any]


def to_device(batches: Iterable[Batch], device: str | torch.device) -> Iterator[Batch]:
    """The same batches with their tensors on `device`. Lists and other values stay as they are."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={str(device)!r}: torch finds no CUDA device here. Use cpu.")
    return _streamed(batches, where) if where.type == "cuda" else (_moved(batch, where) for batch in batches)


def _moved(batch: Batch, device: torch.device) -> Batch:
    return {name: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for name, v in batch.items()}


def _streamed(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    held: tuple[Batch, torch.cuda.Event] | None = None  # on the host until its copy is done
    for batch in batches:
        with torch.cuda.stream(side):
            copied, done = _moved(batch, device), torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(side)
        if held is not None:
            held[1].synchronize()
        held = (batch, done)
        del batch
        yield _given(copied, done, device)
    if held is not None:
        held[1].synchronize()


def _given(batch: Batch, done: torch.cuda.Event, device: torch.device) -> Batch:
    current = torch.cuda.current_stream(device)
    current.wait_event(done)
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            value.record_stream(current)
    return batch
