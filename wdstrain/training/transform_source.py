"""Inputs that a function of the user's makes of whole samples.

The function is that of `wt.Loader`: it takes a sample, or (sample, rng), and returns a dict. An
entry that has the name of a label is a target; a label that it leaves out is read from the sample.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wdstrain.decode.decoder import Transform
from wdstrain.decode.fields import Field
from wdstrain.decode.labels import LabelField, with_classes
from wdstrain.decode.transforms import DRAWS
from wdstrain.errors import SampleError, UsageError
from wdstrain.loader.options import takes_rng
from wdstrain.shards.index import Index
from wdstrain.training.config import Config
from wdstrain.training.data import few_batches
from wdstrain.training.heads import Head, MaskHead
from wdstrain.training.inputs import InputSpec, ModelInputs, check_input_names
from wdstrain.training.tasks import Task
from wdstrain.webdataset.to_example import read_sample


@dataclass(frozen=True)
class TransformSource:
    """Inputs that a function of the user's returns for a sample; see `wt.Loader`.

    label_names: entries of its examples that are targets, with their heads.
    """

    transform: Transform
    specs: Mapping[str, InputSpec]
    label_names: Mapping[str, Head]
    title: str

    def __post_init__(self) -> None:
        if not callable(self.transform):
            raise UsageError(
                f"{self.title}={self.transform!r}: must be a function of a sample, or of "
                f"(sample, rng)."
            )

    @classmethod
    def of(
        cls,
        transform: Transform,
        task: Task,
        index: Index,
        config: Config,
        title: str,
        *,
        reads_labels: bool,
    ) -> TransformSource:
        """Return the source after a look at the examples of a few samples.

        reads_labels: the labels of the samples are tried too.
        """
        source = cls(transform, {}, task.label_names, title)
        function = _TransformInputs(transform, {}, source.label_names, {})
        options = source.loader_options(task, index) if reads_labels else {"transform": function}
        batch = next(few_batches(index, options, config, epochs=1))
        left_out = ["__key__", "__rng__", *(f"target {head.name}" for head in task.heads)]
        inputs = {name: value for name, value in batch.items() if name not in left_out}
        check_input_names(inputs, source.label_names, title)
        return replace(source, specs={name: _spec(value[0]) for name, value in inputs.items()})

    def loader_options(self, task: Task, index: Index) -> dict[str, Any]:
        readers = {
            head.name: _target_reader(head, index, self.title)
            for head in task.heads
            if not isinstance(head, MaskHead)  # its crop is the transform's
        }
        function = _TransformExample(self.transform, self.specs, self.label_names, readers)
        return {"transform": function}

    def bytes_options(self, fields: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        function = _TransformInputs(self.transform, self.specs, self.label_names, fields)
        return {"transform": function, "on_error": "replace"}

    def read_file(self, key: str, extension: str, data: bytes) -> Mapping[str, Any]:
        function = _TransformInputs(self.transform, self.specs, self.label_names, {})
        sample = {"__key__": key, extension: data}
        return function(sample, np.random.Generator(np.random.Philox(0)))


def _spec(value: Tensor) -> InputSpec:
    """Return the input that a transform gives as this value of one sample."""
    return InputSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."), "transform")


# --- examples of a transform ----------------------------------------------------------------------


class _Examples:
    """Calls the user's transform. Pickled for worker processes.

    specs: of the inputs; empty if they are not known yet.
    """

    def __init__(self, transform: Transform, specs: Mapping[str, InputSpec]) -> None:
        self._transform, self._takes_rng = transform, takes_rng(transform)
        self._specs = dict(specs)

    def example(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Return the example of a sample. Raises SampleError if it is no dict."""
        given = (sample, rng) if self._takes_rng else (sample,)
        example = self._transform(*given)
        if not isinstance(example, Mapping):
            raise SampleError(
                f"it returned {type(example).__name__}: must be a dict with the inputs of the model"
            )
        return {
            name: _as_torch_takes_it(value) for name, value in example.items() if name != "__key__"
        }


class _TransformExample(_Examples):
    """Function of a sample for a Loader: inputs of the user's transform, and "target NAME".

    A label that the transform returns is the target. Other labels are read as the shards have them.
    """

    def __init__(
        self,
        transform: Transform,
        specs: Mapping[str, InputSpec],
        label_names: Mapping[str, Head],
        readers: Mapping[str, Field],
    ) -> None:
        super().__init__(transform, specs)
        self._label_names, self._readers = dict(label_names), dict(readers)

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        example = self.example(sample, rng)
        found: dict[str, Any] = {}
        targets: dict[str, Any] = {}
        for name, value in example.items():
            head = self._label_names.get(name)
            if head is None:
                found[name] = value
            elif f"target {head.name}" in targets:
                raise SampleError(f"it returned the label {head.name} under two names: give one")
            else:
                target = np.asarray(head.checked_target(value))
                targets[f"target {head.name}"] = torch.as_tensor(target)
        inputs = _checked_inputs(found, self._specs)
        for name, reader in self._readers.items():
            if f"target {name}" not in targets:
                value = read_sample(reader, sample, np.zeros(DRAWS))
                targets[f"target {name}"] = torch.as_tensor(value)
        for head in self._label_names.values():
            if f"target {head.name}" not in targets:
                raise SampleError(f"the transform returned no {head.name}: masks must follow it")
            if isinstance(head, MaskHead):
                _check_size(targets[f"target {head.name}"], inputs)
        return {**inputs, **targets}


class _TransformInputs(_Examples):
    """Function of a sample for a Loader: inputs of the user's transform, and bytes of fields."""

    def __init__(
        self,
        transform: Transform,
        specs: Mapping[str, InputSpec],
        left_out: Collection[str],
        fields: Mapping[str, tuple[str, ...]],
    ) -> None:
        super().__init__(transform, specs)
        self._left_out, self._fields = tuple(left_out), dict(fields)

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        example = self.example(sample, rng)
        found = {name: value for name, value in example.items() if name not in self._left_out}
        inputs = _checked_inputs(found, self._specs)
        own = {
            name: next((sample[field] for field in fields if field in sample), b"")
            for name, fields in self._fields.items()
        }
        return {**inputs, **own}


def _as_torch_takes_it(value: Any) -> Any:
    """Return a value; a copy of an array that is read-only, mirrored or of another byte order."""
    if not isinstance(value, np.ndarray):
        return value
    is_view = not value.flags.writeable or min(value.strides, default=0) < 0
    if is_view or not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="), order="C")
    return value


def _checked_inputs(found: Mapping[str, Any], specs: Mapping[str, InputSpec]) -> dict[str, Tensor]:
    """Return the inputs of a sample. Raises SampleError if they differ from those of the first.

    Other types would be normalized otherwise: uint8 as pixels, int64 as class numbers. Only other
    numbers for a float are converted. specs: empty if they are not known yet.
    """
    values = {name: _tensor(name, value) for name, value in found.items()}
    if not specs:
        return values
    if set(values) != set(specs):
        raise SampleError(f"it returned the inputs {sorted(found)}: must be {sorted(specs)}")
    for name, value in values.items():
        spec, given = specs[name], _spec(value)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        is_converted = dtype.is_floating_point and given.dtype != "uint8"
        if given.shape != spec.shape or not (given.dtype == spec.dtype or is_converted):
            raise SampleError(f"it returned {name} as {given.kind}: must be {spec.kind}")
        values[name] = value.to(dtype)
    return values


def _tensor(name: str, value: Any) -> Tensor:
    """Return an input as a tensor. Raises SampleError for other values than numbers."""
    if isinstance(value, (Tensor, np.ndarray, np.generic, int, float)):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            return torch.as_tensor(np.asarray(value) if isinstance(value, np.generic) else value)
    kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise SampleError(
        f"it returned {name} as {kind}: must be numbers, in an array, a tensor or alone. "
        f"Leave other values out"
    )


def _check_size(mask: Tensor, inputs: Mapping[str, Tensor]) -> None:
    """Raise SampleError for a mask of another size than the image."""
    specs = {name: _spec(value) for name, value in inputs.items()}
    size = ModelInputs(specs).image_shape[1:] if specs else mask.shape
    if tuple(mask.shape) != tuple(size):
        raise SampleError(
            f"it returned a mask {list(mask.shape)} and an image {list(size)}: "
            f"both must have one height and width"
        )


def _target_reader(head: Head, index: Index, title: str) -> Field:
    """Return the field that reads a target from the bytes of a sample."""
    reader = with_classes(head.field(), index)
    if isinstance(reader, LabelField) and reader.is_joined:
        raise UsageError(
            f"{title}= takes sets whose label {head.name!r} has one numbering of classes, and these "
            f"differ. Pack them together, or give fields=."
        )
    return reader
