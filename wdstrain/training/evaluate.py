"""Use of a checkpoint: metrics on shards, and predictions as a table with a row per image.

Rows come in the order of the shards, or of the sorted paths. An image that cannot be read has its
row too, with the error. Targets are there to compare with: one that cannot be read is reported in
the error column, and the image beside it is predicted all the same.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from wdstrain.conversion.listing import Sample
from wdstrain.conversion.sources.folder import list_folder
from wdstrain.decode.formats import EXTENSIONS
from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.loader.device import to_device
from wdstrain.report.terminal import Reporter, reporting
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_shards
from wdstrain.storage.addresses import INDEX_NAME, Urls
from wdstrain.storage.files import check_file_output, put_whole
from wdstrain.training.config import (
    EvaluateArguments,
    PredictArguments,
    PredictOptions,
    given_options,
    refuse,
)
from wdstrain.training.data import (
    count_pixels,
    label_column,
    run_loader,
    whole_loader,
    with_task_labels,
)
from wdstrain.training.distributed import DistributedContext, device_of
from wdstrain.training.heads import Head, MaskHead
from wdstrain.training.inputs import Fields, read_file, with_targets
from wdstrain.training.metrics import classes_of
from wdstrain.training.models import last_layer
from wdstrain.training.report import write_evaluation
from wdstrain.training.tasks import Task
from wdstrain.training.validation import MaskFolder, PictureSize, Setup, evaluate_pass, upright_size
from wdstrain.training.weights import LoadedCheckpoint

_TABLES = (".csv", ".parquet")
_GROUP_ROWS = 4096  # rows of a row group of Parquet
_SIZE = "true size"  # entry of batches: height and width of the picture


@takes(EvaluateArguments)
@WorkerDeathsAsErrors()
def evaluate(arguments: EvaluateArguments) -> tuple[Task, dict[str, Any]]:
    """Return (task, metrics) of a checkpoint on shards; every sample counts once.

    "classes" among the metrics has count, precision, recall and the like of each class by label.

    Under torchrun all processes share the samples. The predictions, which one process writes, are
    made first, by a pass of their own.
    """
    if arguments.report is not None:
        check_file_output(os.fspath(arguments.report))
    if arguments.predictions is not None:
        inputs = ("model", "fields", "progress", *PredictOptions.__dataclass_fields__)
        same = {name: getattr(arguments, name) for name in inputs}
        predict(arguments.checkpoint, arguments.urls, arguments.predictions, **same)
    loaded, distributed = _loaded(arguments), DistributedContext()
    config, task = loaded.config, loaded.task
    index = with_task_labels(open_shards(arguments.urls), task, config)
    task.check(index)
    if isinstance(task.heads[0], MaskHead) and config.on_error == "raise":
        count_pixels(index, task.heads[0], is_strict=True)
    fields = with_targets(loaded.fields(arguments.fields, index), task)
    loader = run_loader(index, fields, config, distributed)
    with ExitStack() as stack:
        reporter = stack.enter_context(reporting(arguments.progress, distributed.leads))
        stack.callback(loader.close)
        stack.enter_context(distributed.joined(device_of(config.device, distributed)))
        setup = _setup(
            loaded,
            distributed,
            reporter,
            criterion=arguments.criterion,
            metrics=arguments.metrics or {},
        )
        metrics, details = evaluate_pass(loaded.model.to(setup.device), loader, setup, "evaluating")
    if arguments.report is not None and distributed.leads:
        write_evaluation(os.fspath(arguments.report), loaded, index, metrics, details)
    return task, metrics | classes_of(details)


def _loaded(arguments: EvaluateArguments | PredictArguments) -> LoadedCheckpoint:
    """Return the model that the arguments name."""
    return LoadedCheckpoint.of(
        arguments.checkpoint, model=arguments.model, options=given_options(arguments)
    )


def _setup(
    loaded: LoadedCheckpoint, distributed: DistributedContext, reporter: Reporter, **own: Any
) -> Setup:
    """Return how a loaded model is called. own: objects of the user's."""
    return Setup(
        task=loaded.task,
        config=loaded.config,
        inputs=loaded.inputs,
        device=device_of(loaded.config.device, distributed),
        distributed=distributed,
        reporter=reporter,
        **own,
    )


@dataclass(frozen=True)
class PredictResult:
    """rows: in all. bad: rows with an error in place of a prediction."""

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
    path, distributed = os.fspath(arguments.out), DistributedContext()
    refuse(
        (
            os.path.splitext(path)[1].lower() not in _TABLES,
            f"out={path}: must end in {' or '.join(_TABLES)}.",
        ),
        (
            distributed.size > 1,
            f"predict writes its table in one process, and this job has {distributed.size}.",
            "Start it without torchrun or srun.",
        ),
    )
    check_file_output(path)
    loaded = _loaded(arguments)
    refuse(
        *(
            (
                getattr(arguments, option) and loaded.task.is_dense,
                f"{option}: not available for masks.",
                "Leave it out.",
            )
            for option in ("probabilities", "embeddings")
        )
    )
    with reporting(arguments.progress, True) as reporter:
        images = _image_paths(arguments.urls, reporter)
        index = None if images else open_shards(arguments.urls)
        fields = loaded.fields(arguments.fields, index)
        setup = _setup(loaded, distributed, reporter)
        if index is None:
            batches, true = _batches_of_images(images, fields, loaded), {}
        else:
            batches = _batches_of_shards(index, fields, loaded, setup.device)
            true = _true_columns(index, loaded, reporter)
        table = _Table(setup, loaded.model.to(setup.device), arguments, true)
        with closing(batches), torch.inference_mode():
            _write(path, table.schema(), table.rows(batches, len(images or index or ())))
    return PredictResult(table.count, table.bad)


def _true_columns(
    index: Index, loaded: LoadedCheckpoint, reporter: Reporter
) -> dict[str, pa.Array]:
    """Return the values of the labels by name; of shards without or with other labels none."""
    heads = loaded.task.heads
    if loaded.task.is_dense or not any(head.target.field in index.fields for head in heads):
        return {}
    try:
        index = with_task_labels(index, loaded.task, loaded.config)
        loaded.task.check(index)
        return {head.name: label_column(index, head.label).values for head in heads}
    except UsageError as difference:
        reporter.line(f"The targets are left out: {difference}")
        return {}


class _Sample(NamedTuple):
    """A sample to predict. error: why it has no inputs. size: of its picture, if it is known."""

    key: str
    error: str = ""
    size: tuple[int, int] | None = None


# inputs of the readable samples of a batch, and all its samples
Batches = Generator[tuple[dict[str, Tensor], list[_Sample]], None, None]

# --- the table ------------------------------------------------------------------------------------


class _Table:
    """Rows of a table of predictions, of one batch after the other. true: targets by label.

    count, bad: rows so far, and those with an error.
    """

    def __init__(
        self,
        setup: Setup,
        model: nn.Module,
        arguments: PredictArguments,
        true: Mapping[str, pa.Array],
    ) -> None:
        self._setup, self._model, self._true, self._arguments = setup, model, true, arguments
        path = os.fspath(arguments.out)
        self._masks = MaskFolder(setup.inputs, path) if setup.task.is_dense else None
        self.count = self.bad = 0
        self._embedding = torch.zeros(0, 0)
        if arguments.embeddings:
            last_layer(model)[1].register_forward_pre_hook(self._keep_input)

    def _keep_input(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._embedding = inputs[0].detach().flatten(1).float().cpu()

    def schema(self) -> pa.Schema:
        """Return names that SQL and data frames take without quotes, each once, and types."""
        plain: dict[str, pa.DataType] = {}
        for column, kind, _ in self._columns({}, []):
            name = re.sub(r"^(?=\d)|\W", "_", column)
            while name in plain:
                name += "_"
            plain[name] = kind
        return pa.schema(plain)

    def rows(self, batches: Batches, count: int) -> Iterator[tuple[Any, ...]]:
        """Yield the cells of each row. count: samples."""
        for inputs, samples in batches:
            columns = [cells for *_, cells in self._columns(inputs, samples)]
            yield from zip(*columns, strict=True)
            self.count += len(samples)
            self.bad += sum(error is not None for error in columns[-1])
            self._setup.reporter.step("predicting", self.count, count, unit="samples")

    def _columns(
        self, inputs: Mapping[str, Tensor], samples: Sequence[_Sample]
    ) -> Iterator[tuple[str, pa.DataType, list[Any]]]:
        """Yield (name, type, cells) of each column for some samples."""
        task = self._setup.task
        errors = np.array([sample.error for sample in samples], object)
        readable = np.flatnonzero(errors == "")
        outputs = torch.zeros(0, *task.output_shape((0, 1, 1)))
        if len(readable):
            on_device = {name: x.to(self._setup.device) for name, x in inputs.items()}
            outputs = self._setup.call(self._model, on_device).float().cpu()
        is_finite = outputs.flatten(1).isfinite().all(1)
        errors[readable[~is_finite.numpy()]] = "the output of the model is not finite"
        rows = np.flatnonzero(errors == "").tolist()

        def placed(values: Iterable[Any]) -> list[Any]:
            by_row = dict(zip(rows, values, strict=True))
            return [by_row.get(row) for row in range(len(samples))]

        yield "key", pa.string(), [sample.key for sample in samples]
        for head, scores in zip(task.heads, task.split(outputs[is_finite]), strict=True):
            own = self._predictions(head, scores, [samples[row] for row in rows])
            yield from ((name, kind, placed(values)) for name, kind, values in own)
            if head.name in self._true:
                true = self._true[head.name].slice(self.count, len(samples)).to_pylist()
                is_number = head.kind == "number"
                cells = [x if is_number or x is None else head.text(x) for x in true]
                yield f"{head.name}_true", pa.float64() if is_number else pa.string(), cells
        if self._arguments.embeddings:
            embedding = self._embedding[is_finite].tolist() if rows else []
            yield "embedding", pa.list_(pa.float32()), placed(embedding)
        yield "error", pa.string(), [error or None for error in errors]

    def _predictions(
        self, head: Head, scores: Tensor, samples: Sequence[_Sample]
    ) -> Iterator[tuple[str, pa.DataType, list[Any]]]:
        """Yield (name, type, values) of the columns of a prediction."""
        values = head.predicted(scores)
        if head.kind == "number":
            yield head.name, pa.float64(), values
            return
        if self._masks is not None:
            write, masks = self._masks.write, zip(values, samples, strict=True)
            yield head.name, pa.string(), [write(mask, own.key, own.size) for mask, own in masks]
            return
        yield head.name, pa.string(), [head.text(value) for value in values]
        shares = head.probabilities(scores.double())
        columns = [("probability", shares.amax(1))] if head.has_accuracy else []
        if self._arguments.probabilities:
            columns += zip(head.classes, shares.T, strict=True)
        for name, column in columns:
            digits = [float(f"{share:.9g}") for share in column.tolist()]
            yield f"{head.name}_{name}", pa.float64(), digits


def _write(path: str, schema: pa.Schema, rows: Iterator[tuple[Any, ...]]) -> None:
    """Write a table. The file appears when it is complete."""
    with put_whole(path) as file:
        if path.lower().endswith(".csv"):
            text = io.TextIOWrapper(
                file, "utf-8", errors="surrogateescape", newline="", write_through=True
            )
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(schema.names)
            writer.writerows(map(_csv_cell, row) for row in rows)
            text.detach()
            return
        with pq.ParquetWriter(file, schema) as parquet:
            while group := list(islice(rows, _GROUP_ROWS)):
                cells = [list(map(_parquet_cell, cells)) for cells in zip(*group, strict=True)]
                parquet.write_table(pa.table(cells, schema))


def _csv_cell(cell: Any) -> str:
    if isinstance(cell, float):
        return repr(cell).removesuffix(".0")
    is_list = isinstance(cell, list)
    return f"[{', '.join(f'{value:.9g}' for value in cell)}]" if is_list else cell or ""


def _parquet_cell(cell: Any) -> Any:
    return cell.encode("utf-8", "replace").decode() if isinstance(cell, str) else cell


# --- samples --------------------------------------------------------------------------------------


def _batches_of_shards(
    index: Index, fields: Fields, loaded: LoadedCheckpoint, device: torch.device
) -> Batches:
    """Yield the samples of shards, a batch at a time. Masks get the sizes of the pictures."""
    config, names, image = loaded.config, loaded.inputs.specs, loaded.inputs.image
    if loaded.task.is_dense and image is not None:
        fields = {**fields, _SIZE: PictureSize(image.names)}
    loader = whole_loader(index, fields, config, config.batch_size, config.num_workers, "mark")
    keys = map(index.key, count())
    with closing(loader):
        batches = loader.epoch(0, until=1)
        for batch in to_device(batches, device):
            own, bad = batches.own, iter(batches.bad)
            sizes = map(tuple, batch[_SIZE].tolist()) if _SIZE in batch else repeat(None)
            samples = [
                _Sample(next(keys), "" if is_own else next(bad).reason, size)
                for is_own, size in zip(own.tolist(), sizes, strict=False)
            ]
            rows = torch.tensor(own, device=device)
            yield {name: batch[name][rows] for name in names}, samples


def _batches_of_images(
    images: Sequence[tuple[str, str]], fields: Fields, loaded: LoadedCheckpoint
) -> Batches:
    """Yield image files, a batch at a time. images: (key, path)."""
    names = loaded.inputs.specs
    if len(names) > 1:
        raise UsageError(
            f"image files give one input, and the model has {len(names)}: {', '.join(names)}.",
            "Convert the files to shards.",
        )
    sized = loaded.task.is_dense and loaded.inputs.image is not None
    read = partial(_read_image, fields=fields, sized=sized)
    with ThreadPoolExecutor(thread_name_prefix="wdstrain-predict") as pool:
        for first in range(0, len(images), loaded.config.batch_size):
            results = list(pool.map(read, images[first : first + loaded.config.batch_size]))
            good = [inputs for inputs, _ in results if inputs]
            batch = {name: torch.stack([inputs[name] for inputs in good]) for name in names if good}
            yield batch, [sample for _, sample in results]


def _read_image(
    image: tuple[str, str], fields: Fields, sized: bool
) -> tuple[Mapping[str, Any], _Sample]:
    """Return (inputs as a batch has them, the sample) of an image file. sized: it has its size."""
    key, path = image
    try:
        if not os.path.isfile(path):  # opening a pipe would block
            raise OSError("it is not a regular file")
        data = Path(path).read_bytes()
        inputs = read_file(fields, os.path.splitext(path)[1][1:].lower(), data)
        return inputs, _Sample(key, size=upright_size(data) if sized else None)
    except Exception as error:  # decoders raise errors of many types
        return {}, _Sample(key, str(error) or type(error).__name__)


def _image_paths(urls: Urls | Index, reporter: Reporter) -> list[tuple[str, str]]:
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
    if listing.ignored:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(listing.ignored.items()))
        reporter.line(
            f"files passed over: {sum(listing.ignored.values())} ({kinds}). "
            f"Images end in {', '.join(EXTENSIONS)}."
        )
    samples = (entry for entry in listing.samples() if isinstance(entry, Sample))
    return [(os.path.relpath(p, path), p) for p in sorted(str(s.parts[0][1]) for s in samples)]
