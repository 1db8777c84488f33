"""Samples of a validation pass for the report: the worst with images, and predicted numbers.

Masks are shown in the colors of Pascal VOC.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from wdstrain.training.heads import MaskHead, NumberHead
from wdstrain.training.tasks import Task

_KEPT = 24  # worst samples
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

    @property
    def order(self) -> tuple[float, str]:
        return -self.loss, self.key


class Previews:
    """The worst samples of a pass, and (true, predicted) numbers of its first samples by label."""

    def __init__(self, task: Task, picture: str | None) -> None:
        """picture: name of RGB images in the batch."""
        self._task, self._picture = task, picture
        self.worst: list[PreviewSample] = []
        heads = (head for head in task.heads if isinstance(head, NumberHead))
        self.points: dict[str, list[tuple[float, float]]] = {head.name: [] for head in heads}

    def add(
        self, batch: Mapping[str, Any], outputs: Tensor, targets: Sequence[Tensor], losses: Tensor
    ) -> None:
        """Add a batch: outputs [b, outputs], targets of each head, losses [b]."""
        ranks = losses.nan_to_num(nan=math.inf).tolist()
        order = list(zip((-rank for rank in ranks), batch["__key__"], strict=True))
        last = self.worst[-1].order if len(self.worst) == _KEPT else (math.inf, "")
        rows = sorted(range(len(order)), key=order.__getitem__)[:_KEPT]
        new = [
            self._preview(batch, outputs, targets, row, ranks[row])
            for row in rows
            if order[row] < last
        ]
        self.worst = self.merged([self.worst, new])
        columns = self._task.split(outputs)
        for head, own, target in zip(self._task.heads, columns, targets, strict=True):
            if isinstance(head, NumberHead) and len(self.points[head.name]) < _POINTS:
                predicted = head.values(own.double()).tolist()
                self.points[head.name] += zip(target.tolist(), predicted, strict=True)

    @staticmethod
    def merged(parts: Iterable[Iterable[PreviewSample]]) -> list[PreviewSample]:
        """Return the worst samples of several parts, the worst first."""
        return sorted((s for part in parts for s in part), key=lambda s: s.order)[:_KEPT]

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
