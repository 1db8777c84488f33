"""Resizing while converting: the shorter side, images that are small already, EXIF rotation."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import wdstrain as wt
from tests import conftest
from tests.support.tables import read_members

SIDE = 24


def encoded(width: int, height: int, form: str, orientation: int = 1) -> bytes:
    """Return an image that is dark on the left and light on the right, as it is stored."""
    ramp = np.linspace(0, 255, width).astype(np.uint8)
    pixels = np.broadcast_to(ramp[None, :, None], (height, width, 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    return conftest.encoded(Image.fromarray(np.ascontiguousarray(pixels)), form, exif=exif)


def converted(folder: Path, data: bytes, field: str) -> bytes:
    wt.pack([{"__key__": "k", field: data}], folder / "out", resize=SIDE)
    (member,) = read_members(folder / "out").values()
    return bytes(member)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [(60, 40), (40, 60), (200, 25), (25, 200)])
def test_the_shorter_side_has_the_wanted_length(
    tmp_path: Path, size: tuple[int, int], form: str
) -> None:
    made = converted(tmp_path, encoded(*size, form), "jpg" if form == "JPEG" else "png")
    factor = SIDE / min(size)
    with Image.open(io.BytesIO(made)) as image:
        assert image.size == (round(size[0] * factor), round(size[1] * factor))


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [(SIDE, SIDE), (90, SIDE), (SIDE, 90), (90, 10)])
def test_an_image_with_a_short_side_that_is_small_already_keeps_its_bytes(
    tmp_path: Path, size: tuple[int, int], form: str
) -> None:
    data = encoded(*size, form)
    assert converted(tmp_path, data, "jpg" if form == "JPEG" else "png") == data


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_a_turned_jpeg_is_upright_after_resizing(tmp_path: Path, orientation: int) -> None:
    made = converted(tmp_path, encoded(96, 48, "JPEG", orientation), "jpg")
    with Image.open(io.BytesIO(made)) as image:
        assert image.getexif().get(0x0112, 1) == 1
        pixels = np.asarray(image.convert("L")).astype(int)
    assert pixels.shape == ((24, 48) if orientation == 3 else (48, 24))
    across = pixels.mean(0) if orientation == 3 else pixels.mean(1)
    rises = across[-1] > across[0]
    assert rises == (orientation == 6)
