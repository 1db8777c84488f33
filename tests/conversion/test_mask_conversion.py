"""Masks beside images: resized with them, never blended, and described once in the set."""

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
from tests.support.tables import attempt, read_members, write_table
from wdstrain.cli.main import main

CLASSES = {0, 20}  # classes of every mask: left of column 81, and right of it
PHOTO = np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)
MASK = np.where(np.arange(80) < 41, 0, 20).astype(np.uint8)[None].repeat(60, 0)


def encoded(pixels: Any, kind: str = "PNG", **options: Any) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    return conftest.encoded(image, kind, **options)


def palette_mask() -> Image.Image:
    image = Image.fromarray(MASK)
    image.putpalette([0, 0, 0] * 20 + [255, 0, 0] + [0, 0, 0] * 235)
    return image


def images_of(out: Path) -> dict[str, Image.Image]:
    """Return {field: image} of a set with one sample."""
    return {
        name.split("/")[-1].split(".", 1)[1]: Image.open(io.BytesIO(data))
        for name, data in read_members(out).items()
        if name.endswith(("png", "jpg", "tif"))
    }


def only_mask(out: Path) -> Image.Image:
    return next(image for field, image in images_of(out).items() if field.startswith("mask."))


# --- size ---


def _folder(tmp_path: Path, mask: bytes, photo: bytes, name: str = "1.png", **options: Any) -> None:
    for folder, file, data in (("images", "1.jpg", photo), ("masks", name, mask)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_bytes(data)
    source, masks = tmp_path / "images", tmp_path / "masks"
    wt.convert_folder(source, tmp_path / "out", flat=True, masks=masks, **options)


def _pack(tmp_path: Path, mask: bytes, photo: bytes, **options: Any) -> None:
    wt.pack([{"__key__": "k", "jpg": photo, "mask.png": mask}], tmp_path / "out", **options)


def _table(tmp_path: Path, mask: bytes, photo: bytes, **options: Any) -> None:
    table = write_table(tmp_path / "t", "parquet", image=[photo], mask=[mask])
    wt.convert_table(table, tmp_path / "out", image="image", **options)


def _arrays(tmp_path: Path, mask: bytes, photo: bytes, **options: Any) -> None:
    wt.convert_arrays({"jpg": PHOTO[None], "mask.png": MASK[None]}, tmp_path / "out", **options)


def _hdf5(tmp_path: Path, mask: bytes, photo: bytes, **options: Any) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["photos"], file["masks"] = PHOTO[None], MASK[None]
    fields = {"jpg": "photos", "mask.png": "masks"}
    wt.convert_hdf5(tmp_path / "f.h5", tmp_path / "out", fields, **options)


def _tars(tmp_path: Path, mask: bytes, photo: bytes, **options: Any) -> None:
    write_tar(tmp_path / "old.tar", [("k", {"jpg": photo, "mask.png": mask})])
    wt.convert_tars(tmp_path / "old.tar", tmp_path / "out", **options)


SOURCES = [_folder, _pack, _table, _arrays, _hdf5, _tars]


def check_equal_sizes(tmp_path: Path, convert: Callable[[], None]) -> None:
    """Check that image and mask have one size and the mask its classes, or that it is refused."""
    if isinstance(attempt(convert), str):
        return
    mask = only_mask(tmp_path / "out")
    assert {image.size for image in images_of(tmp_path / "out").values()} == {mask.size}
    assert set(np.unique(np.asarray(mask)).tolist()) == CLASSES


@pytest.mark.parametrize("source", SOURCES)
def test_a_mask_is_resized_with_its_image_or_the_option_is_refused(
    tmp_path: Path, source: Callable[..., None]
) -> None:
    photo = encoded(PHOTO, "JPEG")
    check_equal_sizes(tmp_path, lambda: source(tmp_path, encoded(MASK), photo, resize=20))


@pytest.mark.parametrize(
    ("name", "mask"),
    [("1.png", encoded(palette_mask())), ("1.tif", encoded(MASK, "TIFF"))],
    ids=["palette", "tiff"],
)
def test_a_mask_of_any_form_keeps_its_classes_when_it_is_resized(
    tmp_path: Path, name: str, mask: bytes
) -> None:
    photo = encoded(PHOTO, "JPEG")
    check_equal_sizes(tmp_path, lambda: _folder(tmp_path, mask, photo, name, resize=20))


@pytest.mark.parametrize("drawn_on", ["upright", "stored"])
def test_a_mask_of_a_rotated_photo_is_resized_to_the_upright_size_or_refused(
    tmp_path: Path, drawn_on: str
) -> None:
    exif = Image.Exif()
    exif[0x112] = 6  # shown turned by 90 degrees
    photo = encoded(PHOTO, "JPEG", exif=exif)
    mask = encoded(np.rot90(MASK, -1).copy() if drawn_on == "upright" else MASK)
    check_equal_sizes(tmp_path, lambda: _folder(tmp_path, mask, photo, resize=20))


@pytest.mark.parametrize("source", SOURCES)
def test_a_mask_keeps_its_pixels_without_resizing(
    tmp_path: Path, source: Callable[..., None]
) -> None:
    source(tmp_path, encoded(MASK), encoded(PHOTO, "JPEG"))
    assert np.array_equal(np.asarray(only_mask(tmp_path / "out")), MASK)


# --- classes ---


@pytest.mark.parametrize("verb", ["pack", "convert tars"])
@pytest.mark.parametrize(
    ("options", "mask", "classes"),
    [
        ({"resize": 20}, MASK, CLASSES),
        ({"resize": 20}, palette_mask(), CLASSES),
        ({"resize": 20}, MASK.astype(np.uint16) * 300, {0, 6000}),
        ({"resize": 20}, MASK > 0, {0, 1}),
        ({"quality": 50}, MASK, CLASSES),
    ],
    ids=["8 bits", "palette", "16 bits", "1 bit", "quality"],
)
def test_a_png_of_classes_beside_a_photo_keeps_its_classes_or_is_refused(
    tmp_path: Path, verb: str, options: dict[str, Any], mask: Any, classes: set[int]
) -> None:
    samples = [{"__key__": "k", "jpg": encoded(PHOTO, "JPEG"), "png": encoded(mask)}]
    if verb == "pack":
        result = attempt(lambda: wt.pack(samples, tmp_path / "out", **options))
    else:
        wt.pack(samples, tmp_path / "old")
        result = attempt(lambda: wt.convert_tars(tmp_path / "old", tmp_path / "out", **options))
    if isinstance(result, str):
        assert "png" in result
    else:
        pixels = np.asarray(images_of(tmp_path / "out")["png"]).astype(int)
        assert set(np.unique(pixels).tolist()) == classes


# --- what the values mean ---


@pytest.mark.parametrize("verb", ["convert", "index"])
def test_classes_and_the_ignored_value_of_masks_are_stored_in_the_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    for folder, shape in (("images", (4, 4, 3)), ("masks", (4, 4))):
        (tmp_path / folder).mkdir()
        for number in range(3):
            pixels = np.full(shape, number, np.uint8)
            (tmp_path / folder / f"{number}.png").write_bytes(encoded(pixels))
    out, names = str(tmp_path / "out"), "sky,road,car"
    convert = ["convert", "folder", str(tmp_path / "images"), out, "--flat"]
    convert += ["--masks", str(tmp_path / "masks")]
    named = ["--mask-classes", names] if verb == "convert" else []
    assert main([*convert, *named, *(["--ignore", "2"] if named else [])]) == 0
    if verb == "index":
        assert main(["index", out, "--label", "mask.png", "--classes", names, "--ignore", "2"]) == 0
    capsys.readouterr()
    assert main(["info", out, "--json"]) == 0
    (label,) = json.loads(capsys.readouterr().out)["labels"]
    assert (label["kind"], label["field"], label["ignored"]) == ("mask", "mask.png", 2)
    assert label["classes"] == names.split(",")


@pytest.fixture
def scenes(tmp_path: Path) -> dict[str, Any]:
    """Arguments of convert_folder for six images with masks of three classes."""
    for folder, shape in (("images", (4, 4, 3)), ("masks", (4, 4))):
        (tmp_path / folder).mkdir()
        for number in range(6):
            pixels = np.full(shape, number % 3, np.uint8)
            (tmp_path / folder / f"{number}.png").write_bytes(encoded(pixels))
    return {"source": tmp_path / "images", "masks": tmp_path / "masks", "flat": True}


@pytest.mark.parametrize("changed", [{"mask_classes": ["a", "c", "b"]}, {"ignore": 2}])
def test_other_names_of_masks_are_another_conversion(
    tmp_path: Path, scenes: dict[str, Any], changed: dict[str, Any]
) -> None:
    named = {"mask_classes": ["a", "b", "c"]}
    wt.convert_folder(out=tmp_path / "out", **scenes, **named)
    with pytest.raises(wt.UsageError, match=f"{min(changed)} was"):
        wt.convert_folder(out=tmp_path / "out", **scenes, **{**named, **changed}, resume=True)


def test_named_masks_lie_in_one_field(tmp_path: Path, scenes: dict[str, Any]) -> None:
    (scenes["masks"] / "0.png").unlink()
    (scenes["masks"] / "0.tif").write_bytes(encoded(np.zeros((4, 4), np.uint8), "TIFF"))
    with pytest.raises(wt.SourceError, match="mask.png and mask.tif: a label lies in one field"):
        wt.convert_folder(out=tmp_path / "out", **scenes, mask_classes=["a", "b", "c"])
    assert len(wt.convert_folder(out=tmp_path / "out", **scenes)) == 6


def test_a_set_with_masks_may_get_more_shards(tmp_path: Path, scenes: dict[str, Any]) -> None:
    names = ["a", "b", "c"]
    index = wt.convert_folder(out=tmp_path / "out", **scenes, mask_classes=names, ignore=2)
    fields = {"png": encoded(np.zeros((4, 4, 3), np.uint8)), "mask.png": encoded(MASK[:4, :4])}
    write_tar(tmp_path / "out" / "more.tar", [("new", fields)])
    again = wt.index(tmp_path / "out")
    assert (len(again), again.labels, again.columns) == (7, index.labels, ())


@pytest.mark.parametrize("name", ["mask", "mask.png"])
def test_a_label_field_of_masks_is_refused(
    tmp_path: Path, scenes: dict[str, Any], name: str
) -> None:
    wt.convert_folder(out=tmp_path / "out", **scenes, mask_classes=["a", "b", "c"])
    with pytest.raises(wt.UsageError, match=r"wt.mask\('mask.png'\)"):
        wt.Loader(tmp_path / "out", {"label": wt.label(name)}, batch_size=2)


def test_appended_masks_need_the_names_of_the_set(tmp_path: Path, scenes: dict[str, Any]) -> None:
    wt.convert_folder(out=tmp_path / "out", **scenes, mask_classes=["a", "b", "c"])
    with pytest.raises(wt.UsageError, match="missing in the new samples.*mask_classes="):
        wt.convert_folder(out=tmp_path / "out", **scenes, append=True)
