"""Every example that `--help` prints runs as printed, in the order of the verbs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT, picture, write_class_folder, write_tar

_KINDS = ("folder", "table", "hdf5", "arrays", "tars", "torchvision", "coco", "yolo")


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}


def run(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line in a shell, as a user types it."""
    command = ["bash", "-c", f'wdstrain() {{ "{sys.executable}" -m wdstrain "$@"; }}; {words}']
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 240}
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, **options)


def examples(folder: Path) -> list[str]:
    """Return the examples of the help texts, in the order of the verbs."""
    verbs = re.findall(r"^    (\w+)  ", run("wdstrain --help", folder).stdout, re.MULTILINE)
    assert verbs[0] == "convert"
    words = ["convert", *(f"convert {kind}" for kind in _KINDS), *verbs[1:]]
    texts = [run(f"wdstrain {word} --help", folder).stdout for word in words]
    return [text.rpartition("\nexample: ")[2].strip() for text in texts]


def make_sources(folder: Path) -> None:
    """Make the sources that the examples name."""
    write_class_folder(folder / "photos", {"sharp": 90, "blurred": 10})
    rows = [f"photos/sharp/{number:03d}.png,{number / 10}\n" for number in range(30)]
    (folder / "log.csv").write_text("path,angle\n" + "".join(rows))
    keys = [f"sharp/{number:03d}" for number in range(90)]
    pq.write_table(pa.table({"key": keys, "caption": keys}), folder / "captions.parquet")
    with h5py.File(folder / "data.h5", "w") as file:
        images = file.create_dataset("images", 8, h5py.vlen_dtype(np.uint8))
        for number in range(8):
            images[number] = np.frombuffer(picture(number), np.uint8)
        file["labels"] = np.arange(8) % 3
    np.save(folder / "images.npy", np.zeros((8, 16, 16, 3), np.uint8))
    np.save(folder / "labels.npy", np.arange(8) % 3)
    for shard in range(2):
        samples = [
            (f"s{n:02d}", {"cls": b"%d" % (n % 4), "json": b'{"kind": "k%d"}' % (n % 4)})
            for n in range(20 * shard, 20 * shard + 20)
        ]
        write_tar(folder / "old" / f"{shard}.tar", samples)
    raw = folder / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 12), ("t10k", 4)):
        pixels = np.zeros((count, 28, 28), np.uint8).tobytes()
        sizes = b"".join(size.to_bytes(4, "big") for size in (count, 28, 28))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + pixels)
        labels = bytes(number % 10 for number in range(count))
        head = b"\0\0\x08\x01" + count.to_bytes(4, "big")
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + labels)
    for place in ("train", "new-photos", "traffic/images", "traffic/labels"):
        (folder / place).mkdir(parents=True)
        if place != "traffic/labels":
            (folder / place / "a.png").write_bytes(picture(1))
    box = {"image_id": 1, "category_id": 1, "bbox": [1, 2, 9, 8]}
    coco = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [box]}
    coco["categories"] = [{"id": 1, "name": "car"}]
    (folder / "instances_train.json").write_text(json.dumps(coco))
    (folder / "traffic" / "labels" / "a.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (folder / "traffic" / "data.yaml").write_text("names: [car]\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_example_of_the_help_texts_runs(tmp_path: Path) -> None:
    make_sources(tmp_path)
    commands = examples(tmp_path)
    assert len(commands) == 25
    for command in commands:
        assert command.startswith("wdstrain "), command
        if command.startswith(("wdstrain serve ", "wdstrain demo ")):
            continue  # the former ends by Ctrl-C: below; for the latter see test_start_scripts.py
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    (serving,) = [command for command in commands if command.startswith("wdstrain serve ")]
    words = [sys.executable, "-m", *serving.replace("--port 8000", "--port 0").split()]
    options: dict[str, Any] = {"cwd": tmp_path, "env": ENVIRONMENT, "text": True}
    with subprocess.Popen(words, stderr=subprocess.PIPE, **options) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("serving ")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
