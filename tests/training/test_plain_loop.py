"""A run ends in the weights of a plain PyTorch loop over the same batches."""

from __future__ import annotations

import copy
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wdstrain as wt

LR, DECAY = 0.05, 0.1
IMAGE = wt.array("x.npy", shape=(6,), dtype="float32")


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 90 vectors of three classes of different sizes."""
    folder = tmp_path_factory.mktemp("vectors") / "shards"
    values = np.random.default_rng(0).normal(0, 1, (90, 6)).astype(np.float32)
    classes = (values[:, 0] > 0.4).astype(int) + (values[:, 1] > 1.0)
    samples = (
        {"__key__": f"{i:03d}", "x.npy": values[i], "cls": int(classes[i])} for i in range(90)
    )
    wt.pack(samples, folder)
    return folder


def net(outputs: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, outputs))


def scheduler(name: str, optimizer: Any, updates: int, epochs: int) -> Any:
    """Return torch's own scheduler. updates: of an epoch."""
    from torch.optim import lr_scheduler as schedulers

    total = updates * epochs
    if name == "onecycle":
        return schedulers.OneCycleLR(optimizer, LR, total_steps=total, cycle_momentum=False)
    if name == "cosine":  # after one epoch of warm-up
        rise = schedulers.LambdaLR(optimizer, lambda step: (step + 1) / updates)
        fall = schedulers.CosineAnnealingLR(optimizer, total - updates)
        return schedulers.SequentialLR(optimizer, [rise, fall], [updates])
    if name == "step":
        return schedulers.StepLR(optimizer, math.ceil(epochs / 3) * updates)
    return schedulers.ConstantLR(optimizer, 1.0)


def plain_weights(shards: Path, options: dict[str, Any], classes: int = 3) -> nn.Module:
    """Return the model after a plain training loop; with ema its average."""
    model = net(classes)
    average, step = copy.deepcopy(model), 0
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer: Any = (
        torch.optim.AdamW(groups, lr=LR)
        if options["optimizer"] == "adamw"
        else torch.optim.SGD(groups, lr=LR, momentum=0.9, nesterov=True)
    )
    fields = {"x": IMAGE, "y": wt.label()}
    with closing(wt.Loader(shards, fields, batch_size=options["batch_size"], lanes=1)) as loader:
        epochs = [list(loader.epoch(number)) for number in range(options["epochs"])]
    labels = torch.cat([batch["y"] for batch in wt.Loader(shards, fields, batch_size=90)])
    counts = torch.bincount(labels, minlength=classes)
    weight = len(labels) / (classes * counts.float())
    weight = weight if options["class_weights"] == "balanced" else torch.ones(classes)
    updates = math.ceil(len(epochs[0]) / options["accumulate"])
    schedule = scheduler(options["schedule"], optimizer, updates, options["epochs"])
    for batches in epochs:
        for first in range(0, len(batches), options["accumulate"]):
            group = batches[first : first + options["accumulate"]]
            optimizer.zero_grad()
            for batch in group:
                losses = nn.functional.cross_entropy(
                    model(batch["x"]),
                    batch["y"],
                    weight,
                    label_smoothing=options["label_smoothing"],
                    reduction="none",
                )
                (losses.mean() / len(group)).backward()
            if options["clip_norm"]:
                nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
            optimizer.step()
            if step + 1 < updates * len(epochs):
                schedule.step()
            decay, step = min(options["ema"], (1 + step) / (10 + step)), step + 1
            with torch.no_grad():
                for mean, own in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(own, 1 - decay)
    return average if options["ema"] else model


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw", "schedule": "onecycle", "accumulate": 1, "label_smoothing": 0.1},
        {"optimizer": "sgd", "schedule": "cosine", "accumulate": 2, "class_weights": "balanced"},
        {"optimizer": "adamw", "schedule": "step", "accumulate": 3, "ema": 0.9, "clip_norm": 0.3},
        {"optimizer": "sgd", "schedule": "constant", "accumulate": 4, "ema": 0.5},
    ],
    ids=lambda options: options["schedule"],
)
def test_a_run_ends_in_the_weights_of_a_plain_loop(
    vectors: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    plain = {"label_smoothing": 0.0, "class_weights": "none", "clip_norm": 0.0, "ema": 0.0}
    options = {**plain, "epochs": 3, "batch_size": 16, **options}
    warmup = 1 if options["schedule"] == "cosine" else 0
    done = wt.train(
        vectors,
        tmp_path / "run",
        model=net,
        fields={"image": IMAGE},
        lr=LR,
        weight_decay=DECAY,
        warmup=warmup,
        lanes=1,
        device="cpu",
        **options,
    )
    expected = plain_weights(vectors, options).state_dict()
    for name, value in done.model.state_dict().items():
        assert torch.allclose(value, expected[name], atol=2e-6), name


def test_rate_and_patience_may_change_when_a_run_is_resumed(vectors: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model": net,
        "fields": {"image": IMAGE},
        "fold": "1/3",
        "schedule": "constant",
        "batch_size": 16,
        "device": "cpu",
    }
    first = wt.train(vectors, tmp_path / "run", lr=1e-9, patience=1, epochs=9, **options)
    assert len(first.epochs) < 9
    assert "did not improve" in first.stop_reason
    resumed = wt.train(
        vectors, tmp_path / "run", lr=0.01, patience=0, epochs=5, resume=True, **options
    )
    assert len(resumed.epochs) == 5
    assert resumed.stop_reason == "all 5 epochs are done"
    assert {epoch["lr"] for epoch in resumed.epochs[: len(first.epochs)]} == {1e-9}
    assert {epoch["lr"] for epoch in resumed.epochs[len(first.epochs) :]} == {0.01}
