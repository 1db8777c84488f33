"""Inputs that a function of the user's makes of whole samples.

The function is that of `wt.Loader`: it takes a sample, or (sample, rng), and returns a dict. An
entry that has the name of a label is a target; a label that it leaves out is read from the sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wdstrain.decode.fields import Field
from wdstrain.decode.label_fields import Label, with_classes
from wdstrain.decode.task import Transform
from wdstrain.decode.transforms import DRAWS
from wdstrain.errors import SampleError, UsageError
from wdstrain.loader.options import takes_rng
from wdstrain.loader.to_example import read_sample
from wdstrain.shards.index import Index
from wdstrain.training.config import Config
from wdstrain.training.data import few_batches
from wdstrain.training.heads import Head
from wdstrain.training.inputs import InputSpec, check_input_names
from wdstrain.training.mask_head import MaskHead
from wdstrain.training.tasks import Task


@dataclass(frozen=True)
class TransformSource:
    """Inputs that a function of the user's returns for a sample; see `wt.Loader`.

    label_names: entries of its examples that are targets, with their heads.
    """

    transform: Transform
    specs: Mapping[str, InputSpec]
    label_names: Mapping[str, Head]
    title: str

    @classmethod
    def of(
        cls, transform: Transform, task: Task, index: Index, config: Config, title: str
    ) -> TransformSource:
        """Return the source after a look at the examples of a few samples."""
        if not callable(transform):
            raise UsageError(
                f"{title}={transform!r}: must be a function of a sample, or of (sample, rng)."
            )
        names = task.label_names
        source = cls(transform, {}, names, title)
        batch = next(few_batches(index, source.loader_options(task, index), config, epochs=1))
        left_out = ["__key__", *(f"target {head.name}" for head in task.heads)]
        inputs = {name: value for name, value in batch.items() if name not in left_out}
        check_input_names(inputs, names, title)
        return replace(source, specs={n: _spec(n, value, title) for n, value in inputs.items()})

    def loader_options(self, task: Task, index: Index) -> dict[str, Any]:
        readers = {
            head.name: _target_reader(head, index, self.title)
            for head in task.heads
            if not isinstance(head, MaskHead)  # its crop is the transform's
        }
        function = TransformExample(self.transform, tuple(self.specs), self.label_names, readers)
        return {"transform": function}

    def bytes_options(self, fields: Mapping[str, str]) -> dict[str, Any]:
        function = _TransformBytes(
            self.transform, tuple(self.specs), tuple(self.label_names), fields
        )
        return {"transform": function, "on_error": "replace"}

    def read_file(self, key: str, extension: str, data: bytes) -> Mapping[str, Any]:
        sample = {"__key__": key, extension: data}
        rng = np.random.Generator(np.random.Philox(0))
        example = _Examples(self.transform).example(sample, rng)
        found = {}
        for name, spec in self.specs.items():
            if name not in example:
                raise SampleError(f"the transform returned no {name}")
            found[name] = torch.as_tensor(example[name])
            if tuple(found[name].shape) != spec.shape:
                raise SampleError(
                    f"the transform returned {name} {list(found[name].shape)}: must be {spec.kind}"
                )
        return found


def _spec(name: str, value: Any, title: str) -> InputSpec:
    """Return an input that a transform gives. value: of a batch."""
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{title}= returns {name} as {type(value).__name__}: must be numbers, in an array, a "
            f"tensor or alone. Leave other values out."
        )
    return InputSpec(tuple(value.shape[1:]), str(value.dtype).removeprefix("torch."), "transform")


# --- examples of a transform ----------------------------------------------------------------------


class _Examples:
    """Calls the user's transform. Pickled for worker processes."""

    def __init__(self, transform: Transform) -> None:
        self._transform, self._takes_rng = transform, takes_rng(transform)

    def example(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Return the example of a sample. Raises SampleError if it is no dict."""
        given = (sample, rng) if self._takes_rng else (sample,)
        example = self._transform(*given)
        if not isinstance(example, Mapping):
            raise SampleError(
                f"it returned {type(example).__name__}: must be a dict with the inputs of the model"
            )
        return {name: _as_torch_takes_it(value) for name, value in example.items()}


class TransformExample(_Examples):
    """Function of a sample for a Loader: inputs of the user's transform, and "target NAME".

    A label that the transform returns is the target. Other labels are read as the shards have them.
    """

    def __init__(
        self,
        transform: Transform,
        inputs: Sequence[str],
        label_names: Mapping[str, Head],
        readers: Mapping[str, Field],
    ) -> None:
        super().__init__(transform)
        self._inputs = inputs
        self._label_names, self._readers = dict(label_names), dict(readers)

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        example = self.example(sample, rng)
        found: dict[str, Any] = {}
        targets: dict[str, Any] = {}
        for name, value in example.items():
            head = self._label_names.get(name)
            if head is not None:
                targets[f"target {head.name}"] = head.checked_target(value)
            elif name != "__key__":
                found[name] = value
        _check_names(found, self._inputs)
        for name, reader in self._readers.items():
            if f"target {name}" not in targets:
                targets[f"target {name}"] = read_sample(reader, sample, np.zeros(DRAWS))
        for head in self._label_names.values():
            if f"target {head.name}" not in targets:
                raise SampleError(f"the transform returned no {head.name}: masks must follow it")
        return {**found, **targets}


class _TransformBytes(_Examples):
    """Function of a sample for a Loader: inputs of the user's transform, and bytes of fields."""

    def __init__(
        self,
        transform: Transform,
        inputs: Sequence[str],
        left_out: Sequence[str],
        fields: Mapping[str, str],
    ) -> None:
        super().__init__(transform)
        self._inputs = inputs
        self._left_out, self._fields = (*left_out, "__key__"), dict(fields)

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        example = self.example(sample, rng)
        found = {name: value for name, value in example.items() if name not in self._left_out}
        _check_names(found, self._inputs)
        return {**found, **{name: sample.get(field, b"") for name, field in self._fields.items()}}


def _as_torch_takes_it(value: Any) -> Any:
    """Return a value; a copy of an array that is read-only or mirrored, which torch refuses."""
    is_view = isinstance(value, np.ndarray) and not (
        value.flags.writeable and min(value.strides, default=0) >= 0
    )
    return np.array(value) if is_view else value


def _check_names(found: Mapping[str, Any], inputs: Sequence[str]) -> None:
    """Raise SampleError for another set of inputs than the first samples have."""
    if inputs and set(found) != set(inputs):
        raise SampleError(f"it returned the inputs {sorted(found)}: must be {sorted(inputs)}")


def _target_reader(head: Head, index: Index, title: str) -> Field:
    """Return the field that reads a target from the bytes of a sample."""
    reader = with_classes(head.field(), index)
    if isinstance(reader, Label) and reader.parts:
        raise UsageError(
            f"{title}= takes sets whose label {head.name!r} has one numbering of classes, and these "
            f"differ. Pack them together, or give fields=."
        )
    return reader
