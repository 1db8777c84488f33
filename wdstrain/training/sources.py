"""The source of a model's inputs: what the user gave, or images by the options of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wdstrain.decode.decoder import Transform
from wdstrain.decode.fields import Field, Image, NumpyArray, image
from wdstrain.decode.labels import LabelField
from wdstrain.decode.masks import Mask
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index
from wdstrain.training.arguments import TrainArguments
from wdstrain.training.config import OPTIONS, Config
from wdstrain.training.data import TrainData, few_batches
from wdstrain.training.field_source import FieldSource, field_source
from wdstrain.training.inputs import InputSource, InputSpec, augments_batches
from wdstrain.training.tasks import Task
from wdstrain.training.transform_source import TransformSource

_COMPARED_EPOCHS = 4  # that tell whether inputs are augmented
_PLAIN_FIELDS = (Image, NumpyArray, LabelField, Mask)  # without randomness of their own
_IMAGE_OPTIONS = ("augment", "scale", "ratio", "crop_pct")  # of the default input


def given_source(
    fields: Mapping[str, Field] | None,
    transform: Transform | None,
    task: Task,
    index: Index | None,
    config: Config,
    *,
    prefix: str = "",
    known: Mapping[str, InputSpec] | None = None,
    reads_labels: bool = True,
) -> InputSource | None:
    """Return the source that `fields` or `transform` gives; None if neither was given.

    index: of samples that a transform is tried on. prefix: "val_" for those of validation, in
    errors. known: inputs of training. reads_labels: the samples have labels, which are tried. Raises UsageError for fields that are no inputs, and for labels that are not those of
    the task.
    """
    if fields is not None and transform is not None:
        raise UsageError(
            f"{prefix}fields= and {prefix}transform= were both given. Give one of them."
        )
    if transform is not None and index is not None:
        title = f"{prefix}transform"
        return TransformSource.of(transform, task, index, config, title, reads_labels=reads_labels)
    if fields is None:
        return None
    return field_source(fields, task, f"{prefix}fields", index, known or {})


def default_source(config: Config) -> FieldSource:
    """Return the source of images uint8[b, 3, image_size, image_size]."""
    pixels = image(
        size=config.image_size,
        augment=config.augment,
        scale=config.scale,
        ratio=config.ratio,
        crop_pct=config.crop_pct,
    )
    return FieldSource({"image": pixels}, "fields")


def check_source(source: InputSource, config: Config, *, is_given: bool) -> None:
    """Raise UsageError for options that do not go with the inputs of training.

    is_given: the user gave the source, so options of the default input have no effect.
    """
    specs, maker = source.specs, "wt.image" if source.title == "fields" else "the transform"
    if is_given:
        for name in _IMAGE_OPTIONS:
            if getattr(config, name) != OPTIONS[name].default:
                raise UsageError(f"{name} has no effect with {source.title}=. Give it to {maker}.")
        sizes = {max(spec.shape[1:]) for spec in specs.values() if len(spec.shape) == 3}
        if config.image_size not in {OPTIONS["image_size"].default, *sizes}:
            raise UsageError(
                f"image_size={config.image_size} has no effect with {source.title}=. Leave it out, "
                f"and give {maker} the size."
            )
    given = f"{source.title}= gives " + ", ".join(spec.kind for spec in specs.values())
    for spec in specs.values():
        if getattr(torch, spec.dtype).is_complex:
            raise UsageError(
                f"{given}: must be real numbers. Give two channels for complex numbers."
            )
    if config.channels_last and not any(len(spec.shape) == 3 for spec in specs.values()):
        raise UsageError(f"{given}: channels_last needs channels, height and width. Leave it out.")
    if augments_batches(config) and (len(specs) > 1 or not next(iter(specs.values())).is_rgb):
        raise UsageError(
            f"{given}: mixup, cutmix, color_jitter and random_erasing need a single input "
            f"uint8[3, height, width]. Leave them out."
        )


def run_sources(
    arguments: TrainArguments, data: TrainData, task: Task, config: Config
) -> tuple[InputSource, InputSource]:
    """Return the sources of the inputs for training and validation, checked against the options."""
    val = data.val if data.val is not None else data.train
    given = given_source(arguments.fields, arguments.transform, task, data.train, config)
    train_source = given or default_source(config)
    check_source(train_source, config, is_given=given is not None)
    given_val = given_source(
        arguments.val_fields,
        arguments.val_transform,
        task,
        val,
        config,
        prefix="val_",
        known=train_source.specs,
    )
    val_source = validation_source(train_source, given_val)
    if given is not None:
        try_samples(data.train, train_source, task, config)
    if given_val is not None:
        try_samples(val, val_source, task, config)
    if data.val is not None and given_val is None:
        check_no_randomness(data.val, val_source, task, config)
    return train_source, val_source


# --- validation -----------------------------------------------------------------------------------


def validation_source(train: InputSource, given: InputSource | None) -> InputSource:
    """Return the source of validation: the given one, or that of training without augmentation.

    Raises UsageError for a given one that augments, or that gives other inputs.
    """
    if given is None:
        return train.without_randomness() if isinstance(train, FieldSource) else train
    if isinstance(given, FieldSource):
        for _, field in given.inputs:
            augment = field.augment if isinstance(field, (Image, Mask)) else None
            if augment is not None and augment != augment.without_randomness():
                raise UsageError(
                    f"{given.title}= augments images. Validation needs the same images every time."
                )
    check_same_inputs(train.specs, given, "training has", sizes=False)
    return given


def check_same_inputs(
    wanted: Mapping[str, InputSpec], given: InputSource, owner: str, *, sizes: bool
) -> None:
    """Raise UsageError if a source gives other inputs. sizes: heights and widths count too."""

    def kinds(specs: Mapping[str, InputSpec]) -> dict[str, tuple[Any, ...]]:
        return {
            name: (
                spec.dtype,
                spec.shape if sizes else (len(spec.shape), spec.shape[:1]),
                spec.classes,
            )
            for name, spec in specs.items()
        }

    if kinds(wanted) != kinds(given.specs):
        raise UsageError(
            f"{given.title}= gives {_listed(given.specs)}, and {owner} {_listed(wanted)}. "
            f"Give the same inputs."
        )


def _listed(specs: Mapping[str, InputSpec]) -> str:
    return ", ".join(f"{name}: {spec.kind}" for name, spec in specs.items())


def check_no_randomness(index: Index, source: InputSource, task: Task, config: Config) -> None:
    """Raise UsageError for inputs that differ between epochs. Reads a few samples a few times."""
    if isinstance(source, FieldSource) and all(type(f) in _PLAIN_FIELDS for _, f in source.inputs):
        return
    options = source.loader_options(task, index)
    epochs = list(few_batches(index, options, config, epochs=_COMPARED_EPOCHS))
    for name in source.specs:
        if any(not _are_equal(batch[name], epochs[0][name]) for batch in epochs[1:]):
            raise UsageError(
                f"{source.title}= gives other inputs in each epoch, and validation needs the same "
                f"ones. Give one without augmentation: "
                f"val_{source.title.removeprefix('val_')}=."
            )


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN in the same places."""
    both_nan = first.isnan() & second.isnan()
    return bool(((first == second) | both_nan).all())


def try_samples(index: Index, source: InputSource, task: Task, config: Config) -> None:
    """Read a few samples. Raises SampleError if none of them can be read by fields of the user's."""
    if isinstance(source, FieldSource):  # a transform was tried when its source was made
        next(few_batches(index, source.loader_options(task, index), config, epochs=1))
