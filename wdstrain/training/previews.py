"""Samples of a validation pass: the worst and random ones with images, and predicted numbers.

A hash of the key chooses the random ones, so they are the same samples after every epoch and for
any number of processes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
from torch import Tensor

from wdstrain.training.heads import NumberHead
from wdstrain.training.tasks import Task

_KEPT = 24  # samples of each kind
_POINTS = 1000  # numbers of each label


@dataclass(frozen=True)
class PreviewSample:
    """A sample with its loss, and by the name of the head its prediction and target in words.

    pixels: uint8[h, w, 3] or None. wrong: heads that predicted another class.
    """

    key: str
    loss: float
    predictions: dict[str, str]
    targets: dict[str, str]
    pixels: npt.NDArray[np.uint8] | None
    wrong: frozenset[str] = frozenset()


class NumberPoints:
    """(true, predicted) numbers of an even part of the samples of a pass.

    Every `stride`-th sample is kept. The stride doubles when there are too many, so memory is
    bounded without knowing the number of samples.
    """

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._stride, self._seen = 1, 0

    def add(self, true: Tensor, predicted: Tensor) -> None:
        """Add a batch. float[b] each"""
        rows = slice(-self._seen % self._stride, None, self._stride)
        self._seen += len(true)
        self.points += zip(true[rows].tolist(), predicted[rows].tolist(), strict=True)
        while len(self.points) > _POINTS:
            self.points, self._stride = self.points[::2], 2 * self._stride


Ranked = tuple[float, str, int, PreviewSample]


class PreviewCollector:
    """Collects such samples over a pass."""

    def __init__(self, task: Task, picture: str | None) -> None:
        """picture: name of RGB images in the batch."""
        self._task, self._picture = task, picture
        # (rank, key, position, sample), heaps with the lowest rank first; keys may be equal
        self._worst: list[Ranked] = []
        self._random: list[Ranked] = []
        self._seen = 0
        self.numbers = {
            head.name: NumberPoints() for head in task.heads if isinstance(head, NumberHead)
        }

    def add(
        self, batch: Mapping[str, Any], outputs: Tensor, targets: Sequence[Tensor], losses: Tensor
    ) -> None:
        """Add a batch: outputs [b, outputs], targets of each head, losses [b]."""
        keys, rows = batch["__key__"], losses.tolist()
        for heap, ranks in (
            (self._worst, rows),
            (self._random, [-float(crc32(key.encode("utf-8", "surrogateescape"))) for key in keys]),
        ):
            for row in heapq.nlargest(_KEPT, range(len(keys)), key=ranks.__getitem__):
                if len(heap) == _KEPT and (ranks[row], keys[row]) <= heap[0][:2]:
                    break
                sample = self._preview(batch, outputs, targets, row, rows[row])
                ranked = ranks[row], keys[row], self._seen + row, sample
                (heapq.heappushpop if len(heap) == _KEPT else heapq.heappush)(heap, ranked)
        self._seen += len(keys)
        columns = self._task.split(outputs)
        for head, own, target in zip(self._task.heads, columns, targets, strict=True):
            if isinstance(head, NumberHead):
                self.numbers[head.name].add(target, head.values(own.double()))

    def best(self) -> dict[str, list[Ranked]]:
        """Return the samples of this process, for `merged`."""
        return {"worst": self._worst, "random": self._random}

    @staticmethod
    def merged(parts: Sequence[Mapping[str, list[Ranked]]]) -> dict[str, list[PreviewSample]]:
        """Return {"worst": samples by falling loss, "random": samples} of all processes."""
        found = {}
        for name in ("worst", "random"):
            every = [ranked for part in parts for ranked in part[name]]
            found[name] = [
                sample for *_, sample in heapq.nlargest(_KEPT, every, key=lambda ranked: ranked[:2])
            ]
        return found

    def _preview(
        self,
        batch: Mapping[str, Any],
        outputs: Tensor,
        targets: Sequence[Tensor],
        row: int,
        loss: float,
    ) -> PreviewSample:
        predictions, targets_text, wrong = {}, {}, set()
        columns = self._task.split(outputs)
        for head, own, target in zip(self._task.heads, columns, targets, strict=True):
            predictions[head.name] = head.prediction_text(own[row])
            targets_text[head.name] = head.target_text(target[row])
            if head.is_wrong(own[row], target[row]):
                wrong.add(head.name)
        pixels = None
        if self._picture is not None:
            pixels = batch[self._picture][row].permute(1, 2, 0).cpu().numpy().copy()
            for head, own, target in zip(self._task.heads, columns, targets, strict=True):
                pixels = head.picture(pixels, own[row], target[row])
        key = batch["__key__"][row]
        return PreviewSample(key, loss, predictions, targets_text, pixels, frozenset(wrong))
