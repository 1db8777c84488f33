"""One pass over samples without learning: metrics of a model, and some of its predictions.

`evaluate`, `predict` and `export` use a checkpoint; a run validates with `evaluate_pass`.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress, islice
from typing import IO, Any

import torch
from torch import Tensor, nn

from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.loader.batch_assembly import TakenBatch
from wdstrain.loader.device import to_device
from wdstrain.loader.loader import Loader
from wdstrain.report.terminal import reporting
from wdstrain.runtime.options import takes
from wdstrain.shards.index_io import json_bytes
from wdstrain.shards.resolve import open_shards
from wdstrain.storage.files import check_file_output, put_whole, write_whole
from wdstrain.training.checkpoint import Setup, load_checkpoint
from wdstrain.training.config import (
    EvaluateArguments,
    ExportArguments,
    PredictArguments,
    TrainedArguments,
    refuse,
    refusing,
)
from wdstrain.training.data import count_pixels, run_loader, with_task_labels
from wdstrain.training.distributed import DistributedContext, is_sharded
from wdstrain.training.heads import MaskHead
from wdstrain.training.inputs import call_model, constants_of, scaled, with_targets
from wdstrain.training.metrics import Metrics, classes_of
from wdstrain.training.options import RunOptions
from wdstrain.training.predict import (
    PredictionTable,
    Preview,
    Scored,
    check_table,
    image_paths,
    index_of_files,
    largest,
    sized,
    with_worst,
)
from wdstrain.training.report import write_evaluation
from wdstrain.training.tasks import Task

drain = partial(deque[Any], maxlen=0)  # exhausts an iterator


def run_model(
    model: nn.Module, loader: Loader, setup: Setup, title: str, limit: int | None = None
) -> Iterator[Scored]:
    """Yield each batch of a pass over a loader, with the outputs [b, ...] of the model, float32.

    Call it without gradients. limit: most batches. FSDP needs all processes for a call, so a
    process whose last batch holds no sample calls the model with a blank one.
    """
    model.eval()
    total, batches = len(loader), loader.epoch(0, until=1)
    steps = min(limit or total, total)
    # a pass that is not cut short goes on to its end, where planned and delivered are compared
    some = islice(to_device(batches, setup.device), steps if steps < total else None)
    for step, batch in enumerate(some, 1):
        rows = len(batch["__key__"])
        outputs = setup.call(model, batch if rows else setup.inputs.blank(1, setup.device))
        yield batch, outputs.float()[:rows], batches.delivered
        setup.reporter.step(title, step, steps)


def evaluate_pass(
    model: nn.Module,
    loader: Loader,
    setup: Setup,
    title: str,
    *,
    limit: int | None = None,
    consume: Callable[[Iterator[Scored]], object] = drain,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return (metrics, details) of one pass over a loader, of all processes together.

    Each sample counts once. A sample that cannot be read counts as bad, and its substitute not at
    all. details: "heads" with confusion matrices and the like, "worst" with predictions. limit:
    most batches. consume: takes all batches, as they are.
    """
    task, distributed = setup.task, setup.distributed
    setup.criterion_modules.eval()
    metrics = EvalMetrics(task, setup.device, setup.metrics)
    worst: list[Preview] = []

    def measured() -> Iterator[Scored]:
        for scored in run_model(model, loader, setup, title, limit):
            own = _select_rows(*scored)
            if len(own["__key__"]):
                outputs, targets = own["__outputs__"], task.targets(own)
                losses = task.losses(outputs, targets, criterion=setup.criterion)
                metrics.update(outputs, targets, losses)
                worst[:] = with_worst(worst, setup, own, outputs, losses)
            yield scored

    # FSDP reuses the memory of completed tensors in training, which must not be of inference mode.
    with torch.no_grad() if is_sharded(model) else torch.inference_mode():
        consume(measured())
    values, details = metrics.compute(distributed.reduce)
    values["bad"] = sum(distributed.gather(loader.report()["bad"]))
    return values, {"heads": details, "worst": largest(chain(*distributed.gather(worst)))}


class EvalMetrics:
    """Metrics of one pass over samples.

    user_metrics: torchmetrics by name, updated with (predictions, target): probabilities of classes
    or numbers. With several heads, by HEAD/NAME.
    """

    def __init__(
        self, task: Task, device: torch.device, user_metrics: Mapping[str, Any] | None = None
    ) -> None:
        self._task = task
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self._loss = zeros(2)  # sum of losses, samples
        self._sums = [{name: zeros(s) for name, s in head.sums().items()} for head in task.heads]
        self._user = {name: metric.to(device) for name, metric in (user_metrics or {}).items()}
        for metric in self._user.values():
            metric.reset()

    @torch.no_grad()
    def update(self, outputs: Tensor, targets: Sequence[Tensor], losses: Tensor) -> None:
        """Add a batch of one sample or more. losses: [b]."""
        self._loss += torch.stack([losses.double().sum(), torch.ones_like(losses).sum()])
        heads, scores = self._task.heads, self._task.split(outputs)
        for head, sums, own, target in zip(heads, self._sums, scores, targets, strict=True):
            head.add(sums, own.double(), target)
        for name, metric in self._user.items():
            n = self._task.head_of(name)
            metric.update(*heads[n].for_metric(scores[n], targets[n]))

    def compute(self, reduce: Callable[[Tensor], Tensor]) -> tuple[Metrics, dict[str, Any]]:
        """Return (metrics, details of each head). Undefined metrics are left out.

        reduce: returns the sum of a tensor over all processes.
        """
        loss, samples = reduce(self._loss).tolist()
        metrics: Metrics = {"samples": int(samples), "loss": loss / max(1.0, samples)}
        details: dict[str, Any] = {}
        for head, sums in zip(self._task.heads, self._sums, strict=True):
            total = {name: reduce(value) for name, value in sums.items()}
            values, details[head.name] = head.results(total, max(1, int(samples)))
            for name, value in values.items():
                if not (head.classes and value.isnan()):
                    metrics[self._task.metric_name(head, name)] = value.item()
        metrics |= {name: float(metric.compute()) for name, metric in self._user.items()}
        return metrics, details


def _select_rows(batch: dict[str, Any], outputs: Tensor, delivered: TakenBatch) -> dict[str, Any]:
    """Return a batch with its outputs, without substitutes of bad samples."""
    batch, own = batch | {"__outputs__": outputs}, delivered.own
    if own.all():
        return batch
    rows, keys = torch.from_numpy(own), compress(batch["__key__"], own)
    return {"__key__": list(keys)} | {
        name: value[rows.to(value.device)]
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }


# --- with a checkpoint ----------------------------------------------------------------------------


@takes(EvaluateArguments)
@WorkerDeathsAsErrors()
def evaluate(arguments: EvaluateArguments) -> tuple[Task, dict[str, Any]]:
    """Return (task, metrics) of a checkpoint on shards; every sample counts once.

    "classes" among the metrics has count, precision, recall and the like of each class by label.
    Page and table of predictions come from the same pass. A sample that cannot be read has a row
    with the error in the table.

    Under torchrun all processes share the samples.
    """
    distributed, predictions = DistributedContext(), arguments.predictions
    if arguments.report is not None:
        check_file_output(os.fspath(arguments.report))
    if predictions is not None:
        check_table(os.fspath(predictions), distributed)
    with ExitStack() as stack:
        reporter = stack.enter_context(reporting(arguments.progress, distributed.leads))
        model, setup = _loaded(
            arguments,
            distributed=distributed,
            reporter=reporter,
            criterion=arguments.criterion,
            metrics=arguments.metrics or {},
        )
        config, task = setup.config, setup.task
        index = with_task_labels(open_shards(arguments.urls), task, config)
        task.check(index)
        if isinstance(task.heads[0], MaskHead) and config.on_error == "raise":
            count_pixels(index, task.heads[0], is_strict=True)
        fields = with_targets(setup.fields(arguments.fields, index), task)
        loader = run_loader(index, sized(fields, setup), config, distributed)
        stack.callback(loader.close)
        stack.enter_context(distributed.joined(setup.device))
        consume: Callable[[Iterator[Scored]], object] = drain
        if predictions is not None:
            consume = PredictionTable(index, model, setup, os.fspath(predictions), arguments).write
        metrics, details = evaluate_pass(
            model.to(setup.device), loader, setup, "evaluating", consume=consume
        )
    if arguments.report is not None and distributed.leads:
        write_evaluation(os.fspath(arguments.report), setup, metrics, details)
    return task, metrics | classes_of(details)


def _loaded(arguments: TrainedArguments, **own: Any) -> tuple[nn.Module, Setup]:
    """Return the model that the arguments name. Raises UsageError for columns that masks lack."""
    model, setup = load_checkpoint(
        arguments.checkpoint,
        arguments.model,
        {name: getattr(arguments, name, None) for name in RunOptions.__dataclass_fields__},
        **own,
    )
    for option in ("probabilities", "embeddings"):
        refuse(
            getattr(arguments, option) and setup.task.is_dense,
            f"{option}: not available for masks.",
            "Leave it out.",
        )
    return model, setup


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
    check_table(path, distributed)
    with reporting(arguments.progress, True) as reporter:
        model, setup = _loaded(arguments, distributed=distributed, reporter=reporter)
        images = image_paths(arguments.urls, reporter)
        index = None if images else open_shards(arguments.urls)
        fields = setup.fields(arguments.fields, index)
        if index is None:
            index = index_of_files(images, fields)
        table = PredictionTable(index, model, setup, path, arguments)
        config = replace(setup.config, on_error="replace", max_errors=1.0)
        loader = run_loader(index, sized(fields, setup), config, on_error="mark")
        with closing(loader), torch.inference_mode():
            table.write(run_model(model.to(setup.device), loader, setup, "predicting"))
    return PredictResult(table.count, table.bad)


# --- export ---------------------------------------------------------------------------------------
# Exported programs take images as they are, [b, 3, h, w] in 0 to 255, and normalize them themselves.
# A JSON file beside them describes inputs and outputs.


class Normalizing(nn.Module):
    """A model that normalizes its images, and returns numbers on the scale of the labels.

    Inputs in the order of the checkpoint, such as images [b, 3, h, w]; output as that of the model.
    Arrays of uint8 that are no RGB images are divided by 255, other values are taken as they are.
    """

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__()
        self.model, self.inputs = model, setup.inputs
        heads = [head for head in setup.task.heads for _ in range(head.outputs)]
        self.is_scaled = any(head.kind == "number" for head in heads)
        # float32 is too coarse for times and coordinates
        scales = torch.tensor([(head.mean, head.deviation) for head in heads], dtype=torch.float64)
        self.shift, self.scale = (nn.Buffer(values.clone()) for values in scales.T)
        constants = constants_of(setup.inputs.normalization, torch.device("cpu"))
        self.mean, self.std = (nn.Buffer(value.clone()) for value in constants)

    def forward(self, *inputs: Tensor) -> Tensor:
        specs = zip(self.inputs.specs.items(), inputs, strict=True)
        values = {
            name: scaled(value, self.mean, self.std, is_byte=spec.dtype == "uint8")
            for (name, spec), value in specs
        }
        outputs = call_model(self.model, values)
        return outputs.double() * self.scale + self.shift if self.is_scaled else outputs


@takes(ExportArguments)
def export(arguments: ExportArguments) -> list[str]:
    """Write the model of a checkpoint to `out`, and return the paths of the written files.

    The ending of `out` chooses the format: .pt is the state dict, .pt2 a program of torch.export,
    .onnx needs onnx and onnxscript.
    """
    path = os.fspath(arguments.out)
    kind = os.path.splitext(path)[1].lower()
    refuse(kind not in _KINDS, f"{{out}}: must end in {', '.join(_KINDS)}.", out=path)
    check_file_output(path)
    model, setup = load_checkpoint(arguments.checkpoint, arguments.model)
    # exporters raise errors of many types
    with (
        refusing(f"the model {setup.config.model} cannot be exported as {kind}"),
        put_whole(path) as file,
    ):
        _KINDS[kind](model, setup, file)
    write_whole(f"{path}.json", json_bytes(_description(setup, kind == ".pt"), indent=1))
    return [path, f"{path}.json"]


def _description(setup: Setup, is_bare: bool) -> dict[str, object]:
    """Return what the JSON file beside an exported model says. is_bare: it has no `Normalizing`."""
    return {
        "model": setup.config.model,
        "normalizes": not is_bare,  # uint8 by 255, RGB images by mean and std
        "mean": setup.inputs.normalization[0],
        "std": setup.inputs.normalization[1],
        "inputs": [
            {"name": name, "shape": [None, *spec.shape], "dtype": spec.dtype}
            for name, spec in setup.inputs.specs.items()
        ],
        "outputs": [
            {
                "label": head.name,
                "kind": head.kind,
                "columns": head.outputs,
                "classes": list(head.classes),
                **({"mean": head.mean, "deviation": head.deviation} if is_bare else {}),
            }
            for head in setup.task.heads
        ],
    }


# --- formats --------------------------------------------------------------------------------------


def _exported(model: nn.Module, setup: Setup) -> dict[str, Any]:
    """Return the arguments of exporters: a program for batches of any size."""
    blank = setup.inputs.blank(2, torch.device("cpu")).values()
    # as `scaled` takes them: only class numbers and tokens keep their type
    examples = tuple(
        value if value.dtype == torch.int64 and value.ndim <= 2 else value.float()
        for value in blank
    )
    batch = torch.export.Dim("batch", min=1)
    return {
        "mod": Normalizing(model, setup).eval(),
        "args": examples,
        "dynamic_shapes": (({0: batch},) * len(examples),),
    }


def _state(model: nn.Module, setup: Setup, file: IO[bytes]) -> None:
    torch.save(model.state_dict(), file)


def _program(model: nn.Module, setup: Setup, file: IO[bytes]) -> None:
    torch.export.save(torch.export.export(**_exported(model, setup)), file)


def _onnx(model: nn.Module, setup: Setup, file: IO[bytes]) -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    refuse(missing, f"ONNX needs {' and '.join(missing)}.", "Run: pip install onnx onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            torch.export.export(**_exported(model, setup)),
            input_names=list(setup.inputs.specs),
            output_names=["outputs"],
            dynamo=True,
            verbose=False,
        )
    file.write(program.model_proto.SerializeToString())


_KINDS: dict[str, Callable[[nn.Module, Setup, IO[bytes]], None]] = {
    ".pt": _state,
    ".pt2": _program,
    ".onnx": _onnx,
}
