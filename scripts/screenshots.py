"""Make the screenshots of the README from the demo's run on photographs.

    apt-get install chromium
    .venv/bin/python scripts/screenshots.py

Writes docs/images/sheet.jpg, report-light.png and report-dark.png, and buckets.jpg for the guide on
buckets. The demo takes half a minute.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from skimage import data

import wdstrain as wt

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
MOST = 150_000  # bytes of a file
SCHEMES = {"dark": 0, "light": 1}  # values of chromium's setting
SIZE = "1180,870"
PHOTOGRAPHS: tuple[Callable[[], Any], ...] = (
    data.astronaut,
    data.chelsea,
    data.coffee,
    data.rocket,
    data.hubble_deep_field,
)
SHAPES = ((150, 220), (220, 150), (190, 190), (110, 300))  # height and width of cuts
BATCH, BATCHES, PIXELS, GAP = 6, 4, 112 * 112, 6


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        made, sheet = Path(folder) / "sheet.png", IMAGES / "sheet.jpg"
        wdstrain(folder, "demo", "--dir", ".")
        wdstrain(folder, "show", "photos", "--random", "-n", "12", "-o", str(made))
        with Image.open(made) as picture:
            picture.convert("RGB").save(sheet, quality=85)
        pages = [screenshot(Path(folder) / "photos-run" / "report.html", name) for name in SCHEMES]
        buckets = batches_of_one_shape(Path(folder) / "cuts")
    for image in (sheet, buckets, *pages):
        size = image.stat().st_size
        if size > MOST:
            sys.exit(f"{image} has {size} bytes, more than {MOST}")
        print(f"{image}: {size} bytes")


def batches_of_one_shape(shards: Path) -> Path:
    """Write a picture of the first batches of a loader with buckets of shapes, a row for each."""
    rng, samples = np.random.default_rng(0), []
    for number in range(120):
        photograph, (height, width) = PHOTOGRAPHS[number % 5](), SHAPES[number % 4]
        top = int(rng.integers(0, photograph.shape[0] - height))
        left = int(rng.integers(0, photograph.shape[1] - width))
        samples.append({"png": photograph[top : top + height, left : left + width]})
    wt.pack(samples, shards)
    wt.index(shards, columns=["png.width", "png.height"])
    fields = {"image": wt.image("png", size="bucket")}
    with wt.Loader(
        shards, fields, batch_size=BATCH, buckets="aspect", pixels=PIXELS, seed=1
    ) as loader:
        rows = [batch["image"].permute(0, 2, 3, 1).numpy() for batch in islice(loader, BATCHES)]
    width = max(BATCH * (row.shape[2] + GAP) for row in rows)
    sheet = Image.new("RGB", (width, sum(row.shape[1] + GAP for row in rows)), "white")
    top = 0
    for row in rows:
        for number, pixels in enumerate(row):
            sheet.paste(Image.fromarray(pixels), (number * (row.shape[2] + GAP), top))
        top += row.shape[1] + GAP
    sheet.save(IMAGES / "buckets.jpg", quality=85)
    return IMAGES / "buckets.jpg"


def wdstrain(folder: str, *words: str) -> None:
    run = [sys.executable, "-m", "wdstrain", *words]
    subprocess.run(run, cwd=folder, check=True, stdout=sys.stderr)


def screenshot(page: Path, scheme: str) -> Path:
    """Write the first screen of a page as PNG, in the light or dark color scheme."""
    image = IMAGES / f"{page.stem}-{scheme}.png"
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            f"--window-size={SIZE}",
            f"--screenshot={image}",
        ]
        subprocess.run(
            ["chromium", *options, page.as_uri()], check=True, capture_output=True, timeout=60
        )
    return image


if __name__ == "__main__":
    main()
