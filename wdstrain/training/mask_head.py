"""The head for segmentation: the class of each pixel, with its loss, overlays and mask files."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image as PillowImage
from torch import Tensor
from torch.nn import functional

from wdstrain.decode.fields import Field, Image
from wdstrain.decode.masks import IGNORED, mask_like
from wdstrain.errors import SampleError, UsageError
from wdstrain.training.heads import Head

_SHOWN = 3  # classes of a prediction in words


@dataclass(frozen=True)
class MaskHead(Head):
    """The class of each pixel: cross entropy over one logit per class and pixel.

    Pixels of the number 255 count neither in the loss nor in metrics. Outputs are
    [b, classes, h, w], targets int64[b, h, w].
    """

    kind: ClassVar[str] = "mask"
    main_metric: ClassVar[str] = "mIoU"
    train_sum: ClassVar[str | None] = None

    def output_shape(self, image: tuple[int, ...]) -> tuple[int, ...]:
        return (self.outputs, *image[1:])

    def field(self, image: Field | None = None) -> Field:
        """Return the field that reads the target: int64[b, h, w], as large as the images."""
        if not isinstance(image, Image) or image.size is None:
            raise UsageError(
                "masks need an image field of wt.image with a size: they get the same crop and flip."
            )
        return mask_like(image, (self.target.field,), len(self.classes))

    def checked_target(self, value: Any) -> Tensor:
        """Return class numbers, int64[h, w]. value: array or tensor of class numbers."""
        numbers = torch.as_tensor(value)
        is_whole = not numbers.is_floating_point() and not numbers.is_complex()
        if numbers.ndim != 2 or not is_whole:
            raise SampleError(
                f"{self.name} is {numbers.dtype}{list(numbers.shape)}: must be whole numbers [h, w]"
            )
        numbers = numbers.long()
        known = ((numbers >= 0) & (numbers < len(self.classes))) | (numbers == IGNORED)
        if not known.all():
            raise SampleError(
                f"{self.name} has the class number {int(numbers[~known][0])}: must be 0 to "
                f"{len(self.classes) - 1}, or {IGNORED} for pixels without a class"
            )
        return numbers

    def losses(
        self,
        outputs: Tensor,
        target: Tensor,
        *,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss of each sample's pixels that have a class; 0 if none has."""
        found = functional.cross_entropy(
            outputs,
            target,
            weight=weights,
            label_smoothing=smoothing,
            ignore_index=IGNORED,
            reduction="none",
        )
        pixels = (target != IGNORED).flatten(1).sum(1)
        return found.flatten(1).sum(1) / pixels.clamp(min=1)

    def train_values(self, outputs: Tensor, target: Tensor) -> None:
        return None

    def compact(self, outputs: Tensor) -> Tensor:
        """Return the predicted class of each pixel, uint8[b, h, w]."""
        return outputs.argmax(1).byte()

    def prediction_text(self, outputs: Tensor) -> str:
        """Return the largest classes of one prediction, with their shares of the pixels."""
        return self.target_text(self.compact(outputs[None])[0])

    def target_text(self, target: Tensor) -> str:
        numbers = target.flatten()
        counts = torch.bincount(numbers[numbers != IGNORED].long(), minlength=len(self.classes))
        shares = (counts / counts.sum().clamp(min=1)).tolist()
        order = sorted(range(len(shares)), key=lambda number: -shares[number])[:_SHOWN]
        return ", ".join(f"{self.classes[i]} {shares[i]:.0%}" for i in order if shares[i])

    def is_wrong(self, outputs: Tensor, target: Tensor) -> bool:
        """Return False: a mask is more or less right."""
        return False

    def picture(
        self, pixels: npt.NDArray[np.uint8], outputs: Tensor, target: Tensor
    ) -> npt.NDArray[np.uint8]:
        """Return image, prediction and truth side by side. Pixels without a class are gray."""
        predicted = self.compact(outputs[None])[0].cpu().numpy()
        true = target.cpu().numpy()
        edge = np.full((len(pixels), 1, 3), 255, np.uint8)
        predicted, true = (_overlay(pixels, numbers) for numbers in (predicted, true))
        return np.concatenate([pixels, edge, predicted, edge, true], axis=1)

    def columns(self, *, probabilities: bool) -> list[str]:
        return [self.name]

    def describe(self) -> str:
        return f"one of {len(self.classes)} classes per pixel"


def palette() -> npt.NDArray[np.uint8]:
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


def mask_png(numbers: npt.NDArray[np.uint8]) -> bytes:
    """Return a mask as a PNG whose palette shows the classes. numbers: uint8[h, w]"""
    height, width = numbers.shape
    image = PillowImage.frombytes("P", (width, height), np.ascontiguousarray(numbers).tobytes())
    image.putpalette(palette().tobytes())
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _overlay(
    pixels: npt.NDArray[np.uint8], numbers: npt.NDArray[np.integer]
) -> npt.NDArray[np.uint8]:
    """Return the image with the colors of the classes laid over it. uint8[h, w, 3]"""
    mixed = pixels.astype(np.uint16) + palette()[numbers.astype(np.uint8)]
    return (mixed // 2).astype(np.uint8)
