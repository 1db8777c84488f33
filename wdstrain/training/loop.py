"""Epochs of training and validation over loaders.

The loop is the plain one of every PyTorch script: forward, loss, backward, step. What it adds is that it knows how long it
waited for data, and says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from wdstrain.device import to_device
from wdstrain.errors import UsageError, WdstrainError
from wdstrain.indexing import Index
from wdstrain.loader import Loader
from wdstrain.opening import one_split, open_index
from wdstrain.storage import Urls
from wdstrain.training.models import build, try_out
from wdstrain.training.run import Run, read_checkpoint
from wdstrain.training.task import Task, normalised


class Tell(Protocol):
    """Who is told how the work goes on."""

    def step(self, title: str, done: int, total: int, text: str = "") -> None: ...
    def line(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Config:
    """How to train. `lr` is the peak of a one-cycle schedule (Smith and Topin, 2017) for AdamW."""

    model: str = "small"
    epochs: int = 10
    batch_size: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.05
    image_size: int = 64
    augment: str | None = None
    label: str | None = None
    num_workers: int = 0
    seed: int = 0
    device: str = "auto"
    cache_dir: str | None = None
    cache_limit: str | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "image_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} is below 1.")
        if not 0 < self.lr < math.inf:
            raise UsageError(f"lr={self.lr} is no number above 0.")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"weight_decay={self.weight_decay} is no number from 0 on.")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed} is not between 0 and 2**63.")


@dataclass
class Outcome:
    """What a run came to. `epochs`: the metrics of each; `val`: those of validation at the end."""

    folder: str
    task: Task
    epochs: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, float] | None = None

    @property
    def val(self) -> dict[str, float]:
        return self.epochs[-1].get("val", {}) if self.epochs else {}


def train(
    urls: Urls, config: Config, out: str, *, val: Urls | None = None, overwrite: bool = False, tell: Tell | None = None
) -> Outcome:
    """Train on the shards of `urls`, validate on `val` after each epoch, and keep the run in the folder `out`.

    An address that holds the splits train and val serves for both. Raises UsageError and ShardError before anything is
    written where shards, labels and configuration do not fit.
    """
    tell = tell or _Nobody()
    train_index, val_index = _sources(urls, val)
    task = Task.of(train_index, config.label)
    if val_index is not None:
        task.check(val_index)
    device = _device(config.device)
    torch.manual_seed(config.seed)
    model = try_out(build(config.model, task.outputs, config.image_size), config.model, config.image_size).to(device)
    fields = task.fields(config.image_size, config.augment)
    loader = Loader(train_index, fields, batch_size=config.batch_size, seed=config.seed, **_own(config))
    val_loader = _val_loader(val_index, task, config) if val_index is not None else None
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, config.lr, total_steps=config.epochs * len(loader))
    data = {"train": [s.shown for s in train_index.shards], "val": [s.shown for s in val_index.shards] if val_index else []}
    run = Run(out, {**asdict(config), **data}, overwrite=overwrite)
    outcome = Outcome(out, task)
    try:
        for epoch in range(config.epochs):
            title = f"epoch {epoch + 1}/{config.epochs}"
            metrics = {"epoch": epoch, **_train_epoch(model, loader, task, optimiser, schedule, device, title, tell)}
            if val_loader is not None:
                metrics["val"] = evaluate_model(model, val_loader, task, device, "validating", tell)
                if not task.is_class:
                    metrics["val"]["mse_of_mean"] = _mse_of_mean(metrics["val"], metrics["target_mean"])
            outcome.epochs.append(metrics)
            run.log(metrics)
            state = {
                "model": model.state_dict(),
                "optimiser": optimiser.state_dict(),
                "schedule": schedule.state_dict(),
                "loader": loader.state_dict(),
                "config": asdict(config),
                "task": task.state(),
                "epoch": epoch,
            }
            run.save("last", state)
            if val_loader is None or task.better(metrics["val"], outcome.best):
                outcome.best = metrics.get("val")
                run.save("best", state)
            tell.line(f"{title}: {_sentence(metrics, task)}")
    finally:
        loader.close()
        if val_loader is not None:
            val_loader.close()
    return outcome


def evaluate(
    checkpoint: str,
    urls: Urls,
    *,
    num_workers: int = 0,
    device: str = "auto",
    cache_dir: str | None = None,
    cache_limit: str | None = None,
    tell: Tell | None = None,
) -> tuple[Task, dict[str, float]]:
    """The metrics of a checkpoint on the shards of `urls`; every sample counts once."""
    state = read_checkpoint(checkpoint)
    here = {"num_workers": num_workers, "device": device, "cache_dir": cache_dir, "cache_limit": cache_limit}
    config = Config(**{**state["config"], **here})
    task, where = Task.from_state(state["task"]), _device(device)
    index = one_split(open_index(urls), urls)
    task.check(index)
    loader = _val_loader(index, task, config)
    model = build(config.model, task.outputs, config.image_size)
    model.load_state_dict(state["model"])
    try:
        return task, evaluate_model(model.to(where), loader, task, where, "evaluating", tell or _Nobody())
    finally:
        loader.close()


def evaluate_model(
    model: nn.Module, loader: Loader, task: Task, device: torch.device, title: str, tell: Tell
) -> dict[str, float]:
    """Metrics over one pass of a loader, the mean over samples each."""
    model.eval()
    sums: dict[str, float] = {}
    count = 0
    with torch.inference_mode():
        for step, batch in enumerate(to_device(loader, device)):
            outputs = model(normalised(batch["image"])).float()
            for name, value in task.score(outputs, batch["target"]).items():
                sums[name] = sums.get(name, 0.0) + value
            if not task.is_class:
                sums["square"] = sums.get("square", 0.0) + float((batch["target"] ** 2).sum())
            count += len(batch["__key__"])
            tell.step(title, step + 1, len(loader))
    return {name: value / count for name, value in sums.items()} | {"samples": float(count)}


# --- parts -----------------------------------------------------------------------------------------------------------


def _train_epoch(
    model: nn.Module,
    loader: Loader,
    task: Task,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    device: torch.device,
    title: str,
    tell: Tell,
) -> dict[str, Any]:
    model.train()
    begun, losses, targets, count = time.perf_counter(), 0.0, 0.0, 0
    for step, batch in enumerate(to_device(loader, device)):
        loss = task.loss(model(normalised(batch["image"])), batch["target"])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        rows = len(batch["__key__"])
        losses, targets, count = losses + loss.item() * rows, targets + float(batch["target"].sum()), count + rows
        if losses != losses:
            raise WdstrainError(
                f"the loss is not a number after step {step} of {title}. Lower --lr (now {optimiser.defaults['lr']})."
            )
        report = loader.report()
        tell.step(title, step + 1, len(loader), f"loss {losses / count:.4f}, stall {report['stall']:.1%}")
    report = loader.report()
    seconds = time.perf_counter() - begun
    return {
        "loss": losses / count,
        "samples": count,
        "left_out": report["left_out"],
        "seconds": seconds,
        "samples_per_second": count / seconds,
        "stall": report["stall"],
        "verdict": report["verdict"],
        **({} if task.is_class else {"target_mean": targets / count}),
    }


def _sources(urls: Urls, val: Urls | None) -> tuple[Index, Index | None]:
    index = open_index(urls)
    if val is None and {"train", "val"} <= set(index.splits):
        numbers = {split: [i for i, shard in enumerate(index.shards) if shard.split == split] for split in index.splits}
        return index.pick(numbers["train"]), index.pick(numbers["val"])
    return one_split(index, urls), one_split(open_index(val), val) if val is not None else None


def _val_loader(index: Index, task: Task, config: Config) -> Loader:
    fields = task.fields(config.image_size)
    return Loader(index, fields, batch_size=config.batch_size, shuffle=False, tail="keep", **_own(config))


def _own(config: Config) -> dict[str, Any]:
    """A run is one process: it takes all samples, also where the environment speaks of ranks."""
    cache = {"cache_dir": config.cache_dir, "cache_limit": config.cache_limit}
    return {"num_workers": config.num_workers, "rank": 0, "world_size": 1, **cache}


def _mse_of_mean(val: Mapping[str, float], mean: float) -> float:
    """The error of always predicting the training data's mean."""
    return val["square"] - 2 * mean * val["mean"] + mean**2


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"device={name!r} cannot be used here ({str(error).splitlines()[0]}). Use cpu, cuda or auto."
        ) from error
    return device


def _sentence(metrics: Mapping[str, Any], task: Task) -> str:
    val = f"val {task.short(metrics['val'])}, " if "val" in metrics else ""
    return f"loss {metrics['loss']:.3f}, {val}{metrics['samples_per_second']:.0f} samples/s, stall {metrics['stall']:.1%}"


class _Nobody:
    def step(self, title: str, done: int, total: int, text: str = "") -> None: ...
    def line(self, text: str) -> None: ...
