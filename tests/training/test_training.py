"""Training on shards learns, reports its results, and can be evaluated later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from wdstrain.cli import main
from wdstrain.errors import UsageError
from wdstrain.training.checkpoint import read_checkpoint
from wdstrain.training.evaluate import evaluate
from wdstrain.training.models import build
from wdstrain.training.train import train


@pytest.fixture(scope="module")
def bright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of dark and bright images (label class), with their brightness (label light)."""
    folder = tmp_path_factory.mktemp("bright")
    rng = np.random.default_rng(0)
    (folder / "img").mkdir()
    rows = ["file,kind,light"]
    for i in range(240):
        light = float(rng.random())
        pixels = np.clip(rng.normal(40 + 170 * light, 20, (16, 16, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "img" / f"{i:03d}.png")
        rows.append(f"img/{i:03d}.png,{'bright' if light > 0.5 else 'dark'},{light:.4f}")
    (folder / "log.csv").write_text("\n".join(rows) + "\n")
    words = ["convert", "table", str(folder / "log.csv"), str(folder / "out")]
    words += ["--image", "file", "--label", "kind,light"]
    assert main([*words, "--split", "train=0.8,val=0.2"]) == 0
    return folder / "out"


CONFIG: dict[str, Any] = {"epochs": 3, "batch_size": 16, "image_size": 16}


def test_classes_are_learned_and_the_checkpoint_has_the_same_scores(
    bright: Path, tmp_path: Path
) -> None:
    done = train(str(bright), tmp_path / "run", label="kind", **CONFIG)
    assert done.val["accuracy"] > 0.85
    _, rescored = evaluate(str(tmp_path / "run" / "checkpoints" / "last.pt"), f"{bright}/val-*.tar")
    assert rescored["accuracy"] == done.val["accuracy"]
    assert rescored["samples"] == 240 - done.epochs[0]["samples"] - done.epochs[0]["left_out"]


def test_the_standard_error_of_the_mean_is_right(bright: Path, tmp_path: Path) -> None:
    done = train(str(bright), tmp_path / "run", label="light", epochs=1, batch_size=1, image_size=8)
    rows = [line.split(",") for line in (bright.parent / "log.csv").read_text().splitlines()[1:]]
    light = {row[0].removesuffix(".png"): float(row[2]) for row in rows}
    from wdstrain.shards.resolve import open_index

    keys = {split: open_index(f"{bright}/{split}-*.tar") for split in ("train", "val")}
    mean = np.mean([light[keys["train"].key(i)] for i in range(len(keys["train"]))])
    val = np.array([light[keys["val"].key(i)] for i in range(len(keys["val"]))])
    assert done.val["mse_of_mean"] == pytest.approx(np.mean((val - mean) ** 2), rel=1e-3)


def test_a_run_folder_records_the_run(bright: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(str(bright), out, label="kind", epochs=2, batch_size=16, image_size=8)
    assert "image_size = 8" in (out / "config.toml").read_text().splitlines()
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1]
    assert {"loss", "samples_per_second", "stall", "verdict", "val"} <= set(lines[0])
    state = read_checkpoint(str(out / "checkpoints" / "last.pt"))
    assert set(state["model"]) == set(build("small", 2, 8).state_dict())
    assert state["loader"]["epoch"] == 2
    with pytest.raises(UsageError, match="holds a run already"):
        train(str(bright), out, label="kind")


def test_other_classes_and_mixed_splits_are_refused(bright: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    train(str(bright), run, label="kind", epochs=1, batch_size=16, image_size=8)
    rows = [
        line
        for line in (bright.parent / "log.csv").read_text().splitlines()
        if "bright" not in line
    ]
    (bright.parent / "dark.csv").write_text("\n".join(rows).replace("dark", "gloomy") + "\n")
    words = ["convert", "table", str(bright.parent / "dark.csv"), str(other)]
    words += ["--image", "file", "--label", "kind:class,light"]
    assert main(words) == 0
    with pytest.raises(
        UsageError,
        match="the classes of these shards are 0 gloomy, the model learns 0 bright, 1 dark",
    ):
        evaluate(str(run / "checkpoints" / "last.pt"), str(other))
    with pytest.raises(UsageError, match="the classes of these shards are 0 gloomy"):
        train(f"{bright}/train-*.tar", tmp_path / "x", label="kind", val=str(other))
    assert not (tmp_path / "x").exists()
    with pytest.raises(UsageError, match="several splits"):
        evaluate(str(run / "checkpoints" / "last.pt"), [str(bright)])
    with pytest.raises(UsageError, match="several splits"):
        train([str(bright)], tmp_path / "x", label="kind", val=f"{bright}/val-*.tar")


def test_every_sample_is_scored_with_any_environment(
    bright: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = train(
        [str(bright)], tmp_path / "run", label="kind", epochs=1, batch_size=16, image_size=8
    )
    assert done.val["samples"] + done.epochs[0]["samples"] + done.epochs[0]["left_out"] == 240


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model": "alexnet", "image_size": 16},
            r"does not take a batch of uint8\[3, 16, 16\].*image_size=224",
        ),
        ({"model": "resnet19"}, "model='resnet19'.*resnet101"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"label": None}, "several labels: kind, light"),
        ({"label": "age"}, "no label 'age'"),
    ],
)
def test_unusable_configurations_are_refused_before_any_write(
    bright: Path, tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        train(str(bright), tmp_path / "run", **{"label": "kind", **config})
    assert not (tmp_path / "run").exists()


def test_lines_fit_into_a_terminal_of_80_columns(bright: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["train", str(bright), "--label", "light", "--out", str(tmp_path / "r")]
    assert main([*words, "--epochs", "1"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch")]
    assert lines
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("where", ["flag", "file", "keyword"])
def test_a_height_and_a_width_can_be_given_as_the_image_size(
    bright: Path, tmp_path: Path, where: str
) -> None:
    """The model takes images of 4 x 16 pixels."""
    out, model = tmp_path / "run", "tests.support.small_runs:Linear"
    words = ["train", str(bright), "--out", str(out), "--model", model]
    words += ["--epochs", "1", "--batch-size", "16", "--label", "kind"]
    if where == "keyword":
        options = {**CONFIG, "label": "kind", "epochs": 1, "model": model, "image_size": (4, 16)}
        train(str(bright), out, **options)
    elif where == "flag":
        assert main([*words, "--image-size", "4x16"]) == 0
    else:
        (tmp_path / "recipe.toml").write_text("image_size = [4, 16]\n")
        assert main([*words, "--config", str(tmp_path / "recipe.toml")]) == 0
    state = read_checkpoint(str(out / "checkpoints" / "last.pt"))
    assert state["model"]["1.weight"].shape == (1, 192)
