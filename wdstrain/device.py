"""Batches on a device, copied while the one before is used.

On CUDA the copy of the next batch runs on a stream of its own; the batch is given out when its copy is done, and
`record_stream` tells torch's allocator that the caller's stream uses the memory, or it would be reused too early. The
host's batch is held until its copy is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from wdstrain.errors import UsageError

Batch = dict[str, Any]


def to_device(batches: Iterable[Batch], device: str | torch.device) -> Iterator[Batch]:
    """The same batches with their tensors on `device`, one copied ahead. Lists and other values stay as they are."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={str(device)!r}: torch finds no CUDA device here. Use cpu.")
    return _streamed(batches, where) if where.type == "cuda" else (_moved(batch, where) for batch in batches)


def _moved(batch: Batch, device: torch.device) -> Batch:
    return {name: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for name, v in batch.items()}


def _streamed(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: tuple[Batch, Batch, torch.cuda.Event] | None = None  # on the host, on the device, its copy is done
    for batch in batches:
        with torch.cuda.stream(side):
            copied, done = _moved(batch, device), torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(side)
        if ahead is not None:
            yield _given(ahead[1], ahead[2], device)
            ahead[2].synchronize()  # the host's batch may go only now
        ahead = (batch, copied, done)
    if ahead is not None:
        yield _given(ahead[1], ahead[2], device)
        ahead[2].synchronize()


def _given(batch: Batch, done: torch.cuda.Event, device: torch.device) -> Batch:
    current = torch.cuda.current_stream(device)
    current.wait_event(done)
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            value.record_stream(current)
    return batch
