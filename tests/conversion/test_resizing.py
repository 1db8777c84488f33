"""Resized images: their size, EXIF rotation, and masks, which are never blended."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import wdstrain as wt
from tests import conftest
from tests.conftest import write_tar
from tests.support.tables import read_members, write_table
from wdstrain.cli.main import main

SIDE = 24


def encoded(pixels: Any, form: str = "PNG", orientation: int = 1) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = orientation
    return conftest.encoded(image, form, exif=exif)


def ramp(width: int, height: int) -> Any:
    """Return pixels that are dark on the left and light on the right."""
    return np.linspace(0, 255, width).astype(np.uint8)[None, :, None].repeat(3, 2).repeat(height, 0)


def resized(folder: Path, data: bytes, form: str) -> bytes:
    field = "jpg" if form == "JPEG" else "png"
    wt.pack([{"__key__": "k", field: data}], folder / "out", resize=SIDE)
    (member,) = read_members(folder / "out").values()
    return bytes(member)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [(60, 40), (40, 60), (200, 25), (25, 200)])
def test_the_shorter_side_has_the_wanted_length(
    tmp_path: Path, size: tuple[int, int], form: str
) -> None:
    factor = SIDE / min(size)
    with Image.open(io.BytesIO(resized(tmp_path, encoded(ramp(*size), form), form))) as image:
        assert image.size == (round(size[0] * factor), round(size[1] * factor))


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [(SIDE, SIDE), (90, SIDE), (90, 10)])
def test_an_image_with_a_short_side_that_is_small_already_keeps_its_bytes(
    tmp_path: Path, size: tuple[int, int], form: str
) -> None:
    data = encoded(ramp(*size), form)
    assert resized(tmp_path, data, form) == data


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_a_turned_jpeg_is_upright_after_resizing(tmp_path: Path, orientation: int) -> None:
    data = resized(tmp_path, encoded(ramp(96, 48), "JPEG", orientation), "JPEG")
    with Image.open(io.BytesIO(data)) as image:
        assert image.getexif().get(0x0112, 1) == 1
        pixels = np.asarray(image.convert("L")).astype(int)
    assert pixels.shape == ((24, 48) if orientation == 3 else (48, 24))
    across = pixels.mean(0) if orientation == 3 else pixels.mean(1)
    assert (across[-1] > across[0]) == (orientation == 6)


PHOTO = np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)
MASK = np.where(np.arange(80) < 41, 0, 20).astype(np.uint8)[None].repeat(60, 0)
PALETTE = Image.fromarray(MASK)
PALETTE.putpalette([0, 0, 0] * 20 + [255, 0, 0] + [0, 0, 0] * 235)


def images_of(out: Path) -> dict[str, Image.Image]:
    """Return {field: image} of a set with one sample."""
    return {
        name.split("/")[-1].split(".", 1)[1]: Image.open(io.BytesIO(data))
        for name, data in read_members(out).items()
        if name.endswith(("png", "jpg", "tif"))
    }


def _folder(folder: Path, mask: bytes, photo: bytes, name: str = "1.png", **options: Any) -> None:
    for place, file, data in (("images", "1.jpg", photo), ("masks", name, mask)):
        (folder / place).mkdir()
        (folder / place / file).write_bytes(data)
    source, masks = folder / "images", folder / "masks"
    wt.convert_folder(source, folder / "out", flat=True, masks=masks, **options)


def _pack(folder: Path, mask: bytes, photo: bytes, **options: Any) -> None:
    wt.pack([{"__key__": "k", "jpg": photo, "mask.png": mask}], folder / "out", **options)


def _table(folder: Path, mask: bytes, photo: bytes, **options: Any) -> None:
    table = write_table(folder / "t", "parquet", image=[photo], mask=[mask])
    wt.convert_table(table, folder / "out", image="image", **options)


def _hdf5(folder: Path, mask: bytes, photo: bytes, **options: Any) -> None:
    with h5py.File(folder / "f.h5", "w") as file:
        file["photos"], file["masks"] = PHOTO[None], MASK[None]
    fields = {"jpg": "photos", "mask.png": "masks"}
    wt.convert_hdf5(folder / "f.h5", folder / "out", fields, **options)


def _tars(folder: Path, mask: bytes, photo: bytes, **options: Any) -> None:
    write_tar(folder / "old.tar", [("k", {"jpg": photo, "mask.png": mask})])
    wt.convert_tars(folder / "old.tar", folder / "out", **options)


@pytest.mark.parametrize("convert", [_folder, _pack, _table, _hdf5, _tars])
def test_a_mask_is_resized_with_its_image_and_keeps_its_classes(
    tmp_path: Path, convert: Callable[..., None]
) -> None:
    for name, options in (("stored", {}), ("resized", {"resize": 20})):
        (tmp_path / name).mkdir()
        convert(tmp_path / name, encoded(MASK), encoded(PHOTO, "JPEG"), **options)
    assert np.array_equal(np.asarray(images_of(tmp_path / "stored" / "out")["mask.png"]), MASK)
    image, mask = images_of(tmp_path / "resized" / "out").values()
    assert image.size == mask.size == (27, 20)
    assert set(np.unique(np.asarray(mask)).tolist()) == {0, 20}


@pytest.mark.parametrize(
    ("name", "mask", "orientation"),
    [
        ("1.png", encoded(PALETTE), 1),
        ("1.tif", encoded(MASK, "TIFF"), 1),
        ("1.png", encoded(np.rot90(MASK, -1).copy()), 6),
    ],
    ids=["palette", "tiff", "rotated photo"],
)
def test_a_mask_of_any_form_is_resized_to_the_upright_image(
    tmp_path: Path, name: str, mask: bytes, orientation: int
) -> None:
    _folder(tmp_path, mask, encoded(PHOTO, "JPEG", orientation), name, resize=20)
    image, small = images_of(tmp_path / "out").values()
    assert image.size == small.size == ((27, 20) if orientation == 1 else (20, 27))
    assert set(np.unique(np.asarray(small)).tolist()) == {0, 20}


def test_a_mask_of_the_stored_size_of_a_rotated_photo_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wt.SourceError, match="mask.png has 80 x 60 pixels, its jpg 60 x 80"):
        _folder(tmp_path, encoded(MASK), encoded(PHOTO, "JPEG", 6), resize=20)
    sample = {"jpg": encoded(PHOTO, "JPEG", 6), "depth.png": encoded(MASK)}
    with pytest.raises(wt.SourceError, match="depth.png has the size of the stored photo, which"):
        wt.pack([sample], tmp_path / "maps", resize=20)


@pytest.mark.parametrize("verb", ["pack", "convert tars"])
@pytest.mark.parametrize(
    ("options", "mask", "classes"),
    [
        ({"resize": 20}, MASK, {0, 20}),
        ({"resize": 20}, PALETTE, {0, 20}),
        ({"resize": 20}, MASK > 0, {0, 1}),
        ({"quality": 50}, MASK, {0, 20}),
    ],
    ids=["8 bits", "palette", "1 bit", "quality"],
)
def test_a_png_of_classes_beside_a_photo_keeps_its_classes(
    tmp_path: Path, verb: str, options: dict[str, Any], mask: Any, classes: set[int]
) -> None:
    samples = [{"__key__": "k", "jpg": encoded(PHOTO, "JPEG"), "png": encoded(mask)}]
    if verb == "pack":
        wt.pack(samples, tmp_path / "out", **options)
    else:
        wt.pack(samples, tmp_path / "old")
        wt.convert_tars(tmp_path / "old", tmp_path / "out", **options)
    pixels = np.asarray(images_of(tmp_path / "out")["png"]).astype(int)
    assert set(np.unique(pixels).tolist()) == classes


NAMES = ["sky", "road", "car"]


@pytest.fixture
def scenes(tmp_path: Path) -> dict[str, Any]:
    """Arguments of convert_folder for six images with masks of three classes."""
    for folder, shape in (("images", (4, 4, 3)), ("masks", (4, 4))):
        (tmp_path / folder).mkdir()
        for number in range(6):
            pixels = np.full(shape, number % 3, np.uint8)
            (tmp_path / folder / f"{number}.png").write_bytes(encoded(pixels))
    return {"source": tmp_path / "images", "masks": tmp_path / "masks", "flat": True}


@pytest.mark.parametrize("verb", ["convert", "index"])
def test_classes_and_the_ignored_value_of_masks_are_stored_in_the_set(
    tmp_path: Path, scenes: dict[str, Any], capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    out, names = str(tmp_path / "out"), ",".join(NAMES)
    convert = ["convert", "folder", str(scenes["source"]), out, "--flat"]
    convert += ["--masks", str(scenes["masks"])]
    named = ["--mask-classes", names, "--ignore", "2"] if verb == "convert" else []
    assert main([*convert, *named]) == 0
    if verb == "index":
        assert main(["index", out, "--label", "mask.png", "--classes", names, "--ignore", "2"]) == 0
    capsys.readouterr()
    assert main(["info", out, "--json"]) == 0
    (label,) = json.loads(capsys.readouterr().out)["labels"]
    assert (label["kind"], label["field"], label["ignored"]) == ("mask", "mask.png", 2)
    assert label["classes"] == NAMES


def test_a_set_with_named_masks_resumes_grows_and_loads_only_by_its_names(
    tmp_path: Path, scenes: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    index = wt.convert_folder(out=out, **scenes, mask_classes=NAMES, ignore=2)
    for changed in ({"mask_classes": ["a", "c", "b"]}, {"ignore": 1}):
        options = {"mask_classes": NAMES, "ignore": 2, **changed}
        with pytest.raises(wt.UsageError, match=f"{min(changed)} was"):
            wt.convert_folder(out=out, **scenes, **options, resume=True)
    with pytest.raises(wt.UsageError, match="missing in the new samples.*mask_classes="):
        wt.convert_folder(out=out, **scenes, append=True)
    for name in ("mask", "mask.png"):
        with pytest.raises(wt.UsageError, match=r"wt.mask\('mask.png'\)"):
            wt.Loader(out, {"label": wt.label(name)}, batch_size=2)
    fields = {"png": encoded(np.zeros((4, 4, 3), np.uint8)), "mask.png": encoded(MASK[:4, :4])}
    write_tar(out / "more.tar", [("new", fields)])
    again = wt.index(out)
    assert (len(again), again.labels, again.columns) == (7, index.labels, ())


def test_named_masks_lie_in_one_field(tmp_path: Path, scenes: dict[str, Any]) -> None:
    (scenes["masks"] / "0.png").unlink()
    (scenes["masks"] / "0.tif").write_bytes(encoded(np.zeros((4, 4), np.uint8), "TIFF"))
    with pytest.raises(wt.SourceError, match="mask.png and mask.tif: a label lies in one field"):
        wt.convert_folder(out=tmp_path / "out", **scenes, mask_classes=["a", "b", "c"])
    assert len(wt.convert_folder(out=tmp_path / "out", **scenes)) == 6
