"""How fast conversion is, beside webdataset's ShardWriter, `tar cf`, and the resizing that img2dataset does.

    python scripts/benchmarks/bench_convert.py          (some minutes; --quick for a look)
    python scripts/benchmarks/bench_convert.py --json > scripts/benchmarks/results/convert.json

Cases, each measured in turn with its rivals, several times, medians of seconds and the spread:

    small    20,000 files of 7 KB in class folders, one process: the folder is listed, shuffled, packed, flushed to disk.
             Goals: 4 times as fast as ShardWriter, 0.5 of the speed of tar
    jobs     photographs made smaller (--resize 224), one process and two. Goal: 1.7 times as fast with two
    resize   the same in this process alone, beside img2dataset's resizer and its bare cv2 calls
    memory   the peak memory while 20,000 and 100,000 samples of a stream are packed within 64 MB
"""

from __future__ import annotations

import argparse
import io
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from record import Record, turns

import wdstrain as wt
from wdstrain.conversion.encode import Recipe

_STREAM = """
import resource, sys
import wdstrain as wt
wt.pack(({"__key__": f"k{n:07d}", "bin": bytes(8000)} for n in range(int(sys.argv[1]))), sys.argv[2], memory=64_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the data, two repeats")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout at the end, text on stderr"
    )
    parser.add_argument("--photos", help="folder of photographs (default: they are drawn)")
    arguments = parser.parse_args()
    repeats = 2 if arguments.quick else 7
    record = Record("Conversion", arguments.json, arguments.quick)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        place = Path(folder)
        small(record, place, 2_000 if arguments.quick else 20_000, repeats)
        photos = (
            Path(arguments.photos)
            if arguments.photos
            else drawn(place / "photos", 60 if arguments.quick else 600)
        )
        jobs(record, photos, repeats)
        resize(record, photos, repeats)
        memory(record, place, 2_000 if arguments.quick else 20_000)
    record.end("torch", "webdataset", "img2dataset", "opencv-python-headless")


def small(record: Record, place: Path, count: int, repeats: int) -> None:
    source = place / "small"
    bits = random.Random(0)
    for number in range(count):
        path = source / f"c{number % 20:02d}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff\xd8\xff" + bits.randbytes(6500 + bits.randrange(1000)))

    def ours(out: Path) -> None:
        wt.convert_folder(str(source), str(out))

    def theirs(out: Path) -> None:
        import webdataset

        with webdataset.ShardWriter(
            str(out / "%06d.tar"), maxcount=10**9, maxsize=256e6, verbose=0
        ) as sink:
            for number, folder in enumerate(sorted(os.listdir(source))):
                for name in sorted(os.listdir(source / folder)):
                    with open(source / folder / name, "rb") as file:
                        sink.write(
                            {"__key__": f"{folder}/{name[:-4]}", "jpg": file.read(), "cls": number}
                        )

    def tar(out: Path) -> None:
        subprocess.run(["tar", "cf", str(out / "a.tar"), "-C", str(place), "small"], check=True)

    table(record, "small", {"ours": ours, "ShardWriter": theirs, "tar cf": tar}, repeats)


def jobs(record: Record, photos: Path, repeats: int) -> None:
    def packed(number: int) -> Callable[[Path], object]:
        return lambda out: wt.convert_folder(
            str(photos), str(out), flat=True, resize=224, num_workers=number
        )

    table(record, "jobs", {"two": packed(2), "one": packed(1)}, repeats)


def resize(record: Record, photos: Path, repeats: int) -> None:
    data = [path.read_bytes() for path in sorted(photos.rglob("*.jpg"))[:600]]
    torch.set_num_threads(1)
    for side in (128, 224):
        recipe = Recipe(side, None, "magic")

        def ours(_: Path, recipe: Recipe = recipe) -> None:
            for one in data:
                recipe.apply([("jpg", one)])

        rivals: dict[str, Callable[[Path], object]] = {f"ours {side}": ours}
        try:
            import cv2

            cv2.setNumThreads(1)

            def theirs(_: Path, side: int = side) -> None:
                for one in data:
                    pixels: Any = cv2.imdecode(np.frombuffer(one, np.uint8), cv2.IMREAD_UNCHANGED)
                    factor = side / min(pixels.shape[:2])
                    if factor < 1:
                        size = (round(pixels.shape[1] * factor), round(pixels.shape[0] * factor))
                        pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
                    cv2.imencode(".jpg", pixels, [int(cv2.IMWRITE_JPEG_QUALITY), 90])

            rivals["cv2"] = theirs
        except ImportError:
            print(
                "resize: cv2 is not installed (pip install opencv-python-headless)", file=sys.stderr
            )
        try:
            from img2dataset.resizer import Resizer

            resizer = Resizer(
                image_size=side,
                resize_mode="keep_ratio",
                resize_only_if_bigger=True,
                encode_quality=90,
            )

            def whole(_: Path, resizer: Any = resizer) -> None:
                for one in data:
                    resizer(io.BytesIO(one))

            rivals["img2dataset"] = whole
        except ImportError:
            print("resize: img2dataset is not installed (pip install img2dataset)", file=sys.stderr)
        table(record, "resize", rivals, repeats)


def memory(record: Record, place: Path, count: int) -> None:
    for number in (count, 5 * count):
        command = [sys.executable, "-c", _STREAM, str(number), str(place / f"stream{number}")]
        peak = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        record.say(
            f"memory, {number} samples of 8 KB within 64 MB",
            f"{peak:.0f} MB at most, imports included",
        )


# --- parts -----------------------------------------------------------------------------------------------------------


def drawn(folder: Path, count: int) -> Path:
    """Pictures with the size and about the detail of photographs."""
    folder.mkdir()
    bits = np.random.default_rng(0)
    for number in range(count):
        rough = Image.fromarray(bits.integers(0, 255, (47, 63, 3), np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        noise = bits.normal(0, 6, (375, 500, 1))
        Image.fromarray(np.clip(np.asarray(rough) + noise, 0, 255).astype(np.uint8)).save(
            folder / f"{number}.jpg", quality=90
        )
    return folder


def table(
    record: Record, name: str, rivals: Mapping[str, Callable[[Path], object]], repeats: int
) -> None:
    """Time the rivals alternately, so that other load of the machine affects all alike.

    Each gets an empty folder. `turns` bounds the time.
    """
    seconds: dict[str, list[float]] = {rival: [] for rival in rivals}
    for _ in turns(name, repeats):
        for rival, run in rivals.items():
            with tempfile.TemporaryDirectory(dir=".") as out:
                os.sync()
                begun = time.perf_counter()
                run(Path(out))
                seconds[rival].append(time.perf_counter() - begun)
    first = statistics.median(next(iter(seconds.values())))
    for rival, found in seconds.items():
        middle = statistics.median(found)
        spread = f"({min(found):.2f} to {max(found):.2f})"
        record.say(
            f"{name}, {rival}", f"{middle:.2f} s {spread}, {middle / first:.2f} of the first"
        )


if __name__ == "__main__":
    main()
