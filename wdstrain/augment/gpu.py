"""Augmentation of a batch of images at once, where the batch is: on a GPU or in memory.

Each image is changed as by torchvision's v2 transforms, by the random numbers of its own sample. A resumed run, or a run with other workers or ranks, gets the same pixels.
The distributions are those of torchvision (tested); the numbers are not.

Crop, resize and flip are two matrix products per image, of weights for rows and for columns. The
filter is that of torchvision and Pillow: a triangle, as wide as the reduction (antialiased). A GPU
does them at the speed of memory, wherever the crop lies. Brightness, contrast and saturation are
all of the form a x + b gray(x) + c mean(gray(x)): one pass in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from wdstrain.augment.mixing import DRAWS, Ints, Mixing, check_probability, erase, mix, on_device_of
from wdstrain.decode.boxes import BoxBatch
from wdstrain.decode.crops import RATIO, SCALE
from wdstrain.decode.fields import sides
from wdstrain.decode.transforms import FLIP_DRAW, Augment, Draws, center_crop, random_crops
from wdstrain.errors import UsageError
from wdstrain.order.rng import stretched

Batch = dict[str, Any]

RNG = "__rng__"  # entry of a batch of images: 64 random bits for each sample, uint64[b]
NO_SAMPLE = 0  # its value for a row whose sample is bad, and that is empty

# Mean and standard deviation that pretrained models expect.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# Places in the random numbers of a sample. The first 23 are crop and flip, as in
# `decode.transforms`; those from 28 on are in `gpu_mixing`.
_JITTER, _JITTER_ORDER = 23, 27

_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)
_ORDERS = np.array(list(permutations(range(4))))
_GRAY = (0.2989, 0.587, 0.114)  # weights of red, green and blue


class Augmentation:
    """Augmentation of the images of a batch, for `to_device`.

    augment         "rrc" (random resized crop), "flip", "rrc+flip" or None. Without rrc the largest
                    region in the center with the aspect ratio of `size` is resized
    size            side, or (height, width), of the result; default: that of the input
    scale, ratio    of rrc: least and largest area as a share of the image, and width / height
    brightness, contrast, saturation    color jitter: largest distance of a factor from 1
    hue             color jitter: largest shift in turns of the color wheel, at most 0.5
    normalize       (mean, standard deviation) of three colors each, or "imagenet"; None leaves
                    values in 0 to 1
    mixup, cutmix   alpha of a beta distribution; 0 for none. An image is blended with the image
                    before it in the batch, or gets a rectangle of it. With both, each image gets
                    one of the two. Labels become shares of classes, float32[b, classes]
    mixup_prob      probability that an image is mixed
    mixup_switch_prob   with mixup and cutmix, probability of cutmix
    random_erasing  probability that a rectangle of an image gets the mean color of `normalize`, or
                    black without it
    classes         number of classes, which mixup and cutmix need
    dtype           of the result: torch.float32, float16 or bfloat16
    image, label    names of the fields in the batch

    The input is uint8[b, 3, h, w]. The result is dtype[b, 3, *size], channels last in memory. Boxes
    (`wt.boxes`) follow; those of which less than a quarter remains are left out.
    """

    def __init__(
        self,
        augment: str | None = None,
        *,
        size: int | tuple[int, int] | None = None,
        scale: tuple[float, float] = SCALE,
        ratio: tuple[float, float] = RATIO,
        brightness: float = 0.0,
        contrast: float = 0.0,
        saturation: float = 0.0,
        hue: float = 0.0,
        normalize: str | tuple[Sequence[float], Sequence[float]] | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mixup_prob: float = 1.0,
        mixup_switch_prob: float = 0.5,
        random_erasing: float = 0.0,
        classes: int = 0,
        dtype: torch.dtype = torch.float32,
        image: str = "image",
        label: str = "label",
    ) -> None:
        self._augment = Augment.parse(augment, scale=scale, ratio=ratio)
        if self._augment.policy:
            raise UsageError(
                f"decoders apply {self._augment.policy}.",
                "Give it to wt.image.",
                option="augment",
                value=augment,
            )
        self._size = sides(size)
        if self._augment.rrc and self._size is None:
            raise UsageError(
                "{augment} needs a size.", "Give for example size=224.", {"augment": augment}
            )
        jitter = {
            "brightness": brightness,
            "contrast": contrast,
            "saturation": saturation,
            "hue": hue,
        }
        for name, value in jitter.items():
            if not 0 <= value <= (0.5 if name == "hue" else math.inf):
                limit = " and <= 0.5" if name == "hue" else ""
                raise UsageError(f"must be >= 0{limit}.", option=name, value=value)
        check_probability("random_erasing", random_erasing)
        self._mixing = Mixing(mixup, cutmix, mixup_prob, mixup_switch_prob)
        if self._mixing.is_used and not classes:
            raise UsageError(
                "mixup and cutmix turn labels into shares of classes: give {classes}, their number.",
                options={"classes": ...},
            )
        if not dtype.is_floating_point:
            raise UsageError(
                "must be a floating-point dtype, such as torch.float32.",
                option="dtype",
                value=dtype,
            )
        self._jitter = np.array(list(jitter.values()))
        self._normalize = _checked_normalization(normalize)
        self._random_erasing, self._classes = random_erasing, classes
        self._dtype, self._image, self._label = dtype, image, label
        self._is_random = (
            self._augment.rrc
            or self._augment.flip
            or self._mixing.is_used
            or bool(self._jitter.any() or random_erasing)
        )

    def __call__(self, batch: Batch, draws: Draws | None = None) -> Batch:
        """Return the batch with augmented images.

        draws: random numbers, float64[b, DRAWS]; default: those of the batch. Raises UsageError for
        images or labels of another type, and for masks that would not follow their images.
        """
        images = self.check(batch)
        count, size = len(images), self._size or (int(images.shape[2]), int(images.shape[3]))
        result = dict(batch)
        if self._mixing.is_used:
            result[self._label] = self._class_shares(batch[self._label])
        if not count:  # the last batch of a rank without samples
            result[self._image] = images.new_zeros((0, 3, *size), dtype=self._dtype)
            return result
        draws = self._draws(batch, count) if draws is None else draws
        pixels, parts = _crop(images.permute(0, 2, 3, 1), self._augment, size, draws)
        result |= {
            name: value.moved(parts, size)
            for name, value in batch.items()
            if isinstance(value, BoxBatch)
        }
        if self._jitter.any():
            pixels = _jitter_colors(pixels, self._jitter, draws)
        if self._random_erasing:
            fill = (0.0, 0.0, 0.0) if self._normalize is None else self._normalize[0]
            color = on_device_of(np.array(fill, np.float32), pixels)
            pixels = erase(pixels, self._random_erasing, color, draws)
        if self._mixing.is_used:
            labels = result[self._label]
            is_sample = batch[RNG] != NO_SAMPLE if RNG in batch else np.ones(count, bool)
            pixels, result[self._label] = mix(pixels, labels, self._mixing, draws, is_sample)
        if self._normalize is not None:
            mean, std = (
                on_device_of(np.array(values, np.float32), pixels).view(1, 1, 1, 3)
                for values in self._normalize
            )
            pixels = (pixels - mean) / std
        result[self._image] = pixels.to(self._dtype).permute(0, 3, 1, 2)
        return result

    def check(self, batch: Batch) -> Tensor:
        """Return the images of a batch that can be augmented. Raises UsageError for others.

        Labels are compared with `classes` only in host memory: a check on a GPU would wait for it.
        """
        images = batch.get(self._image)
        if not are_images(images):
            raise UsageError(
                f"batch[{self._image!r}] is {_described(images)}: must be uint8[b, 3, h, w]. "
                f"Read it with wt.image(size=...)."
            )
        if self._mixing.is_used:
            if any(isinstance(value, BoxBatch) for value in batch.values()):
                raise UsageError("mixup and cutmix blend images, and boxes would not follow.")
            self._check_labels(batch)
        height, width = images.shape[2:]
        moves = self._augment.rrc or self._augment.flip or self._mixing.is_used
        if moves or self._size not in (None, (height, width)):
            for name, value in batch.items():
                if isinstance(value, Tensor) and value.shape[1:] == (height, width):
                    raise UsageError(
                        f"batch[{name!r}] is a mask of the images, which would not follow them. "
                        f"Crop and flip both with wt.image(augment=...) and wt.mask(augment=...)."
                    )
        return images

    def _check_labels(self, batch: Batch) -> None:
        label = batch.get(self._label)
        if not isinstance(label, Tensor) or label.ndim != 1 or label.dtype != torch.int64:
            raise UsageError(
                f"batch[{self._label!r}] is {_described(label)}: mixup and cutmix need int64[b]. "
                f"Read it with wt.label()."
            )
        if label.is_cuda:
            return
        wrong = ((label < 0) | (label >= self._classes)).nonzero().flatten().tolist()
        for row in wrong:
            key = batch["__key__"][row] if "__key__" in batch else f"in row {row}"
            raise UsageError(
                f"sample '{key}' has the label {int(label[row])}, and {{classes}} allows 0 to "
                f"{self._classes - 1}.",
                "Give the number of all classes.",
                {"classes": self._classes},
            )

    def _class_shares(self, label: Tensor) -> Tensor:
        """Return the label of each sample as shares of classes. float32[b, classes]

        A label outside the classes gives NaN, so that the loss shows it on a GPU, where `one_hot`
        would end the process.
        """
        is_class = label[:, None] == torch.arange(self._classes, device=label.device)
        return torch.where(is_class.any(1, keepdim=True), is_class.float(), math.nan)

    def _draws(self, batch: Batch, count: int) -> Draws:
        """Return the random numbers that came with a batch; any if none are needed."""
        if not self._is_random:
            return np.zeros((count, DRAWS))
        if RNG not in batch:
            raise UsageError(
                f"the batch has no random numbers of its samples (batch[{RNG!r}]), which this "
                "augmentation needs.",
                "Keep that entry of the loader's batches.",
            )
        return stretched(batch[RNG], DRAWS)


# --- crop, resize, flip ---------------------------------------------------------------------------


def _crop(
    images: Tensor, augment: Augment, size: tuple[int, int], draws: Draws
) -> tuple[Tensor, Ints]:
    """Return regions of the images, resized and perhaps flipped, and which they are.

    float32[b, *size, 3] in 0 to 1, int64[b, 5] (see `BoxBatch.moved`). images: uint8[b, h, w, 3].
    """
    count, height, width, _ = images.shape
    flips = draws[:, FLIP_DRAW] < 0.5 if augment.flip else np.zeros(count, bool)
    if augment.rrc:
        boxes = random_crops(height, width, draws, augment.scale, augment.ratio)
    else:
        center = np.array(center_crop(height, width, size[1] / size[0]))
        boxes = np.broadcast_to(center, (count, 4))
    parts = np.column_stack([boxes, flips])
    if (boxes == (0, 0, *size)).all():  # the whole images, in their own size
        if flips.any():
            images = torch.where(
                on_device_of(flips, images).view(-1, 1, 1, 1), images.flip(2), images
            )
        return images.float() / 255, parts
    # float16 holds 0 to 255 exactly, and the sums within an eighth. On a CPU it is slow.
    dtype = torch.float16 if images.is_cuda else torch.float32
    top, left, box_height, box_width = (
        on_device_of(boxes[:, i].astype(np.float32), images) for i in range(4)
    )
    mirrored = on_device_of(flips.astype(np.float32), images)
    rows = _resize_weights(top, box_height, height, size[0], torch.zeros_like(top)).to(dtype)
    columns = _resize_weights(left, box_width, width, size[1], mirrored).to(dtype)
    # [b, out height, width * 3], then [b, out height * 3, width], then [b, out height, 3, out width]
    resized = torch.bmm(rows, images.to(dtype).reshape(count, height, width * 3))
    lines = resized.view(count, size[0], width, 3).transpose(2, 3)
    pixels = torch.bmm(lines.reshape(count, size[0] * 3, width), columns.transpose(1, 2))
    pixels = pixels.view(count, size[0], 3, size[1]).transpose(2, 3)
    return pixels.contiguous().float().clamp_(0, 255) / 255, parts


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
            at = on_device_of(rows, pixels)
            shift = on_device_of(factor[rows].astype(np.float32), pixels)
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
        on_device_of(values.astype(np.float32), pixels).view(-1, 1, 1, 1)
        for values in (own, gray, mean)
    )
    grays = (pixels * on_device_of(np.array(_GRAY, np.float32), pixels)).sum(3, keepdim=True)
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


# --- helpers --------------------------------------------------------------------------------------


def _checked_normalization(
    value: str | tuple[Sequence[float], Sequence[float]] | None,
) -> tuple[Sequence[float], Sequence[float]] | None:
    if value is None or value == "imagenet":
        return IMAGENET if value else None
    if (
        isinstance(value, str)
        or len(value) != 2
        or any(len(v) != 3 for v in value)
        or min(value[1]) <= 0
    ):
        raise UsageError(
            'must be (mean, standard deviation > 0) of three colors each, or "imagenet".',
            option="normalize",
            value=value,
        )
    return value


def are_images(value: object) -> TypeGuard[Tensor]:
    """Return whether an entry of a batch is uint8[b, 3, h, w]."""
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.uint8
        and value.ndim == 4
        and value.shape[1] == 3
    )


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "missing" if value is None else type(value).__name__
