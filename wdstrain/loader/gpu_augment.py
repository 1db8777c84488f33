"""Augmentation of a batch of images at once, where the batch is: on a GPU or in memory.

Each image is changed as by torchvision's v2 transforms, by the random numbers of its own sample
(`EpochBatches.draws`). A resumed run, or a run with other workers or ranks, gets the same pixels.
The distributions are those of torchvision (tested); the numbers are not.

Crop, resize and flip are two matrix products per image, of weights for rows and for columns. The
filter is that of torchvision and Pillow: a triangle, as wide as the reduction (antialiased). A GPU
does them at the speed of memory, wherever the crop lies. Brightness, contrast and saturation are
all of the form a x + b gray(x) + c mean(gray(x)): one pass in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from wdstrain.decode.transforms import FLIP_DRAW, Augment, center_crop, random_crops
from wdstrain.errors import UsageError

Batch = dict[str, Any]
Draws = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Mean and standard deviation that pretrained models expect.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# Order of the random numbers of a sample. The first 23 are crop and flip, as in `decode.transforms`.
_JITTER, _JITTER_ORDER, _MIX_KIND, _MIX_SHARE, _CUT_X, _CUT_Y = 23, 27, 28, 29, 30, 31
DRAWS = 33

_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)
_ORDERS = np.array(list(permutations(range(4))))
_GRAY = (0.2989, 0.587, 0.114)  # weights of red, green and blue
_QUANTILES = 4097  # points of the table of the beta distribution


class Augmentation:
    """Augmentation of the images of a batch, for `to_device`.

    augment         "rrc" (random resized crop), "flip", "rrc+flip" or None. Without rrc the largest
                    region in the center with the aspect ratio of `size` is resized
    size            side, or (height, width), of the result; default: that of the input
    brightness, contrast, saturation    color jitter: largest distance of a factor from 1
    hue             color jitter: largest shift in turns of the color wheel, at most 0.5
    normalize       (mean, standard deviation) of three colors each, or "imagenet"; None leaves
                    values in 0 to 1
    mixup, cutmix   alpha of a beta distribution; 0 for none. An image is blended with the image
                    before it in the batch, or gets a rectangle of it. With both, each image gets
                    one of the two. Labels become shares of classes, float32[b, classes]
    classes         number of classes, for mixup and cutmix
    dtype           of the result: torch.float32, float16 or bfloat16
    image, label    names of the fields in the batch

    The input is uint8[b, 3, h, w]. The result is dtype[b, 3, *size], channels last in memory.
    """

    def __init__(
        self,
        augment: str | None = None,
        *,
        size: int | tuple[int, int] | None = None,
        brightness: float = 0.0,
        contrast: float = 0.0,
        saturation: float = 0.0,
        hue: float = 0.0,
        normalize: str | tuple[Sequence[float], Sequence[float]] | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        classes: int | None = None,
        dtype: torch.dtype = torch.float32,
        image: str = "image",
        label: str = "label",
    ) -> None:
        self._augment = Augment.parse(augment)
        if self._augment.policy:
            raise UsageError(
                f"augment={augment!r}: decoders apply {self._augment.policy}. Give it to wt.image."
            )
        self._size = _checked_size(size)
        if self._augment.rrc and self._size is None:
            raise UsageError(f"augment={augment!r} needs a size. Give for example size=224.")
        jitter = {
            "brightness": brightness,
            "contrast": contrast,
            "saturation": saturation,
            "hue": hue,
        }
        for name, value in jitter.items():
            if not 0 <= value <= (0.5 if name == "hue" else math.inf):
                limit = " and <= 0.5" if name == "hue" else ""
                raise UsageError(f"{name}={value}: must be >= 0{limit}.")
        if min(mixup, cutmix) < 0:
            raise UsageError(f"mixup={mixup}, cutmix={cutmix}: must be >= 0; 0 turns it off.")
        if (mixup or cutmix) and not classes:
            raise UsageError(
                "mixup and cutmix turn labels into shares of classes: give classes=, their number."
            )
        if not dtype.is_floating_point:
            raise UsageError(
                f"dtype={dtype}: must be a floating-point dtype, such as torch.float32."
            )
        self._jitter = np.array(list(jitter.values()))
        self._normalize = _checked_normalization(normalize)
        self._mixup, self._cutmix, self._classes = mixup, cutmix, classes
        self._dtype, self._image, self._label = dtype, image, label

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Return the batch with augmented images. draws: float64[b, DRAWS], a row for each sample.

        Raises UsageError for images or labels of another type.
        """
        images = batch.get(self._image)
        is_image = isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] == 3
        if not isinstance(images, Tensor) or not is_image or images.dtype != torch.uint8:
            raise UsageError(
                f"batch[{self._image!r}] is {_described(images)}: must be uint8[b, 3, h, w]. "
                f"Read it with wt.image(size=...)."
            )
        result = dict(batch)
        if self._mixup or self._cutmix:
            result[self._label] = self._class_shares(batch)
        size = self._size or (int(images.shape[2]), int(images.shape[3]))
        if not len(images):  # the last batch of a rank without samples
            result[self._image] = images.new_zeros((0, 3, *size), dtype=self._dtype)
            return result
        pixels = _crop(images.permute(0, 2, 3, 1), self._augment, size, draws)
        if self._jitter.any():
            pixels = _jitter_colors(pixels, self._jitter, draws)
        if self._mixup or self._cutmix:
            pixels, result[self._label] = _mix(
                pixels, result[self._label], (self._mixup, self._cutmix), draws
            )
        if self._normalize is not None:
            mean, std = (
                _on(np.array(values, np.float32), pixels).view(1, 1, 1, 3)
                for values in self._normalize
            )
            pixels = (pixels - mean) / std
        result[self._image] = pixels.to(self._dtype).permute(0, 3, 1, 2)
        return result

    def _class_shares(self, batch: Batch) -> Tensor:
        """Return the label of each sample as shares of classes. float32[b, classes]"""
        label = batch.get(self._label)
        if not isinstance(label, Tensor) or label.ndim != 1 or label.dtype != torch.int64:
            raise UsageError(
                f"batch[{self._label!r}] is {_described(label)}: mixup and cutmix need int64[b]. "
                f"Read it with wt.label()."
            )
        assert self._classes is not None
        return one_hot(label, self._classes).float()


# --- crop, resize, flip ---------------------------------------------------------------------------


def _crop(images: Tensor, augment: Augment, size: tuple[int, int], draws: Draws) -> Tensor:
    """Return regions of the images, resized and perhaps flipped. float32[b, *size, 3] in 0 to 1.

    images: uint8[b, h, w, 3].
    """
    count, height, width, _ = images.shape
    flips = draws[:, FLIP_DRAW] < 0.5 if augment.flip else np.zeros(count, bool)
    if augment.rrc:
        boxes = random_crops(height, width, draws)
    else:
        center = np.array(center_crop(height, width, size[1] / size[0]))
        boxes = np.broadcast_to(center, (count, 4))
    if (boxes == (0, 0, *size)).all():  # the whole images, in their own size
        if flips.any():
            images = torch.where(_on(flips, images).view(-1, 1, 1, 1), images.flip(2), images)
        return images.float() / 255
    # float16 holds 0 to 255 exactly, and the sums within an eighth. On a CPU it is slow.
    dtype = torch.float16 if images.is_cuda else torch.float32
    top, left, box_height, box_width = (
        _on(boxes[:, i].astype(np.float32), images) for i in range(4)
    )
    mirrored = _on(flips.astype(np.float32), images)
    rows = _resize_weights(top, box_height, height, size[0], torch.zeros_like(top)).to(dtype)
    columns = _resize_weights(left, box_width, width, size[1], mirrored).to(dtype)
    # [b, out height, width * 3], then [b, out height * 3, width], then [b, out height, 3, out width]
    resized = torch.bmm(rows, images.to(dtype).reshape(count, height, width * 3))
    lines = resized.view(count, size[0], width, 3).transpose(2, 3)
    pixels = torch.bmm(lines.reshape(count, size[0] * 3, width), columns.transpose(1, 2))
    pixels = pixels.view(count, size[0], 3, size[1]).transpose(2, 3)
    return pixels.contiguous().float().clamp_(0, 255) / 255


def _resize_weights(
    start: Tensor, length: Tensor, pixels: int, out: int, flipped: Tensor
) -> Tensor:
    """Return the weights that resize a line of `pixels` pixels to `out`. float32[b, out, pixels]

    The region [start, start + length) is resized. start, length, flipped (0 or 1): float32[b]. The
    weights of an output pixel add up to 1.
    """
    inputs = torch.arange(pixels, device=start.device, dtype=torch.float32).view(1, 1, -1)
    outputs = torch.arange(out, device=start.device, dtype=torch.float32).view(1, -1)
    outputs = torch.where(flipped.view(-1, 1) > 0, out - 1 - outputs, outputs)
    step = (length / out).view(-1, 1, 1)
    begin = start.view(-1, 1, 1)
    center = begin + (outputs[:, :, None] + 0.5) * step
    weight = (1 - (inputs + 0.5 - center).abs() / step.clamp(min=1)).clamp_(min=0)
    weight = weight * ((inputs >= begin) & (inputs < begin + length.view(-1, 1, 1)))
    return weight / weight.sum(2, keepdim=True)


# --- color ----------------------------------------------------------------------------------------


def _jitter_colors(pixels: Tensor, ranges: Draws, draws: Draws) -> Tensor:
    """Return the images after color jitter, in a random order of operations for each image.

    pixels: float32[b, h, w, 3]. ranges: of brightness, contrast, saturation and hue.
    """
    low, high = np.maximum(0, 1 - ranges), 1 + ranges
    low[_HUE], high[_HUE] = -ranges[_HUE], ranges[_HUE]
    factors = low + draws[:, _JITTER : _JITTER + 4] * (high - low)
    orders = _ORDERS[(draws[:, _JITTER_ORDER] * len(_ORDERS)).astype(np.int64)]
    for turn in range(4):
        operation = orders[:, turn]
        factor = factors[np.arange(len(operation)), operation]
        if ranges[:_HUE].any():
            pixels = _blend(pixels, operation, factor)
        rows = np.flatnonzero(operation == _HUE)
        if ranges[_HUE] and len(rows):
            at = _on(rows, pixels)
            shift = _on(factor[rows].astype(np.float32), pixels)
            pixels = pixels.index_copy(0, at, _shift_hue(pixels[at], shift))
    return pixels


def _blend(pixels: Tensor, operation: Ints, factor: Draws) -> Tensor:
    """Return a x + b gray(x) + c mean(gray(x)): brightness, contrast or saturation of each image.

    operation, factor: one for each image. An image whose operation is hue stays as it is.
    """
    own, gray, mean = np.ones_like(factor), np.zeros_like(factor), np.zeros_like(factor)
    own[operation != _HUE] = factor[operation != _HUE]
    mean[operation == _CONTRAST] = 1 - factor[operation == _CONTRAST]
    gray[operation == _SATURATION] = 1 - factor[operation == _SATURATION]
    a, b, c = (
        _on(values.astype(np.float32), pixels).view(-1, 1, 1, 1) for values in (own, gray, mean)
    )
    grays = (pixels * _on(np.array(_GRAY, np.float32), pixels)).sum(3, keepdim=True)
    shift = b * grays + c * grays.mean((1, 2), keepdim=True)
    return torch.addcmul(shift, pixels, a).clamp_(0, 1)


def _shift_hue(pixels: Tensor, turns: Tensor) -> Tensor:
    """Return the images with shifted hue. pixels: [b, h, w, 3]; turns: [b], of the color wheel."""
    largest, smallest = pixels.amax(3), pixels.amin(3)
    spread = largest - smallest
    red, green, blue = pixels.unbind(3)
    divisor = torch.where(spread == 0, torch.ones_like(spread), spread)
    from_red, from_green, from_blue = ((largest - c) / divisor for c in (red, green, blue))
    sixths = torch.where(
        largest == red,
        from_blue - from_green,
        torch.where(largest == green, 2 + from_red - from_blue, 4 + from_green - from_red),
    )
    hue = torch.remainder(sixths / 6 + turns.view(-1, 1, 1), 1.0) * 6
    # A color is below the largest by its distance on the wheel from its own third.
    distances = [torch.remainder(offset + hue, 6.0) for offset in (5.0, 3.0, 1.0)]
    colors = [largest - spread * torch.minimum(d, 4 - d).clamp(0, 1) for d in distances]
    return torch.stack(colors, 3)


# --- mixup and cutmix -----------------------------------------------------------------------------


def _mix(
    pixels: Tensor, labels: Tensor, alphas: tuple[float, float], draws: Draws
) -> tuple[Tensor, Tensor]:
    """Return the images mixed with those before them, and the labels mixed by the same shares.

    pixels: float32[b, h, w, 3]. labels: float32[b, classes]. alphas: of mixup and cutmix.
    """
    mixup, cutmix = alphas
    cuts = np.full(len(draws), bool(cutmix))
    if mixup and cutmix:
        cuts = draws[:, _MIX_KIND] < 0.5
    keep: Draws = np.empty(len(draws))  # share of the image itself
    for rows, alpha in ((cuts, cutmix), (~cuts, mixup)):
        if rows.any():
            keep[rows] = np.interp(draws[rows, _MIX_SHARE], *beta_quantiles(alpha))
    others = pixels.roll(1, 0)
    if not cuts.all():
        weight = np.where(cuts, 1.0, keep).astype(np.float32)
        pixels = torch.lerp(others, pixels, _on(weight, pixels).view(-1, 1, 1, 1))
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
    share = _on(keep.astype(np.float32), labels).view(-1, 1)
    return pixels, torch.lerp(labels.roll(1, 0), labels, share)


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
    return (pixels >= _on(low, like)[:, None]) & (pixels < _on(high, like)[:, None])


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


# --- helpers --------------------------------------------------------------------------------------


def _on(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    """Return values on the device of a tensor. The copy does not wait for the device's work."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor


def _checked_size(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    pair = (size, size) if isinstance(size, int) else size
    if pair is not None and (
        len(pair) != 2 or not all(isinstance(side, int) and side >= 1 for side in pair)
    ):
        raise UsageError(f"size={size!r}: must be a side in pixels >= 1, or (height, width).")
    return pair


def _checked_normalization(
    value: str | tuple[Sequence[float], Sequence[float]] | None,
) -> tuple[Sequence[float], Sequence[float]] | None:
    if value is None or value == "imagenet":
        return IMAGENET if value else None
    is_pair = not isinstance(value, str) and len(value) == 2
    if (
        isinstance(value, str)
        or not is_pair
        or any(len(v) != 3 for v in value)
        or min(value[1]) <= 0
    ):
        raise UsageError(
            f"normalize={value!r}: must be (mean, standard deviation > 0) of three colors each, or "
            f'"imagenet".'
        )
    return value


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "missing" if value is None else type(value).__name__
