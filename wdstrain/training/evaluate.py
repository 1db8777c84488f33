"""Use of a checkpoint: metrics on shards, and predictions as a table with a row per image.

Rows come in the order of the shards, or of the sorted paths. An image that cannot be read has its
row too, with the error. Targets are there to compare with: one that cannot be read is reported in
the error column, and the image beside it is predicted all the same.
"""

from __future__ import annotations

import codecs
import csv
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import count, islice, repeat
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from wdstrain.conversion.listing import Sample
from wdstrain.conversion.sources.folder import list_folder
from wdstrain.decode.formats import EXTENSIONS
from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.report.terminal import Reporter, reporting
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.offsets import Offsets
from wdstrain.shards.resolve import open_shards
from wdstrain.storage.addresses import INDEX_NAME, Urls
from wdstrain.storage.files import check_file_output, put_whole
from wdstrain.training.config import (
    EvaluateArguments,
    PredictArguments,
    TrainedArguments,
    refuse,
)
from wdstrain.training.data import (
    count_pixels,
    label_column,
    run_loader,
    with_task_labels,
)
from wdstrain.training.distributed import DistributedContext, device_of
from wdstrain.training.heads import Head, MaskHead
from wdstrain.training.inputs import Fields, with_targets
from wdstrain.training.metrics import classes_of
from wdstrain.training.models import last_layer
from wdstrain.training.options import RunOptions
from wdstrain.training.report import write_evaluation
from wdstrain.training.tasks import Task
from wdstrain.training.validation import (
    MaskFolder,
    PictureSize,
    Scored,
    Setup,
    drain,
    evaluate_pass,
    run_model,
)
from wdstrain.training.weights import LoadedCheckpoint

_TABLES = (".csv", ".parquet")
_GROUP_ROWS = 4096  # rows of a row group of Parquet
_NOT_FINITE = "the output of the model is not finite"
_SIZE = "true size"  # entry of batches: height and width of the picture


@takes(EvaluateArguments)
@WorkerDeathsAsErrors()
def evaluate(arguments: EvaluateArguments) -> tuple[Task, dict[str, Any]]:
    """Return (task, metrics) of a checkpoint on shards; every sample counts once.

    "classes" among the metrics has count, precision, recall and the like of each class by label.
    Page and table of predictions come from the same pass. A sample that cannot be read has a row
    with the error in the table.

    Under torchrun all processes share the samples.
    """
    distributed = DistributedContext()
    if arguments.report is not None:
        check_file_output(os.fspath(arguments.report))
    if arguments.predictions is not None:
        _check_table(os.fspath(arguments.predictions), distributed)
    loaded = _loaded(arguments)
    config, task = loaded.config, loaded.task
    index = with_task_labels(open_shards(arguments.urls), task, config)
    task.check(index)
    if isinstance(task.heads[0], MaskHead) and config.on_error == "raise":
        count_pixels(index, task.heads[0], is_strict=True)
    fields = with_targets(loaded.fields(arguments.fields, index), task)
    loader = run_loader(index, _sized(fields, loaded), config, distributed)
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
        consume: Callable[[Iterator[Scored]], object] = drain
        if arguments.predictions is not None:
            consume = _Table(
                index, loaded, setup, os.fspath(arguments.predictions), arguments
            ).write
        metrics, details = evaluate_pass(
            loaded.model.to(setup.device), loader, setup, "evaluating", consume=consume
        )
    if arguments.report is not None and distributed.leads:
        write_evaluation(os.fspath(arguments.report), loaded, metrics, details)
    return task, metrics | classes_of(details)


def _loaded(arguments: TrainedArguments) -> LoadedCheckpoint:
    """Return the model that the arguments name. Raises UsageError for columns that masks lack."""
    options = {name: getattr(arguments, name, None) for name in RunOptions.__dataclass_fields__}
    loaded = LoadedCheckpoint.of(arguments.checkpoint, model=arguments.model, options=options)
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
    return loaded


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


def _sized(fields: Fields, loaded: LoadedCheckpoint) -> Fields:
    """Return the fields, for masks with one of the sizes of the pictures."""
    image = loaded.inputs.image
    if not loaded.task.is_dense or image is None:
        return fields
    return {**fields, _SIZE: PictureSize(image.names)}


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
    _check_table(path, distributed)
    loaded = _loaded(arguments)
    with reporting(arguments.progress, True) as reporter, torch.inference_mode():
        images = _image_paths(arguments.urls, reporter)
        index = None if images else open_shards(arguments.urls)
        fields = loaded.fields(arguments.fields, index)
        setup = _setup(loaded, distributed, reporter)
        if index is None:
            index = _index_of_files(images, fields)
        table = _Table(index, loaded, setup, path, arguments)
        config = replace(loaded.config, on_error="replace", max_errors=1.0)
        loader = run_loader(index, _sized(fields, loaded), config, on_error="mark")
        with closing(loader):
            table.write(run_model(loaded.model.to(setup.device), loader, setup, "predicting"))
    return PredictResult(table.count, table.bad)


def _check_table(path: str, distributed: DistributedContext) -> None:
    """Raise UsageError for a table that cannot be written."""
    refuse(
        (
            os.path.splitext(path)[1].lower() not in _TABLES,
            f"{{out}}: must end in {' or '.join(_TABLES)}.",
            "",
            {"out": path},
        ),
        (
            distributed.size > 1,
            f"predict writes its table in one process, and this job has {distributed.size}.",
            "Start it without torchrun or srun.",
        ),
    )
    check_file_output(path)


def _true_columns(
    index: Index, loaded: LoadedCheckpoint, reporter: Reporter
) -> dict[str, pa.Array]:
    """Return the values of the labels by name; of shards without or with other labels none."""
    heads = loaded.task.heads
    if loaded.task.is_dense or not any(head.target.field in index.fields for head in heads):
        return {}
    try:
        labeled = with_task_labels(index, loaded.task, loaded.config)
        loaded.task.check(labeled)
        refuse((len(labeled) < len(index), "some samples have classes that are not learned."))
        return {head.name: label_column(labeled, head.label).values for head in heads}
    except UsageError as difference:
        reporter.line(f"The targets are left out: {difference}")
        return {}


class _Sample(NamedTuple):
    """A sample to predict. error: why it has no prediction. size: of its picture, if known."""

    key: str
    error: str = ""
    size: tuple[int, int] | None = None


Column = tuple[str, pa.DataType, list[Any]]  # name, type, cells

# --- the table ------------------------------------------------------------------------------------


class _Table:
    """A table of predictions. count, bad: rows so far, and those with an error."""

    def __init__(
        self,
        index: Index,
        loaded: LoadedCheckpoint,
        setup: Setup,
        path: str,
        options: TrainedArguments,
    ) -> None:
        """index: the samples that `write` gets."""
        self._task, self._options, self._path, self._index = setup.task, options, path, index
        self._true = _true_columns(index, loaded, setup.reporter)
        self._masks = MaskFolder(setup.inputs, path) if setup.task.is_dense else None
        self.count = self.bad = 0
        self._embedding = torch.zeros(0, 0)
        if options.embeddings:
            last_layer(loaded.model)[1].register_forward_pre_hook(self._keep_input)

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
        for column, kind, _ in self._columns(nothing, []):
            name = re.sub(r"^(?=\d)|\W", "_", column)
            while name in plain:
                name += "_"
            plain[name] = kind
        return pa.schema(plain)

    def _rows(self, scored: Iterable[Scored]) -> Iterator[tuple[Any, ...]]:
        """Yield the cells of each row."""
        keys = map(self._index.key, count())
        for batch, outputs, delivered in scored:
            bad = iter(delivered.bad)
            sizes = map(tuple, batch[_SIZE].tolist()) if _SIZE in batch else repeat(None)
            samples = [
                _Sample(next(keys), "" if is_own else next(bad).reason, size)
                for is_own, size in zip(delivered.own.tolist(), sizes, strict=False)
            ]
            columns = [cells for *_, cells in self._columns(outputs.cpu(), samples)]
            yield from zip(*columns, strict=True)
            self.count += len(samples)
            self.bad += sum(error is not None for error in columns[-1])

    def _columns(self, outputs: Tensor, samples: list[_Sample]) -> Iterator[Column]:
        """Yield the columns of some samples. The last holds their errors."""
        is_finite = outputs.flatten(1).isfinite().all(1).tolist()
        samples = [
            own if own.error or is_good else own._replace(error=_NOT_FINITE)
            for own, is_good in zip(samples, is_finite, strict=True)
        ]
        yield "key", pa.string(), [sample.key for sample in samples]
        for head, scores in zip(self._task.heads, self._task.split(outputs), strict=True):
            for name, kind, values in self._predictions(head, scores, samples):
                yield name, kind, _without_bad(values, samples)
            if head.name in self._true:
                true = self._true[head.name].slice(self.count, len(samples)).to_pylist()
                is_number = head.kind == "number"
                cells = [x if is_number or x is None else head.text(x) for x in true]
                yield f"{head.name}_true", pa.float64() if is_number else pa.string(), cells
        if self._options.embeddings:
            yield (
                "embedding",
                pa.list_(pa.float32()),
                _without_bad(self._embedding.tolist(), samples),
            )
        yield "error", pa.string(), [sample.error or None for sample in samples]

    def _predictions(self, head: Head, scores: Tensor, samples: list[_Sample]) -> Iterator[Column]:
        """Yield the columns of a prediction."""
        values = head.predicted(scores)
        if head.kind == "number":
            yield head.name, pa.float64(), values
            return
        if self._masks is not None:
            write, rows = self._masks.write, zip(values, samples, strict=True)
            paths = [own.error or write(mask, own.key, own.size) for mask, own in rows]
            yield head.name, pa.string(), paths
            return
        yield head.name, pa.string(), [head.text(value) for value in values]
        shares = head.probabilities(scores.double())
        columns = [("probability", shares.amax(1))] if head.main_metric == "accuracy" else []
        if self._options.probabilities:
            columns += zip(head.classes, shares.T, strict=True)
        for name, column in columns:
            digits = [float(f"{share:.9g}") for share in column.tolist()]
            yield f"{head.name}_{name}", pa.float64(), digits


def _without_bad(values: list[Any], samples: list[_Sample]) -> list[Any]:
    """Return the values, with None for samples that have an error."""
    return [None if sample.error else value for value, sample in zip(values, samples, strict=True)]


def _csv_cell(cell: Any) -> str:
    if isinstance(cell, float):
        return repr(cell).removesuffix(".0")
    is_list = isinstance(cell, list)
    return f"[{', '.join(f'{value:.9g}' for value in cell)}]" if is_list else cell or ""


def _parquet_cell(cell: Any) -> Any:
    return cell.encode("utf-8", "replace").decode() if isinstance(cell, str) else cell


# --- image files ----------------------------------------------------------------------------------


def _index_of_files(images: Sequence[tuple[str, str]], fields: Fields) -> Index:
    """Return an index of image files: each is a shard of one sample. images: (key, path)."""
    refuse(
        (
            len(fields) > 1,
            f"image files give one input, and the model has {len(fields)}: {', '.join(fields)}.",
            "Convert the files to shards.",
        )
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
    if ignored := listing.ignored:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(ignored.items()))
        reporter.line(
            f"files passed over: {sum(ignored.values())} ({kinds}). "
            f"Images end in {', '.join(EXTENSIONS)}."
        )
    samples = (entry for entry in listing.samples() if isinstance(entry, Sample))
    return [(os.path.relpath(p, path), p) for p in sorted(str(s.parts[0][1]) for s in samples)]
