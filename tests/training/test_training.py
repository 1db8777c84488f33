"""Training: losses that need the model, 16 bits that overflow, the terminal, and the image size.

tests/oracle/test_training.py draws all other arithmetic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wdstrain as wt
from tests.support.small_runs import SMALL, Stop, last, numbers, saved, small_image
from wdstrain.cli import main

OPTIONS: dict[str, Any] = {**SMALL, "epochs": 2, "lr": 0.01, "deterministic": True}
OPTIONS["schedule"] = "onecycle"


class Net(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = nn.Linear(3 * 8 * 8, 5)
        self.head = nn.Linear(5, outputs)

    def forward(self, image: Tensor) -> Tensor:
        outputs: Tensor = self.head(functional.dropout(self.features(image), 0.2, self.training))
        return outputs

    def features(self, image: Tensor) -> Tensor:
        return functional.relu(self.body(image.flatten(1)))


def as_without(batch: dict[str, Any], model: Any) -> Tensor:
    assert sorted(batch) == ["__key__", "image", "label"]
    return functional.cross_entropy(model(batch["image"]), batch["label"], reduction="none")


class Distilled(nn.Module):
    """Features of a student that a trained layer maps to those of a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.teacher = nn.Linear(3 * 8 * 8, 7).requires_grad_(False)
        self.mapped = nn.Linear(3, 7)

    def forward(self, batch: dict[str, Any], model: Any) -> Tensor:
        outputs = model(batch["image"])
        wanted = self.teacher(batch["image"].flatten(1))
        own = functional.mse_loss(self.mapped(outputs), wanted)
        return own + functional.cross_entropy(outputs, batch["label"])


def contrastive(batch: dict[str, Any], model: Any) -> Tensor:
    """Two views of an image are closer to each other than to those of other images."""
    views = (batch["image"], batch["image"].flip(3))
    first, second = (functional.normalize(model.features(view), dim=1) for view in views)
    return functional.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 images of three classes."""
    out = tmp_path_factory.mktemp("step") / "set"
    samples = ({"__key__": f"{i:02d}", "png": small_image(i), "cls": i % 3} for i in range(48))
    wt.pack(samples, out, classes=["a", "b", "c"], split={"train": 0.7, "val": 0.3})
    return out


def test_a_step_that_does_what_training_does_gives_its_bits(shards: Path, tmp_path: Path) -> None:
    plain = wt.train(shards, tmp_path / "plain", model=Net, **OPTIONS)
    own = wt.train(shards, tmp_path / "own", model=Net, training_step=as_without, **OPTIONS)
    torch.testing.assert_close(own.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)
    assert own.val == plain.val
    assert own.epochs[-1]["loss"] == plain.epochs[-1]["loss"]
    assert "accuracy" not in own.epochs[-1]  # outputs of a step are not known


@pytest.mark.parametrize("step", [contrastive, Distilled])
@pytest.mark.parametrize("more", [{}, {"accumulate": 2, "ema": 0.9, "amp": "bf16"}])
def test_losses_that_need_the_model_are_learned_and_resumed(
    shards: Path, tmp_path: Path, step: Any, more: dict[str, Any]
) -> None:
    def train(name: str, **again: Any) -> wt.TrainResult:
        own = step() if isinstance(step, type) else step
        options = {**OPTIONS, **more, **again}
        return wt.train(shards, tmp_path / name, model=Net, training_step=own, **options)

    whole = train("whole")
    assert whole.epochs[1]["loss"] < whole.epochs[0]["loss"]
    train("resumed", callbacks=[Stop(1, 2)])
    train("resumed", resume=True)
    first, second = (
        torch.load(last(tmp_path / name), weights_only=True) for name in ("whole", "resumed")
    )
    for name in ("model", "optimizer", "criterion_state"):
        torch.testing.assert_close(first.get(name), second.get(name), rtol=0, atol=0)
    with pytest.raises(wt.UsageError, match="training_step was .*, is None"):
        wt.train(shards, tmp_path / "resumed", model=Net, resume=True, **OPTIONS, **more)


# --- 16 bits ---


class Weights(wt.Callback):
    """Callback that keeps the first weights after each step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_step_end(self, trainer: Any) -> None:
        self.seen.append(next(trainer.model.parameters()).detach().clone())


def test_a_step_whose_gradient_overflows_is_skipped(shards: Path, tmp_path: Path) -> None:
    calls: list[int] = []

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        planted = 1e6 if len(calls) in (2, 3) else 1.0  # finite, but with an infinite gradient
        return functional.cross_entropy(outputs, target, reduction="none") * planted

    options = {**OPTIONS, "epochs": 1, "amp": "fp16", "callbacks": [weights := Weights()]}
    done = wt.train(shards, tmp_path / "run", model=Net, criterion=loss, **options)
    assert done.epochs[0]["skipped_steps"] == 2
    pairs = zip(weights.seen[:3], weights.seen[1:4], strict=True)
    assert [torch.equal(*pair) for pair in pairs] == [True, True, False]
    assert "skipped_steps" in (tmp_path / "run" / "metrics.jsonl").read_text()


class Loud(nn.Sequential):
    """A model of two numbers, which overflows 16 bits where one is large."""

    def __init__(self, outputs: int) -> None:
        super().__init__(nn.Linear(2, 8), nn.Linear(8, outputs))


def test_steps_that_all_overflow_16_bits_end_the_run(tmp_path: Path) -> None:
    arrays = [np.array([1e9, i % 2], np.float32) for i in range(64)]
    wt.pack(({"x.npy": x, "cls": i % 2} for i, x in enumerate(arrays)), tmp_path / "set")
    fields = {"image": wt.array("x.npy", shape=(2,), dtype="float32")}
    options = {**SMALL, "batch_size": 2, "model": Loud, "fields": fields, "amp": "fp16"}
    del options["image_size"]
    with pytest.raises(wt.WdstrainError, match="16 bits overflow at any scale"):
        wt.train(tmp_path / "set", tmp_path / "run", **options)


# --- environment, terminal, image size ---


def test_every_sample_is_scored_with_any_environment(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = wt.train([shards], tmp_path / "run", model=Net, **OPTIONS)
    assert done.val["samples"] + done.epochs[0]["samples"] + done.epochs[0]["left_out"] == 48


def test_lines_fit_into_a_terminal_of_80_columns(tmp_path: Path, capsys: Any) -> None:
    shards = str(numbers(tmp_path / "set", [i / 7 for i in range(64)]))
    words = ["train", shards, "--val", shards, "--out", str(tmp_path / "run"), "--image-size", "8"]
    assert main([*words, "--epochs", "1"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch")]
    assert lines
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("where", ["flag", "file", "keyword"])
def test_the_image_size_may_be_height_and_width(shards: Path, tmp_path: Path, where: str) -> None:
    """The model takes images of 4 x 16 pixels."""
    out, model = tmp_path / "run", "tests.support.small_runs:Linear"
    words = ["train", str(shards), "--out", str(out), "--model", model]
    words += ["--epochs", "1", "--batch-size", "16"]
    if where == "keyword":
        wt.train(shards, out, **{**OPTIONS, "model": model, "image_size": (4, 16)})
    elif where == "flag":
        assert main([*words, "--image-size", "4x16"]) == 0
    else:
        (tmp_path / "recipe.toml").write_text("image_size = [4, 16]\n")
        assert main([*words, "--config", str(tmp_path / "recipe.toml")]) == 0
    assert saved(out)["1.weight"].shape == (3, 192)
