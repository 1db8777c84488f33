"""How images become the input of a model: checks, normalization, and what a checkpoint keeps of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wdstrain.decode.fields import Example, Field, Image, NumpyArray, image
from wdstrain.decode.transforms import Augment
from wdstrain.errors import UsageError
from wdstrain.loader.gpu_augment import IMAGENET, Augmentation
from wdstrain.training.config import OPTIONS, Config
from wdstrain.training.heads import BinaryHead, ClassHead
from wdstrain.training.tasks import Task

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of red, green and blue, of values in 0 to 1."""

    mean: Triple = IMAGENET[0]
    std: Triple = IMAGENET[1]


@dataclass(frozen=True)
class ImageInput:
    """The images that a model is trained on, as a checkpoint keeps them.

    shape: as a batch has them, without the batch: channels, height, width. dtype: before
    normalization. field: "image" or "array" for fields of wt, else the name of the user's class.
    names: names that the field looks for; empty for a field of the user's. augment: of an image
    field. normalization: used for uint8[3, h, w] only.
    """

    shape: tuple[int, ...]
    dtype: str
    field: str
    names: tuple[str, ...] = ()
    augment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    normalization: Normalization = Normalization()

    @classmethod
    def of(cls, source: Field, example: Example, normalization: Normalization) -> ImageInput:
        """Return the input that a field gives. example: of the field."""
        shape = shape_of(example)
        if type(source) is Image:
            augment = vars(source.augment)
            return cls(shape, example.dtype, "image", source.names, augment, normalization)
        if type(source) is NumpyArray:
            return cls(shape, example.dtype, "array", source.names, {}, normalization)
        name = type(source).__qualname__
        return cls(shape, example.dtype, name, normalization=normalization)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ImageInput:
        """Return the input that `state` returned as plain values."""
        normalization = Normalization(tuple(state["mean"]), tuple(state["std"]))
        return cls(
            tuple(state["shape"]),
            state["dtype"],
            state["field"],
            tuple(state["names"]),
            state["augment"],
            normalization,
        )

    def blank(self, device: torch.device) -> Tensor:
        """Return a batch of one image of zeros."""
        return torch.zeros(1, *self.shape, dtype=getattr(torch, self.dtype), device=device)

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "field": self.field,
            "names": list(self.names),
            "augment": dict(self.augment),
            "mean": list(self.normalization.mean),
            "std": list(self.normalization.std),
        }

    @property
    def is_rgb(self) -> bool:
        """Whether images are uint8[3, h, w], which mean and standard deviation are for."""
        return self.dtype == "uint8" and len(self.shape) == 3 and self.shape[0] == 3

    def to_field(self) -> Field | None:
        """Return the field of wt that reads such images; None for a field of the user's."""
        if not self.names:
            return None
        if self.field == "image":
            height, width = self.shape[1:]
            return Image(self.names, (height, width), Augment(**self.augment))
        return NumpyArray(self.names, Example(self.shape, self.dtype))

    def normalize(self, pixels: Tensor) -> Tensor:
        """Return float32[b, ...]: see `normalize`."""
        return normalize(pixels, self.normalization)

    def __str__(self) -> str:
        values = {name: value for name, value in self.state().items() if name != "field"}
        return f"{self.field}({', '.join(f'{name}={value}' for name, value in values.items())})"


def image_field(config: Config) -> Field:
    """Return the field of images uint8[b, 3, image_size, image_size]."""
    return image(
        size=config.image_size,
        augment=config.augment,
        scale=config.scale,
        ratio=config.ratio,
        crop_pct=config.crop_pct,
    )


def input_field(fields: Mapping[str, Field] | None, task: Task, argument: str) -> Field | None:
    """Return the field of the model's input: the only entry that is not named as a label.

    fields: as the user gave them; None: nothing was given. argument: its name, for errors. With a
    single label, "label" names it too. Raises UsageError for another number of inputs, and for
    label fields that read something else than the task learns.
    """
    if fields is None:
        return None
    if not isinstance(fields, Mapping) or not all(isinstance(f, Field) for f in fields.values()):
        raise UsageError(
            f'{argument}= must be a dict of fields by name, such as {{"image": wt.image(size=32)}}.'
        )
    heads = {head.name: head for head in task.heads}
    if not task.has_several:
        heads.setdefault("label", task.heads[0])
    inputs = {name: field for name, field in fields.items() if name not in heads}
    if len(inputs) != 1:
        raise UsageError(
            f"{argument}= has {len(inputs)} inputs ({', '.join(inputs) or 'none'}): must be 1. "
            f"Labels are named {' or '.join(heads)}."
        )
    (source,) = inputs.values()
    for name, head in heads.items():
        if name in fields:
            _check_label_field(f"{argument}[{name!r}]", fields[name], head.field(source))
    return source


def _check_label_field(title: str, given: Field, learned: Field) -> None:
    """Raise UsageError if a given field of a label is not the one that the task learns."""
    names = ("names", "column", "size", "augment")
    is_same = type(given) is type(learned) and all(
        getattr(given, name, None) == getattr(learned, name, None) for name in names
    )
    if not is_same or getattr(given, "classes", None) not in (
        None,
        (),
        getattr(learned, "classes", None),
    ):
        raise UsageError(
            f"{title} reads another value than the label that is learned: {learned}. Leave the "
            f"entry out: the label is read as the shards declare it."
        )


def check_no_image_options(config: Config) -> None:
    """Raise UsageError for options of the image field of a run that has a field of its own."""
    for name in ("augment", "scale", "ratio", "crop_pct"):
        if getattr(config, name) != OPTIONS[name].default:
            raise UsageError(f"{name} has no effect with fields=. Give it to wt.image.")


def shape_of(example: Example) -> tuple[int, ...]:
    """Return the shape of an image as a batch has it: channels, height, width."""
    return (example.shape[-1], *example.shape[:-1]) if example.channels_last else example.shape


def check_image_field(source: Field, *, channels_last: bool, augments: bool) -> Example:
    """Return the example of an image field.

    augments: batches of images are augmented. Raises UsageError for a field that no model takes, or that does
    not go with these options.
    """
    example = source.example
    if example is None:
        raise UsageError(
            "fields= has an input without a fixed size, which forms no batch. Give it a size."
        )
    shape = shape_of(example)
    given = f"fields= gives {example.dtype}{list(shape)}"
    if np.dtype(example.dtype).kind not in "buif":
        raise UsageError(f"{given}: must be real numbers. Give two channels for complex numbers.")
    if channels_last and len(shape) != 3:
        raise UsageError(f"{given}: channels_last needs channels, height and width. Leave it out.")
    if augments and (example.dtype != "uint8" or len(shape) != 3 or shape[0] != 3):
        raise UsageError(
            f"{given}: mixup, cutmix, color_jitter and random_erasing need "
            f"uint8[3, height, width]. Leave them out."
        )
    return example


def normalize(pixels: Tensor, normalization: Normalization) -> Tensor:
    """Return float32: uint8[b, 3, h, w] by mean and standard deviation, other uint8 divided by 255.

    Numbers of other types keep their values.
    """
    if pixels.dtype != torch.uint8:
        return pixels.float()
    if pixels.ndim != 4 or pixels.shape[1] != 3:
        return pixels.float() / 255
    mean, std = _constants(normalization, pixels.device)
    return (pixels.float() - mean) / std


@cache
def _constants(normalization: Normalization, device: torch.device) -> list[Tensor]:
    """Return mean and standard deviation of 0 to 255 on a device, float32[3, 1, 1] each.

    They are copied there once: a copy of pageable memory makes the host wait for the device.
    """
    with torch.inference_mode(False):  # the first call may be part of a validation
        values: Sequence[Triple] = (normalization.mean, normalization.std)
        return [torch.tensor(value, device=device).view(3, 1, 1) * 255 for value in values]


def augments_batches(config: Config) -> bool:
    """Return whether batches of images are augmented, beside what the image field does."""
    mixes = (config.mixup or config.cutmix) and config.mixup_prob
    return bool(mixes or any(config.color_jitter) or config.random_erasing)


def batch_augmentation(
    task: Task, image: ImageInput, config: Config, epoch: int
) -> Augmentation | None:
    """Return color jitter, random erasing, mixup and CutMix of an epoch, if they are used."""
    if not augments_batches(config):
        return None
    mixes = bool(config.mixup or config.cutmix)
    head = task.heads[0]
    if mixes and (task.has_several or not isinstance(head, (ClassHead, BinaryHead))):
        raise UsageError(
            f"mixup={config.mixup}, cutmix={config.cutmix}: they mix the classes of one label, "
            f"and the task is {task}."
        )
    mixes = mixes and (config.mixup_off_epoch is None or epoch < config.mixup_off_epoch)
    jitter = config.color_jitter * 3 if len(config.color_jitter) == 1 else config.color_jitter
    brightness, contrast, saturation, hue = (*jitter, 0.0, 0.0, 0.0, 0.0)[:4]
    return Augmentation(
        normalize=(image.normalization.mean, image.normalization.std),
        brightness=brightness,
        contrast=contrast,
        saturation=saturation,
        hue=hue,
        random_erasing=config.random_erasing,
        mixup=config.mixup if mixes else 0.0,
        cutmix=config.cutmix if mixes else 0.0,
        mixup_prob=config.mixup_prob,
        mixup_switch_prob=config.mixup_switch_prob,
        classes=len(head.classes),
        label=f"target {head.name}",
    )
