"""Data of a run: train and validation sets, their labels, and the loaders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wdstrain.decode.codecs import decode_mask
from wdstrain.decode.fields import Field
from wdstrain.decode.formats import is_image
from wdstrain.decode.labels import LabelField, with_classes
from wdstrain.decode.masks import Mask
from wdstrain.errors import UsageError, WdstrainError
from wdstrain.loader.loader import Loader
from wdstrain.loader.pipeline import Batch
from wdstrain.shards.declare import with_label, with_mask
from wdstrain.shards.index import Index
from wdstrain.shards.label_values import (
    classes_in,
    complete_column,
    even_part,
    label_bytes,
    recorded_counts,
)
from wdstrain.shards.options import read_classes
from wdstrain.shards.resolve import open_shards
from wdstrain.shards.values import scalar
from wdstrain.storage.addresses import Urls
from wdstrain.storage.remote import is_remote, redacted
from wdstrain.training.config import Config
from wdstrain.training.distributed import DistributedContext
from wdstrain.training.heads import Head, MaskHead, NumberHead
from wdstrain.training.tasks import Task

# Labels that are read where no column has them: to count classes, and for the mean of numbers.
_COUNTED_LABELS, _AVERAGED_LABELS, _COUNTED_MASKS = 10_000, 2_000, 200
_MASK_NUMBERS = 1 << 16  # class numbers in masks that are told apart
_FEW_SAMPLES = 4  # that are tried before a run


@dataclass(frozen=True)
class TrainData:
    """The sets of a run.

    label: to learn, as `Task.of` takes it. undeclared: the label of the user's field, as the option
    `label` names it, if the index declares none.
    """

    train: Index
    val: Index | None
    label: str | None
    undeclared: str | None = None

    @classmethod
    def of(
        cls,
        urls: Urls | Index,
        val: Urls | Index | None,
        config: Config,
        fields: Mapping[str, Field] | None = None,
    ) -> TrainData:
        """Open train and validation set, with declared labels and only the chosen samples.

        fields: of the user's. Its entry "label" tells the label to learn if no option does.
        """
        if config.fold is not None:
            if val is not None:
                raise UsageError(
                    f"fold={config.fold} takes the validation data from the training shards. "
                    f"Give either fold or val."
                )
            train_index, val_index = open_shards(urls), None
        else:
            train_index, val_index = _open_sets(urls, val)
        label = config.label
        classes: Sequence[str] | None = read_classes(config.classes) if config.classes else None
        undeclared = None
        label_field = fields.get("label") if isinstance(fields, Mapping) else None
        if label is None and label_field is not None:
            label, undeclared = _label_of(train_index, label_field)
        if undeclared is not None:
            classes = classes or _classes_of(label_field)
        train_index, val_index, label = _with_label(train_index, val_index, label, classes)
        if config.where is not None:
            train_index = train_index.where(config.where)
            val_index = val_index.where(config.where) if val_index is not None else None
        if config.fold is not None:
            train_index, val_index = _fold(train_index, label, config)
        return cls(train_index, val_index, label, undeclared)

    def task(self, checkpoint: Mapping[str, Any] | None) -> Task:
        """Return the task of the training set, checked against the validation set.

        checkpoint: of a run to resume, whose scale of numbers is kept.
        """
        task = Task.of(self.train, self.label)
        former = Task.from_state(checkpoint["task"]) if checkpoint is not None else None
        task = former if former is not None and former.equals(task) else _scaled(task, self.train)
        if self.val is not None:
            task.check(self.val)
        return task


def _open_sets(urls: Urls | Index, val: Urls | Index | None) -> tuple[Index, Index | None]:
    """Return train and validation set. A set with the splits train and val is both."""
    if val is not None:
        return open_shards(urls), open_shards(val)
    index = open_shards(urls, unless=("train", "val"))
    if not {"train", "val"} <= set(index.splits):
        return index, None
    return open_shards(index, "train"), open_shards(index, "val")


def _fold(index: Index, label: str | None, config: Config) -> tuple[Index, Index]:
    """Return training and validation set of one fold; each class has its share of both."""
    assert config.fold is not None
    part, count = map(int, config.fold.split("/"))
    target = Task.of(index, label).heads[0].target
    column = complete_column(index, target) if target.is_class else None
    stratify = None if column is None else column.name
    return list(index.folds(count, stratify=stratify, seed=config.seed))[part - 1]


def _mask_field(index: Index, name: str) -> str | None:
    """Return the field of masks that FIELD or FIELD:mask names; None if it names no image field."""
    field = name.strip().removesuffix(":mask")
    return field if is_image(field) and field in index.fields else None


def with_task_labels(index: Index, task: Task, *, undeclared: bool) -> Index:
    """Return the index with masks that a task learns, and with its labels if it declares none.

    undeclared: the task was trained on shards without declared labels, so it counts classes as they
    do. Otherwise class 1 of shards without class names may be another class than the model's.
    """
    declares = not undeclared or bool(index.labels or index.shard_labels)
    for target in (head.target for head in task.heads):
        if target.field not in index.fields:
            continue
        if target.kind == "mask":
            index = with_mask(index, target.field, target.classes)
        elif not declares:
            entry = "" if target.entry is None else f".{target.entry}"
            name = f"{target.field}{entry}:{target.kind}"
            index = with_label(index, name, target.classes or None)
    return index


def _with_label(
    train: Index, val: Index | None, label: str | None, classes: Sequence[str] | None
) -> tuple[Index, Index | None, str | None]:
    """Return both sets with the label that is learned, and its name; see `TrainData.of`."""
    if label is not None and (masks := _mask_field(train, label)):
        if classes is None:
            raise UsageError(
                f"label={label}: it holds masks. Name their classes in the order of their numbers, "
                f"such as classes=background,cat,dog, or give their number, such as classes=21."
            )
        train = with_mask(train, masks, classes)
        val = with_mask(val, masks, classes) if val is not None else None
        return train, val, train.labels[0].name
    if label is not None and not train.labels and not train.shard_labels:
        train = with_label(train, label, classes)
        if val is not None and not val.labels and not val.shard_labels:
            val = with_label(val, label, train.labels[0].classes or None)
        return train, val, train.labels[0].name
    if classes is not None:
        raise UsageError(
            "classes= names the classes of a field that no index declares as a label. Leave it "
            "out, or name such a field with label=."
        )
    return train, val, label


def _label_of(index: Index, field: Field) -> tuple[str | None, str | None]:
    """Return (name of the label that a field reads, the same if no index declares it).

    None for a label that is not declared beside others, and for a field that reads no label.
    """
    kind, column = "mask", None
    if type(field) is LabelField:
        field = with_classes(field, index)
        assert isinstance(field, LabelField)
        kind, column = field.kind, field.entry
    elif type(field) is not Mask:
        return None, None
    for label in index.labels:
        if label.field in field.names and label.entry == column:
            return (label.name if len(index.labels) > 1 else None), None
    name = next((name for name in field.names if name in index.fields), None)
    if index.labels or index.shard_labels or name is None:
        return None, None
    text = f"{name}:{kind}" if column is None else f"{name}.{column}:{kind}"
    return text, text


def _classes_of(field: Field | None) -> Sequence[str] | None:
    """Return the classes that a label field of the user's names; of masks also their number."""
    classes = getattr(field, "classes", None)
    return [str(classes)] if isinstance(classes, int) else classes or None


# --- loaders --------------------------------------------------------------------------------------


def train_loader(
    index: Index,
    options: Mapping[str, Any],
    config: Config,
    distributed: DistributedContext,
    lanes: int | None,
) -> Loader:
    """Return the shuffled loader of the training set. options: of the source of its inputs."""
    return Loader(
        index,
        **options,
        seed=config.seed,
        shuffle_buffer=config.shuffle_buffer,
        balance=config.balance,
        lanes=lanes,
        **_shared_options(config, distributed),
    )


def val_loader(
    index: Index, options: Mapping[str, Any], config: Config, distributed: DistributedContext
) -> Loader:
    """Return a loader that delivers every sample once, in order. options: see `train_loader`."""
    shared = _shared_options(config, distributed)
    return Loader(index, shuffle=False, tail="keep", **options, **shared)


def _shared_options(config: Config, distributed: DistributedContext) -> dict[str, Any]:
    """Return the options of both loaders. batch_size is that of all processes together."""
    if config.batch_size % distributed.size:
        raise UsageError(
            f"batch_size={config.batch_size} cannot be shared by {distributed.size} processes. "
            f"Use a multiple of {distributed.size}."
        )
    return {
        "batch_size": config.batch_size // distributed.size,
        "num_workers": config.num_workers,
        "rank": distributed.rank,
        "world_size": distributed.size,
        "on_error": config.on_error,
        "max_errors": config.max_errors,
        "cache_dir": config.cache_dir,
        "cache_limit": config.cache_limit,
    }


def few_batches(
    index: Index, options: Mapping[str, Any], config: Config, epochs: int
) -> Iterator[Batch]:
    """Yield a batch of the first samples in each of some epochs."""
    few = index.take(np.arange(min(_FEW_SAMPLES, len(index))))
    with closing(
        Loader(
            few,
            **options,
            batch_size=len(few),
            shuffle=False,
            tail="keep",
            rank=0,
            world_size=1,
            on_error="replace",
            max_errors=1.0,
            cache_dir=config.cache_dir,
            cache_limit=config.cache_limit,
        )
    ) as loader:
        for epoch in range(epochs):
            yield next(iter(loader.epoch(epoch)))


def addresses(urls: Urls | Index) -> str | list[str]:
    """Return addresses for config.toml: absolute paths, and no secrets of remote addresses."""
    if isinstance(urls, Index):
        return [str(addresses(shard.path)) for shard in urls.shards]
    if isinstance(urls, (str, os.PathLike)):
        scheme, separator, rest = os.fspath(urls).partition("://")
        text = f"{scheme.lower()}://{rest}" if separator else scheme
        if is_remote(text):
            return redacted(text)
        return text if "://" in text else os.path.abspath(text)
    return [str(addresses(url)) for url in urls]


# --- labels ---------------------------------------------------------------------------------------


def class_counts(index: Index, head: Head, *, is_strict: bool = False) -> dict[str, int]:
    """Return samples by class: of the index's columns, else of an even part of the samples.

    is_strict: raise UsageError for masks with class numbers that are not learned.
    """
    if is_strict and isinstance(head, MaskHead):
        return _count_pixels(index, head, is_strict=True)[0]
    return recorded_counts(index, head.target) or _count_labels(index, head)[0]


def class_weights(index: Index, head: Head, option: str, device: torch.device) -> Tensor | None:
    """Return weights for rare classes if the option asks for them and the head has classes."""
    if option == "none" or isinstance(head, NumberHead):
        return None
    recorded = recorded_counts(index, head.target)
    counts, samples = (recorded, len(index)) if recorded else _count_labels(index, head)
    if not any(counts.values()):
        raise UsageError(
            f"class_weights={option}: no label {head.name!r} could be read. Leave it out."
        )
    weights = head.class_weights(counts, samples)
    return None if weights is None else weights.to(device)


def _scaled(task: Task, index: Index) -> Task:
    """Return the task with mean and deviation of its numbers."""
    scaled = (_scaled_head(h, index) if isinstance(h, NumberHead) else h for h in task.heads)
    return Task(tuple(scaled))


def _scaled_head(head: NumberHead, index: Index) -> NumberHead:
    # the column of classes holds their names, while their entries may be numbers
    column = complete_column(index, head.target) if head.target.kind == "number" else None
    values = _read_numbers(index, head) if column is None else np.asarray(column.values)
    if not len(values) and head.target.kind != "number":
        raise UsageError(
            f"label {head.name!r} cannot be learned as 'number': its values are names. Use class."
        )
    finite = values[np.isfinite(values)] if len(values) else np.zeros(1)
    mean, deviation = float(finite.mean()), float(finite.std())
    is_constant = deviation <= 1e-12 * abs(mean)  # rounding errors are no deviation
    return replace(head, mean=mean, deviation=1.0 if is_constant else deviation)


def _read_numbers(index: Index, head: Head) -> npt.NDArray[np.float64]:
    """Return the numbers of an even part of the samples, without unreadable ones."""
    values = []
    for _, data in label_bytes(index, head.target.field, even_part(index, _AVERAGED_LABELS)):
        with suppress(WdstrainError, ValueError, TypeError):
            values.append(float(scalar(data, head.target.entry)))
    return np.array(values, np.float64)


def _count_labels(index: Index, head: Head) -> tuple[dict[str, int], int]:
    """Return (samples by class, number of labels that were read); of masks the pixels by class."""
    if isinstance(head, MaskHead):
        return _count_pixels(index, head)
    counts: Counter[str] = Counter()
    samples = 0
    for i, data in label_bytes(index, head.target.field, even_part(index, _COUNTED_LABELS)):
        label = index.label_in_sample(head.target, i)
        counts.update(set(classes_in(data, head.target.entry, label.classes)))
        samples += 1
    return {name: counts.get(name, 0) for name in head.classes}, samples


def _count_pixels(
    index: Index, head: MaskHead, *, is_strict: bool = False
) -> tuple[dict[str, int], int]:
    """Return (pixels by class, number of pixels) of an even part of the masks."""
    counts, learned = np.zeros(_MASK_NUMBERS, np.int64), len(head.classes)
    for _, data in label_bytes(index, head.target.field, even_part(index, _COUNTED_MASKS)):
        with suppress(WdstrainError):
            numbers = decode_mask(data).clip(0, _MASK_NUMBERS - 1)
            counts += np.bincount(numbers.ravel(), minlength=_MASK_NUMBERS)
    others = [n for n in np.flatnonzero(counts[learned:]) + learned if n != head.ignored]
    if is_strict and others:
        raise UsageError(
            f"masks in {head.target.field} have the class number {others[0]}, and {learned} classes "
            f"are learned, 0 to {learned - 1}. Name all of them with classes=, or store "
            f"{head.ignored} where a pixel has no class."
        )
    by_class = dict(zip(head.classes, counts[:learned].tolist(), strict=True))
    return by_class, sum(by_class.values())
