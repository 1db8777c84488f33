"""Data of a run: train and validation sets, what is learned from them, and the loaders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from wdstrain.conversion.encode import check_mask, photo_of
from wdstrain.decode.codecs import IGNORED, decode_mask
from wdstrain.decode.fields import Field, Image, Mask, image
from wdstrain.errors import SampleError, UsageError, WdstrainError
from wdstrain.loader.batch_assembly import Batch
from wdstrain.loader.loader import Loader
from wdstrain.shards.columns import Column, as_label, counted
from wdstrain.shards.declare import (
    complete_column,
    even_part,
    read_columns,
    with_field_label,
    with_label,
)
from wdstrain.shards.formats import is_image
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.options import read_classes
from wdstrain.shards.resolve import open_shards
from wdstrain.storage.addresses import Urls
from wdstrain.storage.secrets import redacted
from wdstrain.training.config import IMAGE_OPTIONS, Config, TrainArguments, refuse
from wdstrain.training.distributed import DistributedContext
from wdstrain.training.heads import Head
from wdstrain.training.inputs import Fields, check_same_inputs, input_fields, specs_of, with_targets
from wdstrain.training.tasks import Task

# Labels that are read where no column has them: to count classes, and for the mean of numbers.
_COUNTED_LABELS, _AVERAGED_LABELS, _COUNTED_MASKS = 10_000, 2_000, 200
_MASK_NUMBERS = 1 << 16  # class numbers in masks that are told apart
_FEW_SAMPLES = 4  # that are tried before a run
_LOADER_OPTIONS = ("num_workers", "on_error", "max_errors", "cache_dir", "cache_limit")


def open_data(
    urls: Urls | Index,
    val: Urls | Index | None,
    config: Config,
    checkpoint: Mapping[str, Any] | None,
) -> tuple[Index, Index | None, Task]:
    """Return (training set, validation set, what is learned), with only the chosen samples.

    checkpoint: of a run to resume, whose scale of numbers is kept. Raises UsageError for sets whose
    labels differ.
    """
    refuse(
        config.fold is not None and val is not None,
        "{fold} takes the validation data from the training shards.",
        "Give either fold or val.",
        fold=config.fold,
    )
    train, *sets = _open_sets(urls, val, is_whole=config.fold is not None)
    train, label = _with_label(train, config)
    task = Task.of(train, label)
    sets = [train, *(with_task_labels(index, task, config) for index in sets)]
    if config.where is not None:
        sets = [index.where(config.where) for index in sets]
    if config.fold is not None:
        sets = _fold(sets[0], task, config)
    former = Task.from_state(checkpoint["task"]) if checkpoint is not None else None
    if former is not None and former.equals(task):
        task = former
    else:
        task = Task(tuple(_scaled(head, sets[0]) for head in task.heads))
    for index in sets[1:]:
        task.check(index)
    return sets[0], sets[1] if len(sets) > 1 else None, task


def _fold(index: Index, task: Task, config: Config) -> list[Index]:
    """Return training and validation set of a fold; each class has its share of both."""
    part, count = map(int, str(config.fold).split("/"))
    target = task.heads[0].target
    column = complete_column(index, target) if target.is_class else None
    refuse(
        count > len(index),
        f"{{fold}}: {len(index)} samples cannot be divided into {count} folds.",
        f"Use at most {len(index)} folds.",
        fold=config.fold,
    )
    folds = index.folds(count, stratify=None if column is None else column.name, seed=config.seed)
    return list(list(folds)[part - 1])


def _open_sets(urls: Urls | Index, val: Urls | Index | None, *, is_whole: bool) -> list[Index]:
    """Return train and, if there is one, validation set. A set with the splits train and val is both."""
    if val is not None or is_whole:
        return [open_shards(one) for one in (urls, val) if one is not None]
    index = open_shards(urls, unless=("train", "val"))
    if not {"train", "val"} <= set(index.splits):
        return [index]
    return [open_shards(index, name) for name in ("train", "val")]


def _with_label(index: Index, config: Config) -> tuple[Index, str | None]:
    """Return the training set with the label that is learned, and its name."""
    label, classes = config.label, read_classes(config.classes) if config.classes else None
    field = "" if label is None else label.strip().removesuffix(":mask")
    declared = [own for own in index.labels if (own.kind, own.field) == ("mask", field)]
    if declared and classes is None:
        return index, declared[0].name
    if is_image(field) and field in index.fields:
        refuse(
            classes is None,
            "{label}: it holds masks.",
            "Name their classes in the order of their numbers, such as {classes}, or give their "
            "number.",
            label=label,
            classes="background,cat,dog",
        )
        ignored = declared[0].ignored if declared else None
        index = _with_masks(index, field, classes or (), ignored)
    elif label is not None and not index.labels and not index.differing:
        index = with_label(index, label, classes)
    else:
        return index if classes is None else _with_some_classes(index, label, classes), label
    return index, index.labels[0].name


def _with_masks(index: Index, field: str, classes: Sequence[str], ignored: int | None) -> Index:
    """Return the index with a label of masks.

    Raises UsageError for shards that declare other classes: a number would be another class.
    """
    made = with_field_label(index, field, classes, ignored)
    declared = (own for own in (*index.labels, *index.differing) if own.place == (field, None))
    other = next((own for own in declared if own.meaning != made.labels[0].meaning), None)
    reason = index.disagreement(field, None) or (
        f"these shards declare {other.numbering}, and {made.labels[0].numbering} would be learned"
        if other is not None
        else ""
    )
    refuse(
        reason,
        f"{reason}.",
        f"Leave {{classes}} out, or declare them anew: wdstrain index SET --label {field}",
        classes=...,
    )
    return made


def _with_some_classes(index: Index, name: str | None, classes: Sequence[str]) -> Index:
    """Return the samples of some classes of a label, which has no other classes any more.

    name: of the label; None: the only one. Raises UsageError for classes that it does not have.
    """
    labels = [own for own in index.labels if name in (None, own.name)]
    label = labels[0] if len(labels) == 1 else None
    column = complete_column(index, label) if label is not None else None
    if label is None or column is None or label.kind != "class":
        raise UsageError(
            "classes= chooses classes of a single label that has one class for each sample, or names "
            "those of a field that no index declares as a label.",
            "Leave it out, or name such a label or field with label=.",
        )
    unknown = [own for own in classes if own not in label.classes]
    refuse(
        unknown,
        f"classes: the label {label.name!r} has no class {unknown[:1]}.",
        f"Use some of: {', '.join(label.classes)}.",
    )
    names = pa.array(classes, pa.string())
    numbers = pc.index_in(column.values.cast(pa.string()), names)
    values = pa.DictionaryArray.from_arrays(numbers, names).cast(column.values.type)
    own = replace(column, classes=tuple(classes), stored=values, files=())
    columns = [own if other.place == own.place else other for other in index.columns]
    index = replace(index.with_columns(columns), labels=(replace(label, classes=own.classes),))
    return index.take(np.flatnonzero(numbers.is_valid()))


def with_task_labels(index: Index, task: Task, config: Config) -> Index:
    """Return the index with masks that a task learns, and with its labels if it declares none.

    Without the option `label` the task was trained on declared labels. Then class 1 of shards
    without class names may be another class than the model's.
    """
    is_declared = config.label is None or bool(index.labels or index.differing)
    fields = ("", *index.fields)  # "" is the field of joined columns
    targets = [head.target for head in task.heads if head.target.field in fields]
    for target in targets:
        if target.kind == "mask":
            index = _with_masks(index, target.field, target.classes, target.ignored)
        elif is_declared and config.classes is not None:
            index = _with_some_classes(index, target.name, target.classes)
        elif not is_declared:
            name = f"{target.stored_as}:{target.kind}"
            index = with_label(index, name, target.classes or None)
    return index


# --- fields and loaders --------------------------------------------------------------------------------------


def run_loader(
    index: Index,
    fields: Mapping[str, Field],
    config: Config,
    distributed: DistributedContext | None = None,
    **options: Any,
) -> Loader:
    """Return the part of this process in a loader of a run; all of it without `distributed`.

    It delivers every sample once, in order, unless `options` of Loader say otherwise. The batch_size
    of a run is that of all processes together.
    """
    rank, size = (distributed.rank, distributed.size) if distributed is not None else (0, 1)
    refuse(
        config.batch_size % size,
        f"{{batch_size}} cannot be shared by {size} processes.",
        f"Use a multiple of {size}.",
        batch_size=config.batch_size,
    )
    shared: dict[str, Any] = {
        "batch_size": config.batch_size // size,
        "shuffle": False,
        "tail": "keep",
        "rank": rank,
        "world_size": size,
        **{name: getattr(config, name) for name in _LOADER_OPTIONS},
    }
    return Loader(index, fields, **shared | options)


def few_samples(
    index: Index, fields: Mapping[str, Field], config: Config, most: int = _FEW_SAMPLES
) -> Batch:
    """Return a batch of the first samples, `most` of them. Raises SampleError if all are bad."""
    few = index.take(np.arange(min(most, len(index))))
    config = replace(config, num_workers=0, on_error="replace", max_errors=1.0)
    with closing(run_loader(few, fields, config, batch_size=len(few))) as loader:
        return next(loader.epoch(0))


def run_fields(
    arguments: TrainArguments, train_set: Index, val_set: Index | None, task: Task, config: Config
) -> tuple[Fields, Fields]:
    """Return the inputs for training and validation, checked against options and a few samples.

    Raises UsageError, and SampleError if none of the samples can be read.
    """
    given, given_val = arguments.fields, arguments.val_fields
    train: Fields = {
        "image": image(
            size=config.image_shape, **{name: getattr(config, name) for name in IMAGE_OPTIONS}
        )
    }
    if given is not None:
        train = input_fields(given, task, train_set)
        refuse(
            not config.has_default("image_size")
            and config.image_shape not in [spec.shape[1:] for spec in specs_of(train).values()],
            "{image_size} has no effect with fields=.",
            "Leave it out, and let your fields do it.",
            image_size=config.image_size,
        )
        few_samples(train_set, with_targets(train, task), config)
    val = {name: _without_randomness(field) for name, field in train.items()}
    if val_set is None or (given is None and given_val is None):
        return train, val
    if given_val is not None:
        specs = specs_of(train)
        val = input_fields(given_val, task, val_set, title="val_fields", known=specs)
        check_same_inputs(specs, val, "training has", sizes=False)
        random = [name for name, own in val.items() if own != _without_randomness(own)]
        refuse(
            random,
            f"val_fields= augments {', '.join(random)}, and validation needs the same images "
            "every time.",
            "Leave the augmentation out.",
        )
    few_samples(val_set, with_targets(val, task), config)
    return train, val


def _without_randomness(field: Field) -> Field:
    """Return a field of wt without its augmentation."""
    if isinstance(field, (Image, Mask)):
        return replace(field, augment=field.augment.without_randomness())
    return field


def addresses(urls: Urls | Index) -> str | list[str]:
    """Return addresses for config.toml: absolute paths, and no secrets of remote addresses."""
    if isinstance(urls, (str, os.PathLike)):
        text = os.fspath(urls)
        return redacted(text) if "://" in text else os.path.abspath(text)
    paths = (shard.path for shard in urls.shards) if isinstance(urls, Index) else urls
    return [str(addresses(path)) for path in paths]


# --- labels ---------------------------------------------------------------------------------------


def label_column(index: Index, label: ColumnInfo, most: int | None = None) -> Column:
    """Return the values of a label: its column, else one that is read from the shards.

    most: samples that are read, an even part. A value that the label cannot have is null. Raises
    UsageError for joined sets that number its classes differently.
    """
    wanted = (label.place, label.kind)
    column = next((own for own in index.columns if (own.place, own.kind) == wanted), None)
    if column is not None and len(column) and (most is None or not column.stored.null_count):
        return column
    if reason := index.disagreement(*label.place):  # a number means another class in each set
        raise UsageError(f"{reason}.", "Pack the sets with one numbering.")
    part = index if most is None else index.take(even_part(index, most))
    return as_label(read_columns(part, [label.place]).columns[0], label)


def class_weights(index: Index, head: Head, option: str, device: torch.device) -> Tensor | None:
    """Return weights for rare classes if the option asks for them and the head has classes."""
    if option == "none" or head.kind == "number":
        return None
    if head.kind == "mask":
        counts = count_pixels(index, head)
        samples = sum(counts.values())
    else:
        values = label_column(index, head.target, _COUNTED_LABELS).values.drop_null()
        counts = {str(value): count for value, count in counted(values).items()}
        samples = len(values)
    refuse(
        not any(counts.values()),
        f"{{class_weights}}: no label {head.name!r} could be read.",
        "Leave it out.",
        class_weights=option,
    )
    return head.class_weights(counts, samples).to(device)


def _scaled(head: Head, index: Index) -> Head:
    """Return the head; one of numbers with their mean and deviation."""
    if head.kind != "number":
        return head
    numbers = label_column(index, head.label, _AVERAGED_LABELS).values.drop_null()
    refuse(
        not len(numbers) and head.target.kind != "number",
        f"label {head.name!r} cannot be learned as 'number': its values are names.",
        "Use class.",
    )
    values = numbers.to_numpy(zero_copy_only=False) if len(numbers) else np.zeros(1)
    finite = values[np.isfinite(values)]
    mean, deviation = float(finite.mean()), float(finite.std())
    is_constant = deviation <= 1e-12 * abs(mean)  # rounding errors are no deviation
    return replace(head, mean=mean, deviation=1.0 if is_constant else deviation)


def count_pixels(index: Index, head: Head, *, is_strict: bool = False) -> dict[str, int]:
    """Return the pixels by class of an even part of the masks.

    is_strict: raise UsageError for masks with class numbers that are not learned, and for a mask of
    another shape than its image.
    """
    counts, learned = np.zeros(_MASK_NUMBERS, np.int64), len(head.classes)
    name = head.target.field
    images = [field for field in index.fields if is_image(field) and is_strict]
    for number, fields in index.read(even_part(index, _COUNTED_MASKS), [name, *images]):
        with suppress(WdstrainError, KeyError):
            numbers = decode_mask(fields[name], head.target.ignored).clip(0, _MASK_NUMBERS - 1)
            counts += np.bincount(numbers.ravel(), minlength=_MASK_NUMBERS)
        photo = photo_of([*fields.items()])
        if is_strict and photo is not None and photo[0] != name and name in fields:
            try:
                check_mask((name, fields[name]), photo)
            except SampleError as error:
                raise UsageError(
                    f"{index.shard_with(number).shown}, key {index.key(number)!r}: {error}.",
                    "Mend the masks and pack them again.",
                ) from error
    others = [n for n in np.flatnonzero(counts[learned:]) + learned if n != IGNORED]
    refuse(
        is_strict and others,
        f"masks in {name} have the class number {min(others, default=0)}, and {learned} classes "
        f"are learned, 0 to {learned - 1}.",
        f"Name all of them with {{classes}}, or store {IGNORED} where a pixel has no class.",
        classes=...,
    )
    return dict(zip(head.classes, counts[:learned].tolist(), strict=True))
