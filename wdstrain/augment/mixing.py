"""Mixup, CutMix and random erasing of a batch of images, by the random numbers of each sample."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wdstrain.decode.transforms import Draws, random_boxes
from wdstrain.errors import UsageError

Ints = npt.NDArray[np.int64]

# Places in the random numbers of a sample; `gpu_augment` has those before.
_MIX_KIND, _MIX_SHARE, _CUT_X, _CUT_Y, _MIXED, _ERASED, _ERASED_BOX = 28, 29, 30, 31, 32, 33, 34
DRAWS = _ERASED_BOX + 22

_ERASED_AREA, _ERASED_ASPECT = (0.02, 0.33), (0.3, 3.3)  # as torchvision's RandomErasing has them
_QUANTILES = 4097  # points of the table of the beta distribution


def erase(pixels: Tensor, probability: float, value: Tensor, draws: Draws) -> Tensor:
    """Return the images, some with a random rectangle of one color (Zhong et al., 2017).

    pixels: float32[b, h, w, 3]. value: float32[3]. Rectangles are drawn as by torchvision's
    RandomErasing; an image that none of ten fits stays as it is.
    """
    height, width = pixels.shape[1:3]
    boxes, fits = random_boxes(
        height,
        width,
        draws[:, _ERASED_BOX:],
        _ERASED_AREA,
        _ERASED_ASPECT,
        within=True,
    )
    chosen = fits & (draws[:, _ERASED] < probability)
    top, left, h, w = np.where(chosen[:, None], boxes, 0).T
    rows = _between(top, top + h, height, pixels)
    columns = _between(left, left + w, width, pixels)
    inside = rows[:, :, None, None] & columns[:, None, :, None]
    return torch.where(inside, value, pixels)


@dataclass(frozen=True)
class Mixing:
    """How images of a batch are mixed.

    mixup, cutmix: alpha of a beta distribution; 0 for none. probability: that an image is mixed.
    switch: with both, probability of cutmix in place of mixup.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5

    def __post_init__(self) -> None:
        if min(self.mixup, self.cutmix) < 0:
            raise UsageError(
                "{mixup}, {cutmix}: must be >= 0; 0 turns it off.",
                options={"mixup": self.mixup, "cutmix": self.cutmix},
            )
        check_probability("mixup_prob", self.probability)
        check_probability("mixup_switch_prob", self.switch)

    @property
    def is_used(self) -> bool:
        """Whether any image is mixed."""
        return bool(self.mixup or self.cutmix) and self.probability > 0


def check_probability(name: str, value: float) -> None:
    """Raise UsageError for a value that is no probability."""
    if not 0 <= value <= 1:
        raise UsageError("must be in 0 to 1.", option=name, value=value)


def mix(
    pixels: Tensor, labels: Tensor, mixing: Mixing, draws: Draws, is_sample: npt.NDArray[np.bool_]
) -> tuple[Tensor, Tensor]:
    """Return the images mixed with those before them, and the labels mixed by the same shares.

    pixels: float32[b, h, w, 3]. labels: float32[b, classes]. is_sample: bool[b], False for rows
    that are empty and mixed into no other.
    """
    partners = np.arange(len(draws))
    partners[is_sample] = np.roll(partners[is_sample], 1)
    order = on_device_of(partners, pixels)
    mixed = draws[:, _MIXED] < mixing.probability
    cuts = np.full(len(draws), bool(mixing.cutmix))
    if mixing.mixup and mixing.cutmix:
        cuts = draws[:, _MIX_KIND] < mixing.switch
    keep: Draws = np.ones(len(draws))  # share of the image itself
    for rows, alpha in ((cuts & mixed, mixing.cutmix), (~cuts & mixed, mixing.mixup)):
        if rows.any():
            keep[rows] = np.interp(draws[rows, _MIX_SHARE], *beta_quantiles(alpha))
    cuts &= mixed
    others = pixels[order]
    if not cuts.all():
        weight = np.where(cuts, 1.0, keep).astype(np.float32)
        pixels = torch.lerp(others, pixels, on_device_of(weight, pixels).view(-1, 1, 1, 1))
    if cuts.any():
        height, width = pixels.shape[1:3]
        half_sides = 0.5 * np.sqrt(1 - keep)
        left, right = _interval(draws[:, _CUT_X], half_sides, width, cuts)
        top, bottom = _interval(draws[:, _CUT_Y], half_sides, height, cuts)
        in_rows, in_columns = (
            _between(top, bottom, height, pixels),
            _between(left, right, width, pixels),
        )
        inside = in_rows[:, :, None] & in_columns[:, None, :]
        pixels = torch.where(inside[..., None], others, pixels)
        keep = np.where(cuts, 1 - (right - left) * (bottom - top) / (width * height), keep)
    share = on_device_of(keep.astype(np.float32), labels).view(-1, 1)
    return pixels, torch.lerp(labels[order], labels, share)


def _interval(
    center: Draws, half: Draws, length: int, cuts: npt.NDArray[np.bool_]
) -> tuple[Ints, Ints]:
    """Return one side of each rectangle as [start, stop) pixels; empty for images without a cut.

    center, half: the center and half of the side, as shares of `length`.
    """
    middle = (center * length).astype(np.int64)
    reach = (half * length).astype(np.int64) * cuts
    return np.clip(middle - reach, 0, length), np.clip(middle + reach, 0, length)


def _between(low: Ints, high: Ints, length: int, like: Tensor) -> Tensor:
    """Return for each image which of `length` pixels are in [low, high). bool[b, length]"""
    pixels = torch.arange(length, device=like.device)
    return (pixels >= on_device_of(low, like)[:, None]) & (
        pixels < on_device_of(high, like)[:, None]
    )


@lru_cache(maxsize=16)
def beta_quantiles(alpha: float) -> tuple[Draws, Draws]:
    """Return probabilities in [0, 1], and the quantiles of the beta distribution (alpha, alpha).

    Integrates the density. With t = x ** alpha it has no pole at 0; the upper half mirrors the
    lower.
    """
    t = np.linspace(0, 0.5**alpha, _QUANTILES)
    x = t ** (1 / alpha)
    density = (1 - x) ** (alpha - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    probability = area / area[-1] / 2
    return (
        np.concatenate([probability, 1 - probability[-2::-1]]),
        np.concatenate([x, 1 - x[-2::-1]]),
    )


def on_device_of(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    """Return values on the device of a tensor. The copy does not wait for the device's work."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor
