"""The main job on a small set of images: convert them to shards, verify the shards, and train.

The images are cut from ten photographs that scikit-image contains: a cat, a rocket, a galaxy and
others. The classes are the photographs. Users take the same steps with their own data.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import numpy as np
import torch
from PIL import Image

from wdstrain.conversion.api import convert_folder
from wdstrain.inspection.verify import verify
from wdstrain.report.printing import counted
from wdstrain.report.terminal import Reporter
from wdstrain.runtime.options import refuse
from wdstrain.training.train import train

_PHOTOGRAPHS = {  # class: function of skimage.data
    "astronaut": "astronaut",
    "bricks": "brick",
    "cat": "chelsea",
    "coffee": "coffee",
    "coins": "coins",
    "galaxies": "hubble_deep_field",
    "grass": "grass",
    "gravel": "gravel",
    "retina": "retina",
    "rocket": "rocket",
}


def demo(folder: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the figures of a run of the demo in `folder`, as names and values, and next steps.

    The steps are commands for the user's own images. Replaces the subfolders photos-jpg, photos and
    photos-run of an earlier demo.
    """
    images, shards, out = (
        os.path.join(folder, name) for name in ("photos-jpg", "photos", "photos-run")
    )
    with Reporter() as tell:
        _write_images(images)
        tell.line(f"1. cuts of ten photographs as JPEG in class folders: {images}")
        made = convert_folder(
            images, shards, split={"train": 0.8, "val": 0.2}, max_shard_samples=300, overwrite=True
        )
        tell.line(
            f"2. converted into {counted(len(made.shards), 'shard')}, {made.megabytes:.1f} MB: {shards}"
        )
        checked = verify(shards)
        tell.line(
            f"3. verified every byte of {counted(checked.samples, 'sample')}: "
            f"{counted(len(checked.findings), 'finding')}"
        )
        tell.line(f"4. training a small model for 4 epochs: {out}")
        # The steps are so short that threads mostly wait for each other: ten times as long with two.
        torch.set_num_threads(1)
        outcome = train(
            shards,
            out,
            model="small",
            epochs=4,
            batch_size=32,
            lr=4e-3,
            image_size=24,
            overwrite=True,
            progress=tell,
        )
    busy = sum(epoch["seconds"] for epoch in outcome.epochs)
    return [
        ("samples", str(len(made))),
        ("shards", str(len(made.shards))),
        ("MB", f"{made.megabytes:.1f}"),
        (
            "samples/s",
            f"{sum(epoch['samples'] for epoch in outcome.epochs) / busy:.0f} in training",
        ),
        (
            "stall",
            f"{outcome.epochs[-1]['stall']:.1%} of the last epoch was spent waiting for data",
        ),
        (
            "accuracy",
            f"{outcome.val['accuracy']:.2%} on {int(outcome.val['samples'])} validation samples",
        ),
        ("time", f"{busy:.0f} s of training"),
        (
            "note",
            "all cuts are of the same ten photographs, so the accuracy is that of an easy task",
        ),
    ], [
        "wdstrain convert folder IMAGES shards/mine --split train=.9,val=.1",
        "wdstrain train shards/mine --out runs/mine --epochs 10",
        f"wdstrain info {shards}",
    ]


def _write_images(folder: str) -> None:
    """Write cuts as <folder>/<photograph>/<number>.jpg."""
    refuse(
        find_spec("skimage") is None,
        "The demo needs the photographs of scikit-image.",
        "Run: pip install 'wdstrain[demo]'",
    )
    from skimage import data

    strange = set(os.listdir(folder) if os.path.isdir(folder) else ()) - {*_PHOTOGRAPHS}
    refuse(
        strange,
        f"{folder} holds {min(strange, default='')}, which no demo wrote.",
        "Name another folder with {folder}.",
        folder=...,
    )
    shutil.rmtree(folder, ignore_errors=True)
    rng = np.random.default_rng(0)
    for name, function in _PHOTOGRAPHS.items():
        photograph = Image.fromarray(getattr(data, function)()).convert("RGB")
        os.makedirs(os.path.join(folder, name))
        for number in range(120):
            side = min(photograph.size) * rng.uniform(0.35, 0.7)
            left, top = (rng.uniform(0, length - side) for length in photograph.size)
            photograph.resize((96, 96), box=(left, top, left + side, top + side)).save(
                f"{folder}/{name}/{number:03d}.jpg"
            )
