"""Fields of a run: which inputs of the model they read, for training, validation and predictions.

An entry of the user's `fields` that has the name of a label is a target, which the shards declare
already; every other entry is an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wdstrain.decode.fields import Example, Field, Image, Mask, image
from wdstrain.decode.labels import LabelField, with_classes
from wdstrain.decode.transforms import DRAWS
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index
from wdstrain.training.config import Config, TrainArguments
from wdstrain.training.data import few_samples
from wdstrain.training.inputs import InputSpec, augments_batches
from wdstrain.training.tasks import Task

Fields = dict[str, Field]  # inputs by their names in a batch

_COMPARED_EPOCHS = 4  # that tell whether inputs are augmented
_IMAGE_OPTIONS = ("augment", "scale", "ratio", "crop_pct")  # of the default input


def specs_of(fields: Fields) -> dict[str, InputSpec]:
    """Return the inputs that fields read."""
    return {name: InputSpec.of(field, example_of(field)) for name, field in fields.items()}


def example_of(field: Field) -> Example:
    """Return the example of an input. Raises UsageError for one without a fixed size."""
    if field.example is None:
        raise UsageError(
            f"{field} is an input without a fixed size.",
            "Give it a size.",
        )
    return field.example


def with_targets(fields: Fields, task: Task) -> dict[str, Field]:
    """Return the fields of inputs and targets. Masks follow the first image."""
    images = (field for field in fields.values() if isinstance(field, Image))
    return {**fields, **task.target_fields(next(images, None))}


def read_file(fields: Fields, extension: str, data: bytes) -> dict[str, Tensor]:
    """Return the single input of a file, by name, as a batch has it."""
    ((name, reader),) = fields.items()
    example = example_of(reader)
    out = np.zeros(example.shape, example.dtype)
    reader.read(extension, memoryview(data), out, np.full(DRAWS, 0.5))
    value = torch.from_numpy(out)
    return {name: value.permute(2, 0, 1) if example.channels_last else value}


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
    if not isinstance(fields, Mapping) or not all(isinstance(f, Field) for f in fields.values()):
        raise UsageError(
            f'{title}= must be a dict of fields by name, such as {{"image": wt.image(size=32)}}.'
        )
    heads, known = task.label_names, known or {}
    inputs = {n: _numbered(f, index, known.get(n)) for n, f in fields.items() if n not in heads}
    if not inputs:
        raise UsageError(
            f"{title}= gives no input of the model.",
            f'Add one, such as "image". Labels are named {" or ".join(heads)}.',
        )
    for name, field in inputs.items():
        example_of(field)
        is_name = isinstance(name, str) and not name.startswith("__")  # "__key__" is of the batch
        if not is_name or (len(inputs) > 1 and not name.isidentifier()):
            raise UsageError(
                f"{title}= names an input {name!r}: several inputs are keyword arguments of the "
                f"model, so each needs a name such as image, and names with __ are those of a batch."
            )
    targets = with_targets(inputs, task)
    for name in heads.keys() & fields.keys():
        given = fields[name] if index is None else with_classes(fields[name], index)
        learned = targets[f"target {heads[name].name}"]
        if _reads(given, learned) != _reads(learned, learned):
            raise UsageError(
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
    names = ("names", "entry", "kind", "size", "augment")
    classes = getattr(field, "classes", None) or getattr(learned, "classes", None)
    return [type(field), classes, *(getattr(field, name, None) for name in names)]


# --- the fields of a run --------------------------------------------------------------------------


def run_fields(
    arguments: TrainArguments, train_set: Index, val_set: Index | None, task: Task, config: Config
) -> tuple[Fields, Fields]:
    """Return the inputs for training and validation, checked against options and a few samples.

    Raises UsageError, and SampleError if none of the samples can be read.
    """
    given = arguments.fields is not None
    if given:
        train = input_fields(arguments.fields, task, train_set)
        shapes = [spec.shape[1:] for spec in specs_of(train).values()]
        if not config.has_default("image_size") and config.image_shape not in shapes:
            raise UsageError(
                f"image_size={config.image_size} has no effect with fields=.",
                "Leave it out, and let your fields do it.",
            )
        few_samples(train_set, with_targets(train, task), config)
    else:
        options = {name: getattr(config, name) for name in _IMAGE_OPTIONS}
        train = {"image": image(size=config.image_shape, **options)}
    specs = specs_of(train)
    if augments_batches(config) and (len(specs) > 1 or not next(iter(specs.values())).is_rgb):
        raise UsageError(
            f"fields= gives {_listed(specs)}: mixup, cutmix, color_jitter and random_erasing "
            "need a single input uint8[3, height, width].",
            "Leave them out.",
        )
    val = plain = {name: _without_randomness(field) for name, field in train.items()}
    if val_set is None or (not given and arguments.val_fields is None):
        return train, val
    if arguments.val_fields is not None:
        val = input_fields(arguments.val_fields, task, val_set, title="val_fields", known=specs)
        check_same_inputs(specs, val, "training has", sizes=False)
        plain = {name: _without_randomness(field) for name, field in val.items()}
    fields = with_targets(val, task)
    epochs = [few_samples(val_set, fields, config, epoch) for epoch in range(_COMPARED_EPOCHS)]
    for name in val:
        if val[name] != plain[name] or len({batch[name].numpy().tobytes() for batch in epochs}) > 1:
            raise UsageError(
                f"the input {name!r} differs between epochs, and validation needs the same "
                "images every time.",
                "Give fields without augmentation: val_fields=.",
            )
    return train, val


def _without_randomness(field: Field) -> Field:
    """Return a field of wt without its augmentation."""
    if type(field) is Image or type(field) is Mask:
        return replace(field, augment=field.augment.without_randomness())
    return field


def check_same_inputs(
    wanted: Mapping[str, InputSpec], fields: Fields, owner: str, *, sizes: bool
) -> None:
    """Raise UsageError for fields that read other inputs. sizes: heights and widths count too."""

    def kinds(specs: Mapping[str, InputSpec]) -> dict[str, tuple[Any, ...]]:
        shapes = {n: s.shape if sizes else (len(s.shape), s.shape[:1]) for n, s in specs.items()}
        return {n: (spec.dtype, shapes[n], spec.classes) for n, spec in specs.items()}

    given = specs_of(fields)
    if kinds(wanted) != kinds(given):
        raise UsageError(
            f"the fields give {_listed(given)}, and {owner} {_listed(wanted)}.",
            "Give the same inputs.",
        )


def _listed(specs: Mapping[str, InputSpec]) -> str:
    return ", ".join(f"{name}: {spec.kind}" for name, spec in specs.items())
