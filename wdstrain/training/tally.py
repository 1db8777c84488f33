"""What is summed over an epoch of training, beside the loss: samples, right answers, numbers, bad samples. Float64, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wdstrain.training.task import Task


def names(task: Task) -> list[str]:
    """What is summed over an epoch of training; the bad samples are counted by the loader, and are none of a batch's."""
    own = [
        f"{'target' if head.kind == 'number' else 'right'} {head.name}"
        for head in task.heads
        if head.kind != "multi"
    ]
    return ["loss", "samples", *own, "overflowed", "bad"]


def counted(
    task: Task,
    outputs: Tensor,
    targets: Sequence[Tensor],
    losses: Tensor,
    *,
    may_overflow: bool = False,
) -> list[Tensor]:
    """A batch's share of each of those sums. may_overflow: losses that are no numbers are counted, and left out of the sum."""
    losses, overflowed = losses.double(), torch.zeros((), dtype=torch.float64, device=losses.device)
    if may_overflow:
        sound = losses.isfinite()
        losses, overflowed = losses.masked_fill(~sound, 0.0), (~sound).double().sum()
    # torch.tensor would copy the count from the host, which waits for the device
    found = [losses.sum(), torch.full((), len(losses), dtype=torch.float64, device=losses.device)]
    for head, own, target in zip(task.heads, task.split(outputs), targets, strict=True):
        if head.kind == "number":
            found.append(target.double().sum())
        elif head.kind != "multi":
            said = own.argmax(1) if head.kind == "class" else (own[:, 0] > 0).long()
            found.append(
                (said == (target.argmax(1) if target.ndim == 2 else target)).double().sum()
            )
    return [*found, overflowed, torch.zeros_like(found[0])]
