"""The pictures of a batch at once come out as they do one by one, and what is odd among them is left to the decoder of one."""

from __future__ import annotations

import ctypes
import io
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg
from PIL import Image

import wdstrain as wt
from tests.conftest import write_tar
from wdstrain.decode import jpeg_region
from wdstrain.decode.fields import Image as Field
from wdstrain.decode.jpeg_batch import EncodedImages
from wdstrain.decode.transforms import DRAWS
from wdstrain.errors import SampleError
from wdstrain.native import kernels
from wdstrain.runtime.watchdog import ProgressCell

pytestmark = pytest.mark.skipif(
    kernels.library is None or jpeg_region.functions() is None,
    reason="there is no compiler, or no libjpeg-turbo 3",
)


def noise(width: int, height: int) -> npt.NDArray[Any]:
    """Noise and slopes, so that every block differs from its neighbours. uint8[height, width, 3]"""
    rows, columns = np.mgrid[:height, :width]
    grains = np.random.default_rng(width * height).integers(0, 60, (height, width, 3))
    return (np.stack([rows % 190, columns % 190, (rows + columns) % 190], axis=2) + grains).astype(
        np.uint8
    )


def jpeg(width: int, height: int, subsampling: str = "420") -> bytes:
    pixels = noise(width, height)
    if subsampling == "Gray":
        return simplejpeg.encode_jpeg(pixels[..., :1].copy(), 80, "GRAY", subsampling)
    return simplejpeg.encode_jpeg(pixels, 80, "RGB", subsampling)


def saved(width: int, height: int, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    into = io.BytesIO()
    Image.fromarray(noise(width, height)).convert(mode).save(into, kind, **options)
    return into.getvalue()


def turned() -> bytes:
    """By EXIF in two segments, which Pillow joins."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = exif.tobytes().removeprefix(b"Exif\0\0")
    parts = [b"Exif\0\0" + one for one in (data[:20], data[20:])]
    plain = saved(90, 60)
    return (
        plain[:2]
        + b"".join(b"\xff\xe1" + (len(one) + 2).to_bytes(2, "big") + one for one in parts)
        + plain[2:]
    )


ODD = {
    "PNG": saved(40, 40, "PNG"),
    "progressive": saved(90, 60, progressive=True),
    "turned by EXIF in two segments": turned(),
    "CMYK": saved(90, 60, mode="CMYK"),
    "cut": jpeg(90, 60)[:1500],
    "cut, with an end": jpeg(90, 60)[:1500] + b"\xff\xd9",
    "of a bad head": b"\xff\xd8\xff\xc0\x00\x11\x08\x00\x00\x00\x00\x00\xff\xd9",
    "an end and no more": b"\xff\xd8\xff\xd9",
    "nothing": b"",
    "text": b"no picture",
}


class Batch:
    """Encoded pictures in memory, and where they become pixels."""

    def __init__(self, pictures: list[bytes], field: Field) -> None:
        self.data = np.frombuffer(b"-".join(pictures), np.uint8)
        self.size = np.array([len(one) for one in pictures])
        self.start = np.concatenate([[0], np.cumsum(self.size + 1)[:-1]])
        assert field.size is not None
        self.field, self.draws = (
            field,
            np.random.default_rng(len(pictures)).random((len(pictures), DRAWS)),
        )
        self.out = np.full((len(pictures), *field.size, 3), 7, np.uint8)
        self.desk = ProgressCell.unwatched()

    def read(self, rows: list[int] | None = None) -> set[int]:
        members = EncodedImages(self.start + self.data.ctypes.data, self.size)
        wanted = list(range(len(self.size))) if rows is None else rows
        return self.field.read_rows(members, wanted, self.out, self.draws, self.desk.row_address)

    def one_by_one(self, row: int) -> npt.NDArray[Any]:
        found = np.zeros(self.out.shape[1:], np.uint8)
        start = int(self.start[row])
        self.field.read(
            "jpg",
            memoryview(bytes(self.data[start : start + int(self.size[row])])),
            found,
            self.draws[row],
        )
        return found


@pytest.mark.parametrize("augment", ["none", "flip", "rrc", "rrc+flip", "rrc+flip+trivialaugment"])
@pytest.mark.parametrize("size", [(1, 1), (48, 64), (77, 129), (224, 224)])
def test_pixels_are_those_of_one_by_one(size: tuple[int, int], augment: str) -> None:
    kinds = ("444", "422", "420", "440", "411", "Gray")
    sides = ((1, 1), (7, 3), (16, 16), (64, 48), (129, 77), (500, 375))
    batch = Batch(
        [jpeg(*side, kind) for kind in kinds for side in sides],
        wt.image(size=size, augment=augment),
    )
    assert batch.read() == set(range(36))
    assert batch.desk.state[1] == 35
    for row in range(36):
        assert np.array_equal(batch.out[row], batch.one_by_one(row)), row


def test_a_part_whose_surroundings_have_the_size_that_is_wanted_is_no_whole() -> None:
    """At the left upper corner a part and one block more may be as large as what it becomes: it is resized all the same."""
    batch = Batch([jpeg(64, 64)] * 1000, wt.image(size=64, augment="rrc+flip"))
    assert batch.read() == set(range(1000))
    for row in range(1000):
        assert np.array_equal(batch.out[row], batch.one_by_one(row)), row


def without(picture: bytes, marker: int) -> bytes:
    """A JPEG without its segments of this marker."""
    found, at = bytearray(picture[:2]), 2
    while picture[at + 1] != 0xDA:
        size = 2 + int.from_bytes(picture[at + 2 : at + 4], "big")
        if picture[at + 1] != marker:
            found += picture[at : at + size]
        at += size
    return bytes(found) + picture[at:]


@pytest.mark.parametrize("augment", ["none", "rrc"])
def test_a_picture_never_has_the_tables_of_another(augment: str) -> None:
    """What lacks how it was quantised is bad, whatever was decoded before; what lacks the usual codes is decoded with those."""
    usual = [without(saved(60 + n, 48, quality=30), 0xC4) for n in range(20)]
    others = [saved(60 + n, 48, quality=95, optimize=True) for n in range(20)]
    bare = without(saved(64, 48, quality=30), 0xDB)
    pictures = [one for pair in zip(others, usual, strict=True) for one in pair]
    batch = Batch([*pictures, bare], wt.image(size=32, augment=augment))
    assert batch.read() == set(range(40))
    for row in range(40):
        assert np.array_equal(batch.out[row], batch.one_by_one(row)), row
    for row in range(1, 40, 2):
        alone = Batch([usual[row // 2]], batch.field)
        alone.draws[0] = batch.draws[row]
        assert alone.read() == {0}
        assert np.array_equal(alone.out[0], batch.out[row]), row
    with pytest.raises(SampleError):
        batch.one_by_one(40)


def tall_blocks(width: int, height: int) -> bytes:
    """A JPEG whose colours are sampled in blocks of 8 x 32 (4:4:1), as no encoder of Python's makes it."""
    library, pixels = jpeg_region._library(), noise(width, height)
    library.tj3Set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    number, address = ctypes.c_int, ctypes.c_void_p
    library.tj3Compress8.argtypes = [
        address,
        address,
        number,
        number,
        number,
        number,
        address,
        address,
    ]
    library.tj3Free.argtypes, library.tj3Free.restype = [address], None
    handle, data, size = library.tj3Init(0), ctypes.c_void_p(), ctypes.c_size_t()
    assert library.tj3Set(handle, 4, 6) == library.tj3Set(handle, 3, 85) == 0
    into = ctypes.addressof(data), ctypes.addressof(size)
    assert library.tj3Compress8(handle, pixels.ctypes.data, width, 0, height, 0, *into) == 0
    found = ctypes.string_at(data, size.value)
    library.tj3Free(data)
    library.tj3Destroy(handle)
    return found


@pytest.mark.parametrize("augment", ["none", "rrc+flip"])
def test_a_way_to_sample_colours_that_one_decoder_does_not_know_is_read_by_all(
    augment: str,
) -> None:
    picture = tall_blocks(129, 77)
    batch = Batch([picture, jpeg(129, 77)], wt.image(size=(77, 129), augment=augment))
    assert batch.read() == {0, 1}
    assert np.array_equal(batch.out[0], batch.one_by_one(0))
    whole = np.asarray(Image.open(io.BytesIO(picture)))
    assert np.array_equal(
        wt.image().read("jpg", memoryview(picture), None, np.zeros(DRAWS)).transpose(1, 2, 0), whole
    )


@pytest.mark.parametrize("augment", ["flip", "rrc+flip"])
@pytest.mark.parametrize("odd", ODD)
def test_what_is_odd_is_left_as_it_was_and_what_follows_is_good(odd: str, augment: str) -> None:
    pictures = [jpeg(90 + n, 64) for n in range(6)]
    pictures[2:2] = [ODD[odd], ODD[odd]]
    pictures.append(ODD[odd])
    batch = Batch(pictures, wt.image(size=(60, 90), augment=augment))
    done = batch.read()
    assert done == {0, 1, 4, 5, 6, 7}
    for row in done:
        assert np.array_equal(batch.out[row], batch.one_by_one(row)), row


def test_only_the_rows_that_are_asked_for_are_read() -> None:
    batch = Batch([jpeg(64, 64) for _ in range(5)], wt.image(size=32))
    assert batch.read([1, 3]) == {1, 3}
    assert batch.read([]) == set()
    assert (batch.out[[0, 2, 4]] == 7).all()
    assert np.array_equal(batch.out[1], batch.one_by_one(1))


def test_pictures_that_together_are_more_than_the_processor_keeps_and_one_that_is_by_itself() -> (
    None
):
    batch = Batch(
        [jpeg(400, 400), jpeg(900, 800), jpeg(400, 380), jpeg(390, 400), jpeg(80, 60)],
        wt.image(size=100),
    )
    assert batch.read() == {0, 2, 3, 4}
    for row in (0, 2, 3, 4):
        assert np.array_equal(batch.out[row], batch.one_by_one(row))


class Negative(Field):
    """A picture of a user's own."""

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> None:
        super().read(name, data, out, draws)
        out[...] = 255 - out


def test_a_loader_reads_ours_at_once_and_asks_what_a_user_made_of_it(tmp_path: Path) -> None:
    pictures = [jpeg(50 + n, 60) for n in range(7)] + [ODD["progressive"]]
    write_tar(
        tmp_path / "a.tar", [(f"k{n}", {"jpg": one, "cls": b"1"}) for n, one in enumerate(pictures)]
    )
    wt.index(tmp_path)
    ours = wt.image("jpg", size=32, augment="rrc+flip")
    fields = {"ours": ours, "theirs": Negative(ours.names, ours.size, ours.augment)}
    for workers in (0, 1):
        with closing(
            wt.Loader(tmp_path, fields, batch_size=8, num_workers=workers, seed=3)
        ) as loader:
            (batch,) = loader
            assert (batch["ours"] + batch["theirs"] == 255).all()


def test_without_the_library_or_the_compiled_part_all_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = Batch([jpeg(64, 64)], wt.image(size=32))
    with monkeypatch.context() as without:
        without.setattr(jpeg_region, "_library", lambda: None)
        assert batch.read() == set()
    with monkeypatch.context() as without:
        without.setattr(kernels, "library", None)
        assert batch.read() == set()
    assert batch.read() == {0}
