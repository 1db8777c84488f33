"""JPEGs decoded as a batch have the pixels of JPEGs decoded one by one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg
from PIL import Image

import wdstrain as wt
from tests.conftest import Sample, encoded, noise, quick_and_slow, write_tar
from wdstrain.decode.codecs import decode_image, resize
from wdstrain.decode.fields import Image as ImageField
from wdstrain.decode.transforms import DRAWS, FLIP_DRAW, region
from wdstrain.errors import SampleError
from wdstrain.native import kernels

pytestmark = pytest.mark.skipif(
    kernels.library is None or kernels.libjpeg_turbo() is None,
    reason="no C compiler, or no libjpeg-turbo 3",
)

Pixels = npt.NDArray[np.uint8]


def jpeg(width: int, height: int, subsampling: str = "420") -> bytes:
    pixels = noise(width, height)
    if subsampling == "Gray":
        return simplejpeg.encode_jpeg(pixels[..., :1].copy(), 80, "GRAY", subsampling)
    return simplejpeg.encode_jpeg(pixels, 80, "RGB", subsampling)


def saved(width: int, height: int, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    return encoded(Image.fromarray(noise(width, height)).convert(mode), kind, **options)


def with_split_exif() -> bytes:
    """Return a JPEG with its EXIF in two segments, which Pillow joins."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = exif.tobytes().removeprefix(b"Exif\0\0")
    parts = [b"Exif\0\0" + part for part in (data[:20], data[20:])]
    segments = [b"\xff\xe1" + (len(part) + 2).to_bytes(2, "big") + part for part in parts]
    plain = saved(90, 60)
    return plain[:2] + b"".join(segments) + plain[2:]


NOT_PLAIN = {
    "PNG": saved(40, 40, "PNG"),
    "progressive, with an early end marker": saved(90, 60, progressive=True) + b"\xff\xd9",
    "EXIF in two segments": with_split_exif(),
    "CMYK": saved(90, 60, mode="CMYK"),
    "truncated, with an end marker": jpeg(90, 60)[:1500] + b"\xff\xd9",
    "invalid frame header": b"\xff\xd8\xff\xc0\x00\x11\x08\x00\x00\x00\x00\x00\xff\xd9",
    "empty": b"",
}


class Batch:
    """Encoded images in memory, and the batch memory that they are decoded into."""

    def __init__(self, images: list[bytes], field: ImageField) -> None:
        self.images, self.field = images, field
        self.data = np.frombuffer(b"-".join(images), np.uint8)
        self.size = np.array([len(image) for image in images])
        self.start = np.concatenate([[0], np.cumsum(self.size + 1)[:-1]])
        assert field.size is not None
        self.draws = np.random.default_rng(len(images)).random((len(images), DRAWS))
        self.out = np.full((len(images), *field.size, 3), 7, np.uint8)

    def decode(self, rows: list[int] | None = None) -> set[int]:
        number = np.arange(len(self.size)) if rows is None else np.array(rows, np.int64)
        address = self.start[number] + self.data.ctypes.data
        return self.field.read_rows(number, address, self.size[number], self.out, self.draws)

    def alone(self, row: int) -> Pixels:
        out = np.zeros(self.out.shape[1:], np.uint8)
        self.field.read("jpg", memoryview(self.images[row]), out, self.draws[row])
        return out

    def expected(self, row: int) -> Pixels:
        """Return the pixels of a row from the full image, cropped and resized by torchvision."""
        full, draws = decode_image(self.images[row]), self.draws[row]
        assert self.field.size is not None
        height, width = full.shape[:2]
        top, left, h, w = region(height, width, self.field.size, self.field.augment, draws)
        out = np.zeros(self.out.shape[1:], np.uint8)
        resize(full[top : top + h, left : left + w], out)
        if self.field.augment.flip and draws[FLIP_DRAW] < 0.5:
            out = out[:, ::-1].copy()
        self.field.augment.apply_policy(out, draws)
        return out

    def check(self, row: int) -> None:
        assert np.array_equal(self.out[row], self.alone(row)), row
        assert np.array_equal(self.out[row], self.expected(row)), row


SIZES = [(1, 1), (48, 64), (77, 129), (224, 224)]
GRID = itertools.product(SIZES, ["none", "flip", "rrc", "rrc+flip", "rrc+flip+trivialaugment"])


@pytest.mark.parametrize(
    ("size", "augment"),
    quick_and_slow(sorted(GRID, key=lambda pair: (pair[0][0] + len(pair[1])) % 3), 7),
)
def test_a_batch_has_the_pixels_of_whole_images_cropped_and_resized(
    size: tuple[int, int], augment: str
) -> None:
    subsamplings = ("444", "422", "420", "440", "411", "Gray")
    sides = ((1, 1), (7, 3), (16, 16), (64, 48), (129, 77), (500, 375))
    images = [jpeg(*side, subsampling) for subsampling in subsamplings for side in sides]
    images += [saved(*side, progressive=True) for side in sides]
    batch = Batch(images, wt.image(size=size, augment=augment))
    assert batch.decode() == set(range(42))
    for row in range(42):
        batch.check(row)


@pytest.mark.parametrize("trailing", [b"", b"x"])
def test_a_region_with_the_final_size_only_with_its_border_is_resized(trailing: bytes) -> None:
    """In the upper left corner, a region and one more block may be as large as the final image.

    With a byte after its end, the JPEG is decoded completely.
    """
    batch = Batch([jpeg(64, 64) + trailing] * 1000, wt.image(size=64, augment="rrc+flip"))
    done = batch.decode()
    assert done == set(range(1000)) or trailing
    for row in range(1000):
        assert np.array_equal(batch.alone(row), batch.expected(row)), row
        assert row not in done or np.array_equal(batch.out[row], batch.alone(row)), row


def without_segment(image: bytes, marker: int) -> bytes:
    kept, position = bytearray(image[:2]), 2
    while image[position + 1] != 0xDA:
        size = 2 + int.from_bytes(image[position + 2 : position + 4], "big")
        if image[position + 1] != marker:
            kept += image[position : position + size]
        position += size
    return bytes(kept) + image[position:]


@pytest.mark.parametrize("augment", ["none", "rrc"])
def test_an_image_never_gets_the_tables_of_another(augment: str) -> None:
    """An image without quantization tables is bad; without Huffman tables it gets the defaults."""
    without_huffman = [without_segment(saved(60 + n, 48, quality=30), 0xC4) for n in range(20)]
    complete = [saved(60 + n, 48, quality=95, optimize=True) for n in range(20)]
    without_quantization = without_segment(saved(64, 48, quality=30), 0xDB)
    images = [image for pair in zip(complete, without_huffman, strict=True) for image in pair]
    batch = Batch([*images, without_quantization], wt.image(size=32, augment=augment))
    assert batch.decode() == set(range(40))
    for row in range(40):
        assert np.array_equal(batch.out[row], batch.alone(row)), row
    for row in range(1, 40, 2):
        single = Batch([without_huffman[row // 2]], batch.field)
        single.draws[0] = batch.draws[row]
        assert single.decode() == {0}
        assert np.array_equal(single.out[0], batch.out[row]), row
    with pytest.raises(SampleError):
        batch.alone(40)


@pytest.mark.parametrize("augment", ["flip", "rrc+flip"])
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_other_images_than_plain_jpegs_are_left_out_of_the_batch(kind: str, augment: str) -> None:
    images = [jpeg(90, 64), *[NOT_PLAIN[kind]] * 2, jpeg(91, 64), NOT_PLAIN[kind]]
    batch = Batch(images, wt.image(size=(60, 90), augment=augment))
    assert batch.decode() == {0, 3}
    batch.check(0)
    batch.check(3)


def test_a_batch_may_be_larger_than_the_scratch_memory() -> None:
    sides = ((400, 400), (900, 800), (400, 380), (390, 400), (80, 60))
    batch = Batch([jpeg(*side) for side in sides], wt.image(size=100))
    assert batch.decode() == {0, 2, 3, 4}
    for row in (0, 2, 3, 4):
        batch.check(row)
    assert np.array_equal(batch.alone(1), batch.expected(1))


class Negative(ImageField):
    """An image field of a user."""

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> None:
        super().read(name, data, out, draws)
        out[...] = 255 - out


def test_a_subclass_of_the_image_field_decodes_every_image_itself(tmp_path: Path) -> None:
    images = [jpeg(50 + n, 60) for n in range(7)] + [saved(90, 60, progressive=True)]
    samples: list[Sample] = [(f"k{n}", {"jpg": data}) for n, data in enumerate(images)]
    write_tar(tmp_path / "a.tar", samples)
    wt.index(tmp_path)
    plain = wt.image("jpg", size=32, augment="rrc+flip")
    fields = {"plain": plain, "negative": Negative(plain.names, plain.size, plain.augment)}
    for num_workers in (0, 1):
        options: dict[str, Any] = {"batch_size": 8, "num_workers": num_workers, "seed": 3}
        with wt.Loader(tmp_path, fields, **options) as loader:
            (batch,) = loader
            assert (batch["plain"] + batch["negative"] == 255).all()


def test_a_random_crop_of_a_narrow_image_is_its_center_at_the_nearest_ratio(tmp_path: Path) -> None:
    """No crop of 8 to 100 % of the area fits: the center with 3 : 4 is taken, as torchvision does."""
    rows = (np.arange(800) % 250).astype(np.uint8)
    pixels = np.broadcast_to(rows[:, None, None], (800, 6, 3))
    image = encoded(Image.fromarray(np.ascontiguousarray(pixels)), "PNG")
    write_tar(tmp_path / "a.tar", [("tall", {"png": image})])
    field = wt.image(size=8, augment="rrc")  # 6 / (3 / 4) = 8 rows: not resized in height
    with wt.Loader(tmp_path, {"image": field}, batch_size=1) as loader:
        (batch,) = loader
    assert batch["image"][0, 0, :, 0].tolist() == rows[396:404].tolist()
