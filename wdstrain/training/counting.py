"""What the labels of a set are: samples of each class as the index says where we made it, else by reading labels alone.

Of a large set an even part is looked at.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.shards.index import Index
from wdstrain.shards.labels import (
    classes_in,
    complete_column,
    even_part,
    label_bytes,
    recorded_counts,
)
from wdstrain.shards.values import scalar
from wdstrain.training.task import Head, Task

_MOST, _NUMBERS = (
    10_000,
    2_000,
)  # labels that are read: to count classes, and for the mean of numbers


def class_counts(index: Index, head: Head) -> dict[str, int]:
    """Samples by class; of a large set that does not say it, of an even part of it."""
    return counts_said(index, head) or _read(index, head)[0]


def counts_said(index: Index, head: Head) -> dict[str, int]:
    """Samples by class as the index has them; nothing if it does not say."""
    return recorded_counts(index, head.target)


def class_weights(index: Index, head: Head, asked: str, device: torch.device) -> Tensor | None:
    """Weights with which rare classes count as much as frequent ones, if that is asked for and the head has classes."""
    if asked == "none" or head.kind == "number":
        return None
    said = counts_said(index, head)
    counts, samples = (said, len(index)) if said else _read(index, head)
    if not any(counts.values()):
        raise UsageError(
            f"class_weights={asked}: no label {head.name!r} could be read. Leave it away."
        )
    return head.weights(counts, samples).to(device)


def scaled(task: Task, index: Index) -> Task:
    """The task, with mean and deviation of its numbers, by an even part of the data."""
    return Task(
        tuple(_scaled(head, index) if head.kind == "number" else head for head in task.heads)
    )


def _scaled(head: Head, index: Index) -> Head:
    column = complete_column(index, head.target)
    values = _read_numbers(index, head) if column is None else np.asarray(column.values)
    found = values[np.isfinite(values)] if len(values) else np.zeros(1)
    mean, deviation = float(found.mean()), float(found.std())
    return replace(
        head, mean=mean, deviation=deviation if deviation > 1e-12 * abs(mean) else 1.0
    )  # rounding is no deviation


def _read_numbers(index: Index, head: Head) -> npt.NDArray[np.float64]:
    """Return the numbers of an even part of the samples, without those that cannot be read."""
    values = []
    for _, data in label_bytes(index, head.target.field, even_part(index, _NUMBERS)):
        with suppress(WdstrainError, ValueError, TypeError):
            values.append(float(scalar(data, head.target.column)))
    return np.array(values, np.float64)


def _read(index: Index, head: Head) -> tuple[dict[str, int], int]:
    """Samples by class, and how many labels were read."""
    found: Counter[str] = Counter()
    samples = 0
    for i, data in label_bytes(index, head.target.field, even_part(index, _MOST)):
        found.update(
            set(classes_in(data, head.target.column, index.label_in_sample(head.target, i).classes))
        )
        samples += 1
    return {name: found.get(name, 0) for name in head.classes}, samples
