"""What a loader delivers, as samples to be looked at: batches as the loop gets them, after whatever varied them.

Pictures of a loop are often floats that were normalised, and nobody can look at those: they are brought back to 0 to 255 by what is
known of such numbers, or else by the least and the greatest of the batch, and which of these was done is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wdstrain.decode.label_fields import Label, Labels
from wdstrain.errors import UsageError
from wdstrain.loader.gpu_augment import IMAGENET
from wdstrain.loader.loader import Loader
from wdstrain.loader.stats import Finding
from wdstrain.looking.picturing import NARROWEST
from wdstrain.looking.seeing import Seen, View
from wdstrain.shards.index import Label as IndexLabel

_NOTED = 3  # bad samples that are told of
_NEARLY = 0.03  # how far numbers of bfloat16, or of a resized picture, may lie beyond their ends


def of_batch(
    batch: Mapping[str, Any], n: int, classes: Sequence[str]
) -> tuple[list[Seen], list[str]]:
    """The first n rows of a batch, and what was done to see them. classes: names for labels that are numbers or shares of classes."""
    views, notes = _views(batch, n, lambda _: classes, lambda _: ())
    return [view.seen() for view in views], notes


def of_loader(loader: Loader, n: int) -> tuple[list[Seen], list[str]]:
    """The first n rows that the next `for` over a loader would give, and what is to be said of them.

    The loader stays where it is. Raises what the loop would raise.
    """
    index, found, notes = loader.index, list[Seen](), list[str]()
    names = {
        name: field.classes
        for name, field in (loader.fields or {}).items()
        if isinstance(field, (Label, Labels))
    }
    with closing(loader.twin()) as twin:
        batches = iter(twin)
        for batch in batches:
            ids = batches.ids.tolist()
            views, said = _views(
                batch,
                n - len(found),
                lambda name: names.get(name, ()),
                lambda row: [index.label_in_sample(label, ids[row]) for label in index.labels],  # noqa: B023
            )
            notes += [note for note in said if note not in notes]
            shards = index.shard_of(batches.ids)
            for row, view in enumerate(views):
                shard, number = index.shards[int(shards[row])], int(batches.ids[row])
                if not batches.own[row]:
                    view.wrong("", "it stands in for a bad sample")
                found.append(
                    view.seen(
                        shard=shard.shown,
                        offset=int(index.offsets.start[number]),
                        split=shard.split,
                    )
                )
            if len(found) >= n:
                break
        notes += [
            f"bad: {Finding(**one).sentence}" for one in twin.report()["bad_samples"][:_NOTED]
        ]
    return found, notes


def _views(
    batch: Mapping[str, Any],
    n: int,
    classes_of: Callable[[str], Sequence[str]],
    labels_of: Callable[[int], Sequence[IndexLabel]],
) -> tuple[list[View], list[str]]:
    """The first n rows of a batch. labels_of: a row, in fields that are bytes."""
    count = min(n, _rows(batch))
    keys = batch.get("__key__")
    views = [
        View(str(keys[row]) if keys is not None else f"row {row}", labels_of(row))
        for row in range(count)
    ]
    notes = []
    for name, column in batch.items():
        if name == "__key__":
            continue
        values, note = _values(column, count)
        notes += [f"{name}: {note}"] if note else []
        for view, value in zip(views, values, strict=False):
            if name == "__source__":
                view.labels["source"] = str(value)
            elif name == "__valid__":
                view.fields |= {} if value else {"padding": "this row counts as no sample"}
            else:
                view.add_value(name, value, classes_of(name))
    return views, notes


def _rows(batch: Mapping[str, Any]) -> int:
    for column in (batch.get("__key__"), *batch.values()):
        if isinstance(column, (list, tuple)) or (
            isinstance(column, (Tensor, np.ndarray)) and column.ndim
        ):
            return len(column)
    raise UsageError(
        "this batch has no column with a row for each sample. Give a batch of a loader, a dict of tensors and lists."
    )


def _values(column: Any, count: int) -> tuple[Sequence[Any], str]:
    """The first values of a column as numpy has them, pictures as bytes 0 to 255; and what was done to see those."""
    if isinstance(column, Tensor) and column.ndim:
        first = column.detach()[:count].cpu()
        rows = (first.float() if first.is_floating_point() else first).numpy()
        if first.ndim == 4 and first.is_floating_point() and first.numel():
            whole = column.detach().float()
            spread = (
                whole.movedim(-1, 1)
                if whole.shape[1] not in (1, 3) and whole.shape[-1] in (1, 3)
                else whole
            )
            if spread.shape[1] in (1, 3) and min(spread.shape[2:]) >= NARROWEST:
                good = torch.nan_to_num(spread, nan=0.0)
                return _brought_back(
                    rows,
                    good.amin((0, 2, 3)).tolist(),
                    good.amax((0, 2, 3)).tolist(),
                    spread is whole,
                )
        return list(rows), ""
    if isinstance(column, (list, tuple)):
        return [
            one.detach().cpu().numpy() if isinstance(one, Tensor) else one for one in column[:count]
        ], ""
    return (
        (list(column[:count]), "")
        if isinstance(column, np.ndarray) and column.ndim
        else ([column] * count, "")
    )


def _brought_back(
    pictures: npt.NDArray[Any], lows: Sequence[float], highs: Sequence[float], planes_first: bool
) -> tuple[Sequence[Any], str]:
    """Float pictures as uint8. lows, highs: the least and the greatest number of each plane of the whole batch."""
    low, high = min(lows), max(highs)
    shape = (-1, 1, 1) if planes_first else (-1,)
    scaled: npt.NDArray[Any]
    said = f"floats, {low:.3g} to {high:.3g}"
    if low >= 0 and (high <= 1 or not high <= 255):
        scaled = pictures / (1 if high <= 1 else high)
        said = f"{said}; shown with {'1' if high <= 1 else 'the greatest'} as white"
    elif low >= 0:
        scaled, said = pictures / 255, f"{said}; shown with 255 as white"
    elif max(-low, high) <= 1 + 1e-3:
        scaled, said = (pictures + 1) / 2, f"{said}; shown with -1 as black and 1 as white"
    elif _is_imagenet(lows, highs):
        mean, deviation = (np.array(one, np.float32).reshape(shape) for one in IMAGENET)
        scaled, said = (
            pictures * deviation + mean,
            f"{said}; taken for normalised by ImageNet's mean and deviation, and brought back",
        )
    else:
        scaled = (pictures - low) / (high - low)
        said = f"{said}; shown with the least of the batch as black and the greatest as white"
    return list(np.rint(np.nan_to_num(scaled).clip(0, 1) * 255).astype(np.uint8)), said


def _is_imagenet(lows: Sequence[float], highs: Sequence[float]) -> bool:
    """Whether the numbers of three planes lie where a picture's do that was normalised as pretrained models expect."""
    return len(lows) == 3 and all(
        low >= (0 - mean) / deviation - _NEARLY and high <= (1 - mean) / deviation + _NEARLY
        for low, high, mean, deviation in zip(lows, highs, *IMAGENET, strict=True)
    )
