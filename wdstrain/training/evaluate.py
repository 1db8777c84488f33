"""One pass over samples without learning: metrics of a model, and some of its predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.loader.device import to_device
from wdstrain.loader.loader import Loader
from wdstrain.report.terminal import Reporter, reporting
from wdstrain.runtime.options import takes
from wdstrain.shards.resolve import open_shards
from wdstrain.training.arguments import EvaluateArguments, given_options
from wdstrain.training.config import Config
from wdstrain.training.data import count_pixels, run_loader, with_task_labels
from wdstrain.training.distributed import DistributedContext, device_of
from wdstrain.training.fsdp import is_sharded
from wdstrain.training.heads import MaskHead
from wdstrain.training.inputs import ModelInputs
from wdstrain.training.loaded_checkpoint import LoadedCheckpoint
from wdstrain.training.metrics import EvalMetrics, class_shares
from wdstrain.training.optim import autocast
from wdstrain.training.previews import Previews
from wdstrain.training.tasks import Criterion, Task


@takes(EvaluateArguments)
@WorkerDeathsAsErrors()
def evaluate(arguments: EvaluateArguments) -> tuple[Task, dict[str, Any]]:
    """Return (task, metrics) of a checkpoint on shards; every sample counts once.

    "classes" among the metrics has the recall, of masks the IoU, of each class by label.

    Under torchrun all processes share the samples.
    """
    distributed, options = DistributedContext(), given_options(arguments)
    loaded = LoadedCheckpoint.of(arguments.checkpoint, model=arguments.model, options=options)
    config, task = loaded.config, loaded.task
    index = with_task_labels(open_shards(arguments.urls), task, config)
    task.check(index)
    if isinstance(task.heads[0], MaskHead) and config.on_error == "raise":
        count_pixels(index, task.heads[0], is_strict=True)
    source = loaded.source(arguments.fields, arguments.transform, index)
    device = device_of(config.device, distributed)
    loader = run_loader(index, source.loader_options(task, index), config, distributed)
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
    classes = class_shares(details["heads"])
    return task, metrics | ({"classes": classes} if classes else {})


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What training and evaluation of one task share.

    criterion: of the user's, in place of the heads' losses; for each head by name, if there are
    several. metrics: torchmetrics by name.
    """

    task: Task
    config: Config
    inputs: ModelInputs
    device: torch.device
    distributed: DistributedContext
    reporter: Reporter
    criterion: Criterion | Mapping[str, Criterion] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def criterion_modules(self) -> nn.ModuleList:
        """Criteria of the user's that are modules: they may have parameters and buffers."""
        own = self.criterion
        given = own.values() if isinstance(own, Mapping) else [own]
        return nn.ModuleList(one for one in given if isinstance(one, nn.Module)).to(self.device)

    def call(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the outputs of a model for a batch."""
        with autocast(self.config, self.device):
            return self.inputs.call(model, batch, channels_last=self.config.channels_last)


def evaluate_pass(
    model: nn.Module,
    loader: Loader,
    setup: Setup,
    title: str,
    *,
    limit: int | None = None,
    check_stop: Callable[[], object] = lambda: None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return (metrics, details) of one pass over a loader, of all processes together.

    Each sample counts once. A sample that cannot be read counts as bad, and its substitute not at
    all. details: "heads" with confusion matrices and the like, "worst" with
    predictions. limit: most batches. check_stop: called after each batch; raises to end the pass.
    """
    task, gather = setup.task, setup.distributed.gather
    model.eval()
    setup.criterion_modules.eval()
    metrics = EvalMetrics(task, setup.device, setup.metrics)
    previews = Previews(task, setup.inputs.picture)
    steps = len(loader) if limit is None else min(limit, len(loader))
    # FSDP reuses the memory of completed tensors in training, which must not be of inference mode.
    is_split = is_sharded(model)
    with torch.no_grad() if is_split else torch.inference_mode():
        batches = loader.epoch(0, until=1)
        for step, batch in enumerate(to_device(batches, setup.device)):
            if not batches.own.all():
                batch = _select_rows(batch, torch.from_numpy(batches.own))
            targets = task.targets(batch)
            if len(batch["__key__"]):  # the last batch of a process may hold none
                outputs = setup.call(model, batch).float()
                losses = task.losses(outputs, targets, criterion=setup.criterion)
                metrics.update(outputs, targets, losses)
                previews.add(batch, outputs, targets, losses)
            elif is_split:  # the processes complete the tensors of the model together
                setup.call(model, setup.inputs.blank(1, setup.device))
            setup.reporter.step(title, step + 1, steps)
            check_stop()
            if step + 1 == steps < len(loader):
                break
    values, details = metrics.compute(setup.distributed.reduce)
    bad = torch.tensor([loader.report()["bad"]], device=setup.device)
    values["bad"] = int(setup.distributed.reduce(bad).item())
    for name, points in previews.points.items():
        details[name]["points"] = [point for part in gather(points) for point in part]
    return values, {"heads": details, "worst": Previews.merged(gather(previews.worst))}


def _select_rows(batch: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Return some rows of a batch. rows: bool[b]."""
    kept = {
        name: value[rows.to(value.device)]
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }
    keys = [key for key, keep in zip(batch["__key__"], rows.tolist(), strict=True) if keep]
    return {**kept, "__key__": keys}
