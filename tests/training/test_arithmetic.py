"""Arithmetic of a step: gradient checkpointing and 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wdstrain as wt

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
    """Blocks with dropout, which can be checkpointed."""

    checkpoints, asked = False, list[bool]()

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.3)) for _ in range(3)
        )
        self.head = nn.Linear(4, outputs)

    def set_grad_checkpointing(self) -> None:
        self.checkpoints = True
        self.asked.append(True)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        result: Tensor = self.head(x)
        return result


# --- gradient checkpointing ---


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
    assert Blocks.asked == [True]


def test_a_model_without_the_method_cannot_be_checkpointed(vectors: Path, tmp_path: Path) -> None:
    with pytest.raises(wt.UsageError, match="grad_checkpointing= needs a model that has it.*timm"):
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
