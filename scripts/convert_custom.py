"""Convert anything that Python can iterate over into shards. Copy this file and change `samples`.

    python scripts/convert_custom.py shards/shapes --count 1000

`samples` may be a generator, a list or a torch data set; it is read once and may be more than memory
holds. Values are bytes, or images, numbers, texts and arrays, encoded by the name of their field.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import wdstrain as wt

CLASSES = ["disc", "square"]


def samples(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield images of discs and squares, with a class and a size."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[-32:32, -32:32]
    for number in range(count):
        name, radius = CLASSES[number % 2], int(draw.integers(5, 30))
        inside = (
            x * x + y * y < radius**2 if name == "disc" else np.maximum(abs(x), abs(y)) < radius
        )
        yield {
            "__key__": f"{number:06d}",
            "png": np.where(inside, 255, 0).astype(np.uint8),
            "cls": name,
            "json": {"radius": radius},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert an iterable into shards.")
    parser.add_argument("out", help="folder for the shards")
    parser.add_argument("--count", type=int, default=1000, help="samples to make")
    parser.add_argument("--overwrite", action="store_true", help="replace shards in the folder")
    arguments = parser.parse_args()

    start = time.monotonic()
    index = wt.pack(
        samples(arguments.count),
        arguments.out,
        classes=CLASSES,
        split={"train": 0.9, "val": 0.1},
        overwrite=arguments.overwrite,
    )
    seconds = time.monotonic() - start
    print(f"{len(index)} samples in {len(index.shards)} shards: {arguments.out}")
    print(f"{len(index) / seconds:.0f} samples/s; fields: {', '.join(index.fields)}")


if __name__ == "__main__":
    main()
