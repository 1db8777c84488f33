"""Predictions of a checkpoint as a table: one row per image, of shards or of a folder of images.

Rows come in the order of the shards, or of the sorted paths. An image that cannot be read has its
row too, with the error. Targets are there to compare with: one that cannot be read is reported in
the error column, and the image beside it is predicted all the same.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image as PillowImage
from torch import Tensor, nn

from wdstrain.conversion.listing import Sample
from wdstrain.conversion.sources.folder import list_folder
from wdstrain.decode.codecs import FIRST_TRANSPOSED, open_picture
from wdstrain.decode.formats import EXTENSIONS
from wdstrain.decode.labels import LabelField, numbered
from wdstrain.decode.masks import IGNORED
from wdstrain.decode.transforms import DRAWS, center_crop
from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.loader.device import to_device
from wdstrain.loader.loader import Loader
from wdstrain.report.terminal import Reporter, reporting
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_shards
from wdstrain.storage.addresses import INDEX_NAME, Urls
from wdstrain.storage.files import check_file_output, put_whole, write_whole
from wdstrain.training.arguments import (
    PredictArguments,
    check_cache,
    given_options,
    refuse_without_effect,
)
from wdstrain.training.data import with_task_labels
from wdstrain.training.distributed import DistributedContext, device_of
from wdstrain.training.heads import Head, NumberHead
from wdstrain.training.loaded_checkpoint import LoadedCheckpoint
from wdstrain.training.models import last_layer
from wdstrain.training.optim import autocast
from wdstrain.training.previews import Pixels, mask_png
from wdstrain.training.sources import ERROR, InputSource, check_fields

_TABLES = (".csv", ".parquet")
_GROUP_ROWS = 4096  # rows of a row group of Parquet


@dataclass(frozen=True)
class PredictResult:
    """rows: in all. bad: rows with an error: of the image, or of a target beside it."""

    rows: int
    bad: int


@takes(PredictArguments)
@WorkerDeathsAsErrors()
def predict(arguments: PredictArguments) -> PredictResult:
    """Write predictions to the file `out`: one row per image.

    Columns: key; for each label NAME the prediction, NAME_probability (of classes), and NAME_true
    where the shards have it; error. Characters other than letters, digits and _ are _ in names of
    columns. Predicted masks are PNGs of the size of the pictures and named by their keys, in a
    folder named like `out` without its ending; a column has their paths in it.
    """
    path, urls = os.fspath(arguments.out), arguments.urls
    if arguments.fields is not None:
        check_fields(arguments.fields, "fields")
    if os.path.splitext(path)[1].lower() not in _TABLES:
        raise UsageError(f"out={path}: must end in {' or '.join(_TABLES)}.")
    check_file_output(path)
    options = given_options(arguments)
    loaded = LoadedCheckpoint.of(arguments.checkpoint, model=arguments.model, options=options)
    heads, distributed = loaded.task.heads, DistributedContext()
    for option in ("probabilities", "embeddings"):
        if getattr(arguments, option) and loaded.task.is_dense:
            raise UsageError(f"{option}: not available for masks. Leave it out.")
    if distributed.size > 1:
        raise UsageError(
            f"predict writes its table in one process, and this job has {distributed.size}. "
            f"Start it without torchrun or srun."
        )
    if arguments.probabilities and all(isinstance(head, NumberHead) for head in heads):
        raise UsageError("probabilities has no effect: no label has classes. Leave it out.")
    device = device_of(loaded.config.device, distributed)
    with reporting(arguments.progress, True) as reporter:
        images = _image_paths(urls, _extensions(arguments, loaded), reporter)
        index = None if images else open_shards(urls)
        source = loaded.source(arguments.fields, arguments.transform, index, reads_labels=False)
        compares = False
        if index is None:
            without = ("num_workers", "cache_dir", "cache_limit")
            refuse_without_effect(options, without, "image files are read in threads")
            batches = _batches_of_images(images, source, loaded.config.batch_size, reporter)
        else:
            check_cache(options, index)
            compares = _has_targets(index, loaded, reporter)
            known = heads if compares else ()
            batches = _batches_of_shards(index, source, loaded, known, device, reporter)
        predictor = _Predictor(loaded, device, arguments.embeddings)
        table = _Table(loaded, compares, arguments, path)
        with closing(batches), torch.inference_mode():
            table.write(predictor.rows(batches))
        return PredictResult(table.rows, table.bad)


def _has_targets(index: Index, loaded: LoadedCheckpoint, reporter: Reporter) -> bool:
    """Return whether the shards have the targets of the model."""
    undeclared = loaded.config.label is not None
    if loaded.task.is_dense or not (undeclared or index.labels or index.shard_labels):
        return False
    if not any(head.target.field in index.fields for head in loaded.task.heads):
        return False
    try:
        loaded.task.check(with_task_labels(index, loaded.task, undeclared=undeclared))
    except UsageError as difference:
        reporter.line(f"The targets are left out: {difference}")
        return False
    return True


class _Sample(NamedTuple):
    """A sample to predict. true: targets by known head. picture: encoded; b"" if it is not known."""

    key: str
    error: str = ""
    is_readable: bool = True
    true: Sequence[Any] = ()
    picture: bytes = b""


# inputs of the readable samples of a batch, and all its samples
Batches = Generator[tuple[dict[str, Tensor], list[_Sample]], None, None]


class _Row(NamedTuple):
    """outputs: by head, [1, ...]; none of a sample without a prediction."""

    sample: _Sample
    outputs: Sequence[Tensor] = ()
    embedding: Sequence[float] = ()


# --- the table ------------------------------------------------------------------------------------


class _Table:
    """A table of predictions: its columns, its rows, and its file.

    compares: the targets are in it. rows, bad: how many were written, and those with an error.
    """

    def __init__(
        self, loaded: LoadedCheckpoint, compares: bool, arguments: PredictArguments, path: str
    ) -> None:
        self._heads, self._compares, self._path = loaded.task.heads, compares, path
        self._probabilities, self._embeds = arguments.probabilities, arguments.embeddings
        self._masks = _MaskFolder(loaded, path) if loaded.task.is_dense else None
        self.rows = self.bad = 0
        columns: list[tuple[str, Any]] = [("key", pa.string())]
        for head in self._heads:
            own = self._columns(head)
            columns += own
            columns += [(f"{head.name}_true", own[0][1])] if compares else []
        columns += [("embedding", pa.list_(pa.float32()))] if self._embeds else []
        self._schema = pa.schema(_plain_names([*columns, ("error", pa.string())]))

    def _columns(self, head: Head) -> list[tuple[str, Any]]:
        """Return (name, type) of the columns of a prediction."""
        if isinstance(head, NumberHead):
            return [(head.name, pa.float64())]
        names = ["probability"] if head.kind in ("class", "binary") else []
        names += head.classes if self._probabilities else []
        shares = [(f"{head.name}_{name}", pa.float64()) for name in names]
        return [(head.name, pa.string()), *shares]

    def _cells(self, head: Head, outputs: Tensor, sample: _Sample) -> list[Any]:
        """Return the cells of one prediction. outputs: [1, ...]"""
        (value,) = head.predicted(outputs)
        if isinstance(head, NumberHead):
            return [value]
        if self._masks is not None:
            return [self._masks.write(value.numpy(), sample)]
        shares = head.probabilities(outputs.double())[0].tolist()
        cells = [max(shares)] if head.kind in ("class", "binary") else []
        cells += shares if self._probabilities else []
        return [head.text(value), *(float(f"{share:.9g}") for share in cells)]

    def write(self, rows: Iterable[_Row]) -> None:
        """Write all rows. The file appears when it is complete."""
        lines = self._lines(rows)
        with put_whole(self._path) as file:
            if self._path.lower().endswith(".csv"):
                text = io.TextIOWrapper(
                    file, "utf-8", errors="surrogateescape", newline="", write_through=True
                )
                writer = csv.writer(text, lineterminator="\n")
                writer.writerow(self._schema.names)
                writer.writerows(map(_csv_cell, line) for line in lines)
                text.detach()
                return
            with pq.ParquetWriter(file, self._schema) as parquet:
                while group := list(islice(lines, _GROUP_ROWS)):
                    columns = (
                        list(map(_parquet_cell, cells)) for cells in zip(*group, strict=True)
                    )
                    parquet.write_table(pa.table(list(columns), self._schema))

    def _lines(self, rows: Iterable[_Row]) -> Iterator[list[Any]]:
        """Yield the cells of each row."""
        for sample, outputs, embedding in rows:
            cells: list[Any] = [sample.key]
            for i, head in enumerate(self._heads):
                if outputs:
                    cells += self._cells(head, outputs[i], sample)
                else:
                    kinds = (kind for _, kind in self._columns(head))
                    cells += [None if kind == pa.float64() else "" for kind in kinds]
                if self._compares:
                    cells.append(sample.true[i] if sample.true else None)
            cells += [embedding] if self._embeds else []
            yield [*cells, sample.error or None]
            self.rows, self.bad = self.rows + 1, self.bad + bool(sample.error)


def _plain_names(columns: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return columns under names that SQL and data frames take without quotes, each once."""
    plain: dict[str, Any] = {}
    for name, kind in columns:
        name = re.sub(r"^(?=\d)|\W", "_", name)
        while name in plain:
            name += "_"
        plain[name] = kind
    return list(plain.items())


def _csv_cell(cell: Any) -> str:
    if isinstance(cell, float):
        return repr(cell).removesuffix(".0")
    is_list = isinstance(cell, list)
    return f"[{', '.join(f'{value:.9g}' for value in cell)}]" if is_list else cell or ""


def _parquet_cell(cell: Any) -> Any:
    return cell.encode("utf-8", "replace").decode() if isinstance(cell, str) else cell


class _MaskFolder:
    """Folder of predicted masks, named by the keys of their pictures."""

    def __init__(self, loaded: LoadedCheckpoint, path: str) -> None:
        self._folder, self._names = os.path.splitext(path)[0], set[str]()
        self._seen = loaded.inputs.image
        if os.path.isdir(self._folder) and os.listdir(self._folder):
            raise UsageError(
                f"{self._folder} has files already, and predicted masks would be written there. "
                f"Name another out, or empty the folder."
            )
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{self._folder}: the folder for masks cannot be made ({error.strerror}). "
                f"Name another out."
            ) from error

    def write(self, numbers: Pixels, sample: _Sample) -> str:
        """Write a mask, uint8[h, w]. Returns its path from the folder of the table."""
        stem, ending = os.path.splitext(sample.key)
        stem = stem if ending[1:].lower() in EXTENSIONS else sample.key
        name = re.sub(r"[^\w. -]", "_", stem.lstrip("."))[:60] or "_"
        while name.lower() in self._names:
            name += f"-{len(self._names)}"
        self._names.add(name.lower())
        png = mask_png(self._of_picture(numbers, sample.picture))
        write_whole(os.path.join(self._folder, f"{name}.png"), png)
        return f"{os.path.basename(self._folder)}/{name}.png"

    def _of_picture(self, numbers: Pixels, picture: bytes) -> Pixels:
        """Return a mask in the size of the picture, of which the model saw the center."""
        if not picture or self._seen is None:
            return numbers
        image = open_picture(picture)
        width, height = image.size
        if image.getexif().get(0x0112, 1) >= FIRST_TRANSPOSED:
            width, height = height, width
        aspect = numbers.shape[1] / numbers.shape[0]
        top, left, h, w = center_crop(height, width, aspect, self._seen.augment["crop_pct"])
        whole = np.full((height, width), IGNORED, np.uint8)
        seen = PillowImage.fromarray(numbers).resize((w, h), PillowImage.Resampling.NEAREST)
        whole[top : top + h, left : left + w] = np.asarray(seen)
        return whole


# --- predictions ----------------------------------------------------------------------------------


class _Predictor:
    """A model on its device. embeds: rows have the input of the last layer."""

    def __init__(self, loaded: LoadedCheckpoint, device: torch.device, embeds: bool) -> None:
        self._loaded, self._device = loaded, device
        self._embedding: Tensor | None = None
        loaded.model.to(device)
        if embeds:
            last_layer(loaded.model)[1].register_forward_pre_hook(self._keep_input)

    def _keep_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._embedding = inputs[0].detach().flatten(1).float().cpu()

    def rows(self, batches: Batches) -> Iterator[_Row]:
        """Yield a row for each sample."""
        for inputs, samples in batches:
            outputs = self._outputs(inputs) if any(one.is_readable for one in samples) else None
            at = 0
            for sample in samples:
                if outputs is None or not sample.is_readable:
                    yield _Row(sample, embedding=[])
                    continue
                own = [columns[at : at + 1] for columns in outputs]
                if all(bool(columns.isfinite().all()) for columns in own):
                    embedding = [] if self._embedding is None else self._embedding[at].tolist()
                    yield _Row(sample, own, embedding)
                else:
                    error = "the output of the model is not finite"
                    yield _Row(sample._replace(error=error), embedding=[])
                at += 1

    def _outputs(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the outputs of the model by head, on the CPU."""
        loaded = self._loaded
        on_device = {name: value.to(self._device) for name, value in inputs.items()}
        with autocast(loaded.config, self._device):
            outputs = loaded.inputs.call(loaded.model, on_device, channels_last=False)
        return [columns.cpu() for columns in loaded.task.split(outputs)]


def _true_cell(head: Head, index: Index, number: int, data: bytes) -> tuple[Any, str]:
    """Return (target, error) of a sample. data: of the label; empty if it is missing."""
    try:
        if not data:
            raise LookupError(f"it has no {head.target.field}")
        reader = head.field()
        if isinstance(reader, LabelField):  # joined sets may number their classes differently
            label = index.label_in_sample(head.target, number)
            reader = numbered(reader, label, is_alone=not index.shard_labels)
        assert reader.example is not None
        value = np.zeros((1, *reader.example.shape), reader.example.dtype)
        reader.read(head.target.field, memoryview(data), value[0, ...], np.zeros(DRAWS))
    except Exception as error:  # a bad target does not hide the prediction
        return None, f"{head.name}: {error}"
    (true,) = head.true(torch.from_numpy(value))
    return (true if isinstance(head, NumberHead) else head.text(true)), ""


def _batches_of_shards(
    index: Index,
    source: InputSource,
    loaded: LoadedCheckpoint,
    known: Sequence[Head],
    device: torch.device,
    reporter: Reporter,
) -> Batches:
    config = loaded.config
    image = loaded.inputs.image if loaded.task.is_dense else None
    encoded: dict[str, tuple[str, ...]] = {
        f"true {i}": (head.target.field,) for i, head in enumerate(known)
    }
    encoded |= {} if image is None else {"true picture": image.names}
    loader = Loader(
        index,
        **source.predict_options(encoded),
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
    with closing(loader):
        batches = loader.epoch(0, until=1)
        for step, batch in enumerate(to_device(batches, device)):
            samples, bad = [], iter(batches.bad)
            errors = batch.get(ERROR) or [""] * len(batches.own)
            for row, is_own in enumerate(batches.own.tolist()):
                key, reason = index.key(number), errors[row] if is_own else next(bad).reason
                if reason:
                    samples.append(_Sample(key, reason, is_readable=False))
                else:
                    cells = [
                        _true_cell(head, index, number, batch[f"true {i}"][row])
                        for i, head in enumerate(known)
                    ]
                    error = "; ".join(problem for _, problem in cells if problem)
                    picture = batch["true picture"][row] if image is not None else b""
                    samples.append(_Sample(key, error, True, [one for one, _ in cells], picture))
                number += 1
            inputs = {name: batch[name] for name in loaded.inputs.specs}
            if not all(sample.is_readable for sample in samples):
                rows = torch.tensor([sample.is_readable for sample in samples], device=device)
                inputs = {name: value[rows] for name, value in inputs.items()}
            yield inputs, samples
            reporter.step("predicting", step + 1, len(loader))


def _batches_of_images(
    images: Sequence[tuple[str, str]], source: InputSource, size: int, reporter: Reporter
) -> Batches:
    """Yield image files, `size` at a time. images: (key, path)."""
    with ThreadPoolExecutor(thread_name_prefix="wdstrain-predict") as pool:
        for first in range(0, len(images), size):
            some = images[first : first + size]
            read = list(pool.map(lambda image: _read_image(image[0], image[1], source), some))
            good = [inputs for inputs, _ in read if inputs]
            names = good[0] if good else ()
            batch = {name: torch.stack([inputs[name] for inputs in good]) for name in names}
            yield batch, [sample for _, sample in read]
            reporter.step("predicting", first // size + 1, -(-len(images) // size))


def _read_image(key: str, path: str, source: InputSource) -> tuple[Mapping[str, Any], _Sample]:
    """Return (inputs as a batch has them, the sample) of an image file."""
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would block
        return {}, _Sample(key, "it is not a regular file", is_readable=False)
    try:
        with open(path, "rb") as file:
            data = file.read()
        inputs = source.read_file(key, os.path.splitext(path)[1][1:].lower(), data)
        return inputs, _Sample(key, picture=data)
    except UsageError:
        raise
    except Exception as error:  # decoders raise errors of many types
        return {}, _Sample(key, str(error) or type(error).__name__, is_readable=False)


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
