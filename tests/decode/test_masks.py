"""Masks keep the class of each pixel, and get the crop and flip of their image."""

from __future__ import annotations

import io
import pickle
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import wdstrain as wt

# Classes 0 to 3, in colors of which no mixture is another class color.
COLORS = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)


def png(pixels: npt.NDArray[Any], mode: str | None = None, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    if mode == "P":
        height, width = pixels.shape
        image = Image.frombytes("P", (width, height), pixels.tobytes())
        image.putpalette([255 - value for value in range(256) for _ in range(3)])
    elif mode is not None:
        image = image.convert(mode)
    image.save(buffer, kind, quality=95)
    return buffer.getvalue()


def blocks(rng: np.random.Generator, height: int, width: int) -> npt.NDArray[np.uint8]:
    """A mask of blocks of 16 pixels of one class each."""
    shape = (-(-height // 16), -(-width // 16))
    return np.kron(rng.integers(0, 4, shape), np.ones((16, 16)))[:height, :width].astype(np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("augment", [None, "flip", "rrc+flip"])
def test_a_mask_stays_aligned_with_its_image(
    augment: str | None, kind: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    samples = []
    for number in range(12):
        mask = blocks(rng, *(int(side) for side in rng.integers(90, 140, 2)))
        fields = {kind.lower(): png(COLORS[mask], kind=kind), "mask.png": png(mask)}
        samples.append({"__key__": f"k{number}", **fields})
    wt.pack(samples, tmp_path / "out")
    size = (48, 64)
    fields = {
        "image": wt.image(size=size, augment=augment),
        "mask": wt.mask(size=size, augment=augment),
    }
    seen = []
    with closing(wt.Loader(tmp_path / "out", fields, batch_size=6)) as loader:
        for _ in range(2):
            for batch in loader:
                image = batch["image"].permute(0, 2, 3, 1).numpy().astype(int)
                mask = batch["mask"].numpy()
                assert mask.shape == (6, *size)
                assert mask.dtype == np.int64
                distance = np.abs(image[..., None, :] - COLORS.astype(int)).sum(-1)
                # Pixels at edges are mixtures of two classes.
                assert (distance.argmin(-1) == mask).mean() > 0.97
                seen.append({row.tobytes() for row in mask})
    assert (seen[0] | seen[1] == seen[2] | seen[3]) == (augment is None)


@pytest.mark.parametrize("mode", ["L", "P"])
def test_every_class_number_of_a_mask_is_delivered(mode: str) -> None:
    numbers = np.arange(256, dtype=np.uint8).reshape(16, 16)
    out = wt.mask().read("mask.png", memoryview(png(numbers, mode)), None, np.zeros(27))
    assert np.array_equal(out, numbers)


def test_masks_of_1_to_16_bits_are_delivered() -> None:
    wide = np.arange(256, dtype=np.uint16).reshape(16, 16) * 3
    assert np.array_equal(_read(png(wide)), wide)
    bits = np.arange(256, dtype=np.uint8).reshape(16, 16) % 2
    assert np.array_equal(_read(png(bits * 255, "1")), bits)
    gray = bytes([137]) + b"PNG\r\n\x1a\n" + _chunk(b"IHDR", b"\0\0\0\4\0\0\0\1\2\0\0\0\0")
    gray += _chunk(b"IDAT", zlib.compress(b"\0\x1b")) + _chunk(b"IEND", b"")
    assert _read(gray).tolist() == [[0, 1, 2, 3]]


def _chunk(name: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(name + data).to_bytes(4, "big")
    return len(data).to_bytes(4, "big") + name + data + checksum


def _read(data: bytes, **options: Any) -> npt.NDArray[Any]:
    value: npt.NDArray[Any] = wt.mask(**options).read(
        "mask.png", memoryview(data), None, np.full(27, 0.9)
    )
    return value


@pytest.mark.parametrize("case", range(20))
def test_a_resized_mask_contains_the_nearest_pixels(case: int) -> None:
    rng = np.random.default_rng(case)
    numbers = rng.integers(0, 256, rng.integers(1, 40, 2)).astype(np.uint8)
    side = int(rng.integers(1, 50))
    out = np.zeros((side, side), np.int64)
    field = pickle.loads(pickle.dumps(wt.mask(size=side)))
    field.read("mask.png", memoryview(png(numbers)), out, np.full(27, 0.9))
    edge = min(numbers.shape)
    top, left = (numbers.shape[0] - edge) // 2, (numbers.shape[1] - edge) // 2
    places = np.floor((np.arange(side) + 0.5) * edge / side + 1e-9).astype(int)
    assert np.array_equal(out, numbers[top + places[:, None], left + places[None, :]])


def test_data_that_is_not_a_mask_is_a_bad_sample() -> None:
    numbers = np.full((8, 8), 3, np.uint8)
    for data, reason in (
        (png(numbers, kind="JPEG"), "JPEG"),
        (png(numbers, "RGB"), "color mode RGB"),
        (png(numbers)[:-30], "truncated|bytes"),
        (b"nothing", "no image"),
    ):
        with pytest.raises(wt.SampleError, match=reason):
            _read(data)
    with pytest.raises(wt.SampleError, match="class number 3: must be 0 to 2, or 255"):
        _read(png(numbers), classes=3)
    assert (_read(png(np.full((8, 8), 255, np.uint8)), classes=3) == 255).all()


@pytest.mark.parametrize("augment", ["trivialaugment", "flip+randaugment"])
def test_policies_that_masks_cannot_follow_are_refused(augment: str) -> None:
    with pytest.raises(wt.UsageError, match="masks would not follow"):
        wt.mask(size=8, augment=augment)
