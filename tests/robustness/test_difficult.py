"""Real files that break decoders: right pixels or a clean error, in threads and in processes.

The reference is another decoder (torchvision's, where it can read the file), to the last bit. It
runs in a process of its own, because one of these files kills it.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.conftest import Sample, picture, write_tar
from wdstrain.shards.formats import EXTENSIONS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of unusual metadata


JUDGE = """
import os, sys, warnings
from pathlib import Path
import numpy as np, torch
from torchvision.io import ImageReadMode, decode_image

warnings.simplefilter("ignore")  # warnings about torchvision's decoders
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # messages of libpng
for path in sorted(Path(sys.argv[1]).iterdir()):
    child = os.fork()
    if not child:
        try:
            data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            image = decode_image(data, ImageReadMode.RGB, apply_exif_orientation=True)
            image = (image[0] if image.ndim == 4 else image).numpy()
            pixels = (image >> 8 if image.dtype == np.uint16 else image).astype(np.uint8)
            np.save(f"{sys.argv[2]}/{path.name}.npy", pixels.transpose(1, 2, 0))
        finally:
            os._exit(0)
    if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        Path(sys.argv[2], f"{path.name}.died").touch()
"""


@pytest.fixture(scope="session")
def judged(data: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of torchvision's pixels: upright RGB of the high bytes, uint8[h, w, 3], as NAME.npy;
    NAME.died after a crash.
    """
    out = tmp_path_factory.mktemp("judged")
    subprocess.run([sys.executable, "-c", JUDGE, str(data("difficult")), str(out)], check=True)
    return out


def packed(folder: Path, out: Path, is_readable: bool, between: bytes | None = None) -> list[str]:
    """Write a shard of the files that Pillow can read, or cannot; return their names.

    between: an intact image that follows each.
    """
    samples: list[Sample] = []
    with open(folder / "manifest.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [row["file"] for row in rows if row["pillow_rgb"].startswith("ok") == is_readable]
    for number, name in enumerate(names):
        kind = Path(name).suffix[1:].lower()
        kind = kind if kind in EXTENSIONS else {"mpo": "jpg", "apng": "png"}[kind]
        data = (folder / name).read_bytes()
        samples.append((f"{number:03d}", {kind: data, "name": name.encode()}))
        if between is not None:
            samples.append((f"{number:03d}-sound", {"png": between, "name": b"sound"}))
    write_tar(out / "a.tar", samples)
    return names


FIELDS = {"image": wt.image(), "name": wt.text("name")}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_readable_files_have_the_right_pixels(
    data: Callable[[str], Path], judged: Path, tmp_path: Path, num_workers: int
) -> None:
    folder = data("difficult")
    names = packed(folder, tmp_path, is_readable=True)
    loader = wt.Loader(tmp_path, FIELDS, batch_size=1, shuffle=False, num_workers=num_workers)
    pixels_by_name = {b["name"][0]: np.asarray(b["image"][0]).transpose(1, 2, 0) for b in loader}
    loader.close()
    assert list(pixels_by_name) == names
    # torchvision does not rotate these
    turned = {"hopper_orientation_6.webp": -1, "xmp_tags_orientation.png": 2}
    compared = 0
    for name, pixels in pixels_by_name.items():
        if (judged / f"{name}.npy").exists():
            reference = np.rot90(np.load(judged / f"{name}.npy"), turned.get(name, 0))
            assert pixels.shape == reference.shape, name
            assert np.array_equal(pixels, reference), name
            compared += 1
    assert compared >= 40
    # Formats that torchvision cannot read: the same image in another file, or read by hand.
    deep = (folder / "hopper_16bit.pgm").read_bytes()[-128 * 128 * 2 :]
    by_hand = np.frombuffer(deep, ">u2").reshape(128, 128) >> 8
    assert np.array_equal(pixels_by_name["hopper_16bit.pgm"], np.repeat(by_hand[:, :, None], 3, 2))
    likes = {"hopper.bmp": "hopper.jpg", "hopper.avif": "hopper.jpg", "iss634.webp": "iss634.apng"}
    for name, like in likes.items():
        assert np.abs(pixels_by_name[name].astype(int) - pixels_by_name[like]).mean() < 6, name


@pytest.mark.parametrize("num_workers", [0, 2])
def test_unreadable_files_are_bad_samples_and_affect_no_other(
    data: Callable[[str], Path], judged: Path, tmp_path: Path, num_workers: int
) -> None:
    folder = data("difficult")
    assert (judged / "broken_data_stream.png.died").exists()  # it kills torchvision's decoder
    names = packed(folder, tmp_path, is_readable=False, between=picture(7))
    options: dict[str, Any] = {"num_workers": num_workers, "on_error": "replace", "max_errors": 1.0}
    loader = wt.Loader(tmp_path, FIELDS, batch_size=2, shuffle=False, **options)
    batches = list(loader)
    assert [batch["name"] for batch in batches] == [["sound", "sound"]] * len(names)
    assert all(torch.equal(*batch["image"]) for batch in batches)  # no partial image is delivered
    assert loader.report()["bad"] == len(names) >= 20
    loader.close()
