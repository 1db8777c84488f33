"""Arithmetic of a step: gradient checkpointing and 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

import wdstrain as wt
from wdstrain.training.models import blocks_of, checkpointed

QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 8, "device": "cpu"}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 32 training and 16 validation samples: vectors of two classes."""
    folder = tmp_path_factory.mktemp("vectors") / "shards"
    rng = np.random.default_rng(0)
    samples = (
        {"__key__": f"{i:03d}", "x.npy": rng.normal(i % 2, 1, 4).astype(np.float32), "cls": i % 2}
        for i in range(48)
    )
    wt.pack(samples, folder, split={"train": 2 / 3, "val": 1 / 3}, stratify="label")
    return folder


IMAGE = wt.array("x.npy", shape=(4,), dtype="float32")


class Blocks(nn.Module):
    """Blocks with batch norm and dropout."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)) for _ in range(3)
        )
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


# --- gradient checkpointing ---


@pytest.mark.parametrize("name", ["resnet18", "vit_b_32", "densenet121", "mobilenet_v3_small"])
def test_checkpointed_models_have_the_same_gradients_and_statistics(name: str) -> None:
    torch.manual_seed(0)
    size = {"vit_b_32": 64}.get(name, 32)
    options = {"image_size": size, "num_layers": 2} if name == "vit_b_32" else {}
    if options:
        model: nn.Module = torchvision.models.VisionTransformer(
            size, 32, 2, 2, 16, 32, num_classes=2, dropout=0.2
        )
    else:
        model = torchvision.models.get_model(name, num_classes=2)
    images = torch.rand(4, 3, size, size)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    results = []
    for blocks in ([], blocks_of(model)):
        model.load_state_dict(start)
        model.zero_grad()
        torch.manual_seed(1)
        with checkpointed(blocks):
            model(images).square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append((gradients, [buffer.clone() for buffer in model.buffers()]))
    assert len(blocks_of(model)) >= 2
    for plain, other in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_a_checkpointed_run_ends_in_the_same_weights(vectors: Path, tmp_path: Path) -> None:
    runs = [
        wt.train(
            vectors,
            tmp_path / str(checkpoints),
            model=Blocks,
            fields={"image": IMAGE},
            ema=0.9,
            deterministic=True,
            grad_checkpointing=checkpoints,
            **QUICK,
        )
        for checkpoints in (False, True)
    ]
    first, second = (run.model.state_dict() for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [run.epochs[-1]["loss"] for run in runs] == [runs[0].epochs[-1]["loss"]] * 2
    assert runs[0].val == runs[1].val


def test_a_model_without_blocks_cannot_be_checkpointed(vectors: Path, tmp_path: Path) -> None:
    with pytest.raises(wt.UsageError, match="the model has no blocks"):
        wt.train(
            vectors,
            tmp_path / "run",
            model=lambda outputs: nn.Sequential(nn.Flatten(), nn.Linear(4, outputs)),
            fields={"image": IMAGE},
            grad_checkpointing=True,
            **QUICK,
        )


# --- 16 bits ---


def test_a_step_whose_gradient_overflows_16_bits_is_skipped_and_counted(
    vectors: Path, tmp_path: Path
) -> None:
    calls: list[int] = []
    weights: list[Tensor] = []

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        planted = 1e6 if len(calls) in (2, 3) else 1.0  # finite, but with an infinite gradient
        return (
            nn.functional.binary_cross_entropy_with_logits(
                outputs[:, 1], target.float(), reduction="none"
            )
            * planted
        )

    class Weights(wt.Callback):
        def on_step_end(self, trainer: Any) -> None:
            weights.append(next(trainer.model.parameters()).detach().clone())

    done = wt.train(
        vectors,
        tmp_path / "run",
        model=lambda outputs: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, outputs)),
        fields={"image": IMAGE},
        criterion=loss,
        callbacks=[Weights()],
        amp="fp16",
        **{**QUICK, "epochs": 1},
    )
    assert done.epochs[0]["skipped_steps"] == 2
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert "skipped_steps" in (tmp_path / "run" / "metrics.jsonl").read_text()
