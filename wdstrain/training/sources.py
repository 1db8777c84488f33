"""Where the inputs of a model come from: fields, a function of whole samples, or images by options.

A source gives the options of a Loader for training and validation, those for predictions, whose
batches have no targets, and the inputs of a single file. A function is that of `wt.Loader`: it takes
a sample, or (sample, rng), and returns a dict. An entry that has the name of a label is a target; a
label that it leaves out is read from the sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wdstrain.decode.decoder import Transform
from wdstrain.decode.fields import Example, Field, Image, image
from wdstrain.decode.labels import LabelField, with_classes
from wdstrain.decode.masks import Mask
from wdstrain.decode.task import reason_of
from wdstrain.decode.transforms import DRAWS
from wdstrain.errors import SampleError, UsageError
from wdstrain.loader.options import takes_rng
from wdstrain.runtime.cached import cached_property
from wdstrain.shards.index import Index
from wdstrain.training.arguments import TrainArguments
from wdstrain.training.config import OPTIONS, Config
from wdstrain.training.data import few_samples
from wdstrain.training.heads import Head, MaskHead
from wdstrain.training.inputs import InputSpec, ModelInputs, augments_batches, check_input_names
from wdstrain.training.tasks import Task
from wdstrain.webdataset.to_example import read_sample

ERROR = "true error"  # entry of batches for predictions: why a row has no inputs

_COMPARED_EPOCHS = 4  # that tell whether inputs are augmented
_IMAGE_OPTIONS = ("augment", "scale", "ratio", "crop_pct")  # of the default input


# --- fields ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldSource:
    """Inputs that fields read, by name in the batch. title: the argument that gives them."""

    fields: Mapping[str, Field]
    title: str = "fields"

    @property
    def specs(self) -> dict[str, InputSpec]:
        return {n: InputSpec.of(f, _example(n, f, self.title)) for n, f in self.fields.items()}

    def tried(self, task: Task, index: Index, config: Config) -> FieldSource:
        """Return the source after a few samples were read. Raises SampleError if all are bad."""
        few_samples(index, self.loader_options(task, index), config)
        return self

    def targets(self, task: Task) -> dict[str, Field]:
        """Return the fields of the targets. Masks follow the first image."""
        images = (field for field in self.fields.values() if isinstance(field, Image))
        return task.target_fields(next(images, None))

    def loader_options(self, task: Task, index: Index) -> dict[str, Any]:
        """Return the options of a Loader whose batches hold inputs and targets."""
        return {"fields": {**self.fields, **self.targets(task)}}

    def predict_options(self, more: Mapping[str, Field]) -> dict[str, Any]:
        """Return the options of a Loader whose batches hold inputs and the values of more fields."""
        return {"fields": {**self.fields, **more}, "on_error": "mark"}

    def read_file(self, key: str, extension: str, data: bytes) -> dict[str, Tensor]:
        """Return the inputs of a file, by name: values as a batch has them."""
        ((name, reader),) = self.fields.items()
        example = _example(name, reader, self.title)
        out = np.zeros(example.shape, example.dtype)
        reader.read(extension, memoryview(data), out, np.full(DRAWS, 0.5))
        value = torch.from_numpy(out)
        return {name: value.permute(2, 0, 1) if example.channels_last else value}


def _field_source(
    fields: Any, task: Task, title: str, index: Index | None, known: Mapping[str, InputSpec]
) -> FieldSource:
    """Return the source of those fields that are not named as a label.

    Classes as inputs have the numbers of `known`, the inputs of training, else those of the index.
    """
    if not isinstance(fields, Mapping) or not all(isinstance(f, Field) for f in fields.values()):
        raise UsageError(
            f'{title}= must be a dict of fields by name, such as {{"image": wt.image(size=32)}}.'
        )
    heads = task.label_names
    inputs = {n: _numbered(f, index, known.get(n)) for n, f in fields.items() if n not in heads}
    check_input_names(inputs, heads, title)
    for name, own in inputs.items():
        _example(name, own, title)
    source = FieldSource(inputs, title)
    targets = source.targets(task)
    for name in heads.keys() & fields.keys():
        given = fields[name] if index is None else with_classes(fields[name], index)
        learned = targets[f"target {heads[name].name}"]
        if _reads(given, learned) != _reads(learned, learned):
            raise UsageError(
                f"{title}[{name!r}] reads another value than the label that is learned: {learned}. "
                f"Leave the entry out: the label is read as the shards declare it."
            )
    return source


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


def _example(name: str, own: Field, title: str) -> Example:
    """Return the example of an input. Raises UsageError for one without a fixed size."""
    if own.example is None:
        raise UsageError(
            f"{title}= has an input without a fixed size, {name}, which forms no batch. "
            f"Give it a size."
        )
    return own.example


# --- a function of samples ------------------------------------------------------------------------


@dataclass(frozen=True)
class TransformSource:
    """Inputs that a function of the user's returns for a sample; see `wt.Loader`.

    It is itself a transform for a Loader, pickled for worker processes. specs: of the inputs; empty
    if they are not known yet. label_names: entries of its examples that are targets, with their
    heads. readers: of the labels that the function leaves out; None: batches have no targets.
    """

    transform: Transform
    specs: Mapping[str, InputSpec]
    label_names: Mapping[str, Head]
    title: str = "transform"
    readers: Mapping[str, Field] | None = None

    def __post_init__(self) -> None:
        if not callable(self.transform):
            raise UsageError(
                f"{self.title}={self.transform!r}: must be a function of a sample, or of "
                f"(sample, rng)."
            )

    @cached_property
    def _takes_rng(self) -> bool:
        return takes_rng(self.transform)

    def tried(self, task: Task, index: Index, config: Config) -> TransformSource:
        """Return the source with the inputs of a few samples. Raises SampleError if all are bad."""
        options = replace(self, specs={}).loader_options(task, index)
        batch = few_samples(index, options, config)
        left_out = ["__key__", "__rng__", *(f"target {head.name}" for head in task.heads)]
        inputs = {name: value for name, value in batch.items() if name not in left_out}
        check_input_names(inputs, self.label_names, self.title)
        specs = {name: _spec(value[0]) for name, value in inputs.items()}
        mask, size = task.targets(batch)[0], ModelInputs(specs).image_shape[1:]
        if task.is_dense and mask.shape[1:] != size:
            raise UsageError(
                f"{self.title}= returned a mask {list(mask.shape[1:])} and an image {list(size)}: "
                f"both must have one height and width."
            )
        return replace(self, specs=specs)

    def loader_options(self, task: Task, index: Index) -> dict[str, Any]:
        readers = {
            head.name: with_classes(head.field(), index)
            for head in task.heads
            if not isinstance(head, MaskHead)  # its crop is the transform's
        }
        return {"transform": replace(self, readers=readers)}

    def predict_options(self, more: Mapping[str, Field]) -> dict[str, Any]:
        """Return the options of a Loader whose batches hold inputs and an entry ERROR."""
        return {"transform": self.or_error}

    def read_file(self, key: str, extension: str, data: bytes) -> dict[str, Tensor]:
        rng = np.random.Generator(np.random.Philox(0))
        return self({"__key__": key, extension: data}, rng)

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Return the example of a sample. Raises SampleError if it is none."""
        example = self.transform(*((sample, rng) if self._takes_rng else (sample,)))
        if not isinstance(example, Mapping):
            raise SampleError(
                f"it returned {type(example).__name__}: must be a dict with the inputs of the model"
            )
        left_out = ("__key__", *self.label_names)
        inputs = _inputs({n: v for n, v in example.items() if n not in left_out}, self.specs)
        targets = {} if self.readers is None else self._targets(example, sample, self.readers)
        return {**inputs, **targets}

    def or_error(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Return the example of a sample, and an entry ERROR; with inputs of zeros if it has none."""
        try:
            return {**self(sample, rng), ERROR: ""}
        except Exception as error:  # the user's function may raise anything
            blank = ModelInputs(self.specs).blank(1, torch.device("cpu"))
            inputs = {name: value[0] for name, value in blank.items()}
            return {**inputs, ERROR: f"transform raised {type(error).__name__}: {reason_of(error)}"}

    def _targets(
        self, example: Mapping[str, Any], sample: Mapping[str, Any], readers: Mapping[str, Field]
    ) -> dict[str, Tensor]:
        """Return "target NAME" of each label: as the transform has it, else as the shards do."""
        targets: dict[str, Tensor] = {}
        for name, head in self.label_names.items():
            target = f"target {head.name}"
            if name in example and target in targets:
                raise SampleError(f"it returned the label {head.name} under two names: give one")
            if name in example:
                targets[target] = torch.as_tensor(np.asarray(head.checked_target(example[name])))
        for head in self.label_names.values():
            if f"target {head.name}" in targets:
                continue
            if isinstance(head, MaskHead):
                raise SampleError(f"the transform returned no {head.name}: masks must follow it")
            value = read_sample(readers[head.name], sample, np.zeros(DRAWS))
            targets[f"target {head.name}"] = torch.as_tensor(value)
        return targets


def _spec(value: Tensor) -> InputSpec:
    """Return the input that a transform gives as this value of one sample."""
    return InputSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."), "transform")


def _inputs(given: Mapping[str, Any], specs: Mapping[str, InputSpec]) -> dict[str, Tensor]:
    """Return the inputs of a sample. Raises SampleError if they differ from those of the first.

    Other types would be normalized otherwise: uint8 as pixels, int64 as class numbers. Only other
    numbers for a float are converted. specs: empty if they are not known yet.
    """
    values = {name: _tensor(name, value) for name, value in given.items()}
    if specs and set(values) != set(specs):
        raise SampleError(f"it returned the inputs {sorted(given)}: must be {sorted(specs)}")
    for name, spec in specs.items():
        own = _spec(values[name])
        dtype: torch.dtype = getattr(torch, spec.dtype)
        is_converted = dtype.is_floating_point and own.dtype != "uint8"
        if own.shape != spec.shape or not (own.dtype == spec.dtype or is_converted):
            raise SampleError(f"it returned {name} as {own.kind}: must be {spec.kind}")
        values[name] = values[name].to(dtype)
    return values


def _tensor(name: str, value: Any) -> Tensor:
    """Return an input as a tensor. Raises SampleError for other values than numbers."""
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if isinstance(value, (np.ndarray, np.generic)):
            # torch takes no array that is read-only, mirrored or of another byte order
            value = np.array(value, value.dtype.newbyteorder("="), order="C")
        return torch.as_tensor(value)
    raise SampleError(f"it returned {name} as {type(value).__name__}: must be numbers")


# --- the source of a run --------------------------------------------------------------------------

InputSource = FieldSource | TransformSource


def given_source(
    fields: Mapping[str, Field] | None,
    transform: Transform | None,
    task: Task,
    index: Index | None,
    *,
    prefix: str = "",
    known: Mapping[str, InputSpec] | None = None,
) -> InputSource | None:
    """Return the source that `fields` or `transform` gives; None if neither was given.

    index: None for image files. prefix: "val_" for those of validation, in errors. known: inputs of
    training. Raises UsageError for fields that are no inputs, and for other labels than the task's.
    """
    if fields is not None and transform is not None:
        raise UsageError(
            f"{prefix}fields= and {prefix}transform= were both given. Give one of them."
        )
    if fields is not None:
        return _field_source(fields, task, f"{prefix}fields", index, known or {})
    if transform is None:
        return None
    return TransformSource(transform, known or {}, task.label_names, f"{prefix}transform")


def run_sources(
    arguments: TrainArguments, train_set: Index, val_set: Index | None, task: Task, config: Config
) -> tuple[InputSource, InputSource]:
    """Return the sources of the inputs for training and validation, checked against the options."""
    given = given_source(arguments.fields, arguments.transform, task, train_set)
    if given is None:
        options = {name: getattr(config, name) for name in _IMAGE_OPTIONS}
        train: InputSource = FieldSource({"image": image(size=config.image_shape, **options)})
    else:
        train = given.tried(task, train_set, config)
        _check_image_options(train, config)
    specs = train.specs
    if augments_batches(config) and (len(specs) > 1 or not next(iter(specs.values())).is_rgb):
        raise UsageError(
            f"{train.title}= gives {_listed(specs)}: mixup, cutmix, color_jitter and random_erasing "
            f"need a single input uint8[3, height, width]. Leave them out."
        )
    index = train_set if val_set is None else val_set
    own = arguments.val_fields, arguments.val_transform
    given_val = given_source(*own, task, index, prefix="val_", known=specs)
    if given_val is None:
        val = _without_randomness(train)
        if val_set is not None and given is not None:
            _check_no_randomness(val, val_set, task, config)
        return train, val
    if _without_randomness(given_val) != given_val:
        raise UsageError(
            f"{given_val.title}= augments images. Validation needs the same images every time."
        )
    check_same_inputs(specs, given_val, "training has", sizes=False)
    tried = given_val.tried(task, index, config)
    check_same_inputs(specs, tried, "training has", sizes=False)
    return train, tried


def _check_image_options(source: InputSource, config: Config) -> None:
    """Raise UsageError for options of the default input, in whose place the user gave a source."""
    shapes = [spec.shape[1:] for spec in source.specs.values() if len(spec.shape) == 3]
    sizes = {*map(max, shapes), *("x".join(map(str, shape)) for shape in shapes)}
    unused = {name: getattr(config, name) for name in _IMAGE_OPTIONS}
    if config.image_size not in sizes:
        unused["image_size"] = config.image_size
    for name, value in unused.items():
        if value != OPTIONS[name].default:
            raise UsageError(
                f"{name}={value} has no effect with {source.title}=. Leave it out, and let your "
                f"{source.title} do it."
            )


def _without_randomness(source: InputSource) -> InputSource:
    """Return the source without the augmentation of `wt.image`."""
    if not isinstance(source, FieldSource):
        return source
    plain = {
        name: replace(own, augment=own.augment.without_randomness())
        if isinstance(own, (Image, Mask)) and type(own) in (Image, Mask)
        else own
        for name, own in source.fields.items()
    }
    return replace(source, fields=plain)


def _check_no_randomness(source: InputSource, index: Index, task: Task, config: Config) -> None:
    """Raise UsageError for inputs that differ between epochs. Reads a few samples a few times."""
    options = source.loader_options(task, index)
    epochs = [few_samples(index, options, config, epoch) for epoch in range(_COMPARED_EPOCHS)]
    for name in source.specs:
        if len({batch[name].numpy().tobytes() for batch in epochs}) > 1:
            raise UsageError(
                f"{source.title}= gives other inputs in each epoch, and validation needs the same "
                f"ones. Give one without augmentation: val_{source.title}=."
            )


def check_same_inputs(
    wanted: Mapping[str, InputSpec], given: InputSource, owner: str, *, sizes: bool
) -> None:
    """Raise UsageError if a source gives other inputs. sizes: heights and widths count too."""

    def kinds(specs: Mapping[str, InputSpec]) -> dict[str, tuple[Any, ...]]:
        shapes = {n: s.shape if sizes else (len(s.shape), s.shape[:1]) for n, s in specs.items()}
        return {n: (spec.dtype, shapes[n], spec.classes) for n, spec in specs.items()}

    if kinds(wanted) != kinds(given.specs):
        raise UsageError(
            f"{given.title}= gives {_listed(given.specs)}, and {owner} {_listed(wanted)}. "
            f"Give the same inputs."
        )


def _listed(specs: Mapping[str, InputSpec]) -> str:
    return ", ".join(f"{name}: {spec.kind}" for name, spec in specs.items())
