"""Augmentation in training, and unaugmented images in validation."""

from __future__ import annotations

import io
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import wdstrain as wt
from wdstrain.cli import main
from wdstrain.training.config import Config, read_config

QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 8, "image_size": 8}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of train and val, with images of random pixels of two classes."""
    folder = tmp_path_factory.mktemp("images") / "shards"
    rng = np.random.default_rng(0)

    def samples() -> Any:
        for i in range(40):
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(file, "png")
            yield {"__key__": f"{i:03d}", "png": file.getvalue(), "cls": i % 2}

    wt.pack(samples(), folder, split={"train": 0.6, "val": 0.4})
    return folder


class Recorder(nn.Module):
    """A linear model that keeps the images that it gets."""

    seen: list[tuple[bool, Tensor]]

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 8 * 8, outputs)
        self.seen = []

    def forward(self, pixels: Tensor) -> Tensor:
        self.seen.append((self.training, pixels.detach().clone()))
        result: Tensor = self.linear(pixels.flatten(1))
        return result


def images_of(shards: Path, out: Path, **options: Any) -> tuple[Tensor, Tensor, Any]:
    """Return the images of training and of validation, in order, and the run."""
    done = wt.train(shards, out, model=Recorder, lr=1e-9, **{**QUICK, **options})
    seen = done.model.seen[1:]  # type: ignore[union-attr, index]  # the first is a trial
    train, val = (
        torch.cat([x for is_train, x in seen if is_train == kind]) for kind in (True, False)
    )
    return train, val, done


@pytest.mark.parametrize(
    "options",
    [
        {"augment": "rrc+flip", "scale": (0.3, 0.6), "ratio": (1.0, 1.0)},
        {"color_jitter": (0.4, 0.4, 0.4, 0.1)},
        {"augment": "trivialaugment"},
    ],
)
def test_only_images_of_training_are_augmented(
    shards: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    plain, val, _ = images_of(shards, tmp_path / "plain")
    changed, unchanged, _ = images_of(shards, tmp_path / "changed", **options)
    assert torch.equal(val, unchanged)
    assert plain.shape == changed.shape
    assert not torch.allclose(plain, changed)
    assert not torch.allclose(*changed.chunk(2)) if "augment" not in options else True
    resumed = tmp_path / "resumed"
    images_of(shards, resumed, **{**options, "epochs": 1})
    resumed_images, _, _ = images_of(shards, resumed, **options, resume=True)
    assert torch.equal(resumed_images, changed.chunk(2)[1])


def test_validation_crops_the_center_and_so_do_predictions(shards: Path, tmp_path: Path) -> None:
    _, val, _ = images_of(shards, tmp_path / "run", crop_pct=0.5)
    fields = {"image": wt.image(size=8, crop_pct=0.5)}
    loader = wt.Loader(f"{shards}/val-*.tar", fields, batch_size=8, shuffle=False, tail="keep")
    with closing(loader):
        pixels = torch.cat([batch["image"] for batch in loader]).float() / 255
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    assert torch.allclose(val[: len(pixels)], (pixels - mean) / std, atol=1e-4)
    checkpoint = tmp_path / "run" / "checkpoints" / "last.pt"
    model = Recorder(1)
    wt.evaluate(checkpoint, f"{shards}/val-*.tar", model=lambda _: model)
    assert torch.equal(torch.cat([x for _, x in model.seen]), val[: len(pixels)])


class Noisy:
    """A field of the user that adds noise."""

    names = ("png",)
    example = wt.Example((3, 8, 8), "float32")

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> None:
        out[...] = np.frombuffer(data[:64], np.uint8).reshape(8, 8) / 255 + draws[0]


class Plain(Noisy):
    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> None:
        out[...] = np.frombuffer(data[:64], np.uint8).reshape(8, 8) / 255


def test_a_field_that_augments_is_refused_for_validation(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(wt.UsageError, match="val_fields= augments image"):
        images_of(shards, tmp_path / "run", val_fields={"image": wt.image(size=8, augment="flip")})
    with pytest.raises(wt.UsageError, match="augment='flip' has no effect with fields="):
        images_of(shards, tmp_path / "run", fields={"image": Plain()}, augment="flip")
    assert not (tmp_path / "run").exists()
    _, val, _ = images_of(
        shards, tmp_path / "run", fields={"image": Noisy()}, val_fields={"image": Plain()}
    )
    assert torch.equal(*val.chunk(2))
    _, val, _ = images_of(
        shards, tmp_path / "own", fields={"image": wt.image(size=8, augment="rrc+flip")}
    )
    assert torch.equal(*val.chunk(2))


def test_lists_of_numbers_are_flags_and_lines_of_a_file(shards: Path, tmp_path: Path) -> None:
    words = ["--augment", "rrc", "--scale", "0.35,1", "--color-jitter", "0.4", "--epochs", "1"]
    words += ["--batch-size", "8", "--image-size", "8", "--json", "--quiet"]
    assert main(["train", str(shards), "--out", str(tmp_path / "run"), *words]) == 0
    options, _ = read_config(str(tmp_path / "run" / "config.toml"))
    config = Config.of(options)
    assert (config.scale, config.color_jitter) == ((0.35, 1.0), (0.4,))
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--epochs", "2"]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1]
    wrong = ["train", str(shards), "--out", str(tmp_path / "other"), "--scale", "a,b"]
    assert main(wrong) == 2


# --- fields ---


class StopAfterEpoch(wt.Callback):
    def on_epoch_end(self, trainer: Any, metrics: Any) -> None:
        trainer.stop("an epoch is done")


def test_fields_of_a_loader_train_as_options_do(shards: Path, tmp_path: Path) -> None:
    fields = {"pixels": wt.image(size=8, augment="rrc+flip"), "label": wt.label()}
    train, val, done = images_of(shards, tmp_path / "fields", fields=fields)
    by_options, by_options_val, rest_ = images_of(shards, tmp_path / "options", augment="rrc+flip")
    assert torch.equal(train, by_options)
    assert torch.equal(val, by_options_val)
    assert done.val == pytest.approx({**rest_.val})
    images_of(shards, tmp_path / "resumed", fields=fields, callbacks=[StopAfterEpoch()])
    resumed_images, _, resumed_run = images_of(
        shards, tmp_path / "resumed", fields=fields, resume=True
    )
    assert torch.equal(resumed_images, train.chunk(2)[1])
    assert all(
        torch.equal(value, resumed_run.model.state_dict()[name])
        for name, value in done.model.state_dict().items()
    )
    checkpoint, data = tmp_path / "fields" / "checkpoints" / "last.pt", f"{shards}/val-*.tar"
    plain = {"pixels": wt.image(size=8), "label": wt.label()}
    for val_fields in (None, plain):
        _, metrics = wt.evaluate(checkpoint, data, model=Recorder, fields=val_fields)
        assert metrics["loss"] == pytest.approx(done.val["loss"], abs=1e-9)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "gives no input of the model"),
        ({"label": wt.label()}, "gives no input of the model.*Labels are named"),
        ({"a b": wt.image(size=8), "b": wt.image(size=8)}, "names an input 'a b'"),
        ({"image": wt.image(size=8), "label": wt.label("txt")}, "reads another value"),
        ({"image": wt.image(size=8), "label": wt.label(classes=["x", "y"])}, "reads another value"),
        ({"image": wt.image(size=8), "label": Plain()}, "reads another value"),
        ({"image": "png"}, "must be a dict of fields"),
        (wt.image(size=8), "must be a dict of fields"),
        ({"image": wt.image()}, "without a fixed size"),
    ],
)
def test_fields_that_are_not_inputs_are_refused(
    shards: Path, tmp_path: Path, fields: Any, words: str
) -> None:
    with pytest.raises(wt.UsageError, match=words):
        wt.train(shards, tmp_path / "run", fields=fields, **QUICK)
    with pytest.raises(wt.UsageError, match=words):
        wt.train(shards, tmp_path / "run", val_fields=fields, **QUICK)
    assert not (tmp_path / "run").exists()


def test_validation_fields_without_validation_are_refused(shards: Path, tmp_path: Path) -> None:
    fields = {"image": wt.image(size=8)}
    with pytest.raises(wt.UsageError, match="val_fields and the schedule plateau need"):
        wt.train(f"{shards}/train-*.tar", tmp_path / "run", val_fields=fields, **QUICK)
