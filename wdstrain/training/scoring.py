"""One pass over samples that are not learnt: how good a model is on them, and some of its predictions to look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wdstrain.loader.device import to_device
from wdstrain.loader.loader import Loader
from wdstrain.training.configuration import Config
from wdstrain.training.gallery import Gallery
from wdstrain.training.metrics import Scores
from wdstrain.training.recipe import arithmetic
from wdstrain.training.task import Task, normalised
from wdstrain.training.telling import Tell
from wdstrain.training.world import World


def score(
    model: nn.Module,
    loader: Loader,
    task: Task,
    config: Config,
    device: torch.device,
    world: World,
    title: str,
    tell: Tell,
    *,
    stop: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """(metrics, details) of one pass over a loader, all processes together; each sample counts once.

    A sample that could not be read counts as bad, and whatever stands in for it not at all. details: confusion matrices by head, and a
    gallery of the worst and of random predictions. stop: asked after each batch; it raises to end the pass.
    """
    model.eval()
    scores, gallery = Scores(task, device), Gallery(task)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    with torch.inference_mode():
        batches = loader.epoch(0, until=1)
        for step, batch in enumerate(to_device(batches, device)):
            if not batches.own.all():
                batch = _only(batch, torch.from_numpy(batches.own))
            targets = task.targets(batch)
            if len(batch["__key__"]):  # the last batch of a process may hold none
                with arithmetic(config, device):
                    outputs = model(
                        normalised(batch["image"]).contiguous(memory_format=layout)
                    ).float()
                losses = task.losses(outputs, targets)
                scores.update(outputs, targets, losses)
                gallery.add(batch, outputs, targets, losses)
            tell.step(title, step + 1, len(loader))
            stop()
    metrics, details = scores.compute(world.reduce)
    metrics["bad"] = float(
        world.reduce(torch.tensor([loader.report()["bad"]], device=device)).item()
    )
    return metrics, {"heads": details, "gallery": Gallery.merged(world.gather(gallery.best()))}


def _only(batch: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Some rows of a batch. rows: bool[b]"""
    kept = {
        name: value[rows.to(value.device)]
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }
    return {
        **kept,
        "__key__": [key for key, keep in zip(batch["__key__"], rows.tolist(), strict=True) if keep],
    }
