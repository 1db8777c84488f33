"""Rows of a batch, and the next rows of a loader, as views of samples.

Float images are shown with a linear scale, which is reported. A normalization is undone only if the
caller says which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wdstrain.augment.gpu import IMAGENET, RNG
from wdstrain.decode.labels import LabelField
from wdstrain.errors import UsageError
from wdstrain.inspection.show.sample_view import SampleView, ViewBuilder
from wdstrain.inspection.show.values import display_range, is_image_shape, to_image
from wdstrain.loader.loader import Loader
from wdstrain.loader.stats import Finding
from wdstrain.shards.kinds import ColumnInfo

Normalization = str | tuple[Sequence[float], Sequence[float]] | None

_MAX_BAD = 3  # bad samples that are named


def batch_views(
    batch: Mapping[str, Any], n: int, classes: Sequence[str], normalize: Normalization
) -> tuple[list[SampleView], list[str]]:
    """Return views of the first n rows of a batch, and notes on how they are shown.

    classes: names of labels that are class numbers or class shares.
    normalize: normalization of float images, which is undone; see `peek`.
    """
    builders, notes = _builders(batch, n, lambda _: classes, lambda _: (), normalize)
    return [builder.view() for builder in builders], notes


def loader_views(
    loader: Loader, n: int, normalize: Normalization
) -> tuple[list[SampleView], list[str]]:
    """Return views of the first n rows that the next `for` over a loader gives, and notes.

    The loader is not moved. Raises what its loop would raise.
    """
    index, views, notes = loader.index, list[SampleView](), list[str]()
    names = {
        name: field.classes
        for name, field in (loader.fields or {}).items()
        if isinstance(field, LabelField)
    }
    with closing(loader.copy_with_threads()) as copy:
        batches = iter(copy)
        for batch in batches:
            ids = batches.ids.tolist()
            builders, new = _builders(
                batch,
                n - len(views),
                lambda name: names.get(name, ()),
                lambda row: [index.label_in_sample(label, ids[row]) for label in index.labels],  # noqa: B023
                normalize,
            )
            notes += [note for note in new if note not in notes]
            shards = index.shard_of(batches.ids)
            for row, builder in enumerate(builders):
                shard, start = index.shards[int(shards[row])], index.offsets.start[ids[row]]
                if not batches.own[row]:
                    builder.add_error("", "it replaces a bad sample")
                views.append(builder.view(shard=shard.shown, offset=int(start), split=shard.split))
            if len(views) >= n:
                break
        bad = copy.report()["bad_samples"][:_MAX_BAD]
        notes += [f"bad: {Finding(**finding).sentence}" for finding in bad]
    return views, notes


def _builders(
    batch: Mapping[str, Any],
    n: int,
    classes_of: Callable[[str], Sequence[str]],
    labels_of: Callable[[int], Sequence[ColumnInfo]],
    normalize: Normalization,
) -> tuple[list[ViewBuilder], list[str]]:
    """Return the first n rows of a batch. labels_of: of a row, for fields that are bytes."""
    count = min(n, _row_count(batch))
    keys = batch.get("__key__")
    builders = [
        ViewBuilder(str(keys[row]) if keys is not None else f"row {row}", labels_of(row))
        for row in range(count)
    ]
    notes = []
    for name, column in batch.items():
        if name in ("__key__", RNG):
            continue
        values, note = _values(column, count, normalize)
        notes += [f"{name}: {note}"] if note else []
        for builder, value in zip(builders, values, strict=False):
            if name == "__source__":
                builder.labels["source"] = str(value)
            elif name == "__valid__":
                builder.fields |= {} if value else {"padding": "this row is not a sample"}
            else:
                builder.add_value(name, value, classes_of(name))
    return builders, notes


def _row_count(batch: Mapping[str, Any]) -> int:
    for column in (batch.get("__key__"), *batch.values()):
        is_array = isinstance(column, (Tensor, np.ndarray)) and column.ndim
        if is_array or isinstance(column, (list, tuple)):
            return len(column)
    raise UsageError(
        "this batch has no column with a row for each sample. Give a batch of a loader: a dict of "
        "tensors and lists."
    )


def _values(column: Any, count: int, normalize: Normalization) -> tuple[Sequence[Any], str]:
    """Return the first values of a column, images as uint8, and how float images are shown."""
    if isinstance(column, Tensor) and column.ndim:
        rows = column.detach()[:count].cpu()
        if rows.is_floating_point():
            rows = rows.float()
        if rows.ndim == 4 and rows.is_floating_point() and is_image_shape(rows.shape[1:]):
            return _float_images(column.detach().float(), rows, normalize)
        return list(rows.numpy()), ""
    if isinstance(column, (list, tuple)):
        first = column[:count]
        return [v.detach().cpu().numpy() if isinstance(v, Tensor) else v for v in first], ""
    if isinstance(column, np.ndarray) and column.ndim:
        return list(column[:count]), ""
    return [column] * count, ""


def _float_images(
    batch: Tensor, rows: Tensor, normalize: Normalization
) -> tuple[Sequence[Any], str]:
    finite = batch[torch.isfinite(batch)]
    low, high = (finite.min().item(), finite.max().item()) if len(finite) else (0.0, 1.0)
    note = f"floats from {low:.3g} to {high:.3g}"
    if normalize is not None:
        mean, deviation = _mean_and_deviation(normalize)
        shape = (-1, 1, 1) if rows.shape[1] in (1, 3) and rows.shape[3] not in (1, 3) else (-1,)
        rows = rows * torch.tensor(deviation).view(shape) + torch.tensor(mean).view(shape)
        low, high, note = 0.0, 1.0, f"{note}; the normalization is undone"
    else:
        low, high = display_range(low, high)
        note = f"{note}; shown with {low:.3g} as black and {high:.3g} as white"
    return [to_image(row, low, high) for row in rows.numpy()], note


def _mean_and_deviation(normalize: Normalization) -> tuple[Sequence[float], Sequence[float]]:
    if normalize == "imagenet":
        return IMAGENET
    if isinstance(normalize, tuple) and len(normalize) == 2:
        return normalize
    raise UsageError(
        f'normalize={normalize!r}: must be "imagenet" or (mean, standard deviation) of the planes, '
        f"as in wt.Augmentation."
    )
