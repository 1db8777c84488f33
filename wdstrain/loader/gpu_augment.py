"""Pictures varied on the device, a batch at a time.

What torchvision's v2 transforms do to one picture after another, done to a batch of uint8 pictures at once, each by its own
random numbers: those belong to the sample (`Batches.draws`), so a resumed run, or one with other workers or ranks, sees the same
pixels. They are drawn as torchvision draws them: the distributions are the same (tested), the numbers are not.

Cutting, resizing and flipping are two matrix products per picture, of weights for rows and for columns with the filter that
torchvision and Pillow use (triangle, as wide as what is made smaller: anti-aliased). Matrix units do them at the speed of memory
and no gather is needed, so a crop costs the same wherever it lies. Changes of brightness, contrast and saturation are all of
the form a x + b grey(x) + c mean(grey(x)), so they are one pass whatever their order is, which differs from picture to picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from wdstrain.decode.transforms import Augment, center_crop, random_crops
from wdstrain.errors import UsageError

Batch = dict[str, Any]
Draws = npt.NDArray[np.float64]

IMAGENET = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # mean and standard deviation that pretrained models expect

DRAWS = 33  # numbers for one sample: 23 for crop and flip as in `augment`, and from there on
_JITTER, _ORDER, _WHICH, _SHARE, _ACROSS, _DOWN = 23, 27, 28, 29, 30, 31
_ORDERS = np.array(list(permutations(range(4))))  # of brightness, contrast, saturation, hue
_GREY = (0.2989, 0.587, 0.114)
_HUE = 3
_GRID = 4097  # of the table of beta's quantiles


@dataclass(frozen=True, kw_only=True)
class _Jitter:
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0


class Augmentation:
    """Varies the pictures of a batch, where they are: on a GPU or in memory.

    what            "rrc" (random resized crop), "flip", "rrc+flip" or None; without rrc the largest region in the middle with
                    the asked shape is resized, as validation wants it
    size            a side, or (height, width), of what comes out; default: as it came
    brightness, contrast, saturation     how far a factor may be from 1; hue: how far from 0, at most 0.5: colour jitter
    normalise       (mean, standard deviation) of three colours each, or "imagenet"; None leaves values in 0 to 1
    mixup, cutmix   alpha of a beta distribution; a picture is mixed with, or gets a piece of, the one before it in its batch. With
                    both, half of the pictures get the one and half the other. Labels become shares of classes, [b, classes]
    classes         how many there are, for mixup and cutmix
    dtype           of what comes out: torch.float32, float16, bfloat16
    image, label    their names in the batch

    Pictures are uint8[b, 3, h, w] with h and w the same in a batch; [b, 3, *size] comes out, channels last.
    """

    def __init__(
        self,
        what: str | None = None,
        *,
        size: int | tuple[int, int] | None = None,
        brightness: float = 0.0,
        contrast: float = 0.0,
        saturation: float = 0.0,
        hue: float = 0.0,
        normalise: str | tuple[Sequence[float], Sequence[float]] | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        classes: int | None = None,
        dtype: torch.dtype = torch.float32,
        image: str = "image",
        label: str = "label",
    ) -> None:
        self._augment = Augment.parse(what)
        if self._augment.policy:
            raise UsageError(
                f"Augmentation({what!r}): {self._augment.policy} is done by the decoders. Give it to wt.image."
            )
        self._size = _pair(size)
        if self._augment.rrc and self._size is None:
            raise UsageError(
                f"Augmentation({what!r}) cuts regions and needs a size. Give for example size=224."
            )
        for name, value in (
            ("brightness", brightness),
            ("contrast", contrast),
            ("saturation", saturation),
            ("hue", hue),
        ):
            if not 0 <= value <= (0.5 if name == "hue" else math.inf):
                raise UsageError(
                    f"{name}={value} is not between 0 and {'0.5' if name == 'hue' else 'infinity'}."
                )
        if min(mixup, cutmix) < 0:
            raise UsageError(f"mixup={mixup}, cutmix={cutmix}: alpha is above 0, or 0 for none.")
        if (mixup or cutmix) and not classes:
            raise UsageError(
                "mixup and cutmix give each picture shares of classes: give classes=, how many there are."
            )
        if not dtype.is_floating_point:
            raise UsageError(
                f"dtype={dtype}: values in 0 to 1 need torch.float32, float16 or bfloat16."
            )
        self._jitter = (brightness, contrast, saturation, hue)
        self._normalise = _normalisation(normalise)
        self._mixup, self._cutmix, self._classes = mixup, cutmix, classes
        self._dtype, self._image, self._label = dtype, image, label

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """A batch with its pictures varied. draws: float64[b, DRAWS] in [0, 1), a row for each sample."""
        pictures = batch.get(self._image)
        if (
            not isinstance(pictures, Tensor)
            or pictures.dtype != torch.uint8
            or pictures.ndim != 4
            or pictures.shape[1] != 3
        ):
            raise UsageError(
                f"batch[{self._image!r}] is {_kind(pictures)}, and uint8[b, 3, h, w] is varied. Read it with wt.image(size=...)."
            )
        made = dict(batch)
        if not len(pictures):  # of a rank for which nothing is left
            size = self._size or (int(pictures.shape[2]), int(pictures.shape[3]))
            if self._mixup or self._cutmix:
                made[self._label] = self._shares_of(batch)
            return made | {self._image: pictures.new_zeros((0, 3, *size), dtype=self._dtype)}
        varied = self._coloured(self._cut(pictures, draws), draws)
        if self._mixup or self._cutmix:
            varied, made[self._label] = self._mixed(varied, self._shares_of(batch), draws)
        if self._normalise is not None:
            mean, std = (
                _on(np.array(one, np.float32), varied).view(1, 1, 1, 3) for one in self._normalise
            )
            varied = (varied - mean) / std
        made[self._image] = varied.to(self._dtype).permute(0, 3, 1, 2)
        return made

    # --- parts: pictures are [b, h, w, 3] ------------------------------------------------------------------------------

    def _cut(self, pictures: Tensor, draws: Draws) -> Tensor:
        """The part of each picture that is taken, resized, and turned around perhaps; values in 0 to 1."""
        count, _, height, width = pictures.shape
        out = self._size or (height, width)
        flips = draws[:, 22] < 0.5 if self._augment.flip else np.zeros(count, bool)
        pixels = pictures.permute(0, 2, 3, 1)
        if self._augment.rrc:
            boxes = random_crops(height, width, draws)
        else:
            boxes = np.broadcast_to(
                np.array(center_crop(height, width, out[1] / out[0])), (count, 4)
            )
        if (boxes == (0, 0, *out)).all():  # nothing is cut and nothing resized
            turned = (
                torch.where(_on(flips, pixels).view(-1, 1, 1, 1), pixels.flip(2), pixels)
                if flips.any()
                else pixels
            )
            return turned.float() / 255
        # float16 holds 0 to 255 exactly, and weights and sums within an eighth; on a CPU it is slow
        kind = torch.float16 if pixels.is_cuda else torch.float32
        top, left, high, wide = (_on(boxes[:, i].astype(np.float32), pixels) for i in range(4))
        rows = _weights(top, high, height, out[0], torch.zeros_like(top), kind)
        columns = _weights(left, wide, width, out[1], _on(flips.astype(np.float32), pixels), kind)
        lower = torch.bmm(
            rows, pixels.to(kind).reshape(count, height, width * 3)
        )  # [b, out height, width * 3]
        lines = (
            lower.view(count, out[0], width, 3).transpose(2, 3).reshape(count, out[0] * 3, width)
        )
        found = torch.bmm(lines, columns.transpose(1, 2)).view(count, out[0], 3, out[1])
        return found.transpose(2, 3).contiguous().float().clamp_(0, 255) / 255

    def _coloured(self, pixels: Tensor, draws: Draws) -> Tensor:
        """Brightness, contrast, saturation and hue, in an order of each picture's own."""
        if not any(self._jitter):
            return pixels
        reach = np.array(self._jitter)
        low, high = np.maximum(0, 1 - reach), 1 + reach
        low[_HUE], high[_HUE] = -reach[_HUE], reach[_HUE]
        factors = low + draws[:, _JITTER : _JITTER + 4] * (high - low)
        orders = _ORDERS[(draws[:, _ORDER] * len(_ORDERS)).astype(np.int64)]
        for turn in range(4):
            which = orders[:, turn]
            factor = factors[np.arange(len(which)), which]
            if reach[:_HUE].any():
                pixels = self._blended(pixels, which, factor)
            rows = np.flatnonzero(which == _HUE)
            if reach[_HUE] and len(rows):
                at = _on(rows, pixels)
                pixels = pixels.index_copy(
                    0, at, _hue_moved(pixels[at], _on(factor[rows].astype(np.float32), pixels))
                )
        return pixels

    def _blended(self, pixels: Tensor, which: npt.NDArray[np.int64], factor: Draws) -> Tensor:
        """a x + b grey(x) + c mean(grey(x)): which[i] says which of brightness, contrast and saturation picture i has now."""
        own, grey, mean = np.ones_like(factor), np.zeros_like(factor), np.zeros_like(factor)
        own[which != _HUE] = factor[which != _HUE]
        mean[which == 1], grey[which == 2] = 1 - factor[which == 1], 1 - factor[which == 2]
        a, b, c = (
            _on(one.astype(np.float32), pixels).view(-1, 1, 1, 1) for one in (own, grey, mean)
        )
        greys = (pixels * _on(np.array(_GREY, np.float32), pixels)).sum(3, keepdim=True)
        shift = b * greys + c * greys.mean((1, 2), keepdim=True)
        return torch.addcmul(shift, pixels, a).clamp_(0, 1)

    def _shares_of(self, batch: Batch) -> Tensor:
        """The label of each sample as shares of classes. float32[b, classes]"""
        label = batch.get(self._label)
        if not isinstance(label, Tensor) or label.ndim != 1 or label.dtype != torch.int64:
            raise UsageError(
                f"batch[{self._label!r}] is {_kind(label)}, and mixup and cutmix need int64[b]: wt.label()."
            )
        assert self._classes is not None
        return one_hot(label, self._classes).float()

    def _mixed(self, pixels: Tensor, labels: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Each picture with the one before it in the batch; labels by the share that is left of it."""
        height, width = pixels.shape[1:3]
        cut = (
            draws[:, _WHICH] < 0.5
            if self._mixup and self._cutmix
            else np.full(len(draws), bool(self._cutmix))
        )
        keep: Draws = np.empty(len(draws))
        for rows, alpha in ((cut, self._cutmix), (~cut, self._mixup)):
            if rows.any():
                keep[rows] = np.interp(draws[rows, _SHARE], *beta_quantiles(alpha))
        weight = _on(np.where(cut, 1.0, keep).astype(np.float32), pixels).view(-1, 1, 1, 1)
        others = pixels.roll(1, 0)
        if not cut.all():
            pixels = torch.lerp(others, pixels, weight)
        if cut.any():
            half = 0.5 * np.sqrt(1 - keep)
            across, down = (
                (draws[:, _ACROSS] * width).astype(np.int64),
                (draws[:, _DOWN] * height).astype(np.int64),
            )
            half_width, half_height = (
                (half * width).astype(np.int64) * cut,
                (half * height).astype(np.int64) * cut,
            )
            left, right = (
                np.clip(across - half_width, 0, width),
                np.clip(across + half_width, 0, width),
            )
            top, bottom = (
                np.clip(down - half_height, 0, height),
                np.clip(down + half_height, 0, height),
            )
            inside = (
                _between(top, bottom, height, pixels)[:, :, None]
                & _between(left, right, width, pixels)[:, None, :]
            )
            pixels = torch.where(inside[..., None], others, pixels)
            keep = np.where(cut, 1 - (right - left) * (bottom - top) / (width * height), keep)
        share = _on(keep.astype(np.float32), labels).view(-1, 1)
        return pixels, torch.lerp(labels.roll(1, 0), labels, share)


@lru_cache(maxsize=16)
def beta_quantiles(alpha: float) -> tuple[Draws, Draws]:
    """Numbers in [0, 1], and below which value of the beta distribution (alpha, alpha) lies this part of all.

    By integrating its density; with t = x ** alpha it has no pole at 0, and the upper half mirrors the lower.
    """
    t = np.linspace(0, 0.5**alpha, _GRID)
    x = t ** (1 / alpha)
    density = (1 - x) ** (alpha - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    part = area / area[-1] / 2
    return np.concatenate([part, 1 - part[-2::-1]]), np.concatenate([x, 1 - x[-2::-1]])


def _weights(
    start: Tensor, length: Tensor, of: int, out: int, flipped: Tensor, kind: torch.dtype
) -> Tensor:
    """What each of `of` places of a line gives to each of `out` places of the resized part [start, start + length).

    start, length, flipped (0 or 1): float32[b]. [b, out, of] of `kind`; a row's weights sum to 1.
    """
    places = torch.arange(of, device=start.device, dtype=torch.float32).view(1, 1, -1)
    wanted = torch.arange(out, device=start.device, dtype=torch.float32).view(1, -1)
    wanted = torch.where(flipped.view(-1, 1) > 0, out - 1 - wanted, wanted)
    step = (length / out).view(-1, 1, 1)
    centre = start.view(-1, 1, 1) + (wanted[:, :, None] + 0.5) * step
    weight = (1 - (places + 0.5 - centre).abs() / step.clamp(min=1)).clamp_(min=0)
    begin = start.view(-1, 1, 1)
    weight = weight * ((places >= begin) & (places < begin + length.view(-1, 1, 1)))
    return (weight / weight.sum(2, keepdim=True)).to(kind)


def _hue_moved(pixels: Tensor, by: Tensor) -> Tensor:
    """Colours turned on the wheel. pixels: [b, h, w, 3]; by: [b], in whole turns."""
    most, least = pixels.amax(3), pixels.amin(3)
    spread = most - least
    red, green, blue = pixels.unbind(3)
    safe = torch.where(spread == 0, torch.ones_like(spread), spread)
    from_red, from_green, from_blue = (
        (most - red) / safe,
        (most - green) / safe,
        (most - blue) / safe,
    )
    sixth = torch.where(
        most == red,
        from_blue - from_green,
        torch.where(most == green, 2 + from_red - from_blue, 4 + from_green - from_red),
    )
    turned = torch.remainder(sixth / 6 + by.view(-1, 1, 1), 1.0) * 6
    # a colour is as far below the largest as its place on the wheel is from its own third of it
    parts = [torch.remainder(place + turned, 6.0) for place in (5.0, 3.0, 1.0)]
    return torch.stack(
        [most - spread * torch.minimum(part, 4 - part).clamp(0, 1) for part in parts], 3
    )


def _between(
    low: npt.NDArray[np.int64], high: npt.NDArray[np.int64], length: int, like: Tensor
) -> Tensor:
    """bool[b, length]: which places lie in [low, high)."""
    places = torch.arange(length, device=like.device)
    return (places >= _on(low, like)[:, None]) & (places < _on(high, like)[:, None])


def _on(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    """Numbers on the device of a tensor; the copy does not wait for what the device is doing."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor


def _pair(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    pair = (size, size) if isinstance(size, int) else size
    if pair is not None and (
        len(pair) != 2 or not all(isinstance(side, int) and side >= 1 for side in pair)
    ):
        raise UsageError(f"size={size!r} is no size. Give a side in pixels, or (height, width).")
    return pair


def _normalisation(
    asked: str | tuple[Sequence[float], Sequence[float]] | None,
) -> tuple[Sequence[float], Sequence[float]] | None:
    if asked is None or asked == "imagenet":
        return IMAGENET if asked else None
    if (
        isinstance(asked, str)
        or len(asked) != 2
        or any(len(one) != 3 for one in asked)
        or min(asked[1]) <= 0
    ):
        raise UsageError(
            f'normalise={asked!r}: give (mean, standard deviation) of three colours each, or "imagenet".'
        )
    return asked


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "missing" if value is None else type(value).__name__
