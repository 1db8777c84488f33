"""The main job on a small real data set: convert images to shards, verify them, and train.

The images are the 1,797 handwritten digits of scikit-learn: scans of 8x8 pixels, from NIST forms
that 43 people filled in. They are written as PNG files in class folders. Users take the same steps
with their own data.
"""

from __future__ import annotations

import os
import shutil

import numpy as np
import torch
from PIL import Image

from wdstrain.conversion.options import Options
from wdstrain.conversion.runner import convert
from wdstrain.conversion.sources.folder import list_folder
from wdstrain.errors import UsageError, WdstrainError
from wdstrain.inspection.verify import verify
from wdstrain.report.printing import counted
from wdstrain.report.terminal import Reporter
from wdstrain.training.train import train


def demo(folder: str, tell: Reporter) -> list[tuple[str, str]]:
    """Return the figures of a run of the demo in `folder`, as names and values.

    Replaces the subfolders digits-png, digits and digits-run of an earlier demo.
    """
    images, shards, out = (
        os.path.join(folder, name) for name in ("digits-png", "digits", "digits-run")
    )
    tell.line(
        f"1. {_write_images(images)} scans of handwritten digits as PNG in class folders: {images}"
    )
    options = Options(split={"train": 0.8, "val": 0.2}, max_shard_samples=400, overwrite=True)
    index = convert(list_folder(images), shards, options).index
    splits = {
        split: sum(shard.samples for shard in index.shards if shard.split == split)
        for split in index.splits
    }
    size = sum(shard.bytes for shard in index.shards)
    tell.line(
        f"2. converted into {counted(len(index.shards), 'shard')}, {size / 1e6:.1f} MB in all: {shards}"
    )
    checked = verify(shards)
    if checked.findings:
        raise WdstrainError(f"The new shards in {shards} are damaged: {checked.findings[0]}")
    tell.line(f"3. verified: {checked.samples} samples, every checksum as packed")
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
        image_size=16,
        overwrite=True,
        progress=tell,
    )
    waited = sum(epoch["stall"] * epoch["seconds"] for epoch in outcome.epochs)
    busy = sum(epoch["seconds"] for epoch in outcome.epochs)
    return [
        ("samples", f"{len(index)} ({', '.join(f'{name} {n}' for name, n in splits.items())})"),
        ("shards", str(len(index.shards))),
        ("MB", f"{size / 1e6:.1f}"),
        (
            "samples/s",
            f"{sum(epoch['samples'] for epoch in outcome.epochs) / busy:.0f} in training",
        ),
        ("stall", f"{waited / busy:.1%} of the training time was spent waiting for data"),
        (
            "accuracy",
            f"{outcome.val['accuracy']:.2%} on {int(outcome.val['samples'])} validation samples",
        ),
        ("time", f"{busy:.0f} s of training"),
        ("note", "tiny data and model: the rates say nothing about larger jobs"),
    ]


def next_steps(folder: str) -> list[str]:
    """Return commands for the user's own images."""
    return [
        "wdstrain convert folder IMAGES shards/mine --split train=.9,val=.1",
        "wdstrain train shards/mine --out runs/mine --epochs 10",
        f"wdstrain info {os.path.join(folder, 'digits')}",
    ]


def _write_images(folder: str) -> int:
    """Write the digits as <folder>/<class>/<number>.png and return their number."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError(
            "The demo needs the digits of scikit-learn.",
            "Run: pip install 'wdstrain[demo]'",
        ) from None
    digits = load_digits()
    shutil.rmtree(folder, ignore_errors=True)
    for i, (image, target) in enumerate(zip(digits.images, digits.target, strict=True)):
        pixels = (image * 255 / 16).astype(np.uint8)  # ink is counted in 0..16
        os.makedirs(os.path.join(folder, str(target)), exist_ok=True)
        Image.fromarray(pixels).save(os.path.join(folder, str(target), f"{i:04d}.png"))
    return len(digits.target)
