"""Pictures are packed as they are; those that are encoded anew come out upright, with the right colours, and no larger."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

import wdstrain as wt
from tests.conftest import read_with_webdataset
from wdstrain.errors import SampleError
from wdstrain.packing.pictures import Recipe, field_of, looks_like_image


def photo(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A smooth picture: red grows to the right, green downwards."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    image = Image.fromarray(np.stack([x, y, 255 - x], -1).astype(np.uint8))
    return image.convert(mode)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def difference(found: Image.Image, wanted: Image.Image) -> float:
    """Mean difference of two pictures as RGB, 0 to 255."""
    small = wanted.convert("RGB").resize(found.size, Image.Resampling.BICUBIC)
    return float(np.abs(np.asarray(found.convert("RGB"), float) - np.asarray(small, float)).mean())


def apply(field: str, data: bytes, resize: int | None = 64, quality: int | None = None) -> tuple[str, bytes]:
    ((name, made), untouched) = Recipe(resize, quality, "magic").apply([(field, data), ("cls", b"3")])
    assert untouched == ("cls", b"3")
    return name, made


@pytest.mark.parametrize(
    ("size", "made"), [((300, 200), (96, 64)), ((200, 300), (64, 96)), ((65, 65), (64, 64)), ((900, 70), (823, 64))]
)
def test_a_larger_picture_has_the_shorter_side_that_was_asked_for(size: tuple[int, int], made: tuple[int, int]) -> None:
    image = photo(*size)
    name, data = apply("jpg", encoded(image, "JPEG", quality=95))
    assert (name, opened(data).size) == ("jpg", made)
    assert difference(opened(data), image) < 4


def test_only_pictures_that_are_larger_are_touched() -> None:
    for kind, field in (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")):
        data = encoded(photo(200, 64), kind)
        assert apply(field, data) == (field, data)
    assert apply("jpg", encoded(photo(64, 64), "JPEG"), quality=10)[1] != encoded(photo(64, 64), "JPEG")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_that_lies_on_its_side_is_put_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(200, 120), "JPEG", quality=95, exif=exif)
    made = opened(apply("jpg", data)[1])
    assert difference(made, ImageOps.exif_transpose(opened(data))) < 4
    assert made.getexif().get(0x0112, 1) == 1


@pytest.mark.parametrize(
    ("mode", "kind", "field", "wanted"),
    [
        ("L", "JPEG", "jpg", "L"),
        ("CMYK", "JPEG", "jpg", "RGB"),
        ("L", "PNG", "png", "L"),
        ("RGBA", "PNG", "png", "RGBA"),
        ("P", "PNG", "png", "RGBA"),
        ("P", "GIF", "png", "RGBA"),
        ("RGB", "WEBP", "png", "RGB"),
        ("RGB", "BMP", "png", "RGB"),
        ("1", "PNG", "png", "RGB"),
        ("CMYK", "TIFF", "png", "RGB"),
    ],
)
def test_colours_of_every_mode_come_out_right(mode: str, kind: str, field: str, wanted: str) -> None:
    image = photo(200, 120, mode)
    name, data = apply(kind.lower().replace("jpeg", "jpg").replace("tiff", "tif"), encoded(image, kind))
    assert (name, opened(data).mode) == (field, wanted)
    assert difference(opened(data), image) < (40 if mode == "1" else 8)


def test_sixteen_bits_become_eight_and_alpha_stays() -> None:
    grey = np.linspace(0, 65535, 200 * 120).reshape(120, 200).astype(np.uint16)
    made = opened(apply("png", encoded(Image.fromarray(grey), "PNG"))[1])
    assert made.mode == "L"
    assert abs(np.asarray(made, float).mean() - 127.5) < 1.5
    image = photo(200, 120, "RGBA")
    image.putalpha(Image.fromarray(np.tile(np.linspace(0, 255, 200), (120, 1)).astype(np.uint8)))
    alpha = np.asarray(opened(apply("png", encoded(image, "PNG"))[1]))[:, :, 3]
    assert alpha[0, 0] < 5
    assert alpha[0, -1] > 250


def test_a_quality_makes_everything_jpeg() -> None:
    name, data = apply("png", encoded(photo(40, 40, "RGBA"), "PNG"), resize=None, quality=80)
    assert (name, opened(data).format, opened(data).size) == ("jpg", "JPEG", (40, 40))


def test_masks_beside_a_picture_stay_as_they_are_and_two_pictures_keep_their_names() -> None:
    mask, second = encoded(photo(300, 300, "P"), "PNG"), encoded(photo(300, 200), "GIF")
    parts = [
        ("jpg", encoded(photo(300, 200), "JPEG")),
        ("seg.png", mask),
        ("png", encoded(photo(90, 90), "PNG")),
        ("gif", second),
    ]
    for recipe in (Recipe(64, None, "magic"), Recipe(None, 80, "decode")):
        made = recipe.apply(parts)
        assert [field for field, _ in made] == ["jpg", "seg.png", "png", "gif"]
        assert made[1][1] == mask
    both = [("gif", encoded(photo(90, 90), "GIF")), ("bmp", encoded(photo(90, 90), "BMP"))]
    assert [field for field, _ in Recipe(64, None, "magic").apply(both)] == ["png", "bmp"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "its jpg has 0 bytes"),
        (b"<html>", "does not begin as a picture does, but with b'<html>'"),
        (b"\xff\xd8\xff\xe0 and nothing", "Truncated File Read"),
        (b"BMW is a car", "does not begin as a picture does"),
        (b"P1 is a shelf", "does not begin as a picture does"),
    ],
)
def test_what_is_no_picture_is_said_to_be_none(data: bytes, words: str) -> None:
    with pytest.raises(SampleError, match=words):
        apply("jpg", data)
    with pytest.raises(SampleError):
        Recipe(None, None, "decode").apply([("jpg", data)])


def test_a_picture_cut_short_is_never_half_a_picture() -> None:
    for kind, field in (("JPEG", "jpg"), ("PNG", "png")):
        whole = encoded(photo(300, 200), kind)
        for recipe in (Recipe(64, None, "magic"), Recipe(None, None, "decode"), Recipe(500, None, "magic")):
            with pytest.raises(SampleError):
                recipe.apply([(field, whole[: len(whole) * 2 // 3])])


def test_known_formats_are_known_by_how_they_begin() -> None:
    for kind, field in (("JPEG", "jpg"), ("PNG", "png"), ("GIF", "gif"), ("BMP", "bmp"), ("TIFF", "tif"), ("WEBP", "webp")):
        data = encoded(photo(9, 9), kind)
        assert looks_like_image(data)
        assert field_of(data) == field
    assert looks_like_image(encoded(photo(9, 9), "PPM"))


@pytest.mark.parametrize("name", ["flowers/images", "eurosat5"])
def test_real_photographs_are_packed_verbatim(data: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    folder = data(name.split("/")[0]) / (name.split("/")[1] if "/" in name else "")
    wt.pack_folder(str(folder), str(tmp_path / "out"), limit=400)
    here = {hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*.jpg")}
    packed = [fields["jpg"] for _, fields in read_with_webdataset(sorted((tmp_path / "out").glob("*.tar")))]
    assert len(packed) == 400
    assert {hashlib.sha256(one).hexdigest() for one in packed} <= here


def test_the_difficult_pictures_are_right_or_quarantined(data: Callable[[str], Path], tmp_path: Path) -> None:
    index = wt.pack_folder(
        str(data("difficult")), str(tmp_path / "out"), flat=True, resize=64, on_bad="quarantine", jobs=2, shard_samples=8
    )
    assert index.info["listed"] == len(index) + index.info["quarantined"]
    assert index.info["quarantined"] >= 15
    for key, fields in read_with_webdataset(sorted((tmp_path / "out").glob("*.tar"))):
        (made,) = fields.values()
        image = opened(made)
        image.load()
        assert min(image.size) <= 64, key
        if key.startswith("Landscape"):
            assert image.size == (96, 64)
            assert difference(image, ImageOps.exif_transpose(Image.open(data("difficult") / f"{key}.jpg"))) < 6
