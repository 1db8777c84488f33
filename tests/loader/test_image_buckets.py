"""Columns of the sizes of images, and batches of images of one shape.

The model decodes each image with Pillow, and compares its pixels with those of a loader of one size.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import wdstrain as wt

PIXELS = 64 * 64
STORED = [(64, 64), (96, 64), (64, 96), (120, 60), (70, 100), (90, 30)]  # width, height
TURNED = 6  # EXIF orientation: rows and columns are exchanged


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of class folders with 180 photos of six shapes, some of them turned."""
    folder, rng = tmp_path_factory.mktemp("shapes") / "photos", np.random.default_rng(0)
    for number in range(180):
        width, height = (side + int(rng.integers(-3, 4)) for side in STORED[number % 6])
        pixels = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        image, exif = Image.fromarray(pixels).resize((width, height)), Image.Exif()
        exif[0x0112] = TURNED if number % 7 == 0 else 1
        path = folder / "ab"[number % 2] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, exif=exif)
    return folder


@pytest.fixture(scope="module")
def shards(photos: Path) -> str:
    """Return shards of the photos whose index has their sizes."""
    out = str(photos.parent / "shards")
    wt.convert_folder(photos, out, max_shard_size="100KB", overwrite=True)
    wt.index(out, columns=["jpg.width", "jpg.height"])
    return out


def upright_sizes(photos: Path) -> dict[str, tuple[int, int]]:
    """Return (width, height) of each photo as it is shown, by key."""
    sizes = {}
    for path in photos.rglob("*.jpg"):
        with Image.open(path) as image:
            sizes[f"{path.parent.name}/{path.stem}"] = ImageOps.exif_transpose(image).size
    return sizes


def loader(shards: Any, **options: Any) -> wt.Loader:
    fields = {"image": wt.image(size="bucket"), "label": wt.label()}
    given = {"fields": fields, "batch_size": 8, "buckets": "aspect", "pixels": PIXELS}
    return wt.Loader(shards, **{**given, **options})


def delivered(loader: wt.Loader, epoch: int = 0) -> list[tuple[list[str], Any]]:
    """Return the keys and images of each batch of an epoch."""
    with loader:
        batches = loader.epoch(epoch, until=epoch + 1)
        return [(batch["__key__"], batch["image"].clone()) for batch in batches]


def test_the_sizes_of_images_are_columns_of_the_index_as_they_are_shown(
    photos: Path, shards: str
) -> None:
    sizes, index = upright_sizes(photos), wt.open(shards)
    columns = {column.name: column.values.to_pylist() for column in index.columns}
    rows = zip(columns["jpg.width"], columns["jpg.height"], strict=True)
    assert dict(zip(map(index.key, range(len(index))), rows, strict=True)) == sizes
    chosen = index.where("jpg.width > 80 and jpg.height < 70")
    assert {chosen.key(n) for n in range(len(chosen))} == {
        key for key, (width, height) in sizes.items() if width > 80 and height < 70
    }
    assert wt.verify(shards).ok


def test_the_size_of_an_image_is_a_number_of_a_batch_without_a_column(photos: Path) -> None:
    out = str(photos.parent / "bare")
    wt.convert_folder(photos, out, overwrite=True)
    sizes = upright_sizes(photos)
    with wt.Loader(out, {"width": wt.number("jpg.width")}, batch_size=20) as batches:
        for batch in batches:
            assert batch["width"].tolist() == [sizes[key][0] for key in batch["__key__"]]
    wt.convert_tars(out, f"{out}-wide", where="jpg.width > 80", overwrite=True)
    assert len(wt.open(f"{out}-wide")) == sum(width > 80 for width, _ in sizes.values())


def test_an_entry_of_json_is_never_taken_for_the_size_of_an_image(tmp_path: Path) -> None:
    samples = (
        {"__key__": str(n), "png": np.zeros((8, 9, 3), np.uint8), "json": {"png.width": n}}
        for n in range(4)
    )
    wt.pack(samples, tmp_path, shuffle=False)
    field = {"n": wt.number("json.png.width")}
    with wt.Loader(tmp_path, field, batch_size=4, shuffle=False) as loader:
        assert next(iter(loader))["n"].tolist() == [0, 1, 2, 3]
    with pytest.raises(wt.UsageError, match=r"json\.png\.width is a column called 'png\.width'"):
        wt.index(tmp_path, columns=["png.width", "png.height"])


def test_a_batch_holds_images_of_one_shape_that_is_near_to_their_own(
    photos: Path, shards: str
) -> None:
    sizes, seen = upright_sizes(photos), Counter[str]()
    areas, cropped = set(), list[float]()
    for keys, images in delivered(loader(shards)):
        height, width = images.shape[2:]
        areas.add(height * width)
        assert images.shape == (8, 3, height, width)
        assert images.dtype == torch.uint8
        for key in keys:
            shape = sizes[key][0] / sizes[key][1]
            cropped.append(max(shape * height / width, width / shape / height))
        seen.update(keys)
    assert set(seen.values()) == {1}
    assert np.median(cropped) < 1.1
    assert max(cropped) < 1.6  # the few narrow ones, too few for a bucket of their own
    assert max(areas) <= PIXELS
    assert min(areas) > 0.8 * PIXELS
    assert len(sizes) - seen.total() == loader(shards).plan(0).left_out < 60


def test_pixels_are_those_of_a_loader_of_that_size(shards: str) -> None:
    index = wt.open(shards)
    numbers = {index.key(n): n for n in range(len(index))}
    for keys, images in delivered(loader(shards))[:5]:
        one = {"image": wt.image(size=tuple(images.shape[2:]))}
        chosen = index.take([numbers[key] for key in sorted(keys, key=numbers.__getitem__)])
        with wt.Loader(chosen, one, batch_size=8, shuffle=False) as same:
            (batch,) = same.epoch(0, until=1)
            own = dict(zip(batch["__key__"], batch["image"], strict=True))
            assert torch.equal(images, torch.stack([own[key] for key in keys]))


@pytest.mark.parametrize("augment", [None, "rrc+flip"])
def test_the_order_and_pixels_are_those_of_any_number_of_workers(
    shards: str, augment: str | None
) -> None:
    fields = {"image": wt.image(size="bucket", augment=augment)}
    runs = [delivered(loader(shards, fields=fields, num_workers=n), 1) for n in (0, 2)]
    for (keys, images), (other_keys, others) in zip(*runs, strict=True):
        assert keys == other_keys
        assert torch.equal(images, others)


def test_all_ranks_have_one_shape_at_a_step_and_resume(shards: str) -> None:
    options: dict[str, Any] = {"world_size": 2, "batch_size": 4}
    ranks = [delivered(loader(shards, rank=rank, **options)) for rank in (0, 1)]
    for (_, images), (_, others) in zip(*ranks, strict=True):
        assert images.shape == others.shape
    with loader(shards, rank=1, **options) as first:
        assert len(list(islice(first, 3))) == 3
        state = first.state_dict()
    with loader(shards, rank=1, num_workers=1, **options) as second:
        second.load_state_dict(state)
        assert [batch["__key__"] for batch in second] == [keys for keys, _ in ranks[1][3:]]


def test_masks_have_the_shape_of_their_image(tmp_path: Path) -> None:
    samples = (
        {
            "png": np.full((*STORED[number % 4], 3), number, np.uint8),
            "mask.png": np.full(STORED[number % 4], number % 5, np.uint8),
        }
        for number in range(40)
    )
    wt.pack(samples, tmp_path)
    wt.index(tmp_path, columns=["png.width", "png.height"])
    given: dict[str, Any] = {"size": "bucket", "augment": "rrc+flip"}
    fields = {"image": wt.image("png", **given), "mask": wt.mask(**given)}
    with loader(tmp_path, fields=fields, batch_size=4) as batches:
        for batch in batches:
            assert batch["mask"].shape == (4, *batch["image"].shape[2:])
            assert torch.equal(batch["mask"], batch["image"][:, 0].long() % 5)


@pytest.mark.parametrize("fields", [("a", "b"), ("b", "a")])
def test_the_image_of_the_bucket_decides_and_not_another_one(
    tmp_path: Path, fields: tuple[str, ...]
) -> None:
    samples = (
        {
            "png": np.zeros((50, 100, 3) if number % 2 else (100, 50, 3), np.uint8),
            "left.png": np.zeros((50, 50, 3) if number % 2 else (25, 25, 3), np.uint8),
            "mask.png": np.zeros((25, 51) if number % 2 else (51, 25), np.uint8),
            "__key__": str(number),
        }
        for number in range(16)
    )
    wt.pack(samples, tmp_path)
    wt.index(tmp_path, columns=["png.width", "png.height", "left.png.width"])
    known = {"a": wt.image("png", size="bucket"), "b": wt.image("left.png", size=16)}
    given = {"mask": wt.mask(size="bucket"), **{n: known[n] for n in fields}}
    with loader(tmp_path, fields=given, batch_size=4) as batches:
        for batch in batches:
            height, width = batch["a"].shape[2:]
            assert {int(key) % 2 for key in batch["__key__"]} == {int(width > height)}
            assert batch["mask"].shape[1:] == (height, width)


def test_columns_of_sizes_end_with_new_samples_as_a_warning_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        samples = (
            {"__key__": f"{name}{n}", "png": np.zeros((8, 9, 3), np.uint8)} for n in range(4)
        )
        wt.pack(samples, tmp_path, append=name == "b")
        if name == "a":
            wt.index(tmp_path, columns=["png.width", "png.height"])
    assert "--columns png.width,png.height" in caplog.text
    assert wt.verify(tmp_path).ok
    assert len(wt.index(tmp_path, columns=["png.width"]).where("png.width == 9")) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pixels": None}, "need the largest area of a shape"),
        ({"buckets": None}, "pixels=4096 is the largest area of images"),
        ({"buckets": "label", "pixels": None}, 'size="bucket" is the size of the shape'),
        ({"pixels": 3}, "pixels=3: must be an integer >= 64"),
        ({"batch_size": 500}, "cannot give 1 rank"),
    ],
)
def test_wrong_options_are_refused(shards: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(wt.UsageError, match=message):
        loader(shards, **options)


def test_an_index_without_the_sizes_names_the_command_that_adds_them(photos: Path) -> None:
    out = str(photos.parent / "unknown")
    wt.convert_folder(photos, out, overwrite=True)
    with pytest.raises(wt.UsageError, match=r"wdstrain index FOLDER --columns jpg\.width"):
        loader(out)
    samples = [{"png" if n % 3 else "jpg": np.zeros((64, 64, 3), np.uint8)} for n in range(30)]
    wt.pack(samples, f"{out}-mixed", overwrite=True)
    wt.index(f"{out}-mixed", columns=["jpg.width", "jpg.height"])
    with pytest.raises(wt.UsageError, match=r"--columns jpg\.width,jpg\.height,png\.width,png"):
        loader(f"{out}-mixed")
    with pytest.raises(wt.UsageError, match="20 samples have no size, the first of them"):
        loader(f"{out}-mixed", fields={"image": wt.image("jpg", size="bucket")})
