"""Real files that break decoders: each ends in the right pixels or in a clean error, in threads and in worker processes.

Right is what another decoder says (torchvision's, on whatever it reads), to the last bit; it runs in a process of its own, which one of
these files kills.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.conftest import Sample, picture, write_tar
from wdstrain.decode.image_formats import EXTENSIONS
from wdstrain.errors import SampleError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of odd metadata


JUDGE = """
import os, sys, warnings
from pathlib import Path
import numpy as np, torch
from torchvision.io import ImageReadMode, decode_image

warnings.simplefilter("ignore")  # torchvision's decoders are to leave it
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libpng has to say
for path in sorted(Path(sys.argv[1]).iterdir()):
    child = os.fork()
    if not child:
        try:
            data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            found = decode_image(data, ImageReadMode.RGB, apply_exif_orientation=True)
            found = (found[0] if found.ndim == 4 else found).numpy()
            pixels = (found >> 8 if found.dtype == np.uint16 else found).astype(np.uint8)
            np.save(f"{sys.argv[2]}/{path.name}.npy", pixels.transpose(1, 2, 0))
        finally:
            os._exit(0)
    if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        Path(sys.argv[2], f"{path.name}.died").touch()
"""


@pytest.fixture(scope="session")
def judged(data: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what torchvision says: upright RGB of the high bytes, uint8[h, w, 3], as NAME.npy; NAME.died where it did."""
    out = tmp_path_factory.mktemp("judged")
    subprocess.run([sys.executable, "-c", JUDGE, str(data("difficult")), str(out)], check=True)
    return out


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "manifest.csv", newline="") as file:
        return list(csv.DictReader(file))


def packed(
    folder: Path, out: Path, wanted: Callable[[str], bool], *, between: bytes | None = None
) -> list[str]:
    """A shard of the files whose fate in Pillow is wanted, each followed by a sound picture if that is asked for; their names."""
    samples: list[Sample] = []
    names = [row["file"] for row in rows(folder) if wanted(row["pillow_rgb"])]
    for number, name in enumerate(names):
        kind = Path(name).suffix[1:].lower()
        kind = kind if kind in EXTENSIONS else {"mpo": "jpg", "apng": "png"}[kind]
        samples.append(
            (f"{number:03d}", {kind: (folder / name).read_bytes(), "name": name.encode()})
        )
        samples += (
            [(f"{number:03d}-sound", {"png": between, "name": b"sound"})]
            if between is not None
            else []
        )
    write_tar(out / "a.tar", samples)
    return names


FIELDS = {"image": wt.image(), "name": wt.text("name")}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_whatever_can_be_read_has_the_right_pixels(
    data: Callable[[str], Path], judged: Path, tmp_path: Path, num_workers: int
) -> None:
    folder = data("difficult")
    names = packed(folder, tmp_path, lambda fate: fate.startswith("ok"))
    loader = wt.Loader(tmp_path, FIELDS, batch_size=1, shuffle=False, num_workers=num_workers)
    ours = {batch["name"][0]: np.asarray(batch["image"][0]).transpose(1, 2, 0) for batch in loader}
    loader.close()
    assert list(ours) == names
    compared = 0
    for name, pixels in ours.items():
        if not (judged / f"{name}.npy").exists():
            continue
        turned = {
            "hopper_orientation_6.webp": -1,
            "xmp_tags_orientation.png": 2,
        }  # which torchvision leaves as they lie
        other = np.rot90(np.load(judged / f"{name}.npy"), turned.get(name, 0))
        assert pixels.shape == other.shape, name
        assert np.array_equal(pixels, other), (name, np.abs(pixels.astype(int) - other).max())
        compared += 1
    assert compared >= 40
    # of formats that torchvision has not: the same picture in another file, or read by hand
    deep = (folder / "hopper_16bit.pgm").read_bytes()[-128 * 128 * 2 :]
    by_hand = np.frombuffer(deep, ">u2").reshape(128, 128) >> 8
    assert np.array_equal(ours["hopper_16bit.pgm"], np.repeat(by_hand[:, :, None], 3, 2))
    for name, like in (
        ("hopper.bmp", "hopper.jpg"),
        ("hopper.avif", "hopper.jpg"),
        ("iss634.webp", "iss634.apng"),
    ):
        assert np.abs(ours[name].astype(int) - ours[like]).mean() < 6, name


@pytest.mark.parametrize("num_workers", [0, 2])
def test_whatever_cannot_be_read_is_a_bad_sample_and_nothing_else(
    data: Callable[[str], Path], tmp_path: Path, num_workers: int
) -> None:
    folder = data("difficult")
    names = packed(folder, tmp_path, lambda fate: not fate.startswith("ok"), between=picture(7))
    loader = wt.Loader(
        tmp_path,
        FIELDS,
        batch_size=2,
        shuffle=False,
        num_workers=num_workers,
        on_error="replace",
        max_errors=1.0,
    )
    batches = list(loader)
    assert [batch["name"] for batch in batches] == [["sound", "sound"]] * len(names)
    assert all(
        torch.equal(*batch["image"]) for batch in batches
    )  # no part of a picture is taken for it
    assert loader.report()["bad"] == len(names) >= 20
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_error_names_shard_key_field_and_offset(
    data: Callable[[str], Path], judged: Path, tmp_path: Path, num_workers: int
) -> None:
    """The first of them is the one that kills torchvision's decoder with its whole process."""
    folder = data("difficult")
    assert (judged / "broken_data_stream.png.died").exists()
    write_tar(
        tmp_path / "a.tar",
        [("k", {"png": (folder / "broken_data_stream.png").read_bytes(), "name": b"x"})],
    )
    loader = wt.Loader(tmp_path, FIELDS, batch_size=1, num_workers=num_workers)
    with pytest.raises(
        SampleError,
        match=r"a\.tar: 'k', field 'png' at offset 512: unrecognized data stream contents",
    ):
        list(loader)
    loader.close()
