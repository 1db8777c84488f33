"""What the labels of a set are: samples of each class as the index says where we made it, else by reading labels alone.

Labels are read at their own places, without the pictures between them, and of a large set an even part is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.fields import scalar
from wdstrain.indexing import Index
from wdstrain.remote import is_remote
from wdstrain.storage import open_source
from wdstrain.training.task import Head, Task

_MOST, _NUMBERS = 10_000, 2_000  # labels that are read: to count classes, and for the mean of numbers
_MOST_FAR = 200  # of shards on a server, where each is a request


def class_counts(index: Index, head: Head) -> dict[str, int]:
    """Samples by class; of a large set that does not say it, of an even part of it."""
    return counts_said(index, head) or _read(index, head)


def counts_said(index: Index, head: Head) -> dict[str, int]:
    """Samples by class as the index has them; nothing if it does not say."""
    said = index.info.get("samples", {})
    said = {split: said[split] for split in index.splits if split in said} if isinstance(said, dict) else {}
    sums: Counter[str] = Counter()
    for counts in said.values():
        sums.update(counts if isinstance(counts, dict) else {})
    if head.target.column is None and sums and set(sums) <= set(head.classes) and sums.total() == len(index):
        return {name: sums.get(name, 0) for name in head.classes}
    return {}


def class_weights(index: Index, head: Head, asked: str, device: torch.device) -> Tensor | None:
    """Weights with which rare classes count as much as frequent ones, if that is asked for and the head has classes."""
    if asked == "none" or head.kind == "number":
        return None
    counts = class_counts(index, head)
    if not any(counts.values()):
        raise UsageError(f"class_weights={asked}: no label {head.name!r} could be read. Leave it away.")
    return head.weights(counts).to(device)


def scaled(task: Task, index: Index) -> Task:
    """The task, with mean and deviation of its numbers, by an even part of the data."""
    return Task(tuple(_scaled(head, index) if head.kind == "number" else head for head in task.heads))


def _scaled(head: Head, index: Index) -> Head:
    values = []
    for data in _labels(index, head, _NUMBERS):
        with suppress(WdstrainError, ValueError, TypeError):
            values.append(float(scalar(data, head.target.column)))
    found = np.array(values)[np.isfinite(values)] if values else np.zeros(1)
    return replace(head, mean=float(found.mean()), deviation=float(found.std()) or 1.0)


def _read(index: Index, head: Head) -> dict[str, int]:
    found: Counter[str] = Counter()
    for data in _labels(index, head, _MOST):
        found.update(_classes(head, data))
    return {name: found.get(name, 0) for name in head.classes}


def _labels(index: Index, head: Head, most: int) -> Iterator[memoryview]:
    """The bytes of the field that holds a label, of an even part of the samples."""
    if head.target.field not in index.fields:
        return
    field, table = index.fields.index(head.target.field), index.table
    most = min(most, _MOST_FAR) if any(is_remote(shard.path) for shard in index.shards) else most
    ids = np.linspace(0, len(index) - 1, min(len(index), most)).astype(np.int64)
    shards = index.shard_of(ids)
    for number in np.unique(shards).tolist():
        shard = index.shards[number]
        with open_source(shard.path, shard.bytes) as source:
            for i in ids[shards == number].tolist():
                for row in range(int(table.member_first[i]), int(table.member_first[i + 1])):
                    if table.member_field[row] == field:
                        data = memoryview(bytearray(int(table.member_size[row])))
                        source.read_into([data], int(table.member_offset[row]))
                        yield data
                        break


def _classes(head: Head, data: memoryview) -> list[str]:
    """The classes that a label names; none where it cannot be read, which is for the training itself to tell."""
    try:
        value = scalar(data, head.target.column)
    except (WdstrainError, ValueError):
        return []
    if isinstance(value, list):
        return [str(one) for one in value]
    if head.target.column is None and str(value).isdecimal() and int(value) < len(head.classes):
        return [head.classes[int(value)]]
    return [str(value)]
