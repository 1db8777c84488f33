"""How many samples there are of each class: as the index says where we made it, else by reading labels alone.

Labels are read at their own places, without the pictures between them, and of a large set an even part is looked at.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.fields import scalar
from wdstrain.indexing import Index
from wdstrain.remote import is_remote
from wdstrain.storage import open_source
from wdstrain.training.task import Head

_MOST, _MOST_FAR = 10_000, 500  # labels that are read: of shards on a disk, and of those on a server, each by a request


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


def _read(index: Index, head: Head) -> dict[str, int]:
    found: Counter[str] = Counter()
    if head.target.field not in index.fields:
        return dict.fromkeys(head.classes, 0)
    field, table = index.fields.index(head.target.field), index.table
    most = _MOST_FAR if any(is_remote(shard.path) for shard in index.shards) else _MOST
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
                        found.update(_classes(head, data))
                        break
    return {name: found.get(name, 0) for name in head.classes}


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
