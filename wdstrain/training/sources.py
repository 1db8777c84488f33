"""Where the inputs of a model come from: fields, a function of whole samples, or images by options.

A source gives the options of a Loader for training and validation, those for predictions, whose
batches hold the bytes of targets, and the inputs of a single file. A function is that of
`wt.Loader`: it takes a sample, or (sample, rng), and returns a dict. An entry that has the name of a
label is a target; a label that it leaves out is read from the sample.
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
from wdstrain.decode.fields import Example, Field, Image, NumpyArray, image
from wdstrain.decode.labels import LabelField, with_classes
from wdstrain.decode.masks import Mask
from wdstrain.decode.task import reason_of
from wdstrain.decode.transforms import DRAWS
from wdstrain.errors import SampleError, UsageError
from wdstrain.loader.options import takes_rng
from wdstrain.shards.index import Index
from wdstrain.training.arguments import TrainArguments
from wdstrain.training.config import OPTIONS, Config
from wdstrain.training.data import TrainData, few_batches
from wdstrain.training.heads import Head, MaskHead
from wdstrain.training.inputs import (
    InputSpec,
    ModelInputs,
    augments_batches,
    check_input_names,
)
from wdstrain.training.tasks import Task
from wdstrain.webdataset.to_example import read_sample

ERROR = "true error"  # entry of batches for predictions: why a row has no inputs

_COMPARED_EPOCHS = 4  # that tell whether inputs are augmented
_PLAIN_FIELDS = (Image, NumpyArray, LabelField, Mask)  # without randomness of their own
_IMAGE_OPTIONS = ("augment", "scale", "ratio", "crop_pct")  # of the default input

Encoded = Mapping[str, tuple[str, ...]]  # tar fields, by name in the batch; the first is taken


# --- fields ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldSource:
    """Inputs that fields read, by name in the batch. title: the argument that gives them."""

    fields: Mapping[str, Field]
    title: str = "fields"

    @property
    def specs(self) -> dict[str, InputSpec]:
        return {n: InputSpec.of(f, _example(n, f, self.title)) for n, f in self.fields.items()}

    @property
    def is_plain(self) -> bool:
        """Whether no field has randomness of its own."""
        return all(type(field) in _PLAIN_FIELDS for field in self.fields.values())

    def targets(self, task: Task) -> dict[str, Field]:
        """Return the fields of the targets. Masks follow the first image."""
        images = (field for field in self.fields.values() if isinstance(field, Image))
        return task.target_fields(next(images, None))

    def loader_options(self, task: Task, index: Index) -> dict[str, Any]:
        """Return the options of a Loader whose batches hold inputs and targets."""
        return {"fields": {**self.fields, **self.targets(task)}}

    def predict_options(self, encoded: Encoded) -> dict[str, Any]:
        """Return the options of a Loader whose batches hold inputs and the bytes of some fields.

        A sample without the fields has an empty value. Samples without inputs are bad, or have an
        entry ERROR.
        """
        others = next(iter(self.fields.values())).names
        read = {name: _FieldBytes(own, others) for name, own in encoded.items()}
        return {"fields": {**self.fields, **read}, "on_error": "mark"}

    def read_file(self, key: str, extension: str, data: bytes) -> dict[str, Tensor]:
        """Return the inputs of a file, by name: values as a batch has them."""
        if len(self.fields) > 1:
            raise UsageError(
                f"image files give one input, and the model has {len(self.fields)}: "
                f"{', '.join(self.fields)}. Convert the files to shards."
            )
        ((name, reader),) = self.fields.items()
        example = _example(name, reader, self.title)
        out = np.zeros(example.shape, example.dtype)
        reader.read(extension, memoryview(data), out, np.full(DRAWS, 0.5))
        value = torch.from_numpy(out)
        return {name: value.permute(2, 0, 1) if example.channels_last else value}


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


def _field_source(
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
        name: _numbered(own, index, known.get(name))
        for name, own in fields.items()
        if name not in heads
    }
    check_input_names(inputs, heads, title)
    for name, own in inputs.items():
        _example(name, own, title)
    source = FieldSource(inputs, title)
    targets = source.targets(task)
    for name in heads.keys() & fields.keys():
        given = fields[name] if index is None else with_classes(fields[name], index)
        _check_label_field(f"{title}[{name!r}]", given, targets[f"target {heads[name].name}"])
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


def _check_label_field(title: str, given: Field, learned: Field) -> None:
    """Raise UsageError if a given field of a label is not the one that the task learns."""
    names = ("names", "entry", "kind", "size", "augment")
    is_same = type(given) is type(learned) and all(
        getattr(given, name, None) == getattr(learned, name, None) for name in names
    )
    classes = getattr(given, "classes", None) or None
    if not is_same or classes not in (None, getattr(learned, "classes", None)):
        raise UsageError(
            f"{title} reads another value than the label that is learned: {learned}. Leave the "
            f"entry out: the label is read as the shards declare it."
        )


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

    label_names: entries of its examples that are targets, with their heads.
    """

    transform: Transform
    specs: Mapping[str, InputSpec]
    label_names: Mapping[str, Head]
    title: str = "transform"
    is_plain = False  # it may draw random numbers

    def __post_init__(self) -> None:
        if not callable(self.transform):
            raise UsageError(
                f"{self.title}={self.transform!r}: must be a function of a sample, or of "
                f"(sample, rng)."
            )

    def tried(self, task: Task, index: Index, config: Config, *, reads_labels: bool) -> Any:
        """Return the source with the inputs of a few samples. reads_labels: they are tried too."""
        options = self.loader_options(task, index)
        if not reads_labels:
            options = {"transform": self._function()}
        batch = next(few_batches(index, options, config, epochs=1))
        left_out = ["__key__", "__rng__", *(f"target {head.name}" for head in task.heads)]
        inputs = {name: value for name, value in batch.items() if name not in left_out}
        check_input_names(inputs, self.label_names, self.title)
        return replace(self, specs={name: _spec(value[0]) for name, value in inputs.items()})

    def loader_options(self, task: Task, index: Index) -> dict[str, Any]:
        readers = {
            head.name: _target_reader(head, index, self.title)
            for head in task.heads
            if not isinstance(head, MaskHead)  # its crop is the transform's
        }
        return {"transform": self._function(readers)}

    def predict_options(self, encoded: Encoded) -> dict[str, Any]:
        return {"transform": self._function(None, encoded).or_error, "on_error": "replace"}

    def read_file(self, key: str, extension: str, data: bytes) -> dict[str, Tensor]:
        rng = np.random.Generator(np.random.Philox(0))
        return self._function()({"__key__": key, extension: data}, rng)

    def _function(
        self, readers: Mapping[str, Field] | None = None, encoded: Encoded | None = None
    ) -> _Function:
        own = self.transform, takes_rng(self.transform), self.specs, self.label_names
        return _Function(*own, readers, encoded or {})


def _spec(value: Tensor) -> InputSpec:
    """Return the input that a transform gives as this value of one sample."""
    return InputSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."), "transform")


@dataclass(frozen=True)
class _Function:
    """Function of a sample for a Loader: inputs of the user's transform, and targets or bytes.

    Pickled for worker processes. specs: of the inputs; empty if they are not known yet. readers: of
    the labels that the transform leaves out; None: batches have no targets.
    """

    transform: Transform
    takes_rng: bool
    specs: Mapping[str, InputSpec]
    label_names: Mapping[str, Head]
    readers: Mapping[str, Field] | None
    encoded: Encoded

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Return the example of a sample. Raises SampleError if it is none."""
        given = (sample, rng) if self.takes_rng else (sample,)
        example = self.transform(*given)
        if not isinstance(example, Mapping):
            raise SampleError(
                f"it returned {type(example).__name__}: must be a dict with the inputs of the model"
            )
        values = {n: _as_torch_takes_it(v) for n, v in example.items() if n != "__key__"}
        inputs = {n: value for n, value in values.items() if n not in self.label_names}
        inputs = _checked_inputs(inputs, self.specs)
        targets = {} if self.readers is None else self._targets(values, sample, inputs)
        return {**inputs, **targets, **self._bytes(sample)}

    def or_error(self, sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Return the example of a sample, and an entry ERROR; with inputs of zeros if it has none."""
        try:
            return {**self(sample, rng), ERROR: ""}
        except Exception as error:  # the user's function may raise anything
            blank = ModelInputs(self.specs).blank(1, torch.device("cpu"))
            inputs = {name: value[0] for name, value in blank.items()}
            reason = f"transform raised {type(error).__name__}: {reason_of(error)}"
            return {**inputs, **self._bytes(sample), ERROR: reason}

    def _bytes(self, sample: Mapping[str, Any]) -> dict[str, bytes]:
        return {
            name: next((sample[field] for field in fields if field in sample), b"")
            for name, fields in self.encoded.items()
        }

    def _targets(
        self, values: Mapping[str, Any], sample: Mapping[str, Any], inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return "target NAME" of each label: as the transform has it, else as the shards do."""
        targets: dict[str, Tensor] = {}
        for name, head in self.label_names.items():
            if name in values and f"target {head.name}" in targets:
                raise SampleError(f"it returned the label {head.name} under two names: give one")
            if name in values:
                own = np.asarray(head.checked_target(values[name]))
                targets[f"target {head.name}"] = torch.as_tensor(own)
        for head in self.label_names.values():
            target = targets.get(f"target {head.name}")
            if target is None and isinstance(head, MaskHead):
                raise SampleError(f"the transform returned no {head.name}: masks must follow it")
            if target is None:
                assert self.readers is not None
                value = read_sample(self.readers[head.name], sample, np.zeros(DRAWS))
                targets[f"target {head.name}"] = torch.as_tensor(value)
            elif isinstance(head, MaskHead):
                _check_size(target, inputs)
        return targets


def _as_torch_takes_it(value: Any) -> Any:
    """Return a value; a copy of an array that is read-only, mirrored or of another byte order."""
    if not isinstance(value, np.ndarray):
        return value
    is_view = not value.flags.writeable or min(value.strides, default=0) < 0
    if is_view or not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="), order="C")
    return value


def _checked_inputs(given: Mapping[str, Any], specs: Mapping[str, InputSpec]) -> dict[str, Tensor]:
    """Return the inputs of a sample. Raises SampleError if they differ from those of the first.

    Other types would be normalized otherwise: uint8 as pixels, int64 as class numbers. Only other
    numbers for a float are converted. specs: empty if they are not known yet.
    """
    values = {name: _tensor(name, value) for name, value in given.items()}
    if not specs:
        return values
    if set(values) != set(specs):
        raise SampleError(f"it returned the inputs {sorted(given)}: must be {sorted(specs)}")
    for name, value in values.items():
        spec, own = specs[name], _spec(value)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        is_converted = dtype.is_floating_point and own.dtype != "uint8"
        if own.shape != spec.shape or not (own.dtype == spec.dtype or is_converted):
            raise SampleError(f"it returned {name} as {own.kind}: must be {spec.kind}")
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


# --- the source of a run --------------------------------------------------------------------------

InputSource = FieldSource | TransformSource


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

    index: of samples that are tried; None for image files. prefix: "val_" for those of validation,
    in errors. known: inputs of training. reads_labels: the samples have labels, which are tried.
    Raises UsageError for fields that are no inputs, and for labels that are not those of the task.
    """
    if fields is not None and transform is not None:
        raise UsageError(
            f"{prefix}fields= and {prefix}transform= were both given. Give one of them."
        )
    if fields is not None:
        return _field_source(fields, task, f"{prefix}fields", index, known or {})
    if transform is None:
        return None
    title = f"{prefix}transform"
    if index is None:
        return TransformSource(transform, known or {}, task.label_names, title)
    source = TransformSource(transform, {}, task.label_names, title)
    try:
        tried: TransformSource = source.tried(task, index, config, reads_labels=reads_labels)
        return tried
    except SampleError:
        if reads_labels:
            raise
        return replace(source, specs=known or {})  # each sample has a row with its error


def _default_source(config: Config) -> FieldSource:
    """Return the source of images uint8[b, 3, image_size, image_size]."""
    options = {name: getattr(config, name) for name in _IMAGE_OPTIONS}
    return FieldSource({"image": image(size=config.image_shape, **options)})


def _check_source(source: InputSource, config: Config, *, is_given: bool) -> None:
    """Raise UsageError for options that do not go with the inputs of training.

    is_given: the user gave the source, so options of the default input have no effect.
    """
    specs, maker = source.specs, "wt.image" if source.title == "fields" else "the transform"
    if is_given:
        for name in _IMAGE_OPTIONS:
            if getattr(config, name) != OPTIONS[name].default:
                raise UsageError(f"{name} has no effect with {source.title}=. Give it to {maker}.")
        shapes = [spec.shape[1:] for spec in specs.values() if len(spec.shape) == 3]
        sizes = {*map(max, shapes), *("x".join(map(str, shape)) for shape in shapes)}
        if config.image_size not in {OPTIONS["image_size"].default, *sizes}:
            raise UsageError(
                f"image_size={config.image_size} has no effect with {source.title}=. Leave it out, "
                f"and give {maker} the size."
            )
    given = f"{source.title}= gives " + ", ".join(spec.kind for spec in specs.values())
    if any(getattr(torch, spec.dtype).is_complex for spec in specs.values()):
        raise UsageError(f"{given}: must be real numbers. Give two channels for complex numbers.")
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
    train = given or _default_source(config)
    _check_source(train, config, is_given=given is not None)
    given_val = given_source(
        arguments.val_fields,
        arguments.val_transform,
        task,
        val,
        config,
        prefix="val_",
        known=train.specs,
    )
    source = given_val or _without_randomness(train)
    if given_val is not None:
        _check_validation(train, given_val)
    for own, index in ((given, data.train), (given_val, val)):
        if isinstance(own, FieldSource):  # a transform was tried; raises SampleError
            next(few_batches(index, own.loader_options(task, index), config, epochs=1))
    if data.val is not None and given_val is None and not source.is_plain:
        _check_no_randomness(data.val, source, task, config)
    return train, source


# --- validation -----------------------------------------------------------------------------------


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


def _check_validation(train: InputSource, given: InputSource) -> None:
    """Raise UsageError for a given source of validation that augments, or that gives other inputs."""
    if isinstance(given, FieldSource) and _without_randomness(given) != given:
        raise UsageError(
            f"{given.title}= augments images. Validation needs the same images every time."
        )
    check_same_inputs(train.specs, given, "training has", sizes=False)


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


def _check_no_randomness(index: Index, source: InputSource, task: Task, config: Config) -> None:
    """Raise UsageError for inputs that differ between epochs. Reads a few samples a few times."""
    options = source.loader_options(task, index)
    first, *others = few_batches(index, options, config, epochs=_COMPARED_EPOCHS)
    for name in source.specs:
        if not all(torch.equal(_bits(batch[name]), _bits(first[name])) for batch in others):
            raise UsageError(
                f"{source.title}= gives other inputs in each epoch, and validation needs the same "
                f"ones. Give one without augmentation: "
                f"val_{source.title.removeprefix('val_')}=."
            )


def _bits(value: Tensor) -> Tensor:
    """Return a tensor whose numbers may be compared also where they are NaN."""
    return value.nan_to_num(nan=1e30) if value.is_floating_point() else value
