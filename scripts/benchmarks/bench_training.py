"""Training from shards beside a plain ImageFolder and DataLoader: the same recipe, its accuracy, and its speed.

    python scripts/benchmarks/bench_training.py --data DATA [--case flowers ...] [--work DIR]

DATA holds the folders flowers, eurosat5, fashion-mnist and driving. Each case is converted once, trained by `wt.train`, and
trained by the twenty lines of PyTorch that people copy: ImageFolder (for driving a CSV and PIL), torchvision's v2 transforms,
a DataLoader with a worker per core, the same model, optimizer, learning rate, batches and epochs. The seeds differ, so
accuracies differ by their noise. Seconds are those of whole epochs, the start of workers included, without validation.

On two cores the model takes 98 % of the time in both, so the ratio says only that reading costs nothing beside it.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from record import Record
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets
from torchvision.transforms import v2

import wdstrain as wt
from wdstrain.augment.gpu import IMAGENET
from wdstrain.training.config import Config
from wdstrain.training.inputs import normalize
from wdstrain.training.models import build, make_optimizer, rate_factor


@dataclass(frozen=True)
class Case:
    """What is trained. `prepare` gives the class folders of train and val; `labels`: outputs, 0 for one number."""

    name: str
    classes: int
    options: dict[str, Any]
    convert: Callable[[Path, Path], None]
    theirs: Callable[[Path, Path, v2.Compose], tuple[Any, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument(
        "--work", type=Path, default=Path("bench-training"), help="folder for shards and runs"
    )
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout at the end, text on stderr"
    )
    parser.add_argument("--quick", action="store_true", help="one epoch")
    arguments = parser.parse_args()
    columns = ("data", "options", "wdstrain", "plain loop", "speed, wdstrain / plain")
    record = Record(
        "Training beside a plain ImageFolder loop", arguments.json, arguments.quick, columns
    )
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in arguments.case:
        case = CASES[name]
        if arguments.quick:
            case = replace(case, options={**case.options, "epochs": 1})
        print(f"{name}: converting, training", file=sys.stderr, flush=True)
        shards = arguments.work / f"{name}-shards"
        if not shards.exists():
            case.convert(arguments.data / name, arguments.work)
        ours = of_ours(case, shards, arguments.work / f"{name}-run")
        theirs = of_theirs(case, arguments.data / name, arguments.work)
        kind = "accuracy" if case.classes else "squared error"
        results = [f"{kind} {score:.4f}, {rate:.0f} samples/s" for score, _, rate in (ours, theirs)]
        words = ", ".join(f"{key}={value}" for key, value in case.options.items())
        record.say(name, words, *results, f"{theirs[1] / ours[1]:.2f}")
    record.end("torch", "torchvision")
    return 0


def of_ours(case: Case, shards: Path, run: Path) -> tuple[float, float, float]:
    """(accuracy or squared error, seconds of training, samples per second)"""
    done = wt.train(shards, run, overwrite=True, **case.options)
    seconds, samples = (
        sum(one["seconds"] for one in done.epochs),
        sum(one["samples"] for one in done.epochs),
    )
    return done.val["accuracy" if case.classes else "mse"], seconds, samples / seconds


def of_theirs(case: Case, data: Path, work: Path) -> tuple[float, float, float]:
    """The same by PyTorch's own parts."""
    config = Config.of(case.options)
    size = max(config.image_shape)
    end = [v2.PILToTensor()]
    crop: list[nn.Module] = [v2.Resize(size), v2.CenterCrop(size)]
    varied: list[nn.Module] = crop
    if "rrc" in (config.augment or ""):
        varied = [v2.RandomResizedCrop(size)]
    if "flip" in (config.augment or ""):
        varied = [*varied, v2.RandomHorizontalFlip()]
    train, _ = case.theirs(data, work, v2.Compose([*varied, *end]))
    _, val = case.theirs(data, work, v2.Compose([*crop, *end]))
    torch.manual_seed(1)
    workers = os.cpu_count() or 1
    loader = DataLoader(
        train,
        config.batch_size,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=True,
    )
    val_loader = DataLoader(val, config.batch_size, num_workers=workers)
    model = build(config.model, case.classes or 1, size)
    scale = (
        (0.0, 1.0) if case.classes else (float(np.mean(train.angles)), float(np.std(train.angles)))
    )
    optimizer, rate = (
        make_optimizer(model, config),
        partial(rate_factor, config, len(loader), config.lr),
    )
    step, seconds = 0, 0.0
    for _ in range(config.epochs):
        model.train()
        begun = time.perf_counter()
        for pixels, target in loader:
            for group in optimizer.param_groups:
                group["lr"] = config.lr * rate(step) * group["lr_scale"]
            outputs = model(normalize(pixels, IMAGENET))
            if case.classes:
                loss = nn.functional.cross_entropy(
                    outputs, target, label_smoothing=config.label_smoothing
                )
            else:
                loss = nn.functional.mse_loss(outputs[:, 0], (target - scale[0]) / scale[1])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
        seconds += time.perf_counter() - begun
    model.eval()
    total = 0.0
    with torch.inference_mode():
        for pixels, target in val_loader:
            outputs = model(normalize(pixels, IMAGENET))
            right = (
                (outputs.argmax(1) == target)
                if case.classes
                else (outputs[:, 0] * scale[1] + scale[0] - target) ** 2
            )
            total += float(right.double().sum())
    return total / len(val), seconds, step * config.batch_size / seconds


# --- the cases -------------------------------------------------------------------------------------------------------


def folder(options: dict[str, Any]) -> Callable[[Path, Path], None]:
    def convert(data: Path, work: Path) -> None:
        wt.convert_folder(str(source_of(data, work)), str(work / f"{data.name}-shards"), **options)

    return convert


def source_of(data: Path, work: Path) -> Path:
    """The class folders of a data set."""
    return (
        pngs(data, work)
        if data.name == "fashion-mnist"
        else data / "images"
        if data.name == "flowers"
        else data
    )


def pngs(data: Path, work: Path) -> Path:
    """Fashion-MNIST as <split>/<class>/<number>.png, made once."""
    out = work / "fashion-mnist-png"
    for split, prefix in (("train", "train"), ("val", "t10k")):
        if (out / split).exists():
            continue
        pixels, labels = (
            np.frombuffer(
                gzip.decompress(next(data.glob(f"{prefix}-{kind}*")).read_bytes()),
                np.uint8,
                offset=offset,
            )
            for kind, offset in (("images", 16), ("labels", 8))
        )
        for digit in range(10):
            (out / split / str(digit)).mkdir(parents=True)
        for i, (picture, label) in enumerate(zip(pixels.reshape(-1, 28, 28), labels, strict=True)):
            Image.fromarray(picture).save(out / split / str(label) / f"{i:05d}.png")
    return out


def image_folders(data: Path, work: Path, transform: v2.Compose) -> tuple[Any, Any]:
    root = source_of(data, work)
    return datasets.ImageFolder(str(root / "train"), transform), datasets.ImageFolder(
        str(root / "val"), transform
    )


def split_folder(data: Path, work: Path, transform: v2.Compose) -> tuple[Any, Any]:
    """A folder without splits, parted as its shards are."""
    whole = datasets.ImageFolder(str(source_of(data, work)), transform)
    parts = []
    for split in ("train", "val"):
        index = wt.Loader(f"{work}/{data.name}-shards/{split}-*.tar", batch_size=1).index
        keys = {index.key(i) for i in range(len(index))}
        names = [
            os.path.splitext(os.path.relpath(path, whole.root))[0] for path, _ in whole.samples
        ]
        parts.append(
            torch.utils.data.Subset(whole, [i for i, name in enumerate(names) if name in keys])
        )
    assert sum(map(len, parts)) == len(whole)
    return parts[0], parts[1]


class Frames(Dataset[Any]):
    """Frames of a drive and their steering angles."""

    def __init__(self, data: Path, keys: set[str], transform: v2.Compose) -> None:
        with open(data / "driving_log_clean.csv", newline="") as file:
            rows = [(data / row["center"], float(row["steering"])) for row in csv.DictReader(file)]
        self._rows = [row for row in rows if row[0].stem in {os.path.basename(key) for key in keys}]
        self._transform = transform

    @property
    def angles(self) -> list[float]:
        return [angle for _, angle in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        path, angle = self._rows[i]
        return self._transform(Image.open(path).convert("RGB")), torch.tensor(
            angle, dtype=torch.float32
        )


def convert_frames(data: Path, work: Path) -> None:
    wt.convert_table(
        str(data / "driving_log_clean.csv"),
        str(work / "driving-shards"),
        image="center",
        label="steering:number",
        split={"train": 0.9, "val": 0.1},
    )


def frames(data: Path, work: Path, transform: v2.Compose) -> tuple[Any, Any]:
    found = []
    for split in ("train", "val"):
        index = wt.Loader(f"{work}/driving-shards/{split}-*.tar", batch_size=1).index
        found.append(Frames(data, {index.key(i) for i in range(len(index))}, transform))
    return found[0], found[1]


CASES = {
    "flowers": Case(
        "flowers",
        5,
        {
            "model": "resnet18",
            "epochs": 12,
            "batch_size": 32,
            "image_size": 64,
            "lr": 1e-3,
            "augment": "rrc+flip",
        },
        folder({"split": {"train": 0.8, "val": 0.2}, "stratify": "label"}),
        split_folder,
    ),
    "eurosat5": Case(
        "eurosat5", 5, {"epochs": 3, "batch_size": 64, "image_size": 64}, folder({}), image_folders
    ),
    "fashion-mnist": Case(
        "fashion-mnist",
        10,
        {"epochs": 2, "batch_size": 128, "image_size": 28, "lr": 4e-3},
        folder({}),
        image_folders,
    ),
    "driving": Case(
        "driving", 0, {"epochs": 6, "batch_size": 32, "image_size": 64}, convert_frames, frames
    ),
}


if __name__ == "__main__":
    sys.exit(main())
