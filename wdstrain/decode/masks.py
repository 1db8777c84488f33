"""Masks for segmentation: the class of each pixel, cropped and flipped like the image beside it.

The random numbers of a crop belong to the sample (see `transforms`), so a mask with the same `size`
and `augment` as the image stays aligned with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wdstrain.decode.codecs import decode_mask
from wdstrain.decode.crops import RATIO, SCALE
from wdstrain.decode.fields import Example, Image, field_names, image
from wdstrain.decode.transforms import FLIP_DRAW, Augment, Draws, region
from wdstrain.errors import SampleError, UsageError
from wdstrain.shards.values import Array

IGNORED = 255  # pixels that have no class: they count neither in losses nor in metrics


@dataclass(frozen=True)
class Mask:
    """Field of `mask`. size: (height, width), or None for masks as they are stored."""

    names: tuple[str, ...]
    size: tuple[int, int] | None
    augment: Augment
    classes: int | None = None

    @property
    def example(self) -> Example | None:
        return Example(self.size, "int64") if self.size else None

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Array | None:
        numbers = decode_mask(data)
        self._check(numbers)
        if out is not None and self.size is not None:
            top, left, height, width = region(
                len(numbers), numbers.shape[1], self.size, self.augment, draws
            )
            rows = top + _nearest(height, self.size[0])
            columns = left + _nearest(width, self.size[1])
            numbers = numbers[rows[:, None], columns]
        if self.augment.flip and draws[FLIP_DRAW] < 0.5:
            numbers = numbers[:, ::-1]
        if out is None:
            return numbers.astype(np.int64)
        out[...] = numbers
        return None

    def _check(self, numbers: npt.NDArray[np.integer]) -> None:
        """Raise SampleError for numbers that are no class."""
        if self.classes is None:
            return
        wrong = (numbers >= self.classes) | (numbers < 0)
        if wrong.any() and (wrong := wrong & (numbers != IGNORED)).any():
            raise SampleError(
                f"it has the class number {numbers[wrong][0]}: must be 0 to {self.classes - 1}, or "
                f"{IGNORED} for pixels without a class"
            )


def mask(
    names: str = "mask.png",
    *,
    size: int | tuple[int, int] | None = None,
    augment: str | None = None,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
    crop_pct: float = 1.0,
    classes: int | None = None,
) -> Mask:
    """Return a field of masks: the class number of each pixel, 255 where there is none.

    With `size`, the batch holds one tensor, int64[b, height, width]. Without it, a list of b tensors
    int64[height, width]. Masks are PNGs or other lossless images of one channel, grayscale or with
    a palette.

    names: tar fields to look for, separated by ";".
    size, augment, scale, ratio, crop_pct: the same as for the image. The mask gets the same crop and flip, and is resized
    to the nearest pixel. Changes of color are for images only. "trivialaugment" and "randaugment"
    also rotate and shear, so they are refused.
    classes: number of classes; a mask with another number is a bad sample.

        size, augment = 256, "rrc+flip"
        fields = {"image": wt.image(size=size, augment=augment), "mask": wt.mask(size=size, augment=augment)}
    """
    like = image(names, size=size, augment=augment, scale=scale, ratio=ratio, crop_pct=crop_pct)
    if classes is not None and not 1 <= classes <= IGNORED:
        raise UsageError(f"classes={classes}: must be 1 to {IGNORED}.")
    return mask_like(like, field_names(names), classes)


def mask_like(source: Image, names: tuple[str, ...], classes: int | None = None) -> Mask:
    """Return the field of masks that belong to images of this field."""
    if source.augment.policy:
        raise UsageError(
            f"augment={source.augment.policy}: it rotates and shears images, and masks would not "
            f"follow. Use rrc and flip."
        )
    return Mask(names, source.size, source.augment, classes)


def _nearest(stored: int, wanted: int) -> npt.NDArray[np.int64]:
    """Return the nearest of `stored` pixels for each of `wanted`: their centers coincide."""
    return ((2 * np.arange(wanted, dtype=np.int64) + 1) * stored) // (2 * wanted)
