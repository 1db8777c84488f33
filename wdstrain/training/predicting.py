"""Predictions of a checkpoint, a row per picture: of shards, or of a plain folder of pictures.

Rows come in the order of the shards, or of the sorted paths. A picture that cannot be read has its row all the same, with what is
wrong with it, so a table has as many rows as there are pictures. What is true is for people to compare with: a label that cannot
be read is told, and the picture beside it is predicted all the same.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wdstrain.decode.fields import Field
from wdstrain.decode.label_fields import Label, with_classes
from wdstrain.decode.transforms import DRAWS, Draws
from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.loader.device import to_device
from wdstrain.loader.loader import Loader
from wdstrain.packing.folder import list_folder
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_index, require_one_split
from wdstrain.shards.values import Array, scalar
from wdstrain.storage.addresses import INDEX_NAME, Urls
from wdstrain.storage.files import put_whole
from wdstrain.training.configuration import OF_PREDICTING
from wdstrain.training.gallery import true_of
from wdstrain.training.models import Maker
from wdstrain.training.opened import Opened
from wdstrain.training.recipe import arithmetic
from wdstrain.training.task import Head, normalised
from wdstrain.training.telling import Tell, told
from wdstrain.training.world import World, device_of


@dataclass(frozen=True)
class Predicted:
    """What came of it: rows in all, and those with something wrong: a picture, or a label beside it, that could not be read."""

    rows: int
    bad: int


@WorkerDeathsAsErrors()
def predict(
    checkpoint: str | os.PathLike[str],
    urls: Urls | Index,
    out: str | os.PathLike[str],
    *,
    model: Maker | nn.Module | str | None = None,
    image: Field | None = None,
    probabilities: bool = False,
    tell: Tell | None = None,
    **options: Any,
) -> Predicted:
    """Write predictions of a checkpoint to the CSV file `out`: a row per picture of shards, or of a folder of pictures.

    Columns: key; for each label what is said, how probable it is (of classes), and where the shards have it what is true; error.
    model: as it was given to `train`, where that was a function or its name. image: as it was given to `train`; a field of wt is
    that of the checkpoint. probabilities: a column for each class too. options: batch_size, num_workers, device, amp, cache_dir,
    cache_limit; others are refused, because the checkpoint says them.
    """
    opened = Opened.of(checkpoint, model=model, options=options, known=OF_PREDICTING)
    device = device_of(opened.config.device, World())
    field = opened.field(image)
    opened.model.to(device)
    with told(tell, True) as speaker:
        return _written(opened, urls, os.fspath(out), field, device, probabilities, speaker)


def _written(
    opened: Opened,
    urls: Urls | Index,
    out: str,
    field: Field,
    device: torch.device,
    probabilities: bool,
    tell: Tell,
) -> Predicted:
    if _is_pictures(urls):
        found, known = _of_folder(os.fspath(urls), opened, field, device, tell), []  # type: ignore[arg-type]
    else:
        index = urls if isinstance(urls, Index) else require_one_split(open_index(urls), urls)
        known = list(opened.task.heads) if index.labels or index.shard_labels else []
        try:
            opened.task.check(index) if known else None
        except UsageError as other:
            known = []
            tell.line(f"What is true is left away: {other}")
        found = _of_shards(index, opened, field, device, known, tell)
    rows = bad = 0
    with put_whole(out) as file, closing(found):
        text = io.TextIOWrapper(
            file, "utf-8", errors="surrogateescape", newline="", write_through=True
        )
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            [
                "key",
                *(
                    name
                    for head in opened.task.heads
                    for name in _columns(head, probabilities, head in known)
                ),
                "error",
            ]
        )
        for key, outputs, targets, error in found:
            row = [key]
            for i, head in enumerate(opened.task.heads):
                row += _cells(head, outputs[i] if outputs is not None else None, probabilities)
                row += [targets[i] if targets else ""] if head in known else []
            writer.writerow([*row, error])
            rows, bad = rows + 1, bad + bool(error)
        text.detach()
    return Predicted(rows, bad)


Row = tuple[
    str, Sequence[Tensor] | None, Sequence[str], str
]  # key, outputs and what is true by head, what is wrong


@dataclass(frozen=True)
class _Truth:
    """The bytes of a label; None of a sample without it, which has its row too, for it has one of the pictures."""

    label: str
    pictures: tuple[str, ...]
    example: None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.label, *self.pictures)

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> bytes | None:
        return bytes(data) if name == self.label else None


def _truth(head: Head, field: Field, number: int, data: bytes | None) -> tuple[str, str]:
    """What the label of a sample says, in words, and what is wrong with it."""
    try:
        if data is None:
            raise LookupError(f"it has no {head.target.field}")
        if head.kind == "number":  # as it stands there, not as a float32 holds it
            return _shown(float(scalar(memoryview(data), head.target.column))), ""
        own = (
            field.readers(np.array([number]))[0]
            if isinstance(field, Label) and field.parts
            else field
        )
        assert field.example is not None
        value = np.zeros(field.example.shape, field.example.dtype)
        own.read(head.target.field, memoryview(data), value, np.zeros(DRAWS))
    except (
        Exception
    ) as error:  # a label that cannot be read is no reason to say nothing of the picture
        return "", f"{head.name}: {error}"
    return true_of(head, torch.from_numpy(value)), ""


def _of_shards(
    index: Index,
    opened: Opened,
    field: Field,
    device: torch.device,
    known: Sequence[Head],
    tell: Tell,
) -> Generator[Row, None, None]:
    config, task = opened.config, opened.task
    fields: dict[str, Field] = {"image": field}
    fields |= {f"true {i}": _Truth(head.target.field, field.names) for i, head in enumerate(known)}
    readers = [with_classes(head.field(), index) for head in known]
    loader = Loader(
        index,
        fields,
        batch_size=config.batch_size,
        num_workers=config.num_workers,
        shuffle=False,
        tail="keep",
        rank=0,
        world_size=1,
        on_bad="mark",
        max_bad=1.0,
        cache_dir=config.cache_dir,
        cache_limit=config.cache_limit,
    )
    number = 0
    with closing(loader), torch.inference_mode():
        batches = loader.epoch(0, until=1)
        for step, batch in enumerate(to_device(batches, device)):
            outputs = _outputs(opened, batch["image"], device)
            split = [own.cpu() for own in task.split(outputs)]
            bad = iter(batches.bad)
            for row, is_own in enumerate(batches.own.tolist()):
                key = index.key(number)
                if is_own:
                    truths = [
                        _truth(head, reader, number, batch[f"true {i}"][row])
                        for i, (head, reader) in enumerate(zip(known, readers, strict=True))
                    ]
                    wrong = "; ".join(problem for _, problem in truths if problem)
                    yield key, [own[row] for own in split], [true for true, _ in truths], wrong
                else:
                    yield key, None, [], next(bad).reason
                number += 1
            tell.step("predicting", step + 1, len(loader))


def _of_folder(
    folder: str, opened: Opened, field: Field, device: torch.device, tell: Tell
) -> Generator[Row, None, None]:
    paths = sorted(str(item.parts[0][1]) for item in list_folder(folder, flat=True).items)
    size = opened.config.batch_size

    def read(path: str) -> tuple[Tensor | None, str]:
        example = field.example
        assert example is not None
        out = np.empty(example.shape, example.dtype)
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
            return None, "it is no file"
        try:
            with open(path, "rb") as file:
                field.read(
                    os.path.splitext(path)[1][1:].lower(),
                    memoryview(file.read()),
                    out,
                    np.full(DRAWS, 0.5),
                )
        except Exception as error:  # whatever a decoder says of it is what is wrong with it
            return None, str(error) or type(error).__name__
        pixels = torch.from_numpy(out)
        return pixels.permute(2, 0, 1) if example.channels_last else pixels, ""

    with ThreadPoolExecutor(thread_name_prefix="wdstrain-predict") as pool, torch.inference_mode():
        for first in range(0, len(paths), size):
            some = paths[first : first + size]
            pictures = list(pool.map(read, some))
            whole = [pixels for pixels, _ in pictures if pixels is not None]
            outputs = (
                _outputs(opened, torch.stack(whole).to(device), device).cpu()
                if whole
                else torch.zeros(0, 1)
            )
            rows = iter(torch.split(outputs, 1))
            for path, (pixels, error) in zip(some, pictures, strict=True):
                split = (
                    [own[0] for own in opened.task.split(next(rows))]
                    if pixels is not None
                    else None
                )
                yield os.path.relpath(path, folder), split, [], error
            tell.step("predicting", first // size + 1, -(-len(paths) // size))


def _outputs(opened: Opened, pixels: Tensor, device: torch.device) -> Tensor:
    with arithmetic(opened.config, device):
        found: Tensor = opened.model(normalised(pixels))
    return found.float()


def _columns(head: Head, probabilities: bool, known: bool) -> list[str]:
    names = [head.name]
    if head.kind in ("class", "binary"):
        names.append(f"{head.name} probability")
    if probabilities and head.kind != "number":
        names += [f"{head.name}={name}" for name in head.classes]
    return [*names, f"{head.name} true"] if known else names


def _cells(head: Head, outputs: Tensor | None, probabilities: bool) -> list[str]:
    if outputs is None:
        return [""] * len(_columns(head, probabilities, False))
    if head.kind == "number":
        # as many digits as a float32 has, of what is left when the mean is taken off
        digits = min(
            17, 9 + max(0, math.ceil(math.log10(max(abs(head.mean) / head.deviation, 1.0))))
        )
        return [_shown(float(f"{float(head.values(outputs[None].double())):.{digits}g}"))]
    shares = head.probabilities(outputs[None].double())[0].tolist()
    if head.kind == "multi":
        cells = [
            "|".join(name for name, share in zip(head.classes, shares, strict=True) if share > 0.5)
        ]
    else:
        best = max(range(len(shares)), key=shares.__getitem__)
        cells = [head.classes[best], f"{shares[best]:.9g}"]
    if probabilities:
        cells += [f"{share:.9g}" for share in shares]
    return cells


def _shown(value: float) -> str:
    """A number with all its digits."""
    return repr(value).removesuffix(".0")


def _is_pictures(urls: Urls | Index) -> bool:
    """Whether an address is that of a folder of pictures, and not of shards."""
    if not isinstance(urls, (str, os.PathLike)):
        return False
    path = os.fspath(urls)
    return os.path.isdir(path) and not any(
        name.endswith(".tar") or name == INDEX_NAME for name in os.listdir(path)
    )
