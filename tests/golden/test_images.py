"""Encoded images decode to the same pixels from one version to the next.

`images/` has the images, of 22 x 14 pixels, which Pillow and hand-made encoders wrote once: other
versions of Pillow write other bytes. Those of lossless formats, and the JPEGs
that simplejpeg decodes, are compared by the hash of their pixels. Other decoders of lossy formats
may round differently in another version of a library: the means of a grid of 4 x 4 must be equal
within `TOLERANCE`. So must those of augmented images, since processors resize differently.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import features

import wdstrain as wt
from tests.conftest import Sample, write_tar
from tests.golden.expected import check, check_close, check_names, digest

FOLDER = Path(__file__).parent / "images"
IMAGES = sorted(path.name for path in FOLDER.iterdir())
TOLERANCE = 3.0  # of 255
APPROXIMATE = ("jpeg-cmyk.jpg", "webp-lossy.webp", "avif-lossy.avif", "avif-444.avif")

# Masks are class numbers: grayscale values and positions in a palette.
MASKS = [
    *(f"png-gray-{rest}.png" for rest in ("1-bit", "2-bits", "4-bits-interlaced", "8-bits")),
    *("png-gray-16-bits.png", "png-palette-1-bit.png", "png-palette-4-bits.png"),
    *("png-palette-8-bits-transparent.png", "gif-palette.gif", "bmp-1-bit.bmp"),
    *("bmp-palette-rle.bmp", "tiff-gray-16-bits.tif", "tiff-bilevel-fax.tif", "pgm-raw.pgm"),
]
REFUSED_MASKS = ["jpeg-gray.jpg", "png-rgb.png", "png-gray-alpha.png", "webp-lossless.webp"]

# Name in the file: options of the field. Each is applied to two images in two epochs.
AUGMENTED: dict[str, dict[str, Any]] = {
    "augment: center crop": dict(size=(8, 12), crop_pct=0.8),
    "augment: flip": dict(size=(14, 22), augment="flip"),
    "augment: rrc": dict(size=10, augment="rrc", scale=(0.2, 0.9), ratio=(0.5, 2)),
    "augment: trivialaugment": dict(size=(14, 22), augment="trivialaugment"),
    "augment: randaugment": dict(size=(14, 22), augment="flip+randaugment"),
}

# The same for the augmentation of batches, with four images.
BATCHES: dict[str, dict[str, Any]] = {
    "batch: rrc, flip, jitter": dict(
        augment="rrc+flip", size=12, brightness=0.4, contrast=0.4, saturation=0.3, hue=0.2
    ),
    "batch: erasing": dict(random_erasing=0.8),
    "batch: mixup, cutmix": dict(mixup=0.4, cutmix=1.0, mixup_prob=0.9, classes=3),
}


def needs(name: str) -> None:
    """Skip the test if this Pillow lacks an optional format."""
    kind = name.rpartition(".")[2]
    if kind in ("avif", "webp") and not features.check(kind):
        pytest.skip(f"this Pillow cannot decode {kind}")


def decoded(folder: Path, samples: list[Sample], field: Any) -> list[Any]:
    """Return the decoded value of each sample; None if it is bad."""
    shard = write_tar(folder / "a.tar", samples)
    options: dict[str, Any] = {"shuffle": False, "on_error": "mark", "max_errors": 1.0}
    with closing(wt.Loader(str(shard), {"x": field}, batch_size=1, **options)) as loader:
        return [batch["x"][0] for batch in loader.epoch(0, until=1)]


def sample(name: str) -> Sample:
    return name.replace(".", "-"), {name.rpartition(".")[2]: (FOLDER / name).read_bytes()}


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The pixels of each image, uint8[3, height, width], by its name."""
    folder = tmp_path_factory.mktemp("images")
    return dict(zip(IMAGES, decoded(folder, list(map(sample, IMAGES)), wt.image()), strict=True))


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The class numbers of each mask, int64[height, width]; None if it is refused."""
    names = MASKS + REFUSED_MASKS
    kinds = ";".join(sorted({name.rpartition(".")[2] for name in names}))
    folder = tmp_path_factory.mktemp("masks")
    return dict(zip(names, decoded(folder, list(map(sample, names)), wt.mask(kinds)), strict=True))


def grid(image: Any) -> list[float]:
    """Return the means of 4 x 4 parts of an image [3, height, width], by channel, row, column."""
    array = np.asarray(image, np.float64)
    return [
        round(float(part.mean()), 1)
        for channel in array
        for rows in np.array_split(channel, 4, axis=0)
        for part in np.array_split(rows, 4, axis=1)
    ]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_decodes_to_the_same_pixels(pixels: dict[str, Any], name: str) -> None:
    needs(name)
    image = pixels[name]
    assert image is not None, f"{name} is no longer decoded"
    if name in APPROXIMATE:
        check("images", f"shape of {name}", " x ".join(map(str, image.shape)))
        check_close("images", name, grid(image), TOLERANCE)
    else:
        shape = " x ".join(map(str, image.shape))
        check("images", name, f"{shape}, {digest(image.numpy().tobytes())}")


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_has_the_same_class_numbers(masks: dict[str, Any], name: str) -> None:
    mask = masks[name]
    assert mask is not None, f"{name} is no longer decoded"
    numbers = mask.numpy().astype("<i8")
    shape, first = " x ".join(map(str, mask.shape)), np.unique(numbers)[:4].tolist()
    check("images", f"mask {name}", f"{shape}, {first}, {digest(numbers.tobytes())}")


@pytest.mark.parametrize("name", REFUSED_MASKS)
def test_an_image_that_is_no_mask_stays_refused(masks: dict[str, Any], name: str) -> None:
    needs(name)
    assert masks[name] is None


@pytest.mark.parametrize("name", AUGMENTED)
def test_an_augmented_image_shows_the_same_part(tmp_path: Path, name: str) -> None:
    shard = write_tar(tmp_path / "a.tar", [sample("png-rgb.png"), sample("jpeg-444.jpg")])
    fields = {"x": wt.image(**AUGMENTED[name])}
    with closing(wt.Loader(shard, fields, batch_size=2, shuffle=False)) as loader:
        batches = [list(loader.epoch(epoch, until=epoch + 1)) for epoch in range(4)]
    images = [image for (batch,) in batches for image in batch["x"]]
    check_close("images", name, [value for image in images for value in grid(image)], TOLERANCE)


@pytest.mark.parametrize("name", BATCHES)
def test_an_augmented_batch_shows_the_same_parts(tmp_path: Path, name: str) -> None:
    images = ["png-rgb.png", "jpeg-444.jpg", "png-palette-4-bits.png", "gif-animated.gif"]
    samples: list[Sample] = []
    for number, (key, fields) in enumerate(map(sample, images)):
        samples.append((key, {**fields, "cls": b"%d" % (number % 3)}))
    shard = write_tar(tmp_path / "a.tar", samples)
    wanted = {"image": wt.image(size=(14, 22)), "label": wt.label("cls")}
    values: list[float] = []
    with closing(wt.Loader(str(shard), wanted, batch_size=4, shuffle=False)) as loader:
        for epoch in range(2):
            batches = loader.epoch(epoch, until=epoch + 1)
            for batch in wt.to_device(batches, "cpu", wt.Augmentation(**BATCHES[name])):
                values += [value for image in batch["image"] for value in grid(255 * image)]
                values += [round(255 * float(share), 1) for share in batch["label"].reshape(-1)]
    check_close("images", name, values, TOLERANCE)


def test_the_file_has_no_other_entries() -> None:
    names = [*IMAGES, *(f"shape of {name}" for name in APPROXIMATE), *AUGMENTED, *BATCHES]
    check_names("images", [*names, *(f"mask {name}" for name in MASKS)])
