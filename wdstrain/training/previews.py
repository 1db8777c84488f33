"""Samples of a validation pass: the worst and random ones with images, and predicted numbers.

A hash of the key chooses the random ones, so they are the same samples after every epoch and for
any number of processes. Masks are shown in the colors of Pascal VOC.
"""

from __future__ import annotations

import heapq
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from wdstrain.training.heads import MaskHead, NumberHead
from wdstrain.training.tasks import Task

_KEPT = 24  # samples of each kind
_POINTS = 1000  # numbers of each label

Pixels = npt.NDArray[np.uint8]


class Said(NamedTuple):
    """What a head says about a sample, and the truth, in words."""

    prediction: str
    truth: str
    is_wrong: bool


@dataclass(frozen=True)
class PreviewSample:
    """A sample with its loss, and what each head says about it, by name. pixels: uint8[h, w, 3]."""

    key: str
    loss: float
    said: dict[str, Said]
    pixels: Pixels | None


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
        self.best: dict[str, list[Ranked]] = {"worst": [], "random": []}
        self._seen = 0
        self.numbers = {
            head.name: NumberPoints() for head in task.heads if isinstance(head, NumberHead)
        }

    def add(
        self, batch: Mapping[str, Any], outputs: Tensor, targets: Sequence[Tensor], losses: Tensor
    ) -> None:
        """Add a batch: outputs [b, outputs], targets of each head, losses [b]."""
        keys, rows = batch["__key__"], losses.tolist()
        hashes = [-float(crc32(key.encode("utf-8", "surrogateescape"))) for key in keys]
        for heap, ranks in zip(self.best.values(), (rows, hashes), strict=True):
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

    @staticmethod
    def merged(parts: Sequence[Mapping[str, list[Ranked]]]) -> dict[str, list[PreviewSample]]:
        """Return {"worst": samples by falling loss, "random": samples} of `best` of all processes."""
        merged = {}
        for name in ("worst", "random"):
            every = [ranked for part in parts for ranked in part[name]]
            best = heapq.nlargest(_KEPT, every, key=lambda ranked: ranked[:2])
            merged[name] = [sample for *_, sample in best]
        return merged

    def _preview(
        self,
        batch: Mapping[str, Any],
        outputs: Tensor,
        targets: Sequence[Tensor],
        row: int,
        loss: float,
    ) -> PreviewSample:
        said, panels = {}, []
        if self._picture is not None:
            panels.append(batch[self._picture][row].permute(1, 2, 0).cpu().numpy().copy())
        columns = self._task.split(outputs[row : row + 1])
        for head, own, target in zip(self._task.heads, columns, targets, strict=True):
            (predicted,), (true,) = head.predicted(own), head.true(target[row : row + 1])
            text = head.text(predicted)
            if isinstance(predicted, str):
                text += f" {float(head.probabilities(own).max()):.0%}"
            is_class = isinstance(predicted, (str, list))
            said[head.name] = Said(text, head.text(true), is_class and predicted != true)
            if isinstance(head, MaskHead) and panels:
                edge = np.full((len(panels[0]), 1, 3), 255, np.uint8)
                shown = (_overlay(panels[0], one.numpy()) for one in (predicted, true))
                panels += [part for one in shown for part in (edge, one)]
        pixels = np.concatenate(panels, axis=1) if panels else None
        return PreviewSample(batch["__key__"][row], loss, said, pixels)


# --- masks ----------------------------------------------------------------------------------------


def palette() -> Pixels:
    """Return the colors of classes 0 to 254 and of ignored pixels, uint8[256, 3].

    They are those of Pascal VOC: neighboring numbers have colors that differ much.
    """
    numbers = np.arange(256)
    colors = np.zeros((256, 3), np.int64)
    for bit in range(8):
        for channel in range(3):
            colors[:, channel] |= (numbers >> (3 * bit + channel) & 1) << (7 - bit)
    return colors.astype(np.uint8)


def color_of(number: int) -> str:
    """Return the color of a class in overlays, for HTML."""
    return f"#{palette()[number].tobytes().hex()}"


def mask_png(numbers: Pixels) -> bytes:
    """Return a mask as a PNG whose palette shows the classes. numbers: uint8[h, w]"""
    height, width = numbers.shape
    image = Image.frombytes("P", (width, height), np.ascontiguousarray(numbers).tobytes())
    image.putpalette(palette().tobytes())
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _overlay(pixels: Pixels, numbers: npt.NDArray[np.integer]) -> Pixels:
    """Return the image with the colors of the classes laid over it. uint8[h, w, 3]"""
    mixed: Pixels = ((pixels.astype(np.uint16) + palette()[numbers]) // 2).astype(np.uint8)
    return mixed
