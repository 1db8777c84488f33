"""A few samples of a validation pass, as pictures: those with the greatest loss, and some at random.

Which are random is decided by a hash of the key, so it is the same samples after every epoch and for any number of processes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wdstrain.training.task import Head, Task

_KEPT = 24  # samples of either kind


@dataclass(frozen=True)
class Shown:
    """A sample: its key, its loss, what was said of it and what is true by the name of the head. pixels: uint8[h, w, 3] or None.

    wrong: the heads that said another class. A number is never right or wrong: how far it is off can be seen.
    """

    key: str
    loss: float
    said: dict[str, str]
    true: dict[str, str]
    pixels: npt.NDArray[np.uint8] | None
    wrong: frozenset[str] = frozenset()


Ranked = tuple[float, str, int, Shown]


class Gallery:
    """Collects them over a pass."""

    def __init__(self, task: Task) -> None:
        self._task = task
        # (how much it is wanted, key, how many were looked at, sample): the least wanted first; keys may be equal
        self._worst: list[Ranked] = []
        self._random: list[Ranked] = []
        self._seen = 0

    def add(
        self, batch: Mapping[str, Any], outputs: Tensor, targets: Sequence[Tensor], losses: Tensor
    ) -> None:
        """Look at a batch: outputs [b, outputs], targets as the task has them, losses [b]."""
        keys, rows = batch["__key__"], losses.tolist()
        for heap, wanted in (
            (self._worst, rows),
            (self._random, [-float(crc32(key.encode("utf-8", "surrogateescape"))) for key in keys]),
        ):
            for row in heapq.nlargest(_KEPT, range(len(keys)), key=wanted.__getitem__):
                if len(heap) == _KEPT and (wanted[row], keys[row]) <= heap[0][:2]:
                    break
                shown = self._shown(batch, outputs, targets, row, rows[row])
                ranked = wanted[row], keys[row], self._seen + row, shown
                (heapq.heappushpop if len(heap) == _KEPT else heapq.heappush)(heap, ranked)
        self._seen += len(keys)

    def best(self) -> dict[str, list[Ranked]]:
        """What this process has, for `merged`."""
        return {"worst": self._worst, "random": self._random}

    @staticmethod
    def merged(parts: Sequence[Mapping[str, list[Ranked]]]) -> dict[str, list[Shown]]:
        """{"worst": samples by falling loss, "random": samples} of all processes."""
        found = {}
        for name in ("worst", "random"):
            every = [one for part in parts for one in part[name]]
            found[name] = [
                shown for *_, shown in heapq.nlargest(_KEPT, every, key=lambda one: one[:2])
            ]
        return found

    def _shown(
        self,
        batch: Mapping[str, Any],
        outputs: Tensor,
        targets: Sequence[Tensor],
        row: int,
        loss: float,
    ) -> Shown:
        said, true, wrong = {}, {}, set()
        for head, own, target in zip(
            self._task.heads, self._task.split(outputs), targets, strict=True
        ):
            said[head.name], true[head.name] = said_of(head, own[row]), true_of(head, target[row])
            if head.kind != "number" and classes_said(head, own[row]) != classes_true(
                head, target[row]
            ):
                wrong.add(head.name)
        picture, pixels = batch["image"][row], None
        if picture.dtype == torch.uint8 and picture.ndim == 3 and picture.shape[0] == 3:
            pixels = picture.permute(1, 2, 0).cpu().numpy().copy()
        return Shown(batch["__key__"][row], loss, said, true, pixels, frozenset(wrong))


def said_of(head: Head, outputs: Tensor) -> str:
    """What a row of outputs says, in words."""
    if head.kind == "number":
        return f"{float(head.values(outputs[None])):.4g}"
    if head.kind == "multi":
        return "|".join(classes_said(head, outputs))
    return f"{classes_said(head, outputs)[0]} {float(head.probabilities(outputs[None]).max()):.0%}"


def true_of(head: Head, target: Tensor) -> str:
    """What is true, in words."""
    if head.kind == "number":
        return f"{float(target):.4g}"
    return "|".join(classes_true(head, target))


def classes_said(head: Head, outputs: Tensor) -> list[str]:
    """The classes that a row of outputs says; one unless the head has several at once."""
    shares = head.probabilities(outputs[None])[0]
    if head.kind == "multi":
        return [
            name for name, share in zip(head.classes, shares.tolist(), strict=True) if share > 0.5
        ]
    return [head.classes[int(shares.argmax())]]


def classes_true(head: Head, target: Tensor) -> list[str]:
    """The classes that are true; one unless the head has several at once."""
    if head.kind == "multi":
        return [
            name for name, there in zip(head.classes, target.tolist(), strict=True) if there > 0.5
        ]
    return [head.classes[int(target)]]
