"""Inputs of a model: their shapes, their normalization, and how a batch becomes a call of the model.

A checkpoint keeps them, so that a model is evaluated on the inputs that it was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from wdstrain.augment.gpu import IMAGENET, Augmentation
from wdstrain.decode.fields import Example, Field, Image, NumpyArray
from wdstrain.decode.labels import LabelField, with_classes
from wdstrain.decode.transforms import Augment
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index
from wdstrain.training.config import Config, refuse
from wdstrain.training.tasks import Task

Fields = dict[str, Field]  # inputs by their names in a batch
Triple = tuple[float, float, float]
# Mean and standard deviation of red, green and blue, of values in 0 to 1.
Normalization = tuple[Triple, Triple]
_SOURCES = {"class": "label", "multi": "labels", "number": "number"}  # by kind of label


@dataclass(frozen=True)
class InputSpec:
    """One input of a model.

    shape: in a batch, without the batch, such as (3, 224, 224). dtype: before normalization.
    source: "image", "array", "label", "labels" or "number" for fields of wt, else the class of the
    user's field. names: tar fields that the field looks for; empty for a field of the user's.
    augment: of an image field. column: entry of a JSON field. classes: in the order of the numbers
    that the model gets, whatever their numbers in other shards.
    """

    shape: tuple[int, ...]
    dtype: str
    source: str
    names: tuple[str, ...] = ()
    augment: Mapping[str, Any] = field(default_factory=dict)
    column: str | None = None
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, field: Field) -> InputSpec:
        """Return the input that a field gives. Raises UsageError for one without a fixed size."""
        example = field.example
        if example is None:
            raise UsageError(f"{field} is an input without a fixed size.", "Give it a size.")
        refuse(
            example.dtype.startswith("complex"),  # floats would lose their imaginary part
            f"{example.dtype}{list(example.shape)}: must be real numbers.",
            "Give two channels for complex numbers.",
        )
        shape = example.shape
        shape = (shape[-1], *shape[:-1]) if example.channels_last else shape
        kind = _SOURCES.get(field.kind) if isinstance(field, LabelField) else None
        source = {Image: "image", NumpyArray: "array", LabelField: kind}.get(type(field))
        if source is None:
            return cls(shape, example.dtype, type(field).__qualname__)
        return cls(
            shape,
            example.dtype,
            source,
            tuple(field.names),
            vars(field.augment) if isinstance(field, Image) else {},
            getattr(field, "entry", None),
            getattr(field, "classes", ()),
        )

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> InputSpec:
        """Return the input that `state` returned as plain values."""
        plain: Any = {n: tuple(v) if isinstance(v, list) else v for n, v in state.items()}
        return cls(**plain)

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        values = {**vars(self), "augment": dict(self.augment)}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    def to_field(self) -> Field:
        """Return the field of wt that reads this input. Raises UsageError for one of the user's."""
        if self.source == "image":
            height, width = self.shape[1:]
            return Image(self.names, (height, width), Augment(**self.augment))
        if self.source == "array":
            return NumpyArray(self.names, Example(self.shape, self.dtype))
        kinds = [kind for kind, source in _SOURCES.items() if source == self.source]
        refuse(
            not kinds,
            f"the checkpoint was trained on a field of your own, {self.source}(...).",
            "Give it again: fields=.",
        )
        return LabelField(self.names, kinds[0], self.column, self.classes, is_bound=True)

    @property
    def is_rgb(self) -> bool:
        """Whether it is uint8[3, h, w], which mean and standard deviation are for."""
        return self.dtype == "uint8" and len(self.shape) == 3 and self.shape[0] == 3

    @property
    def kind(self) -> str:
        """Dtype and shape, such as uint8[3, 224, 224]."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class ModelInputs:
    """All inputs of a model, by name in a batch. normalization: of uint8[3, h, w]."""

    specs: Mapping[str, InputSpec]
    normalization: Normalization = IMAGENET

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ModelInputs:
        """Return the inputs that `state` returned as plain values."""
        specs = {name: InputSpec.from_state(spec) for name, spec in state["specs"].items()}
        return cls(specs, (tuple(state["mean"]), tuple(state["std"])))

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            "specs": {name: spec.state() for name, spec in self.specs.items()},
            "mean": list(self.normalization[0]),
            "std": list(self.normalization[1]),
        }

    @property
    def picture(self) -> str | None:
        """Name of the first RGB image, which the report shows; None if there is none."""
        return next((name for name, spec in self.specs.items() if spec.is_rgb), None)

    @property
    def image(self) -> InputSpec | None:
        """The first input of `wt.image`, which masks follow; None if there is none."""
        return next((spec for spec in self.specs.values() if spec.source == "image"), None)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of the first RGB image; else of the first with channels, height and width.

        Without such an input, that of the first.
        """
        return min(self.specs.values(), key=lambda s: (not s.is_rgb, len(s.shape) != 3)).shape

    @property
    def image_size(self) -> int:
        """Longer side of the images; 0 if there are none."""
        return max(self.image_shape[1:]) if len(self.image_shape) == 3 else 0

    def call(self, model: nn.Module, batch: Mapping[str, Any], *, channels_last: bool) -> Tensor:
        """Return the output of a model for the inputs in a batch.

        channels_last: memory format of inputs [b, channels, height, width].
        """
        return call_model(model, self.prepared(batch, channels_last=channels_last))

    def prepared(self, batch: Mapping[str, Any], *, channels_last: bool) -> dict[str, Tensor]:
        """Return the inputs in a batch as the model gets them."""
        layouts = {4: torch.channels_last} if channels_last else {}
        values = {name: normalize(batch[name], self.normalization) for name in self.specs}
        return {
            name: value.contiguous(memory_format=layouts.get(value.ndim, torch.contiguous_format))
            for name, value in values.items()
        }

    def blank(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Return a batch of zeros."""
        return {
            name: torch.zeros(rows, *spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for name, spec in self.specs.items()
        }


def call_model(model: nn.Module, values: Mapping[str, Tensor]) -> Tensor:
    """Return the output of a model.

    A single input is the argument of the model. Several are keyword arguments with their names.
    """
    return cast(Tensor, model(**values) if len(values) > 1 else model(*values.values()))


def normalize(values: Tensor, normalization: Normalization) -> Tensor:
    """Return what a model gets for values [b, ...] in the type of the samples."""
    return scaled(
        values, *constants_of(normalization, values.device), is_byte=values.dtype == torch.uint8
    )


def scaled(values: Tensor, mean: Tensor, std: Tensor, *, is_byte: bool) -> Tensor:
    """Return what a model gets for values [b, ...]. is_byte: they are 0 to 255.

    Such RGB images [b, 3, h, w] are normalized by mean and standard deviation, other such values
    divided by 255. int64[b] and int64[b, n] keep their type, as class numbers and tokens need. All
    other numbers become float32.
    """
    if values.dtype == torch.int64 and values.ndim <= 2:
        return values
    if is_byte and values.ndim == 4 and values.shape[1] == 3:
        return (values.float() - mean) / std
    return values.float() / 255 if is_byte else values.float()


@cache
def constants_of(normalization: Normalization, device: torch.device) -> list[Tensor]:
    """Return mean and standard deviation of 0 to 255 on a device, float32[3, 1, 1] each.

    They are copied there once: a copy of pageable memory makes the host wait for the device.
    """
    with torch.inference_mode(False):  # the first call may be part of a validation
        values = torch.tensor(normalization, device=device)
        return list(values.view(2, 3, 1, 1) * 255)


def batch_augmentation(
    task: Task, inputs: ModelInputs, config: Config, epoch: int
) -> Augmentation | None:
    """Return color jitter, random erasing, mixup and CutMix of an epoch, if they are used."""
    mixes, head = bool((config.mixup or config.cutmix) and config.mixup_prob), task.heads[0]
    if not (mixes or any(config.color_jitter) or config.random_erasing):
        return None
    refuse(
        len(inputs.specs) > 1 or inputs.picture is None,
        f"fields= gives {listed(inputs.specs)}: mixup, cutmix, color_jitter and random_erasing "
        "need a single input uint8[3, height, width].",
        "Leave them out.",
    )
    refuse(
        mixes and (task.has_several or head.kind not in ("class", "binary")),
        f"{{mixup}}, {{cutmix}}: they mix the classes of one label, and the task is {task}.",
        mixup=config.mixup,
        cutmix=config.cutmix,
    )
    mixes = mixes and (config.mixup_off_epoch is None or epoch < config.mixup_off_epoch)
    jitter = config.color_jitter * 3 if len(config.color_jitter) == 1 else config.color_jitter
    brightness, contrast, saturation, hue = (*jitter, 0.0, 0.0, 0.0, 0.0)[:4]
    return Augmentation(
        normalize=inputs.normalization,
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
        image=next(iter(inputs.specs)),
        label=f"target {head.name}",
    )


# --- fields that give the inputs -------------------------------------------------------------------
# An entry of the user's `fields` that has the name of a label is a target, which the shards declare
# already; every other entry is an input.


def specs_of(fields: Fields) -> dict[str, InputSpec]:
    """Return the inputs that fields read."""
    return {name: InputSpec.of(field) for name, field in fields.items()}


def with_targets(fields: Fields, task: Task) -> dict[str, Field]:
    """Return the fields of inputs and targets. Masks follow the first image."""
    image = next((field for field in fields.values() if isinstance(field, Image)), None)
    return {**fields, **{f"target {head.name}": head.field(image) for head in task.heads}}


def input_fields(
    fields: Any,
    task: Task,
    index: Index | None,
    *,
    title: str = "fields",
    known: Mapping[str, InputSpec] | None = None,
) -> Fields:
    """Return those fields of the user's that are not named as a label.

    index: None for image files. known: inputs of training, whose numbers classes as inputs have;
    else those of the index. Raises UsageError for fields that cannot be inputs, and for labels that
    read another value than the one that is learned.
    """
    refuse(
        not isinstance(fields, Mapping) or not all(isinstance(f, Field) for f in fields.values()),
        f'{title}= must be a dict of fields by name, such as {{"image": wt.image(size=32)}}.',
    )
    heads, known = task.label_names, known or {}
    inputs = {n: _numbered(f, index, known.get(n)) for n, f in fields.items() if n not in heads}
    wrong = [n for n in inputs if not isinstance(n, str) or n.startswith("__")]  # "__key__"
    wrong += [n for n in inputs if len(inputs) > 1 and not str(n).isidentifier()]
    refuse(
        not inputs,
        f"{title}= gives no input of the model.",
        f'Add one, such as "image". Labels are named {" or ".join(heads)}.',
    )
    refuse(
        wrong,
        f"{title}= names an input {', '.join(map(repr, wrong))}: several inputs are keyword "
        "arguments of the model, so each needs a name such as image, and names with __ are those "
        "of a batch.",
    )
    targets = with_targets(inputs, task)
    for name in heads.keys() & fields.keys():
        given = fields[name] if index is None else with_classes(fields[name], index)
        learned = targets[f"target {heads[name].name}"]
        refuse(
            _reads(given, learned) != _reads(learned, learned),
            f"{title}[{name!r}] reads another value than the label that is learned: {learned}.",
            "Leave the entry out: the label is read as the shards declare it.",
        )
    return inputs


def _numbered(own: Field, index: Index | None, known: InputSpec | None) -> Field:
    """Return a field of classes with their names, by which other shards may number them.

    Any other field is returned unchanged, and so is one whose classes no index names.
    """
    named = with_classes(own, index)
    if not isinstance(own, LabelField) or not isinstance(named, LabelField):
        return own
    classes = own.classes or (named.classes if known is None else known.classes)
    return LabelField(named.names, named.kind, named.entry, classes, is_bound=True, dtype=own.dtype)


def _reads(field: Field, learned: Field) -> list[Any]:
    """Return what a field of a label reads; classes that it does not name are the learned ones."""
    classes = getattr(field, "classes", None) or getattr(learned, "classes", None)
    return [
        type(field),
        classes,
        *(getattr(field, name, None) for name in ("names", "entry", "kind", "size", "augment")),
    ]


def check_same_inputs(
    wanted: Mapping[str, InputSpec], fields: Fields, owner: str, *, sizes: bool
) -> None:
    """Raise UsageError for fields that read other inputs. sizes: heights and widths count too."""
    given = specs_of(fields)
    refuse(
        _compared(wanted, sizes) != _compared(given, sizes),
        f"the fields give {listed(given)}, and {owner} {listed(wanted)}.",
        "Give the same inputs.",
    )


def _compared(specs: Mapping[str, InputSpec], sizes: bool) -> dict[str, Any]:
    """Return what must be equal of inputs. sizes: heights and widths, too."""
    return {
        name: (spec.dtype, spec.shape if sizes else (len(spec.shape), spec.shape[:1]), spec.classes)
        for name, spec in specs.items()
    }


def listed(specs: Mapping[str, InputSpec]) -> str:
    """Return the inputs in words."""
    return ", ".join(f"{name}: {spec.kind}" for name, spec in specs.items())
