"""Parameter groups, operations of augmentation policies, models, weights, options."""

from __future__ import annotations

import inspect
import math
import re
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
from wdstrain.training.checkpoint import freeze, load
from wdstrain.training.config import OPTIONS, Config, read_config
from wdstrain.training.models import (
    build,
    last_layer,
    make_optimizer,
    parameter_groups,
)


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


def test_weights_of_a_file_are_loaded_except_a_last_layer_of_another_shape(tmp_path: Path) -> None:
    weights, path = build("resnet18", 1000, 64).state_dict(), str(tmp_path / "resnet18.pth")
    torch.save(weights, path)
    model = build("resnet18", 5, 64)
    assert load(model, "resnet18", path)[0] == ("fc.weight", "fc.bias")
    torch.testing.assert_close(model.state_dict()["conv1.weight"], weights["conv1.weight"])
    with pytest.raises(UsageError, match="are of another model: .*Missing key"):
        load(build("mobilenet_v3_small", 5, 64), "", path)
    with pytest.raises(UsageError, match="cannot be read"):
        load(model, "resnet18", str(tmp_path / "none.pth"))
    torch.save({"model": nn.Linear(1, 1)}, path)
    with pytest.raises(UsageError, match="weights_only"):
        load(model, "resnet18", path)


def test_the_last_layer_is_found_and_has_the_requested_number_of_outputs() -> None:
    names = {"resnet18": "fc", "mobilenet_v3_small": "classifier.3", "small": "head"}
    for name, last in {**names, "squeezenet1_0": "classifier.1"}.items():
        model = build(name, 7, 64).eval()
        assert last_layer(model)[0] == last
        assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


def test_models_of_timm_are_built_by_name_and_layers_far_from_the_output_learn_slowly() -> None:
    pytest.importorskip("timm", reason="timm is not installed: pip install 'wdstrain[timm]'")
    with pytest.raises(UsageError, match="cannot be created: Unknown model"):
        build("timm:resnet10q", 7, 64)
    model = build("timm:vit_tiny_patch16_224", 7, 32)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    groups = parameter_groups(model, Config(layer_decay=0.5, backbone_lr=0.1))
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    named = {name: scales[id(p)] for name, p in model.named_parameters()}
    assert named["head.weight"] == named["head.bias"] == 1.0
    blocks = [named[f"blocks.{i}.mlp.fc1.weight"] for i in range(12)]
    assert blocks == pytest.approx([0.1 * 0.5 ** (12 - i) for i in range(12)])
    first = ("cls_token", "pos_embed", "patch_embed.proj.bias")
    assert {named[name] for name in first} == {0.1 * 0.5**13}
    with pytest.raises(UsageError, match="layer_decay.*needs a model of timm"):
        parameter_groups(build("resnet18", 5, 64), Config(layer_decay=0.5))


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup": 3, "epochs": 2, "schedule": "cosine"}, "shorter than the 2 epochs"),
        ({"warmup": 1}, "onecycle' has its own warm-up"),
        ({"momentum": 0.5}, "needs optimizer='sgd'"),
        ({"augment": "trivialaugment+randaugment"}, "use one of trivialaugment and randaugment"),
        ({"lr": math.nan}, "lr=nan"),
        ({"fold": "6/5"}, "must be K/N"),
        ({"batch_size": 2.5}, "must be a whole number"),
        ({"scale": (0.5, 1)}, "Add rrc"),
        ({"augment": "rrc", "scale": (0.5,)}, r"scale=\(0.5,\): must be"),
        ({"color_jitter": (0.1, 0.2, 0.1, 0.6)}, "at most 0.5"),
        ({"random_erasing": 1.5}, "in 0 to 1"),
        ({"mixup_prob": 0.5}, "needs mixup= or cutmix="),
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


def test_both_output_layers_of_a_segmentation_model_are_reinitialized(tmp_path: Path) -> None:
    name = "lraspp_mobilenet_v3_large"
    trained = build(name, 21, 32, is_dense=True).state_dict()
    torch.save({**trained, "aux_classifier.4.weight": torch.zeros(1)}, tmp_path / "w.pt")
    model = build(name, 3, 32, is_dense=True)
    fresh, _ = load(model, name, str(tmp_path / "w.pt"))
    layers = ("low_classifier", "high_classifier")
    assert fresh == tuple(f"classifier.{n}.{p}" for n in layers for p in ("weight", "bias"))
    assert not set(fresh) & set(freeze(model, "backbone"))


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
    trained = torchvision.models.squeezenet1_1(num_classes=1000).state_dict()
    cached.parent.mkdir(parents=True, exist_ok=True)
    torch.save(trained, cached)
    model = build("squeezenet1_1", 5, 64)
    fresh, normalization = load(model, "squeezenet1_1", "DEFAULT")
    assert fresh == ("classifier.1.weight", "classifier.1.bias")
    assert normalization == IMAGENET
    name = "features.0.weight"
    torch.testing.assert_close(model.state_dict()[name], trained[name])


def test_patterns_select_the_frozen_parameters() -> None:
    model = build("resnet18", 5, 64)
    frozen = freeze(model, "conv1,layer1,*.bn2.*")
    assert {"conv1.weight", "layer1.0.conv1.weight", "layer3.0.bn2.weight"} <= set(frozen)
    assert "layer3.0.conv2.weight" not in frozen
    for pattern, words in (("layer9", "matches no parameter"), ("*", "no parameter to train")):
        with pytest.raises(UsageError, match=words):
            freeze(model, pattern)
