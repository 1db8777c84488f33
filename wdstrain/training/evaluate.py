"""Metrics of a checkpoint on shards."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.report.terminal import reporting
from wdstrain.runtime.options import takes
from wdstrain.shards.resolve import open_shards
from wdstrain.storage.files import check_file_output
from wdstrain.training.config import EvaluateArguments, PredictOptions, given_options
from wdstrain.training.data import count_pixels, run_loader, with_task_labels
from wdstrain.training.distributed import DistributedContext, device_of
from wdstrain.training.heads import MaskHead
from wdstrain.training.inputs import with_targets
from wdstrain.training.metrics import classes_of
from wdstrain.training.predict import predict
from wdstrain.training.report import write_evaluation
from wdstrain.training.tasks import Task
from wdstrain.training.validation import Setup, evaluate_pass
from wdstrain.training.weights import LoadedCheckpoint


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
    distributed, options = DistributedContext(), given_options(arguments)
    loaded = LoadedCheckpoint.of(arguments.checkpoint, model=arguments.model, options=options)
    config, task = loaded.config, loaded.task
    index = with_task_labels(open_shards(arguments.urls), task, config)
    task.check(index)
    if isinstance(task.heads[0], MaskHead) and config.on_error == "raise":
        count_pixels(index, task.heads[0], is_strict=True)
    fields = with_targets(loaded.fields(arguments.fields, index), task)
    device = device_of(config.device, distributed)
    loader = run_loader(index, fields, config, distributed)
    with ExitStack() as stack:
        reporter = stack.enter_context(reporting(arguments.progress, distributed.leads))
        stack.callback(loader.close)
        stack.enter_context(distributed.joined(device))
        setup = Setup(
            task=task,
            config=config,
            inputs=loaded.inputs,
            device=device,
            distributed=distributed,
            reporter=reporter,
            criterion=arguments.criterion,
            metrics=arguments.metrics or {},
        )
        metrics, details = evaluate_pass(loaded.model.to(device), loader, setup, "evaluating")
    if arguments.report is not None and distributed.leads:
        write_evaluation(os.fspath(arguments.report), loaded, index, metrics, details)
    return task, metrics | classes_of(details)
