"""Inputs that fields read, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from wdstrain.decode.fields import Example, Field, Image
from wdstrain.decode.labels import LabelField, with_classes
from wdstrain.decode.masks import Mask
from wdstrain.decode.transforms import DRAWS
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index
from wdstrain.training.inputs import InputSpec, check_input_names
from wdstrain.training.tasks import Task


@dataclass(frozen=True)
class FieldSource:
    """Inputs that fields read, by name in the batch."""

    fields: Mapping[str, Field]
    title: str

    @property
    def specs(self) -> dict[str, InputSpec]:
        return {name: InputSpec.of(f, _example(name, f, self.title)) for name, f in self.inputs}

    @property
    def inputs(self) -> list[tuple[str, Field]]:
        return list(self.fields.items())

    def loader_options(self, task: Task, index: Index) -> dict[str, Any]:
        return {"fields": {**self.fields, **self.targets(task)}}

    def targets(self, task: Task) -> dict[str, Field]:
        """Return the fields of the targets. Masks follow the first image."""
        images = (field for _, field in self.inputs if isinstance(field, Image))
        return task.target_fields(next(images, None))

    def bytes_options(self, fields: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        others = self.inputs[0][1].names
        read = {name: _FieldBytes(own, others) for name, own in fields.items()}
        return {"fields": {**self.fields, **read}, "on_error": "mark"}

    def read_file(self, key: str, extension: str, data: bytes) -> Mapping[str, Any]:
        if len(self.fields) > 1:
            raise UsageError(
                f"image files give one input, and the model has {len(self.fields)}: "
                f"{', '.join(self.fields)}. Convert the files to shards."
            )
        ((name, field),) = self.inputs
        example = _example(name, field, self.title)
        out = np.zeros(example.shape, example.dtype)
        field.read(extension, memoryview(data), out, np.full(DRAWS, 0.5))
        value = torch.from_numpy(out)
        return {name: value.permute(2, 0, 1) if example.channels_last else value}

    def without_randomness(self) -> FieldSource:
        """Return the fields of validation: the same without the augmentation of `wt.image`."""
        return replace(self, fields={name: _plain(field) for name, field in self.inputs})


@dataclass(frozen=True)
class _FieldBytes:
    """Field that gives the bytes of the first of some tar fields; empty for a sample without any."""

    own: tuple[str, ...]
    others: tuple[str, ...]  # so that a sample without them has one to be found by
    example: None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.own, *self.others)

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> bytes:
        return bytes(data) if name in self.own else b""


def check_fields(fields: Any, title: str) -> None:
    """Raise UsageError for other values than fields by name."""
    if not isinstance(fields, Mapping) or not all(isinstance(f, Field) for f in fields.values()):
        raise UsageError(
            f'{title}= must be a dict of fields by name, such as {{"image": wt.image(size=32)}}.'
        )


def field_source(
    fields: Mapping[str, Field],
    task: Task,
    title: str,
    index: Index | None,
    known: Mapping[str, InputSpec],
) -> FieldSource:
    """Return the source of those fields that are not named as a label.

    Classes as inputs have the numbers of `known`, the inputs of training, else those of the index.
    """
    check_fields(fields, title)
    heads = task.label_names
    inputs = {
        name: _numbered(field, index, known.get(name))
        for name, field in fields.items()
        if name not in heads
    }
    check_input_names(inputs, heads, title)
    for name, field in inputs.items():
        _example(name, field, title)
    source = FieldSource(inputs, title)
    targets = source.targets(task)
    for name, head in heads.items():
        if name in fields:
            given = fields[name] if index is None else with_classes(fields[name], index)
            _check_label_field(f"{title}[{name!r}]", given, targets[f"target {head.name}"])
    return source


def _numbered(field: Field, index: Index | None, known: InputSpec | None) -> Field:
    """Return a field of classes with their names, by which other shards may number them.

    Any other field is returned unchanged, and so is one whose classes no index names.
    """
    if not isinstance(field, LabelField):
        return field
    named = with_classes(field, index)
    assert isinstance(named, LabelField)
    classes = field.classes or (named.classes if known is None else known.classes)
    return LabelField(
        named.names, named.kind, named.entry, classes, is_bound=True, dtype=field.dtype
    )


def _check_label_field(title: str, given: Field, learned: Field) -> None:
    """Raise UsageError if a given field of a label is not the one that the task learns."""
    names = ("names", "entry", "kind", "size", "augment")
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


def _example(name: str, field: Field, title: str) -> Example:
    """Return the example of an input. Raises UsageError for one without a fixed size."""
    if field.example is None:
        raise UsageError(
            f"{title}= has an input without a fixed size, {name}, which forms no batch. "
            f"Give it a size."
        )
    return field.example


def _plain(field: Field) -> Field:
    """Return a field without the augmentation of `wt.image` and `wt.mask`."""
    if isinstance(field, (Image, Mask)) and type(field) in (Image, Mask):
        return replace(field, augment=field.augment.without_randomness())
    return field
