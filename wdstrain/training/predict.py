"""Predictions: a table with a row per image, masks as pictures, and the worst for the report.

Rows come in the order of the shards, or of the sorted paths. An image that cannot be read has its
row too, with the error. Targets are there to compare with: one that cannot be read is reported in
the error column, and the image beside it is predicted all the same.
"""

from __future__ import annotations

import codecs
import csv
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor, nn

from wdstrain.conversion.listing import Sample
from wdstrain.conversion.sources.folder import list_folder
from wdstrain.decode.codecs import IGNORED
from wdstrain.decode.fields import Example
from wdstrain.decode.transforms import center_crop
from wdstrain.errors import UsageError
from wdstrain.loader.batch_assembly import TakenBatch
from wdstrain.report.terminal import Reporter
from wdstrain.shards.formats import EXTENSIONS, header_of
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.offsets import Offsets
from wdstrain.storage.addresses import INDEX_NAME, Urls
from wdstrain.storage.files import check_file_output, put_whole
from wdstrain.training.checkpoint import Setup
from wdstrain.training.config import TrainedArguments, refuse
from wdstrain.training.data import label_column, with_task_labels
from wdstrain.training.distributed import DistributedContext
from wdstrain.training.heads import Head
from wdstrain.training.inputs import Fields
from wdstrain.training.models import last_layer

Pixels = npt.NDArray[np.uint8]
Scored = tuple[dict[str, Any], Tensor, TakenBatch]  # batch, outputs, its ids and bad samples

SIZE = "true size"  # entry of batches: height and width of the picture
_TABLES = (".csv", ".parquet")
_KEPT = 24  # worst samples
_GROUP_ROWS = 4096  # rows of a row group of Parquet
_NOT_FINITE = "the output of the model is not finite"


def sized(fields: Fields, setup: Setup) -> Fields:
    """Return the fields, for masks with one of the sizes of the pictures."""
    image = setup.inputs.image
    if not setup.task.is_dense or image is None:
        return fields
    return {**fields, SIZE: PictureSize(image.names)}


def check_table(path: str, distributed: DistributedContext) -> None:
    """Raise UsageError for a table that cannot be written."""
    refuse(
        os.path.splitext(path)[1].lower() not in _TABLES,
        f"{{out}}: must end in {' or '.join(_TABLES)}.",
        out=path,
    )
    refuse(
        distributed.size > 1,
        f"predict writes its table in one process, and this job has {distributed.size}.",
        "Start it without torchrun or srun.",
    )
    check_file_output(path)


def _true_columns(index: Index, setup: Setup) -> dict[str, pa.Array]:
    """Return the values of the labels by name; of shards without or with other labels none."""
    heads = setup.task.heads
    places = {*index.fields, *(column.field for column in index.columns)}
    if setup.task.is_dense or not any(head.target.field in places for head in heads):
        return {}
    try:
        labeled = with_task_labels(index, setup.task, setup.config)
        setup.task.check(labeled)
        refuse(len(labeled) < len(index), "some samples have classes that are not learned.")
        return {head.name: label_column(labeled, head.label).values for head in heads}
    except UsageError as difference:
        setup.reporter.line(f"The targets are left out: {difference}")
        return {}


# --- the table ------------------------------------------------------------------------------------

Column = tuple[str, pa.DataType, Sequence[Any]]  # name, type, cells
Errors = Sequence[str | None]  # why a row has no prediction


class PredictionTable:
    """A table of predictions. count, bad: rows so far, and those with an error."""

    def __init__(
        self, index: Index, model: nn.Module, setup: Setup, path: str, options: TrainedArguments
    ) -> None:
        """index: the samples that `write` gets."""
        self._task, self._options, self._path, self._index = setup.task, options, path, index
        self._true = _true_columns(index, setup)
        self._folder, self._image = os.path.splitext(path)[0], setup.inputs.image
        self._masks = set[str]()  # names of written pictures, in small letters
        self.count = self.bad = 0
        if self._task.is_dense:
            refuse(
                os.path.isfile(self._folder)
                or (os.path.isdir(self._folder) and os.listdir(self._folder)),
                f"{self._folder} has files already, and predicted masks would be written there.",
                "Name another out, or empty the folder.",
            )
            os.makedirs(self._folder, exist_ok=True)
        self._embedding = torch.zeros(0, 0)
        if options.embeddings:
            last_layer(model)[1].register_forward_pre_hook(self._keep_input)

    def _keep_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._embedding = inputs[0].detach().flatten(1).float().cpu()

    def write(self, scored: Iterable[Scored]) -> None:
        """Write the predictions of all samples. The file appears when it is complete."""
        schema, rows = self._schema(), self._rows(scored)
        with put_whole(self._path) as file:
            if self._path.lower().endswith(".csv"):
                text = codecs.getwriter("utf-8")(file, "surrogateescape")
                writer = csv.writer(text, lineterminator="\n")
                writer.writerow(schema.names)
                writer.writerows(map(_csv_cell, row) for row in rows)
                return
            with pq.ParquetWriter(file, schema) as parquet:
                while group := list(islice(rows, _GROUP_ROWS)):
                    cells = [list(map(_parquet_cell, cells)) for cells in zip(*group, strict=True)]
                    parquet.write_table(pa.table(cells, schema))

    def _schema(self) -> pa.Schema:
        """Return names that SQL and data frames take without quotes, each once, and types."""
        plain: dict[str, pa.DataType] = {}
        nothing = torch.zeros(0, *self._task.output_shape((0, 1, 1)))
        for column, kind, _ in self._columns(nothing, [], [], []):
            name = re.sub(r"^(?=\d)|\W", "_", column)
            while name in plain:
                name += "_"
            plain[name] = kind
        return pa.schema(plain)

    def _rows(self, scored: Iterable[Scored]) -> Iterator[tuple[Any, ...]]:
        """Yield the cells of each row."""
        for batch, outputs, delivered in scored:
            bad = iter(delivered.bad)
            is_finite = outputs.flatten(1).isfinite().all(1).tolist()
            errors = [
                (None if is_good else _NOT_FINITE) if is_own else next(bad).reason
                for is_own, is_good in zip(delivered.own.tolist(), is_finite, strict=True)
            ]
            keys = self._index.keys(np.arange(self.count, self.count + len(errors)))
            sizes = (
                list(map(tuple, batch[SIZE].tolist())) if SIZE in batch else [None] * len(errors)
            )
            columns = [cells for *_, cells in self._columns(outputs.cpu(), keys, errors, sizes)]
            yield from zip(*columns, strict=True)
            self.count += len(errors)
            self.bad += sum(error is not None for error in errors)

    def _columns(
        self, outputs: Tensor, keys: Sequence[str], errors: Errors, sizes: Sequence[Any]
    ) -> Iterator[Column]:
        """Yield the columns of some samples. sizes: of their pictures, if known."""
        yield "key", pa.string(), keys
        for head, scores in zip(self._task.heads, self._task.split(outputs), strict=True):
            if self._task.is_dense:
                rows = zip(head.predicted(scores), keys, sizes, errors, strict=True)
                paths = [error or self._write_mask(*own) for *own, error in rows]
                predictions: Iterable[Column] = [(head.name, pa.string(), paths)]
            else:
                predictions = self._predictions(head, scores)
            for name, kind, values in predictions:
                yield name, kind, _without_bad(values, errors)
            if head.name in self._true:
                true = self._true[head.name].slice(self.count, len(keys)).to_pylist()
                is_number = head.kind == "number"
                cells = [x if is_number or x is None else head.text(x) for x in true]
                yield f"{head.name}_true", pa.float64() if is_number else pa.string(), cells
        if self._options.embeddings:
            embedding = _without_bad(self._embedding.tolist(), errors)
            yield "embedding", pa.list_(pa.float32()), embedding
        yield "error", pa.string(), errors

    def _predictions(self, head: Head, scores: Tensor) -> Iterator[Column]:
        """Yield the columns of a prediction."""
        values = head.predicted(scores)
        if head.kind == "number":
            yield head.name, pa.float64(), values
            return
        yield head.name, pa.string(), [head.text(value) for value in values]
        shares = head.probabilities(scores.double())
        columns = [("probability", shares.amax(1))] if head.main_metric == "accuracy" else []
        if self._options.probabilities:
            columns += zip(head.classes, shares.T, strict=True)
        for name, column in columns:
            digits = [float(f"{share:.9g}") for share in column.tolist()]
            yield f"{head.name}_{name}", pa.float64(), digits

    def _write_mask(self, mask: Tensor, key: str, size: tuple[int, int] | None) -> str:
        """Write a mask, uint8[h, w], in the size of the picture, of which the model saw the center.

        Returns its path from the folder of the table.
        """
        numbers: Pixels = mask.numpy()
        if size is not None and self._image is not None:
            aspect = numbers.shape[1] / numbers.shape[0]
            top, left, h, w = center_crop(*size, aspect, self._image.augment["crop_pct"])
            seen = Image.fromarray(numbers).resize((w, h), Image.Resampling.NEAREST)
            numbers = np.full(size, IGNORED, np.uint8)
            numbers[top : top + h, left : left + w] = np.asarray(seen)
        stem, ending = os.path.splitext(key)
        stem = stem if ending[1:].lower() in EXTENSIONS else key
        name = re.sub(r"[^\w. -]", "_", stem.lstrip("."))[:60] or "_"
        while name.lower() in self._masks:
            name += f"-{len(self._masks)}"
        self._masks.add(name.lower())
        picture = Image.fromarray(numbers, "L")
        picture.putpalette(self._task.heads[0].target.colors.tobytes())
        with put_whole(os.path.join(self._folder, f"{name}.png")) as file:
            picture.save(file, "PNG")
        return f"{os.path.basename(self._folder)}/{name}.png"


def _without_bad(values: Sequence[Any], errors: Errors) -> list[Any]:
    """Return the values, with None for samples that have an error."""
    return [None if error else value for value, error in zip(values, errors, strict=True)]


def _csv_cell(cell: Any) -> str:
    if isinstance(cell, float):
        return repr(cell).removesuffix(".0")
    is_list = isinstance(cell, list)
    return f"[{', '.join(f'{value:.9g}' for value in cell)}]" if is_list else cell or ""


def _parquet_cell(cell: Any) -> Any:
    return cell.encode("utf-8", "replace").decode() if isinstance(cell, str) else cell


# --- image files ----------------------------------------------------------------------------------


def index_of_files(images: Sequence[tuple[str, str]], fields: Fields) -> Index:
    """Return an index of image files: each is a shard of one sample. images: (key, path)."""
    refuse(
        len(fields) > 1,
        f"image files give one input, and the model has {len(fields)}: {', '.join(fields)}.",
        "Convert the files to shards.",
    )
    ((_, field),) = fields.items()
    rows, shards = [], []
    for key, path in images:
        size = os.path.getsize(path) if os.path.isfile(path) else 1  # of others a read tells why
        extension = os.path.splitext(path)[1][1:].lower()
        name = extension if extension in field.names else field.names[0]
        rows.append((key, 0, size, [(name, 0, size, 0)]))
        shards.append(Shard(path, 1, size))
    return Index(tuple(shards), Offsets.of_samples(rows))


def image_paths(urls: Urls | Index, reporter: Reporter) -> list[tuple[str, str]]:
    """Return (key, path) of each image of a folder or of one image file; empty for shards.

    Reports how many files of a folder are no images.
    """
    path = os.fspath(urls) if isinstance(urls, (str, os.PathLike)) else ""
    if os.path.splitext(path)[1][1:].lower() in EXTENSIONS and os.path.exists(path):
        return [(os.path.basename(path), path)]
    names = os.listdir(path) if os.path.isdir(path) else [INDEX_NAME]
    if any(name.endswith(".tar") or name == INDEX_NAME for name in names):
        return []
    listing = list_folder(path, flat=True)
    if ignored := listing.ignored:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(ignored.items()))
        reporter.line(
            f"files passed over: {sum(ignored.values())} ({kinds}). "
            f"Images end in {', '.join(EXTENSIONS)}."
        )
    samples = (entry for entry in listing.samples() if isinstance(entry, Sample))
    return [(os.path.relpath(p, path), p) for p in sorted(str(s.parts[0][1]) for s in samples)]


@dataclass(frozen=True)
class PictureSize:
    """Field of height and width of a picture, upright. int64[2]"""

    names: tuple[str, ...]
    example: ClassVar[Example] = Example((2,), "int64")

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> None:
        out[...] = header_of(data).size[::-1]


# --- samples for the report -----------------------------------------------------------------------


class Preview(NamedTuple):
    """A sample with its loss. pixels: uint8[h, w, 3].

    said: (prediction, truth, whether it is wrong) by label, in words.
    """

    loss: float
    key: str
    said: dict[str, tuple[str, str, bool]]
    pixels: Pixels | None


def largest(samples: Iterable[Preview]) -> list[Preview]:
    """Return the samples with the largest losses."""
    return sorted(samples, key=lambda sample: (-sample.loss, sample.key))[:_KEPT]


def with_worst(
    worst: Sequence[Preview],
    setup: Setup,
    batch: Mapping[str, Any],
    outputs: Tensor,
    losses: Tensor,
) -> list[Preview]:
    """Return the worst samples so far, of these and of a batch. losses: [b]."""
    ranks = losses.nan_to_num(nan=math.inf).tolist()
    least = worst[-1].loss if len(worst) == _KEPT else -math.inf
    rows = (row for row, loss in enumerate(ranks) if loss >= least)
    some = sorted(rows, key=lambda row: (-ranks[row], batch["__key__"][row]))[:_KEPT]
    new = [_preview(setup, batch, row, outputs[row : row + 1], ranks[row]) for row in some]
    return largest([*worst, *new])


def _preview(
    setup: Setup, batch: Mapping[str, Any], row: int, outputs: Tensor, loss: float
) -> Preview:
    """Return the preview of a row. outputs: of this row alone."""
    said, panels, task, picture = {}, [], setup.task, setup.inputs.picture
    if picture is not None:
        panels.append(batch[picture][row].permute(1, 2, 0).cpu().numpy())
    for head, scores, targets in zip(
        task.heads, task.split(outputs), task.targets(batch), strict=True
    ):
        (predicted,), (true,) = head.predicted(scores), head.true(targets[row : row + 1])
        if head.kind == "mask":
            colors = head.target.colors
            panels += [_colored(panels[0], colors[mask]) for mask in (predicted, true) if panels]
            continue
        is_name = isinstance(predicted, str)
        share = f" {float(head.probabilities(scores).max()):.0%}" if is_name else ""
        is_wrong = isinstance(predicted, (str, list)) and predicted != true
        said[head.name] = (head.text(predicted) + share, head.text(true), is_wrong)
    pixels = np.concatenate(panels, axis=1) if panels else None
    return Preview(loss, batch["__key__"][row], said, pixels)


def _colored(image: Pixels, colors: Pixels) -> Pixels:
    """Return the colors of a mask over its picture, after a white line."""
    colored = (image.astype(np.uint16) + colors) // 2
    return np.pad(colored, ((0, 0), (1, 0), (0, 0)), constant_values=255).astype(np.uint8)
