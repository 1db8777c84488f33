"""Predictions of a checkpoint as a table: one row per image, of shards or of a folder of images.

Rows come in the order of the shards, or of the sorted paths. An image that cannot be read has its
row too, with the error. Targets are there to compare with: one that cannot be read is reported in
the error column, and the image beside it is predicted all the same.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from wdstrain.conversion.sources.folder import list_folder
from wdstrain.decode.fields import Field
from wdstrain.decode.image_formats import EXTENSIONS
from wdstrain.decode.label_fields import Label, with_classes
from wdstrain.decode.transforms import DRAWS, Draws
from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.loader.device import to_device
from wdstrain.loader.loader import Loader
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_index, require_one_split
from wdstrain.shards.values import Array, scalar
from wdstrain.storage.addresses import INDEX_NAME, Urls
from wdstrain.storage.files import check_file_output, put_whole, write_whole
from wdstrain.training.arguments import (
    PredictArguments,
    check_cache,
    given_options,
    refuse_without_effect,
)
from wdstrain.training.distributed import DistributedContext, device_of
from wdstrain.training.heads import Head, NumberHead, number_text
from wdstrain.training.images import input_field
from wdstrain.training.loaded_checkpoint import LoadedCheckpoint
from wdstrain.training.mask_head import mask_png
from wdstrain.training.models import last_layer
from wdstrain.training.optim import autocast
from wdstrain.training.progress import Reporter, reporting

_CHUNK_ROWS = 4096  # rows of a row group of Parquet


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
    if os.path.splitext(path)[1].lower() not in _WRITERS:
        raise UsageError(f"out={path}: must end in {' or '.join(_WRITERS)}.")
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
    source = loaded.image_source(input_field(arguments.fields, loaded.task, "fields"))
    predictor = _Predictor(loaded, source, device, arguments.embeddings)
    with reporting(arguments.progress, True) as reporter:
        images = _image_paths(urls, source, reporter)
        if images:
            names = ("num_workers", "cache_dir", "cache_limit")
            refuse_without_effect(options, names, "image files are read in threads")
            known: list[Head] = []
            rows = _rows_of_images(images, predictor, reporter)
        else:
            index = urls if isinstance(urls, Index) else require_one_split(open_index(urls), urls)
            check_cache(options, index)
            known = _comparable_heads(index, loaded, reporter)
            rows = _rows_of_shards(index, predictor, known, reporter)
        return _write(path, rows, predictor, known, arguments.probabilities)


def _comparable_heads(index: Index, loaded: LoadedCheckpoint, reporter: Reporter) -> list[Head]:
    """Return the heads whose targets the shards have."""
    if loaded.task.is_dense or not (index.labels or index.shard_labels):
        return []
    try:
        loaded.task.check(index)
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


class _Writer(Protocol):
    def write(self, row: Sequence[Any]) -> None: ...


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
    names = ["key"]
    for head in heads:
        names += head.columns(probabilities=probabilities)
        names += [f"{head.name} true"] if head in known else []
    names += ["embedding"] if predictor.embeds else []
    with (
        closing(rows),
        _WRITERS[os.path.splitext(path)[1].lower()](path, [*names, "error"]) as table,
    ):
        for row in rows:
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
            table.write([*cells, row.error])
            count, bad = count + 1, bad + bool(row.error)
    return PredictResult(count, bad)


class _MaskFolder:
    """Folder of predicted masks. Files are numbered: keys of shards are no safe file names."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
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


class _CsvTable:
    def __init__(self, text: io.TextIOBase) -> None:
        self._writer = csv.writer(text, lineterminator="\n")

    def write(self, row: Sequence[Any]) -> None:
        cells = [
            "[" + ", ".join(f"{value:.9g}" for value in cell) + "]"
            if isinstance(cell, list)
            else cell
            for cell in row
        ]
        self._writer.writerow(cells)


@contextmanager
def _csv_table(path: str, names: Sequence[str]) -> Iterator[_Writer]:
    with put_whole(path) as file:
        text = io.TextIOWrapper(
            file, "utf-8", errors="surrogateescape", newline="", write_through=True
        )
        table = _CsvTable(text)
        table.write(names)
        yield table
        text.detach()


class _ParquetTable:
    """Rows of texts, and of lists of float32 in the column "embedding"."""

    def __init__(self, file: Any, names: Sequence[str]) -> None:
        kinds = [pa.list_(pa.float32()) if name == "embedding" else pa.string() for name in names]
        self._schema = pa.schema(list(zip(names, kinds, strict=True)))
        self._writer = pq.ParquetWriter(file, self._schema)
        self._rows: list[Sequence[Any]] = []

    def write(self, row: Sequence[Any]) -> None:
        self._rows.append(
            [
                cell.encode("utf-8", "replace").decode() if isinstance(cell, str) else cell
                for cell in row
            ]
        )
        if len(self._rows) == _CHUNK_ROWS:
            self.flush()

    def flush(self) -> None:
        columns = list(zip(*self._rows, strict=True)) or [()] * len(self._schema)
        arrays = [
            pa.array(values, kind) for values, kind in zip(columns, self._schema.types, strict=True)
        ]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        self.flush()
        self._writer.close()


@contextmanager
def _parquet_table(path: str, names: Sequence[str]) -> Iterator[_Writer]:
    with put_whole(path) as file:
        table = _ParquetTable(file, names)
        yield table
        table.close()


_WRITERS = {".csv": _csv_table, ".parquet": _parquet_table}


# --- predictions ----------------------------------------------------------------------------------


class _Predictor:
    """A model on its device. embeds: rows have the input of the last layer."""

    def __init__(
        self, loaded: LoadedCheckpoint, source: Field, device: torch.device, embeds: bool
    ) -> None:
        self.loaded, self.source, self.device, self.embeds = loaded, source, device, embeds
        loaded.model.to(device)
        self._embedding: Tensor | None = None
        if embeds:
            last_layer(loaded.model)[1].register_forward_pre_hook(self._keep_input)

    def _keep_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._embedding = inputs[0].detach().flatten(1).float().cpu()

    def rows(self, pixels: Tensor) -> list[tuple[list[Tensor], list[float]]]:
        """Return (outputs by head, embedding) of each image. pixels: on the device."""
        with autocast(self.loaded.config, self.device):
            outputs: Tensor = self.loaded.model(self.loaded.image.normalize(pixels))
        task = self.loaded.task
        parts = zip(task.heads, task.split(outputs), strict=True)
        columns = [head.compact(own).cpu() for head, own in parts]
        embeddings = [[]] * len(pixels) if self._embedding is None else self._embedding.tolist()
        return [([own[i] for own in columns], embeddings[i]) for i in range(len(pixels))]


@dataclass(frozen=True)
class _TargetBytes:
    """Field that gives the bytes of a label; None for a sample without it, which has its row too."""

    label: str
    images: tuple[str, ...]  # so that a sample without the label has a field to be found by
    example: None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.label, *self.images)

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> bytes | None:
        return bytes(data) if name == self.label else None


def _target_text(head: Head, reader: Field, number: int, data: bytes | None) -> tuple[str, str]:
    """Return (target in words, error) of a sample."""
    try:
        if data is None:
            raise LookupError(f"it has no {head.target.field}")
        if isinstance(head, NumberHead):  # all digits, which a float32 would not hold
            return number_text(float(scalar(memoryview(data), head.target.column))), ""
        own = reader
        if isinstance(reader, Label) and reader.parts:
            own = reader.readers(np.array([number]))[0]
        assert reader.example is not None
        value = np.zeros(reader.example.shape, reader.example.dtype)
        own.read(head.target.field, memoryview(data), value, np.zeros(DRAWS))
    except Exception as error:  # a bad target does not hide the prediction
        return "", f"{head.name}: {error}"
    return head.target_text(torch.from_numpy(value)), ""


def _rows_of_shards(
    index: Index, predictor: _Predictor, known: Sequence[Head], reporter: Reporter
) -> Generator[_Row, None, None]:
    config = predictor.loaded.config
    fields: dict[str, Field] = {"image": predictor.source}
    for i, head in enumerate(known):
        fields[f"true {i}"] = _TargetBytes(head.target.field, predictor.source.names)
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
        on_error="mark",
        max_errors=1.0,
        cache_dir=config.cache_dir,
        cache_limit=config.cache_limit,
    )
    number = 0
    with closing(loader), torch.inference_mode():
        batches = loader.epoch(0, until=1)
        for step, batch in enumerate(to_device(batches, predictor.device)):
            predictions, bad = predictor.rows(batch["image"]), iter(batches.bad)
            for row, is_readable in enumerate(batches.own.tolist()):
                key = index.key(number)
                if is_readable:
                    texts = [
                        _target_text(head, reader, number, batch[f"true {i}"][row])
                        for i, (head, reader) in enumerate(zip(known, readers, strict=True))
                    ]
                    error = "; ".join(problem for _, problem in texts if problem)
                    outputs, embedding = predictions[row]
                    yield _Row(key, outputs, [text for text, _ in texts], error, embedding)
                else:
                    yield _Row(key, error=next(bad).reason)
                number += 1
            reporter.step("predicting", step + 1, len(loader))


def _rows_of_images(
    images: Sequence[tuple[str, str]], predictor: _Predictor, reporter: Reporter
) -> Generator[_Row, None, None]:
    """Yield the rows of image files. images: (key, path)."""
    size = predictor.loaded.config.batch_size
    with ThreadPoolExecutor(thread_name_prefix="wdstrain-predict") as pool, torch.inference_mode():
        for first in range(0, len(images), size):
            some = images[first : first + size]
            read = list(pool.map(lambda image: _read_image(image[1], predictor.source), some))
            good = [pixels for pixels, _ in read if pixels is not None]
            rows = iter(predictor.rows(torch.stack(good).to(predictor.device)) if good else [])
            for (key, _), (pixels, error) in zip(some, read, strict=True):
                if pixels is None:
                    yield _Row(key, error=error)
                else:
                    outputs, embedding = next(rows)
                    yield _Row(key, outputs, embedding=embedding)
            reporter.step("predicting", first // size + 1, -(-len(images) // size))


def _read_image(path: str, source: Field) -> tuple[Tensor | None, str]:
    """Return (image as a batch has it, error)."""
    example = source.example
    assert example is not None
    out = np.empty(example.shape, example.dtype)
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would block
        return None, "it is not a regular file"
    try:
        with open(path, "rb") as file:
            data = memoryview(file.read())
        source.read(os.path.splitext(path)[1][1:].lower(), data, out, np.full(DRAWS, 0.5))
    except Exception as error:  # decoders raise errors of many types
        return None, str(error) or type(error).__name__
    pixels = torch.from_numpy(out)
    return pixels.permute(2, 0, 1) if example.channels_last else pixels, ""


def _image_paths(urls: Urls | Index, source: Field, reporter: Reporter) -> list[tuple[str, str]]:
    """Return (key, path) of each image of a folder or of one image file; empty for shards.

    Reports how many files of a folder are no images.
    """
    if not isinstance(urls, (str, os.PathLike)):
        return []
    path = os.fspath(urls)
    if os.path.splitext(path)[1][1:].lower() in source.names and os.path.exists(path):
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
    paths = sorted(str(item.parts[0][1]) for item in listing.items)
    return [(os.path.relpath(image, path), image) for image in paths]
