"""Heads, losses, metrics, schedules, averages, options."""

from __future__ import annotations

import inspect
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import _apply_op

import wdstrain as wt
from wdstrain.augment.gpu import IMAGENET
from wdstrain.decode.transforms import DRAWS, Augment
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import Offsets
from wdstrain.training.checkpoint import freeze, load
from wdstrain.training.config import OPTIONS, Config, read_config
from wdstrain.training.heads import ClassHead, Head, MultiLabelHead, NumberHead
from wdstrain.training.models import (
    build,
    last_layer,
    make_optimizer,
    parameter_groups,
    rate_factor,
)
from wdstrain.training.tasks import Monitor, Task

KIND = ColumnInfo("kind", "class", "cls", classes=("a", "b", "c"))
TWO = ColumnInfo("two", "class", "json", "two", ("no", "yes"))
TAGS = ColumnInfo("tags", "multi", "json", "tags", ("x", "y", "z"))
LIGHT = ColumnInfo("light", "number", "json", "light")


def index_of(*labels: ColumnInfo) -> Index:
    members = [(name, 512, 1, 0) for name in ("jpg", "cls", "json")]
    return Index((), Offsets.of_samples([("k", 0, 4096, members)]).slice(0, 0), labels)


# --- tasks ---


def test_the_task_follows_from_the_labels_or_the_option() -> None:
    task = Task.of(index_of(KIND, TWO, TAGS, LIGHT), "kind,two,tags,light")
    kinds = [("class", 3), ("binary", 1), ("multi", 3), ("number", 1)]
    assert [(head.kind, head.outputs) for head in task.heads] == kinds
    assert task.outputs == 8
    assert Task.of(index_of(TWO), "two:class").heads[0].outputs == 2
    assert Task.of(index_of(TWO), "two:number").heads[0].kind == "number"
    assert Task.from_state(task.state()) == task


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("kind:binary", "cannot be learned as 'binary': it is one of 3 classes. Use class"),
        ("kind:number", "cannot be learned as 'number'"),
        ("light:class", "it is of kind number. Use number"),
        ("light:ordinal", r"Kinds are class, binary, multi, number"),
        ("age", "no label 'age'"),
        ("light,light", "names a label twice"),
    ],
)
def test_an_unsuitable_task_is_refused_with_the_suitable_ones(asked: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Task.of(index_of(KIND, LIGHT), asked)


# --- metrics ---


def monitor(*heads: Head, **options: Any) -> Monitor:
    return Monitor(Config(**options), Task(heads).main_metric, {})


def test_the_main_metric_of_the_task_selects_the_best_epoch() -> None:
    for heads, name, maximizes in (
        ((ClassHead(KIND),), "accuracy", True),
        ((MultiLabelHead(TAGS),), "mAP", True),
        ((NumberHead(LIGHT),), "mse", False),
        ((ClassHead(KIND), NumberHead(LIGHT)), "loss", False),
    ):
        assert (monitor(*heads).name, monitor(*heads).maximizes) == (name, maximizes)
    assert monitor(ClassHead(KIND), monitor="kind/f1").maximizes
    assert not monitor(ClassHead(KIND), monitor="light/mse").maximizes
    most, least = monitor(ClassHead(KIND)), monitor(NumberHead(LIGHT))
    assert most.improves(0.6, 0.5)
    assert not most.improves(0.6, 0.5, min_delta=0.2)
    assert least.improves(0.4, 0.5)
    assert not least.improves(math.nan, 0.5)
    assert most.improves(0.5, math.nan)


# --- recipes ---


def test_the_one_cycle_schedule_equals_torch() -> None:
    rate = partial(rate_factor, Config(epochs=3, lr=0.5), 7, 0.5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=21)
    for step in range(21):
        assert 0.5 * rate(step) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        if step < 20:
            scheduler.step()


class Backbone(nn.Module):
    """A model that names its parameters without weight decay, as timm's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.register = nn.Parameter(torch.zeros(1, 2, 4))
        self.body = nn.Linear(4, 4)

    def no_weight_decay(self) -> set[str]:
        return {"register"}


VIT = torchvision.models.VisionTransformer(32, 16, 1, 2, 8, 16, num_classes=3)
SWIN = torchvision.models.SwinTransformer([4, 4], 8, [2], [2], [2, 2], num_classes=3)
TABLES = {f"features.1.{block}.attn.relative_position_bias_table" for block in (0, 1)}


@pytest.mark.parametrize(
    ("model", "free"),
    [
        (VIT, {"class_token", "encoder.pos_embedding"}),
        (SWIN, TABLES),
        (Backbone(), {"register"}),
        (nn.Sequential(Backbone(), nn.Linear(4, 3)), {"0.register"}),
    ],
    ids=["ViT", "Swin", "timm", "part of a model"],
)
def test_tokens_and_embeddings_of_positions_do_not_decay(model: nn.Module, free: set[str]) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = make_optimizer(model, Config(weight_decay=0.1)).param_groups
    without = {names[p] for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    assert {name for name in without if model.get_parameter(name).ndim > 1} == free
    assert without >= {name for name in names.values() if name.endswith(".bias")}
    assert sum(len(group["params"]) for group in groups) == len(names)


# Operations in the order of their random number, with the largest magnitude of TrivialAugment's wide
# ranges. Those of SIGNED take the opposite direction half of the time.
WIDE = {"Identity": 0.0, "ShearX": 0.99, "ShearY": 0.99, "TranslateX": 32.0, "TranslateY": 32.0}
WIDE |= {"Rotate": 135.0, "Brightness": 0.99, "Color": 0.99, "Contrast": 0.99, "Sharpness": 0.99}
WIDE |= {"Posterize": 6.0, "Solarize": 255.0, "AutoContrast": 0.0, "Equalize": 0.0}
SIGNED = list(WIDE)[1:10]


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("strength", [9, 30])
def test_each_operation_of_a_policy_equals_that_of_torchvision(name: str, strength: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3)).astype(np.uint8)
    magnitude = strength / 30 * WIDE[name]
    if name == "Posterize":
        magnitude = 8 - round(magnitude)
    elif name == "Solarize":
        magnitude = 255 - magnitude
    for sign in (1, -1) if name in SIGNED else (1,):
        draws, result = np.zeros(DRAWS), pixels.copy()
        pick = (list(WIDE).index(name) + 0.5) / len(WIDE)
        draws[-4:-1] = pick, (strength + 0.5) / 31, 0.9 if sign > 0 else 0.1
        Augment.parse("trivialaugment").apply_policy(result, draws)
        expected = _apply_op(
            Image.fromarray(pixels), name, sign * magnitude, InterpolationMode.NEAREST, None
        )
        np.testing.assert_array_equal(result, np.asarray(expected))


@pytest.mark.parametrize("policy", ["trivialaugment", "randaugment"])
def test_a_policy_draws_every_operation_and_depends_only_on_the_draws(policy: str) -> None:
    rng = np.random.default_rng(0)
    picture, varied = rng.integers(0, 256, (16, 16, 3)).astype(np.uint8), Augment.parse(policy)

    def changed(row: Any) -> bytes:
        pixels = picture.copy()
        varied.apply_policy(pixels, row)
        return pixels.tobytes()

    draws = rng.random((300, DRAWS))
    images = [changed(row) for row in draws]
    assert images == [changed(row) for row in draws]
    assert len(set(images)) > 100


# --- models ---


def test_weights_of_a_file_are_loaded_except_a_last_layer_of_another_shape(tmp_path: Path) -> None:
    pretrained = build("resnet18", 1000, 64)
    torch.save(pretrained.state_dict(), tmp_path / "resnet18.pth")
    model = build("resnet18", 5, 64)
    assert load(model, "resnet18", str(tmp_path / "resnet18.pth"))[0] == ("fc.weight", "fc.bias")
    torch.testing.assert_close(
        model.state_dict()["conv1.weight"], pretrained.state_dict()["conv1.weight"]
    )
    with pytest.raises(UsageError, match="are of another model: .*Missing key"):
        load(build("mobilenet_v3_small", 5, 64), "", str(tmp_path / "resnet18.pth"))
    with pytest.raises(UsageError, match="cannot be read"):
        load(model, "resnet18", str(tmp_path / "none.pth"))
    torch.save({"model": nn.Linear(1, 1)}, tmp_path / "pickle.pth")
    with pytest.raises(UsageError, match="weights_only"):
        load(model, "resnet18", str(tmp_path / "pickle.pth"))


def test_the_last_layer_is_found_in_models_of_every_kind() -> None:
    """And each has the requested number of outputs."""
    names = {"resnet18": "fc", "mobilenet_v3_small": "classifier.3", "small": "head"}
    for name, last in {**names, "squeezenet1_0": "classifier.1"}.items():
        model = build(name, 7, 64).eval()
        assert last_layer(model)[0] == last
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


# --- options ---


@pytest.mark.parametrize("ending", ["toml", "yaml"])
def test_a_config_file_is_read_and_unknown_options_are_refused(tmp_path: Path, ending: str) -> None:
    path, sign = tmp_path / f"recipe.{ending}", {"toml": " =", "yaml": ":"}[ending]
    data = {"toml": "[data]\ntrain = 'x'\n", "yaml": "data: {train: x}\n"}[ending]
    path.write_text(f"epochs{sign} 3\nlabel-smoothing{sign} 0.1\n{data}")
    assert read_config(str(path)) == ({"epochs": 3, "label_smoothing": 0.1}, {"train": "x"})
    for line, words in (
        (f"epoch{sign} 3", "Did you mean epochs"),
        (f"lerning_rate{sign} 3", "none of the options"),
        (f"batchsize{sign} 3", "batch_size"),
        (f"epochs{sign} 'many'", "epochs='many': must be a whole number"),
        ("{[", f"is no {ending.upper()}"),
    ):
        path.write_text(f"{line}\n")
        with pytest.raises(UsageError, match=words):
            Config.of(read_config(str(path))[0])


def test_saved_options_of_a_run_are_read_back_equal(tmp_path: Path) -> None:
    config = Config(label='a,"b"', lr=1e-4, clip_norm=1.0, deterministic=True, augment="rrc+flip")
    (tmp_path / "config.toml").write_text(config.toml({"train": ["a b", "ü"], "val": None}))
    options, data = read_config(str(tmp_path / "config.toml"))
    assert Config.of(options) == config
    assert data == {"train": ["a b", "ü"]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0}, "lr=0.0"),
        ({"ema": 1.0}, "ema=1.0"),
        ({"warmup": 3, "epochs": 2, "schedule": "cosine"}, "shorter than the 2 epochs"),
        ({"warmup": 1}, "onecycle' has its own warm-up"),
        ({"step_epochs": 2}, "needs schedule='step'"),
        ({"momentum": 0.5}, "needs optimizer='sgd'"),
        ({"optimizer": "adagrad"}, "must be adamw, sgd or module:function"),
        ({"augment": "rrc+blur"}, "'blur' is not known"),
        ({"augment": "trivialaugment+randaugment"}, "use one of trivialaugment and randaugment"),
        ({"lr": math.nan}, "lr=nan"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"seed": -1}, "seed=-1"),
        ({"fold": "0/5"}, "must be K/N"),
        ({"fold": "6/5"}, "must be K/N"),
        ({"fold": "1/1"}, "must be K/N"),
        ({"fold": "1"}, "must be K/N"),
        ({"fold": "a/b"}, "must be K/N"),
        ({"fold": "1/5/2"}, "must be K/N"),
        ({"batch_size": 2.5}, "must be a whole number"),
        ({"epochs": True}, "must be a whole number"),
        ({"scale": (0.5, 1)}, "Add rrc"),
        ({"augment": "rrc", "scale": (0.5,)}, r"scale=\(0.5,\): must be"),
        ({"augment": "rrc", "ratio": (2, 1)}, "ratio"),
        ({"crop_pct": 0}, "above 0"),
        ({"color_jitter": (0.1, 0.2)}, "1, 3 or 4"),
        ({"color_jitter": (0.1, 0.2, 0.1, 0.6)}, "at most 0.5"),
        ({"color_jitter": "strong"}, "not a list of numbers"),
        ({"random_erasing": 1.5}, "in 0 to 1"),
        ({"mixup_prob": 0.5}, "needs mixup= or cutmix="),
        ({"mixup": 1, "mixup_switch_prob": -1}, "in 0 to 1"),
    ],
)
def test_contradicting_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Config.of(options)


def test_help_lists_every_option_with_its_text() -> None:
    page, signature = inspect.getdoc(wt.train) or "", inspect.signature(wt.train)
    for name, field in OPTIONS.items():
        assert name in signature.parameters
        assert re.search(rf"^    {name}: \S", page, re.MULTILINE), name
        assert field.metadata["help"], name
    with pytest.raises(TypeError, match="'epoch'. Did you mean epochs"):
        wt.train("shards", "run", epoch=3)  # type: ignore[call-arg]


# --- optimizers ---


def test_a_plateau_schedule_lowers_the_rate_after_epochs_without_improvement() -> None:
    options: dict[str, Any] = {"schedule": "plateau", "plateau_epochs": 2}
    most, least = monitor(ClassHead(KIND), **options), monitor(NumberHead(LIGHT), **options)
    for one, name, values, count in (
        (most, "accuracy", [0.1, 0.2, 0.2, 0.2], 1),
        (most, "accuracy", [0.1, 0.2, 0.2, 0.3, 0.3], 0),
        (least, "mse", [3.0] * 5, 2),
    ):
        assert one.plateaus([{"val": {name: value}} for value in values]) == count
    rate = partial(rate_factor, Config(schedule="plateau", lr=1.0, min_lr=0.05), 7, 1.0)
    assert [rate(100, plateaus) for plateaus in range(3)] == pytest.approx([1.0, 0.145, 0.0595])


def test_layers_far_from_the_output_learn_more_slowly() -> None:
    pytest.importorskip("timm", reason="timm is not installed: pip install 'wdstrain[timm]'")
    model = build("timm:vit_tiny_patch16_224", 5, 32)
    groups = parameter_groups(model, Config(layer_decay=0.5, backbone_lr=0.1))
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    named = {name: scales[id(p)] for name, p in model.named_parameters()}
    assert named["head.weight"] == named["head.bias"] == 1.0
    blocks = [named[f"blocks.{i}.mlp.fc1.weight"] for i in range(12)]
    assert blocks == pytest.approx([0.1 * 0.5 ** (12 - i) for i in range(12)])
    assert {named[n] for n in ("cls_token", "pos_embed", "patch_embed.proj.bias")} == {
        0.1 * 0.5**13
    }
    assert len(scales) == len(list(model.parameters()))
    with pytest.raises(UsageError, match="layer_decay.*needs a model of timm"):
        parameter_groups(build("resnet18", 5, 64), Config(layer_decay=0.5))


def test_both_output_layers_of_a_segmentation_model_are_reinitialized(tmp_path: Path) -> None:
    name = "lraspp_mobilenet_v3_large"
    trained = build(name, 21, 32, is_dense=True).state_dict()
    torch.save({**trained, "aux_classifier.4.weight": torch.zeros(1)}, tmp_path / "w.pt")
    model = build(name, 3, 32, is_dense=True)
    fresh, _ = load(model, name, str(tmp_path / "w.pt"))
    layers = ("low_classifier", "high_classifier")
    assert fresh == tuple(f"classifier.{n}.{p}" for n in layers for p in ("weight", "bias"))
    assert not set(fresh) & set(freeze(model, "backbone"))


# --- weights ---


def test_weights_by_name_come_from_the_cache_of_torch_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    weights = torchvision.models.SqueezeNet1_1_Weights.DEFAULT
    with pytest.raises(UsageError, match="no such weights.* Use one of: IMAGENET1K_V1"):
        load(build("squeezenet1_1", 5, 64), "squeezenet1_1", "IMAGENET1K_V7")
    with pytest.raises(UsageError, match="cannot be downloaded.*its file as weights"):
        load(build("squeezenet1_1", 5, 64), "squeezenet1_1", "DEFAULT")
    cached = tmp_path / "hub" / "checkpoints" / Path(weights.url).name
    trained = torchvision.models.squeezenet1_1(num_classes=1000)
    cached.parent.mkdir(parents=True, exist_ok=True)
    torch.save(trained.state_dict(), cached)
    model = build("squeezenet1_1", 5, 64)
    fresh, normalization = load(model, "squeezenet1_1", "DEFAULT")
    assert fresh == ("classifier.1.weight", "classifier.1.bias")
    assert normalization == IMAGENET
    torch.testing.assert_close(
        model.state_dict()["features.0.weight"], trained.state_dict()["features.0.weight"]
    )


def test_patterns_select_the_frozen_parameters() -> None:
    model = build("resnet18", 5, 64)
    frozen = freeze(model, "conv1,layer1,*.bn2.*")
    assert "conv1.weight" in frozen
    assert "layer1.0.conv1.weight" in frozen
    assert "layer3.0.bn2.weight" in frozen
    assert "layer3.0.conv2.weight" not in frozen
    for pattern, words in (("layer9", "matches no parameter"), ("*", "no parameter to train")):
        with pytest.raises(UsageError, match=words):
            freeze(model, pattern)


def test_models_of_timm_are_built_by_name() -> None:
    pytest.importorskip("timm", reason="timm is not installed: pip install 'wdstrain[timm]'")
    assert build("timm:resnet10t", 7, 64)(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    assert build("timm:vit_tiny_patch16_224", 7, 32)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    with pytest.raises(UsageError, match="cannot be created: Unknown model"):
        build("timm:resnet10q", 7, 64)
