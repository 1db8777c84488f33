"""Objects of the user keep their values: optimizers, losses, models, callbacks, global settings."""

from __future__ import annotations

import argparse
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional

import wdstrain as wt
from tests.conftest import ROOT
from tests.support.small_runs import (
    SMALL,
    Linear,
    Lines,
    Stop,
    last,
    saved,
    small_image,
    two_classes,
    unless_refused,
)
from wdstrain.cli import main


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28 images of two classes for training, and 12 for validation."""
    out = tmp_path_factory.mktemp("small") / "set"
    return two_classes(out, split={"train": 0.6, "val": 0.4}, seed=1)


class EachStep(wt.Callback):
    """Keeps the values of a function of the trainer after each step."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.seen = function, list[Any]()

    def on_step_end(self, trainer: Any) -> None:
        self.seen.append(self.function(trainer))


def test_groups_of_an_optimizer_keep_the_values_that_its_function_gave(
    shards: Path, tmp_path: Path
) -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        first, *others = [parameter for group in groups for parameter in group["params"]]
        own = [{"params": [first], "lr": 1e-3, "momentum": 0.5}, {"params": others}]
        return torch.optim.SGD(own, lr=torch.tensor(1e-5), momentum=0.7, foreach=False)

    own = EachStep(lambda run: [(g["lr"], g["momentum"]) for g in run.optimizer.param_groups])
    wt.train(shards, tmp_path / "run", optimizer=make, callbacks=[own], model=Linear, **SMALL)
    assert own.seen == [[(1e-3, 0.5), (pytest.approx(1e-5), 0.7)]] * 3


def partly_frozen(outputs: int) -> nn.Module:
    """Return three linear layers, the second of which its author froze."""
    torch.manual_seed(0)
    fixed = nn.Linear(4, 4).requires_grad_(False)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4), fixed, nn.Linear(4, outputs))


@pytest.mark.parametrize(
    "options", [{"ema": 0.5, "backbone_lr": 0.1}, {"freeze": "1", "unfreeze_epoch": 1}], ids=str
)
def test_parameters_that_a_model_froze_stay_as_they_are(
    shards: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    wt.train(shards, tmp_path / "run", model=partly_frozen, **{**SMALL, "epochs": 2, **options})
    trained, initial = saved(tmp_path / "run"), partly_frozen(1).state_dict()
    same = {name for name in initial if torch.equal(trained[name], initial[name])}
    assert same == {"2.weight", "2.bias"}


class Watched(nn.Module):
    """A layer that can be frozen, and a layer beside it that watches its mode."""

    def __init__(self, outputs: int, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.layer, self.last = layer, nn.Linear(4, outputs)
        self.modes: list[bool] = []

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.modes.append(self.layer.training)
        return self.last(self.layer(self.second(self.first(image))).mean((2, 3)))


class Lerp(nn.Module):
    """A layer without parameters that follows the mean of its inputs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(values.detach().mean(), 0.1 * self.training)
        return values - self.mean


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4), nn.Dropout(), Lerp()],
    ids=["batch norm", "batch norm with parameters", "dropout", "own"],
)
def test_freezing_one_layer_leaves_others_in_training_mode(
    shards: Path, tmp_path: Path, layer: nn.Module
) -> None:
    make = lambda outputs: Watched(outputs, layer)  # noqa: E731
    train = f"{shards}/train-*.tar"
    run = wt.train(train, tmp_path / "run", model=make, freeze="first", **SMALL)
    assert isinstance(run.model, Watched)
    assert run.model.modes[-3:] == [True] * 3


def student(outputs: int) -> nn.Module:
    layers = (nn.Flatten(), nn.Linear(192, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, outputs))
    return nn.Sequential(*layers)


def as_without(batch: dict[str, Any], model: Any) -> torch.Tensor:
    assert sorted(batch) == ["__key__", "image", "label"]
    return functional.cross_entropy(model(batch["image"]), batch["label"], reduction="none")


class Distilled(nn.Module):
    """Outputs of a student that a trained layer maps to those of a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.teacher = nn.Linear(192, 7).requires_grad_(False)
        self.own = nn.Linear(2, 7)

    def forward(self, batch: dict[str, Any], model: Any) -> torch.Tensor:
        outputs, wanted = model(batch["image"]), self.teacher(batch["image"].flatten(1))
        own = functional.mse_loss(self.own(outputs), wanted)
        return own + functional.cross_entropy(outputs, batch["label"])


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(2))
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += int(self.training)
        return functional.cross_entropy(outputs * self.own * (1 + self.calls / 10), target)


STEPS: dict[str, Any] = {**SMALL, "epochs": 2, "lr": 0.01, "deterministic": True}
STEPS |= {"schedule": "onecycle", "label": "label:class", "model": student}


def test_a_step_that_does_what_training_does_gives_its_bits(shards: Path, tmp_path: Path) -> None:
    plain = wt.train(shards, tmp_path / "plain", **STEPS)
    own = wt.train(shards, tmp_path / "own", training_step=as_without, **STEPS)
    torch.testing.assert_close(own.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)
    assert own.val == plain.val
    assert own.epochs[-1]["loss"] == plain.epochs[-1]["loss"]
    assert "accuracy" not in own.epochs[-1]  # outputs of a step are not known


@pytest.mark.parametrize("more", [{}, {"accumulate": 2, "ema": 0.9, "amp": "bf16"}], ids=str)
@pytest.mark.parametrize(
    ("name", "make"), [("training_step", Distilled), ("criterion", Temperature)]
)
def test_a_loss_with_parameters_is_learned_and_resumed(
    shards: Path, tmp_path: Path, name: str, make: Any, more: dict[str, Any]
) -> None:
    """The run that was stopped goes on with a loss that was made anew, as a new process does."""
    options, loss = {**STEPS, **more}, make()
    whole = wt.train(shards, tmp_path / "whole", **{name: loss}, **options)
    assert whole.epochs[1]["loss"] < whole.epochs[0]["loss"]
    before, after = ([p for p in own.parameters() if p.requires_grad] for own in (make(), loss))
    assert not torch.equal(before[0], after[0])
    for again in ({"callbacks": [Stop(1, 2)]}, {"resume": True}):
        wt.train(shards, tmp_path / "run", **{name: make()}, **again, **options)
    states = [torch.load(last(tmp_path / run), weights_only=True) for run in ("run", "whole")]
    for part in ("model", "optimizer", "criterion_state"):
        torch.testing.assert_close(states[0][part], states[1][part], rtol=0, atol=0)
    with pytest.raises(wt.UsageError, match=f"{name} was .*, is None"):
        wt.train(shards, tmp_path / "run", resume=True, **options)


@pytest.mark.parametrize(("planted", "batch_size"), [((2, 3), 4), (range(99), 1)])
def test_a_step_whose_gradient_overflows_is_skipped_and_a_run_of_such_steps_ends(
    shards: Path, tmp_path: Path, planted: Any, batch_size: int
) -> None:
    calls = list[int]()

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        factor = 1e34 if len(calls) in planted else 1.0  # finite, but with an infinite gradient
        return functional.cross_entropy(outputs, target, reduction="none") * factor

    weights = EachStep(lambda run: next(run.model.parameters()).detach().clone())
    options = {**STEPS, "batch_size": batch_size, "epochs": 1, "amp": "fp16"}
    run = lambda: wt.train(shards, tmp_path / "run", criterion=loss, callbacks=[weights], **options)  # noqa: E731
    if batch_size == 1:
        with pytest.raises(wt.WdstrainError, match="16 bits overflow at any scale"):
            run()
        return
    assert run().epochs[0]["skipped_steps"] == 2
    pairs = zip(weights.seen[:3], weights.seen[1:4], strict=True)
    assert [torch.equal(*pair) for pair in pairs] == [True, True, False]
    assert "skipped_steps" in (tmp_path / "run" / "metrics.jsonl").read_text()


class Counter(wt.Callback):
    """Callback with state: the number of steps."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, trainer: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_a_run_resumes_only_with_the_state_of_its_callbacks(shards: Path, tmp_path: Path) -> None:
    options, counter = {**SMALL, "model": Linear, "epochs": 2, "resume": True}, Counter()
    wt.train(shards, tmp_path / "run", callbacks=[Counter(), Stop(1, 1)], **options)
    for callbacks in ([], [type("Other", (Counter,), {})(), Counter()]):
        with pytest.raises(wt.UsageError, match="callbacks with a state were Counter"):
            wt.train(shards, tmp_path / "run", callbacks=callbacks, **options)
    wt.train(shards, tmp_path / "run", callbacks=[counter], **options)
    assert counter.steps == 6


def large_loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss that no loss of the package is near to."""
    return 1000 + nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], target.float())


def test_a_run_goes_on_with_its_loss_and_optimizer_or_not_at_all(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**SMALL, "model": "tests.support.small_runs:Linear", "epochs": 2}
    wt.train(shards, tmp_path / "own", criterion=large_loss, callbacks=[Stop(0, 2)], **options)
    wt.train(shards, tmp_path / "plain", callbacks=[Stop(0, 2)], **options)
    words = ["train", "--resume", "--model", options["model"], "--out", str(tmp_path / "own")]
    assert main(words) == 2
    assert "criterion" in capsys.readouterr().err
    for name, given in (
        ("own", {"criterion": {"label": large_loss}}),
        ("plain", {"criterion": large_loss}),
        ("plain", {"optimizer": torch.optim.SGD}),
    ):
        with pytest.raises(wt.UsageError, match=f"{next(iter(given))} was"):
            wt.train(shards, tmp_path / name, resume=True, **given, **options)


@pytest.fixture(scope="module")
def earlier(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run of the model `small`, with a normalization of its own."""
    out = tmp_path_factory.mktemp("runs") / "earlier"
    wt.train(shards, out, **SMALL)
    state = torch.load(last(out), weights_only=True)
    state["inputs"].update(mean=[0.5, 0.5, 0.5], std=[0.25, 0.25, 0.25])
    torch.save(state, out / "weights.pt")
    return out / "weights.pt"


def test_weights_of_a_run_have_a_normalization_and_keep_the_meaning_of_their_classes(
    shards: Path, earlier: Path, tmp_path: Path
) -> None:
    wt.train(shards, tmp_path / "run", weights=str(earlier), **SMALL)
    inputs = torch.load(last(tmp_path / "run"), weights_only=True)["inputs"]
    assert (list(inputs["mean"]), list(inputs["std"])) == ([0.5] * 3, [0.25] * 3)
    wt.train(shards, tmp_path / "first", model=Linear, **SMALL)
    samples = ({"png": small_image(i), "cls": i % 2} for i in range(24))
    wt.pack(samples, tmp_path / "other", classes=["b", "a"])
    options = {**SMALL, "model": Linear, "weights": last(tmp_path / "first"), "progress": Lines()}
    wt.train(tmp_path / "other", tmp_path / "again", **options)
    assert "new weights: 1.weight, 1.bias" in options["progress"].text  # other numbers of classes


@pytest.mark.parametrize(
    "form",
    [
        lambda state: state,
        lambda state: {"model": state, "args": argparse.Namespace(lr=0.1)},
        lambda state: {"model_state_dict": state, "epoch": 3},
        lambda state: {"net": state, "optimizer": {}},
        lambda state: {"state_dict": {f"net.{name}": w for name, w in state.items()}},
        lambda state: {"state_dict": {f"module._orig_mod.{name}": w for name, w in state.items()}},
    ],
    ids=["plain", "arguments of a script", "tutorial", "net", "Lightning", "compiled with DDP"],
)
def test_weights_are_found_in_checkpoints_of_other_trainers(
    shards: Path, tmp_path: Path, form: Callable[[dict[str, Any]], Any]
) -> None:
    torch.manual_seed(5)
    state = Linear(1).state_dict()
    torch.save(form(state), tmp_path / "w.pt")
    options = {**SMALL, "lr": 1e-30, "weight_decay": 0.0, "model": Linear}
    wt.train(shards, tmp_path / "run", weights=str(tmp_path / "w.pt"), **options)
    torch.testing.assert_close(saved(tmp_path / "run"), state)


def torch_settings() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )


def test_settings_of_torch_are_the_same_after_a_call(
    shards: Path, earlier: Path, tmp_path: Path
) -> None:
    was_deterministic, _, _, had_benchmark, precision, _, _ = torch_settings()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("medium")
    try:
        chosen = torch_settings()
        for call in (
            lambda: wt.train(shards, tmp_path / "run", tf32=True, **SMALL),
            lambda: wt.train(shards, tmp_path / "same", deterministic=True, **SMALL),
            lambda: wt.evaluate(earlier, f"{shards}/val-*.tar"),
            lambda: wt.export(earlier, tmp_path / "m.pt2"),
        ):
            call()
            assert torch_settings() == chosen
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        torch.backends.cudnn.benchmark = had_benchmark
        torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("value", [False, True, "no"])
def test_a_progress_that_is_no_display_is_obeyed_or_refused_by_name(
    shards: Path, earlier: Path, tmp_path: Path, value: Any
) -> None:
    val, given = f"{shards}/val-*.tar", {"progress": value}
    for call in (
        lambda: wt.train(shards, tmp_path / "run", **SMALL, **given),
        lambda: wt.evaluate(earlier, val, **given),
        lambda: wt.predict(earlier, val, tmp_path / "p.csv", **given),
        lambda: two_classes(tmp_path / "set", count=4, **given),
        lambda: wt.verify(val, **given),
    ):
        unless_refused(call, "progress")


def test_callbacks_are_called_in_order(shards: Path, tmp_path: Path) -> None:
    calls, recorder = list[str](), wt.Callback()
    for name in ("train_start", "step_end", "epoch_end", "checkpoint", "train_end"):
        setattr(recorder, f"on_{name}", lambda *_, name=name: calls.append(name))
    wt.train(shards, tmp_path / "run", callbacks=[recorder], **SMALL)
    steps = ["step_end"] * 3
    assert calls == ["train_start", *steps, "epoch_end", "checkpoint", "train_end"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_gets_a_run(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    example = runpy.run_path(str(ROOT / "scripts" / "examples" / "wandb_callback.py"))
    callback = example["WandbCallback"](project="test", dir=str(tmp_path))
    done = wt.train(shards, tmp_path / "run", callbacks=[callback], **{**SMALL, "epochs": 2})
    assert callback.run.config["epochs"] == 2
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    end, texts = time.monotonic() + 60, (b"val/accuracy", done.stop_reason.encode())
    while not all(text in log.read_bytes() for text in texts):  # W&B's process writes it later
        assert time.monotonic() < end, log.read_bytes()
        time.sleep(0.05)


def loss(batch: Any, model: Any) -> torch.Tensor:
    return model(batch["image"]).sum()


class Misspelled(wt.Callback):
    def on_epoch_ended(self, trainer: Any) -> None:
        """A name that no run calls."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"criterion": "focal"}, "criterion='focal': must be a function"),
        (
            {"criterion": nn.CrossEntropyLoss(), "label_smoothing": 0.1},
            "label_smoothing=0.1 has no effect with criterion=",
        ),
        ({"metrics": [torchmetrics.MeanMetric()]}, "metrics=.*must be a dict"),
        ({"grad_checkpointing": True}, "grad_checkpointing= needs a model that has it.*timm"),
        ({"optimizer": 3}, "optimizer=3: must be a function of parameter groups"),
        ({"callbacks": [Misspelled()]}, "on_epoch_ended is never called. Methods of callbacks are"),
        ({"model": lambda n: nn.Linear(10, n)}, "does not take a batch of uint8"),
    ],
)
def test_unusable_objects_are_refused(
    shards: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(wt.UsageError, match=words):
        wt.train(shards, tmp_path / "run", **SMALL, **options)
    assert not (tmp_path / "run").exists()
