"""What is learnt and how: heads, losses, metrics, schedules, averages, options."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import r2_score, roc_auc_score
from torch import nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import _apply_op

from wdstrain.decode import augment_policies
from wdstrain.decode.transforms import DRAWS, Augment
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index, Label
from wdstrain.shards.offsets import Offsets
from wdstrain.training.configuration import OPTIONS, Config, read_config
from wdstrain.training.metrics import Scores, better
from wdstrain.training.models import begin_with, build, freeze, head_of, train_mode
from wdstrain.training.recipe import Average, Schedule, make_optimiser
from wdstrain.training.task import Head, Task

KIND = Label("kind", "class", "cls", classes=("a", "b", "c"))
TWO = Label("two", "class", "json", "two", ("no", "yes"))
TAGS = Label("tags", "multi", "json", "tags", ("x", "y", "z"))
LIGHT = Label("light", "number", "json", "light")


def index_of(*labels: Label) -> Index:
    return Index((), ("jpg", "cls", "json"), Offsets.of([], []), labels)


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_a_task_is_told_by_the_labels_and_can_be_told_otherwise() -> None:
    task = Task.of(index_of(KIND, TWO, TAGS, LIGHT), "kind,two,tags,light")
    assert [(head.kind, head.outputs) for head in task.heads] == [
        ("class", 3),
        ("binary", 1),
        ("multi", 3),
        ("number", 1),
    ]
    assert task.outputs == 8
    assert Task.of(index_of(TWO), "two:class").heads[0].outputs == 2
    assert Task.of(index_of(TWO), "two:number").heads[0].kind == "number"
    assert Task.from_state(task.state()) == task


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("kind:binary", "cannot be learnt as 'binary': it is one of 3 classes. Use class"),
        ("kind:number", "cannot be learnt as 'number'"),
        ("light:class", "it is of the kind number. Use number"),
        ("light:ordinal", r"kinds are class, binary, multi, number"),
        ("age", "no label 'age'"),
        ("light,light", "names a label twice"),
    ],
)
def test_a_label_that_cannot_be_learnt_so_is_refused_with_what_it_can_be(
    asked: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Task.of(index_of(KIND, LIGHT), asked)


def test_losses_are_those_of_torch_and_their_mean_does_not_depend_on_how_rows_are_shared() -> None:
    torch.manual_seed(0)
    outputs = torch.randn(12, 3)
    targets = torch.randint(0, 3, (12,))
    weights = torch.tensor([0.5, 1.0, 2.0])
    head = Head(KIND, "class")
    ours = head.losses(outputs, targets, smoothing=0.1)
    torch.testing.assert_close(
        ours.mean(), nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)
    )
    weighted = head.losses(outputs, targets, weights=weights)
    parts = [
        head.losses(outputs[part], targets[part], weights=weights).mean()
        for part in (slice(0, 6), slice(6, 12))
    ]
    torch.testing.assert_close(weighted.mean(), torch.stack(parts).mean())
    two = Head(TWO, "binary")
    hard = two.losses(outputs[:, :1], targets.clamp(max=1))
    soft = two.losses(outputs[:, :1], nn.functional.one_hot(targets.clamp(max=1), 2).float())
    torch.testing.assert_close(hard, soft)
    torch.testing.assert_close(
        hard,
        nn.functional.binary_cross_entropy_with_logits(
            outputs[:, 0], targets.clamp(max=1).float(), reduction="none"
        ),
    )
    tags = nn.functional.one_hot(targets, 3).float()
    several = Head(TAGS, "multi").losses(outputs, tags).mean()
    torch.testing.assert_close(
        several, nn.functional.binary_cross_entropy_with_logits(outputs, tags)
    )
    torch.testing.assert_close(
        Head(LIGHT, "number").losses(outputs[:, :1], tags[:, 0]).mean(),
        nn.functional.mse_loss(outputs[:, 0], tags[:, 0]),
    )


def test_weights_of_classes_make_rare_ones_count_as_much_as_frequent_ones() -> None:
    weights = Head(KIND, "class").weights({"a": 80, "b": 20})
    assert weights[0] * 80 == weights[1] * 20
    assert float(weights[0] * 80 + weights[1] * 20) == pytest.approx(100)
    assert weights[2] == 1  # nobody has it, so it is of no weight


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_of_every_kind_are_those_of_scikit_learn_whatever_the_batches() -> None:
    torch.manual_seed(0)
    task = Task(
        (Head(KIND, "class"), Head(TWO, "binary"), Head(TAGS, "multi"), Head(LIGHT, "number"))
    )
    outputs = torch.randn(100, task.outputs)
    targets = [
        torch.randint(0, 3, (100,)),
        torch.randint(0, 2, (100,)),
        (torch.rand(100, 3) > 0.5).float(),
        torch.randn(100),
    ]
    scores = Scores(task, torch.device("cpu"))
    for rows in torch.arange(100).split([1, 40, 0, 59]):
        own = [target[rows] for target in targets]
        scores.update(outputs[rows], own, task.losses(outputs[rows], own))
    found, details = scores.compute(lambda values: values.clone())
    kind, two, tags, light = (own.numpy() for own in task.split(outputs))
    true = [target.numpy() for target in targets]
    assert found["samples"] == 100
    assert found["loss"] == pytest.approx(float(task.losses(outputs, targets).mean()), rel=1e-5)
    assert found["kind/accuracy"] == pytest.approx((kind.argmax(1) == true[0]).mean())
    assert details["kind"]["confusion"] == [
        [int(((true[0] == i) & (kind.argmax(1) == j)).sum()) for j in range(3)] for i in range(3)
    ]
    assert found["two/auroc"] == pytest.approx(roc_auc_score(true[1], two[:, 0]), abs=1e-3)
    assert found["tags/accuracy"] == pytest.approx(((tags > 0) == true[2]).mean())
    assert found["tags/auroc"] == pytest.approx(
        roc_auc_score(true[2], tags, average="macro"), abs=1e-3
    )
    assert found["light/mse"] == pytest.approx(((light[:, 0] - true[3]) ** 2).mean(), rel=1e-5)
    assert found["light/mae"] == pytest.approx(np.abs(light[:, 0] - true[3]).mean(), rel=1e-5)
    assert found["light/r2"] == pytest.approx(r2_score(true[3], light[:, 0]), rel=1e-4)


def test_the_best_is_told_by_the_metric_that_counts() -> None:
    one, number, several = (
        Task((Head(KIND, "class"),)),
        Task((Head(LIGHT, "number"),)),
        Task((Head(KIND, "class"), Head(LIGHT, "number"))),
    )
    assert better(one, {"accuracy": 0.6, "loss": 9}, {"accuracy": 0.5, "loss": 1})
    assert not better(number, {"mse": 0.6}, {"mse": 0.5})
    assert better(several, {"loss": 0.4}, {"loss": 0.5})
    assert not better(number, {"mse": math.nan}, {"mse": 0.5})


# --- recipes ---------------------------------------------------------------------------------------------------------


def test_one_cycle_is_that_of_torch() -> None:
    rate = Schedule(Config(epochs=3, lr=0.5), 7)
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.5, total_steps=21)
    for step in range(21):
        assert 0.5 * rate(step) == pytest.approx(theirs.get_last_lr()[0])
        optimiser.step()
        if step < 20:
            theirs.step()


def test_schedules_warm_up_and_fall_step_by_step() -> None:
    cosine = Schedule(Config(epochs=4, schedule="cosine", warmup=1), 10)
    found = [cosine(step) for step in range(40)]
    assert found[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert found[10] == 1
    assert sorted(found[10:], reverse=True) == found[10:]
    assert found[39] < 0.01
    steps = Schedule(Config(epochs=4, schedule="step", step_epochs=2), 10)
    assert [steps(0), steps(19), steps(20), steps(39)] == pytest.approx([1, 1, 0.1, 0.1])
    assert Schedule(Config(schedule="constant"), 10)(99) == 1


def test_norms_and_biases_are_not_drawn_to_zero() -> None:
    model = build("small", 3, 16)
    groups = make_optimiser(model, Config(weight_decay=0.1)).param_groups
    assert all(weight.ndim > 1 for weight in groups[0]["params"])
    assert all(weight.ndim == 1 for weight in groups[1]["params"])
    assert [group["weight_decay"] for group in groups] == [0.1, 0]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_an_average_of_weights_follows_them_faster_at_the_start() -> None:
    model = nn.BatchNorm1d(1)
    average = Average(model, 0.9)
    with torch.no_grad():
        model.weight.fill_(11.0)
    average.update(model, 0)  # a decay of 1/10
    assert float(average.model.weight) == pytest.approx(1 + 0.9 * 10)
    average.update(model, 1000)  # of 0.9
    assert float(average.model.weight) == pytest.approx(10 + 0.1 * 1)


@pytest.mark.parametrize("name", sorted({*augment_policies.TRIVIAL_AUGMENT_RANGES} - {"Identity"}))
@pytest.mark.parametrize("part", [0.3, 1.0])
def test_each_operation_of_a_policy_equals_that_of_torchvision(name: str, part: float) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3)).astype(np.uint8)
    magnitude = augment_policies.TRIVIAL_AUGMENT_RANGES[name](part)
    for sign in (1, -1) if name in augment_policies.SIGNED else (1,):
        result = augment_policies.apply(Image.fromarray(pixels), name, sign * magnitude)
        expected = _apply_op(
            Image.fromarray(pixels), name, sign * magnitude, InterpolationMode.NEAREST, None
        )
        np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


@pytest.mark.parametrize("policy", ["trivialaugment", "randaugment"])
def test_a_policy_draws_every_change_and_depends_on_the_draws_alone(policy: str) -> None:
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (16, 16, 3)).astype(np.uint8)
    draws = rng.random((300, DRAWS))
    varied = Augment.parse(policy)
    made = []
    for row in draws:
        for _ in range(2):
            pixels = picture.copy()
            varied.apply_policy(pixels, row)
            made.append(pixels.tobytes())
    assert made[::2] == made[1::2]
    assert len(set(made)) > 100
    with pytest.raises(UsageError, match="use one of trivialaugment and randaugment, not both"):
        Augment.parse("trivialaugment+randaugment")


# --- models ----------------------------------------------------------------------------------------------------------


def test_weights_of_a_file_are_taken_but_for_a_last_layer_of_another_shape(tmp_path: Path) -> None:
    pretrained = build("resnet18", 1000, 64)
    torch.save(pretrained.state_dict(), tmp_path / "resnet18.pth")
    model = build("resnet18", 5, 64)
    assert begin_with(model, str(tmp_path / "resnet18.pth")) == ["fc.weight", "fc.bias"]
    torch.testing.assert_close(
        model.state_dict()["conv1.weight"], pretrained.state_dict()["conv1.weight"]
    )
    with pytest.raises(UsageError, match="are of another model: .* is missing; .* more"):
        begin_with(build("mobilenet_v3_small", 5, 64), str(tmp_path / "resnet18.pth"))
    with pytest.raises(UsageError, match="cannot be read"):
        begin_with(model, str(tmp_path / "none.pth"))
    torch.save({"model": nn.Linear(1, 1)}, tmp_path / "pickle.pth")
    with pytest.raises(UsageError, match="weights_only"):
        begin_with(model, str(tmp_path / "pickle.pth"))


def test_frozen_layers_do_not_learn_and_keep_the_means_of_their_norms() -> None:
    model = build("resnet18", 5, 64)
    freeze(model)
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == {
        "fc.weight",
        "fc.bias",
    }
    train_mode(model)
    before = model.state_dict()["bn1.running_mean"].clone()
    model(torch.randn(4, 3, 64, 64))
    torch.testing.assert_close(model.state_dict()["bn1.running_mean"], before)
    assert model.fc.training


def test_the_last_layer_is_found_in_models_of_every_make() -> None:
    for name, last in (
        ("resnet18", "fc"),
        ("mobilenet_v3_small", "classifier.3"),
        ("small", "head"),
        ("squeezenet1_0", "classifier.1"),
    ):
        assert head_of(build(name, 7, 64))[0] == last


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["toml", "yaml"])
def test_a_file_of_options_is_read_and_what_it_does_not_know_is_refused_with_the_nearest(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"recipe.{ending}"
    texts = {
        "toml": "epochs = 3\nlabel-smoothing = 0.1\n[data]\ntrain = 'x'\n",
        "yaml": "epochs: 3\nlabel-smoothing: 0.1\ndata: {train: x}\n",
    }
    path.write_text(texts[ending])
    assert read_config(str(path)) == ({"epochs": 3, "label_smoothing": 0.1}, {"train": "x"})
    for wrong, words in (
        ("epoch", "Did you mean epochs"),
        ("lerning_rate", "none of the options"),
        ("batchsize", "batch_size"),
    ):
        path.write_text({"toml": f"{wrong} = 3\n", "yaml": f"{wrong}: 3\n"}[ending])
        with pytest.raises(UsageError, match=words):
            read_config(str(path))
    path.write_text({"toml": "epochs = 'many'\n", "yaml": "epochs: many\n"}[ending])
    with pytest.raises(UsageError, match="epochs='many' is not a whole number"):
        read_config(str(path))
    path.write_text("{[")
    with pytest.raises(UsageError, match=f"is no {ending.upper()}"):
        read_config(str(path))


def test_what_a_run_saves_of_its_options_reads_as_the_same(tmp_path: Path) -> None:
    config = Config(label='a,"b"', lr=1e-4, clip=1.0, deterministic=True, augment="rrc+flip")
    (tmp_path / "config.toml").write_text(config.toml({"train": ["a b", "ü"], "val": None}))
    options, data = read_config(str(tmp_path / "config.toml"))
    assert Config.of(options) == config
    assert data == {"train": ["a b", "ü"]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0}, "lr=0.0"),
        ({"ema": 1.0}, "ema=1.0"),
        ({"warmup": 3, "epochs": 2, "schedule": "cosine"}, "not shorter than the 2 epochs"),
        ({"warmup": 1}, "onecycle rises by itself"),
        ({"step_epochs": 2}, "belongs to the schedule step"),
        ({"momentum": 0.5}, "belongs to the optimiser sgd"),
        ({"optimiser": "lion"}, "none of adamw, sgd"),
        ({"augment": "rrc+blur"}, "'blur' is not known"),
        ({"batch_size": 2.5}, "not a whole number"),
        ({"epochs": True}, "not a whole number"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Config.of(options)


def test_every_option_says_what_it_is() -> None:
    assert all(option.metadata["text"] for option in OPTIONS.values())
