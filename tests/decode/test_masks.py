"""Masks keep the class of each pixel, and get the crop and flip of their image."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

import wdstrain as wt
from tests.support.outcomes import result_or_refusal

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
    shape = (-(-height // 16), -(-width // 16))
    return np.kron(rng.integers(0, 4, shape), np.ones((16, 16)))[:height, :width].astype(np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("augment", [None, "flip", "rrc+flip"])
def test_a_mask_stays_aligned_to_its_image(augment: str | None, kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    samples = []
    for number in range(12):
        mask = blocks(rng, *(int(side) for side in rng.integers(90, 140, 2)))
        files = {kind.lower(): png(COLORS[mask], kind=kind), "mask.png": png(mask)}
        samples.append({"__key__": f"k{number}", **files})
    wt.pack(samples, tmp_path / "out")
    size = (48, 64)
    options: dict[str, Any] = {"size": size, "augment": augment}
    fields = {"image": wt.image(**options), "mask": wt.mask(**options)}
    seen = []
    with wt.Loader(tmp_path / "out", fields, batch_size=6) as loader:
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


def _read(data: bytes, **options: Any) -> Any:
    return wt.mask(**options).read("mask.png", memoryview(data), None, np.full(27, 0.9))


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
        (png(numbers, kind="AVIF"), "AVIF"),
        (png(numbers, "RGB"), "color mode RGB"),
        (png(numbers)[:-30], "truncated|bytes"),
        (b"nothing", "no image"),
    ):
        with pytest.raises(wt.SampleError, match=reason):
            _read(data)
    with pytest.raises(wt.SampleError, match="class number 3: must be 0 to 2, or 255"):
        _read(png(numbers), classes=3)
    assert (_read(png(np.full((8, 8), 255, np.uint8)), classes=3) == 255).all()
    with pytest.raises(wt.UsageError, match="masks would not follow"):
        wt.mask(size=8, augment="flip+randaugment")


def _places(side: int, most: float) -> npt.NDArray[np.uint8]:
    """A square whose pixels hold their column. uint8[side, side], 0 to most."""
    return np.tile(((np.arange(side) + 0.5) * most / side).astype(np.uint8), (side, 1))


@pytest.mark.parametrize(
    ("second", "side"),
    [(wt.mask, 64), (wt.image, 64), (wt.mask, 32), (wt.mask, 100), (wt.image, 32)],
)
def test_fields_of_other_sizes_get_the_same_crop(second: Any, side: int, tmp_path: Path) -> None:
    """A mask of half the size of its image shows the same share of it, or is refused."""
    files = {"png": png(_places(64, 256)), "mask.png": png(_places(side, side))}
    if second is wt.image:
        files["mask.png"] = png(_places(side, 256))
    wt.pack(({"__key__": f"k{n:03d}", **files} for n in range(400)), tmp_path / "out")
    crop: dict[str, Any] = {"size": 16, "augment": "rrc", "scale": (0.5, 1.0)}
    fields = {"image": wt.image("png", **crop), "second": second("mask.png", **crop)}

    def distances() -> npt.NDArray[np.float64]:
        """Largest distance of the columns that the two fields of a sample show, as a share."""
        rows = []
        with wt.Loader(tmp_path / "out", fields, batch_size=100) as loader:
            for batch in loader.epoch(0, until=1):
                shown = batch["second"] if second is wt.mask else batch["second"][:, 0]
                places = (shown[:, 8].numpy() + 0.5) / (side if second is wt.mask else 256)
                distance = np.abs(batch["image"][:, 0, 8].numpy() / 256 - places)
                rows.append(distance[:, 1:-1].max(1))
        return np.concatenate(rows)

    outcome = result_or_refusal(distances)
    if isinstance(outcome, str):
        assert "size" in outcome
    else:
        assert (outcome > 0.06).sum() == 0
