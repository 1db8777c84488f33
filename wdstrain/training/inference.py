"""Predictions of a checkpoint as a table: one row per image, of shards or of a folder of images.

Rows come in the order of the shards, or of the sorted paths. An image that cannot be read has its
row too, with the error. Targets are there to compare with: one that cannot be read is reported in
the error column, and the image beside it is predicted all the same.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wdstrain.conversion.listing import Sample
from wdstrain.conversion.sources.folder import list_folder
from wdstrain.decode.formats import EXTENSIONS
from wdstrain.decode.labels import LabelField, numbered
from wdstrain.decode.transforms import DRAWS
from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.loader.device import to_device
from wdstrain.loader.loader import Loader
from wdstrain.report.terminal import Reporter, reporting
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_shards
from wdstrain.shards.values import scalar
from wdstrain.storage.addresses import INDEX_NAME, Urls
from wdstrain.storage.files import check_file_output, write_whole
from wdstrain.training.arguments import (
    PredictArguments,
    check_cache,
    given_options,
    refuse_without_effect,
)
from wdstrain.training.data import with_task_labels
from wdstrain.training.distributed import DistributedContext, device_of
from wdstrain.training.field_source import check_fields
from wdstrain.training.heads import Head, NumberHead, number_text
from wdstrain.training.inputs import InputSource
from wdstrain.training.loaded_checkpoint import LoadedCheckpoint
from wdstrain.training.mask_head import mask_png
from wdstrain.training.models import last_layer
from wdstrain.training.optim import autocast
from wdstrain.training.prediction_table import TABLES, prediction_table


@dataclass(frozen=True)
class PredictResult:
    """rows: in all. bad: rows with an error: of the image, or of a target beside it."""

    rows: int
    bad: int


@takes(PredictArguments)
@WorkerDeathsAsErrors()
def predict(arguments: PredictArguments) -> PredictResult:
    """Write predictions to the file `out`: one row per image.

    Columns: key; for each label the prediction, its probability (of classes), and the target where
    the shards have it; error. Predicted masks are PNGs of the size of the model's images, in a
    folder named like `out` without its ending; a column has their paths in it.
    """
    path, urls = os.fspath(arguments.out), arguments.urls
    if arguments.fields is not None:
        check_fields(arguments.fields, "fields")
    if os.path.splitext(path)[1].lower() not in TABLES:
        raise UsageError(f"out={path}: must end in {' or '.join(TABLES)}.")
    check_file_output(path)
    loaded = LoadedCheckpoint.of(
        arguments.checkpoint, model=arguments.model, options=given_options(arguments)
    )
    for option in ("probabilities", "embeddings"):
        if getattr(arguments, option) and loaded.task.is_dense:
            raise UsageError(f"{option}: not available for masks. Leave it out.")
    distributed, options = DistributedContext(), given_options(arguments)
    if distributed.size > 1:
        raise UsageError(
            f"predict writes its table in one process, and this job has {distributed.size}. "
            f"Start it without torchrun or srun."
        )
    heads = loaded.task.heads
    if arguments.probabilities and all(
        head.columns(probabilities=True) == head.columns(probabilities=False) for head in heads
    ):
        raise UsageError("probabilities has no effect: no label has classes. Leave it out.")
    device = device_of(loaded.config.device, distributed)
    with reporting(arguments.progress, True) as reporter:
        images = _image_paths(urls, _extensions(arguments, loaded), reporter)
        index = None if images else open_shards(urls)
        source = loaded.source(arguments.fields, arguments.transform, index, reads_labels=False)
        predictor = _Predictor(loaded, device, arguments.embeddings)
        if index is None:
            without = ("num_workers", "cache_dir", "cache_limit")
            refuse_without_effect(options, without, "image files are read in threads")
            known: list[Head] = []
            rows = _rows_of_images(images, source, predictor, reporter)
        else:
            check_cache(options, index)
            known = _comparable_heads(index, loaded, reporter)
            rows = _rows_of_shards(index, source, predictor, known, reporter)
        return _write(path, rows, predictor, known, arguments.probabilities)


def _comparable_heads(index: Index, loaded: LoadedCheckpoint, reporter: Reporter) -> list[Head]:
    """Return the heads whose targets the shards have."""
    undeclared = loaded.config.label is not None
    if loaded.task.is_dense or not (undeclared or index.labels or index.shard_labels):
        return []
    if not any(head.target.field in index.fields for head in loaded.task.heads):
        return []
    try:
        loaded.task.check(with_task_labels(index, loaded.task, undeclared=undeclared))
    except UsageError as difference:
        reporter.line(f"The targets are left out: {difference}")
        return []
    return list(loaded.task.heads)


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """outputs: by head, None for a bad image. targets: in words, by known head."""

    key: str
    outputs: Sequence[Tensor] | None = None
    targets: Sequence[str] = ()
    error: str = ""
    embedding: list[float] = field(default_factory=list)


def _write(
    path: str,
    rows: Generator[_Row, None, None],
    predictor: _Predictor,
    known: Sequence[Head],
    probabilities: bool,
) -> PredictResult:
    """Write all rows; the file appears when it is complete."""
    heads, count, bad = predictor.loaded.task.heads, 0, 0
    masks = _MaskFolder(os.path.splitext(path)[0]) if predictor.loaded.task.is_dense else None
    names, numbers = ["key"], set[str]()
    for head in heads:
        own = head.columns(probabilities=probabilities)
        names += own
        names += [f"{head.name} true"] if head in known else []
        numbers |= {*own, f"{head.name} true"} if isinstance(head, NumberHead) else {*own[1:]}
    names += ["embedding"] if predictor.embeds else []
    with closing(rows), prediction_table(path, [*names, "error"], numbers) as write:
        for row in rows:
            if not all(bool(own.isfinite().all()) for own in row.outputs or ()):
                row = replace(row, outputs=None, error="the output of the model is not finite")
            cells: list[Any] = [row.key]
            for i, head in enumerate(heads):
                if row.outputs is None:
                    cells += [""] * len(head.columns(probabilities=probabilities))
                elif masks is not None:
                    cells.append(masks.write(count, row.outputs[i]))
                else:
                    cells += head.cells(row.outputs[i], probabilities=probabilities)
                cells += [row.targets[i] if row.targets else ""] if head in known else []
            cells += [row.embedding] if predictor.embeds else []
            write([*cells, row.error])
            count, bad = count + 1, bad + bool(row.error)
    return PredictResult(count, bad)


class _MaskFolder:
    """Folder of predicted masks. Files are numbered: keys of shards are no safe file names."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        if os.path.isdir(folder) and os.listdir(folder):
            raise UsageError(
                f"{folder} has files already, and predicted masks would be written there. "
                f"Name another out, or empty the folder."
            )
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{folder}: the folder for masks cannot be made ({error.strerror}). Name another out."
            ) from error

    def write(self, row: int, numbers: Tensor) -> str:
        """Write the mask of a row, uint8[h, w]. Returns its path from the folder of the table."""
        name = f"{row:06d}.png"
        write_whole(os.path.join(self._folder, name), mask_png(numbers.numpy()))
        return f"{os.path.basename(self._folder)}/{name}"


# --- predictions ----------------------------------------------------------------------------------


class _Predictor:
    """A model on its device. embeds: rows have the input of the last layer."""

    def __init__(self, loaded: LoadedCheckpoint, device: torch.device, embeds: bool) -> None:
        self.loaded, self.device, self.embeds = loaded, device, embeds
        loaded.model.to(device)
        self._embedding: Tensor | None = None
        if embeds:
            last_layer(loaded.model)[1].register_forward_pre_hook(self._keep_input)

    def _keep_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._embedding = inputs[0].detach().flatten(1).float().cpu()

    def rows(self, batch: Mapping[str, Any]) -> list[tuple[list[Tensor], list[float]]]:
        """Return (outputs by head, embedding) of each sample. batch: inputs, on the device."""
        loaded = self.loaded
        with autocast(loaded.config, self.device):
            outputs = loaded.inputs.call(loaded.model, batch, channels_last=False)
        parts = zip(loaded.task.heads, loaded.task.split(outputs), strict=True)
        columns = [head.compact(own).cpu() for head, own in parts]
        count = len(outputs)
        embeddings = [[]] * count if self._embedding is None else self._embedding.tolist()
        return [([own[i] for own in columns], embeddings[i]) for i in range(count)]


def _target_text(head: Head, index: Index, number: int, data: bytes) -> tuple[str, str]:
    """Return (target in words, error) of a sample. data: of the label; empty if it is missing."""
    try:
        if not data:
            raise LookupError(f"it has no {head.target.field}")
        if isinstance(head, NumberHead):  # all digits, which a float32 would not hold
            return number_text(float(scalar(memoryview(data), head.target.entry))), ""
        reader = head.field()
        if isinstance(reader, LabelField):  # joined sets may number their classes differently
            label = index.label_in_sample(head.target, number)
            reader = numbered(reader, label, is_alone=not index.shard_labels)
        assert reader.example is not None
        value = np.zeros(reader.example.shape, reader.example.dtype)
        reader.read(head.target.field, memoryview(data), value, np.zeros(DRAWS))
    except Exception as error:  # a bad target does not hide the prediction
        return "", f"{head.name}: {error}"
    return head.target_text(torch.from_numpy(value)), ""


def _rows_of_shards(
    index: Index,
    source: InputSource,
    predictor: _Predictor,
    known: Sequence[Head],
    reporter: Reporter,
) -> Generator[_Row, None, None]:
    config = predictor.loaded.config
    targets = {f"true {i}": head.target.field for i, head in enumerate(known)}
    loader = Loader(
        index,
        **source.bytes_options(targets),
        batch_size=config.batch_size,
        num_workers=config.num_workers,
        shuffle=False,
        tail="keep",
        rank=0,
        world_size=1,
        max_errors=1.0,
        cache_dir=config.cache_dir,
        cache_limit=config.cache_limit,
    )
    number = 0
    with closing(loader), torch.inference_mode():
        batches = loader.epoch(0, until=1)
        for step, batch in enumerate(to_device(batches, predictor.device)):
            predictions, bad = predictor.rows(batch), iter(batches.bad)
            for row, is_readable in enumerate(batches.own.tolist()):
                key = index.key(number)
                if is_readable:
                    texts = [
                        _target_text(head, index, number, batch[f"true {i}"][row])
                        for i, head in enumerate(known)
                    ]
                    error = "; ".join(problem for _, problem in texts if problem)
                    outputs, embedding = predictions[row]
                    yield _Row(key, outputs, [text for text, _ in texts], error, embedding)
                else:
                    yield _Row(key, error=next(bad).reason)
                number += 1
            reporter.step("predicting", step + 1, len(loader))


def _rows_of_images(
    images: Sequence[tuple[str, str]],
    source: InputSource,
    predictor: _Predictor,
    reporter: Reporter,
) -> Generator[_Row, None, None]:
    """Yield the rows of image files. images: (key, path)."""
    size = predictor.loaded.config.batch_size
    with ThreadPoolExecutor(thread_name_prefix="wdstrain-predict") as pool, torch.inference_mode():
        for first in range(0, len(images), size):
            some = images[first : first + size]
            read = list(pool.map(lambda image: _read_image(image[0], image[1], source), some))
            good = [inputs for inputs, _ in read if inputs is not None]
            rows = iter(predictor.rows(_stacked(good, predictor.device)) if good else [])
            for (key, _), (inputs, error) in zip(some, read, strict=True):
                if inputs is None:
                    yield _Row(key, error=error)
                else:
                    outputs, embedding = next(rows)
                    yield _Row(key, outputs, embedding=embedding)
            reporter.step("predicting", first // size + 1, -(-len(images) // size))


def _stacked(samples: Sequence[Mapping[str, Any]], device: torch.device) -> dict[str, Tensor]:
    """Return the batch of some samples' inputs."""
    return {name: torch.stack([s[name] for s in samples]).to(device) for name in samples[0]}


def _read_image(key: str, path: str, source: InputSource) -> tuple[Mapping[str, Any] | None, str]:
    """Return (inputs as a batch has them, error) of an image file."""
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would block
        return None, "it is not a regular file"
    try:
        with open(path, "rb") as file:
            data = file.read()
        return source.read_file(key, os.path.splitext(path)[1][1:].lower(), data), ""
    except UsageError:
        raise
    except Exception as error:  # decoders raise errors of many types
        return None, str(error) or type(error).__name__


def _extensions(arguments: PredictArguments, loaded: LoadedCheckpoint) -> set[str]:
    """Return the extensions of files that are an input on their own."""
    names = [name for spec in loaded.inputs.specs.values() for name in spec.names]
    names += [name for field in (arguments.fields or {}).values() for name in field.names]
    return {*EXTENSIONS, *names}


def _image_paths(
    urls: Urls | Index, extensions: Collection[str], reporter: Reporter
) -> list[tuple[str, str]]:
    """Return (key, path) of each image of a folder or of one image file; empty for shards.

    Reports how many files of a folder are no images.
    """
    if not isinstance(urls, (str, os.PathLike)):
        return []
    path = os.fspath(urls)
    if os.path.splitext(path)[1][1:].lower() in extensions and os.path.exists(path):
        return [(os.path.basename(path), path)]
    if not os.path.isdir(path) or any(
        name.endswith(".tar") or name == INDEX_NAME for name in os.listdir(path)
    ):
        return []
    listing = list_folder(path, flat=True)
    if listing.ignored:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(listing.ignored.items()))
        reporter.line(
            f"files passed over: {sum(listing.ignored.values())} ({kinds}). "
            f"Images end in {', '.join(EXTENSIONS)}."
        )
    samples = [entry for entry in listing.samples() if isinstance(entry, Sample)]
    paths = sorted(str(sample.parts[0][1]) for sample in samples)
    return [(os.path.relpath(image, path), image) for image in paths]
