"""Bytes become the right values, or a reason; nothing is unpickled and no partial picture is taken for whole."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg
import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2

import wdstrain as wt
from tests.conftest import picture
from wdstrain.decode import jpeg_region
from wdstrain.decode.codecs import decode_image
from wdstrain.decode.resize import fit
from wdstrain.decode.transforms import DRAWS, Augment, middle_crop, random_crop, region
from wdstrain.errors import SampleError, UsageError
from wdstrain.native import kernels
from wdstrain.order.rng import uniform

NO_DRAWS = np.zeros(DRAWS)


def value(field: Any, data: bytes) -> Any:
    """What a field makes of bytes."""
    out = np.zeros(field.example.shape, field.example.dtype) if field.example else None
    returned = field.read(field.names[0], memoryview(data), out, NO_DRAWS)
    return out if out is not None else returned


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_pixels_are_those_that_pillow_sees(kind: str) -> None:
    data = picture(5, kind=kind)
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert abs(decode_image(data).astype(int) - wanted).max() <= 2


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = Image.open(io.BytesIO(picture(1))).resize((64, 32))
    data = encoded(plain, "JPEG", exif=exif, quality=95)
    turned = decode_image(data)
    assert turned.shape == (64, 32, 3)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(turned, np.asarray(upright))


def test_sixteen_bit_greys_keep_their_high_byte() -> None:
    grey = (np.arange(100, dtype=np.uint16) * 600).reshape(10, 10)
    pixels = decode_image(encoded(Image.fromarray(grey), "PNG"))
    assert np.array_equal(pixels[:, :, 0], (grey >> 8).astype(np.uint8))


def test_cmyk_palette_and_alpha_become_rgb() -> None:
    red = Image.new("RGB", (8, 8), (250, 10, 10))
    for data in (
        encoded(red.convert("CMYK"), "JPEG", quality=95),
        encoded(red.convert("P"), "PNG"),
        encoded(red.convert("RGBA"), "PNG"),
    ):
        pixels = decode_image(data)
        assert pixels.shape == (8, 8, 3)
        assert abs(pixels[4, 4].astype(int) - [250, 10, 10]).max() < 20


def test_a_truncated_picture_is_never_taken_for_whole() -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
        data = encoded(Image.fromarray(noise), kind)
        for share in (0.1, 0.5, 0.9):
            with pytest.raises(SampleError):
                decode_image(data[: int(len(data) * share)])


@pytest.mark.parametrize("data", [b"", b"hello", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_picture_is_a_reason(data: bytes) -> None:
    with pytest.raises(SampleError, match="bytes, starting"):
        decode_image(data)


@pytest.mark.filterwarnings("ignore")  # Pillow warns of odd metadata
def test_difficult_pictures_end_as_pillow_ends_with_them(data: Callable[[str], Path]) -> None:
    folder = data("difficult")
    seen = 0
    with open(folder / "manifest.csv", newline="") as table:
        for row in csv.DictReader(table):
            raw = (folder / row["file"]).read_bytes()
            seen += 1
            if row["pillow_rgb"].startswith("ok"):
                width, height = map(int, row["size"].split("x"))
                assert sorted(decode_image(raw).shape[:2]) == sorted((height, width)), row["file"]
            else:
                with pytest.raises(SampleError):
                    decode_image(raw)
    assert seen > 60


@pytest.mark.parametrize(
    ("data", "wanted"),
    [(b"7", 7), (b"7\n", 7), (b" 0 ", 0), (b"\xef\xbb\xbf12", 12), (b"dog", 1), (b"cat", 0)],
)
def test_labels_are_numbers_or_names_of_classes(data: bytes, wanted: int) -> None:
    classes = ("cat", "dog") if data.isalpha() else ()
    assert value(wt.label(classes=classes), data) == wanted


@pytest.mark.parametrize("data", [b"", b"1.5", b"-1", b"bird", b"\xff", b"99"])
def test_what_is_no_class_is_a_reason(data: bytes) -> None:
    with pytest.raises((SampleError, UnicodeDecodeError)):
        value(wt.label(classes=("cat", "dog")), data)


def test_columns_of_json_are_labels_and_numbers() -> None:
    data = b'{"angle": -0.25, "kind": "dog", "n": 3}'
    assert value(wt.number("json", column="angle"), data) == np.float32(-0.25)
    assert value(wt.label("json", column="kind", classes=["cat", "dog"]), data) == 1
    assert value(wt.label("json", column="n"), data) == 3
    with pytest.raises(SampleError, match="it has no entry 'speed', but angle, kind, n"):
        value(wt.number("json", column="speed"), data)
    with pytest.raises(SampleError, match="'dog' is not a number"):
        value(wt.number("json", column="kind"), data)


@pytest.mark.parametrize(
    "number",
    ["1e400", "-1e400", "1" + "0" * 400, "1e39"],
    ids=["1e400", "-1e400", "400 digits", "1e39"],
)
def test_a_number_beyond_the_largest_is_not_infinity(number: str) -> None:
    for field, data in (
        (wt.number("x"), number),
        (wt.number("json", column="n"), f'{{"n": {number}}}'),
        (wt.number("json", column="n"), f'{{"n": "{number}"}}'),
    ):
        with pytest.raises(SampleError, match=r"more than a float32 holds|is not a number"):
            value(field, data.encode())


def test_a_number_may_be_infinite_itself() -> None:
    assert value(wt.number("x"), b"-inf") == -np.inf
    assert value(wt.number("json", column="n"), b'{"n": Infinity}') == np.inf
    assert value(wt.number("x"), npy_bytes(np.float64("inf"))) == np.inf


def npy_bytes(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_text_json_and_arrays() -> None:
    assert value(wt.text(), "grüß\n".encode()) == "grüß\n"
    assert value(wt.json(), b'{"a": [1, 2]}') == {"a": [1, 2]}
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6.0).reshape(2, 3))
    assert np.array_equal(value(wt.array(), buffer.getvalue()), np.arange(6.0).reshape(2, 3))


def test_arrays_of_objects_are_not_unpickled() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        value(wt.array(), buffer.getvalue())


@pytest.mark.parametrize(
    "dtype", ["uint8", "<f4", ">i2", "bool", "U3", "datetime64[s]", [("a", "<i4"), ("b", "u1")]]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 5, 2)])
def test_arrays_are_what_numpy_loads(dtype: Any, shape: tuple[int, ...]) -> None:
    made = np.zeros(shape, dtype)
    if made.size and not isinstance(dtype, list):
        made.flat[-1] = 1
    for one in (made, np.asfortranarray(made)):
        buffer = io.BytesIO()
        np.save(buffer, one)
        found = value(wt.array(), buffer.getvalue())
        assert np.array_equal(found, one)
        assert (found.dtype, found.flags.writeable) == (one.dtype, True)
        with pytest.raises((ValueError, EOFError, SampleError)):
            value(wt.array(), buffer.getvalue()[:-1] if one.nbytes else buffer.getvalue()[:50])


def test_arrays_of_one_shape_land_in_batch_memory(tmp_path: Path) -> None:
    arrays = [np.random.default_rng(n).integers(0, 255, (4, 3), np.uint8) for n in range(20)]
    wt.pack(
        ({"__key__": f"k{n:02d}", "x.npy": one} for n, one in enumerate(arrays)),
        str(tmp_path / "s"),
        shuffle=False,
    )
    fixed = wt.Loader(
        tmp_path / "s", {"x": wt.array("x.npy", shape=(4, 3), dtype="uint8")}, batch_size=5
    )
    loose = wt.Loader(tmp_path / "s", {"x": wt.array("x.npy")}, batch_size=5)
    for a, b in zip(fixed, loose, strict=True):
        assert torch.equal(a["x"], b["x"])
        assert all(
            torch.equal(x, torch.from_numpy(arrays[int(k[1:])]))
            for k, x in zip(a["__key__"], a["x"], strict=True)
        )
    with pytest.raises(SampleError, match=r"it is uint8\[4, 3\], and uint8\[3, 4\] was asked for"):
        list(
            wt.Loader(
                tmp_path / "s", {"x": wt.array("x.npy", shape=(3, 4), dtype="uint8")}, batch_size=5
            )
        )
    for options in (
        {"shape": (3,)},
        {"shape": (3,), "dtype": "text"},
        {"shape": (-1,), "dtype": "uint8"},
    ):
        with pytest.raises(UsageError):
            wt.array(**options)


def test_a_middle_crop_keeps_the_shape_asked_for() -> None:
    assert middle_crop(100, 200, 1.0) == (0, 50, 100, 100)
    assert middle_crop(200, 100, 1.0) == (50, 0, 100, 100)
    assert middle_crop(100, 100, 2.0) == (25, 0, 50, 100)
    assert middle_crop(1, 1, 7.0) == (0, 0, 1, 1)


def test_random_crops_are_distributed_as_torchvision_draws_them() -> None:
    count, height, width = 4000, 375, 500
    ours = np.array(
        [random_crop(height, width, row) for row in uniform(np.arange(count), DRAWS, "t")]
    )
    torch.manual_seed(0)
    picture = torch.empty(3, height, width)
    drawn = [v2.RandomResizedCrop(224).make_params([picture]) for _ in range(count)]
    theirs = np.array([[one[k] for k in ("top", "left", "height", "width")] for one in drawn])
    for column in range(4):
        spread = theirs[:, column].std()
        assert abs(ours[:, column].mean() - theirs[:, column].mean()) < 0.1 * spread
        assert abs(ours[:, column].std() - spread) < 0.1 * spread
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()


def test_resizing_is_torchvisions() -> None:
    pixels = decode_image(picture(3, size=(60, 40)))
    out = np.empty((20, 30, 3), np.uint8)
    top, left, height, width = region(*pixels.shape[:2], (20, 30), Augment(), NO_DRAWS)
    assert (top, left, height, width) == (0, 0, 40, 60)
    fit(pixels, out)
    wanted = v2.functional.resize(
        torch.from_numpy(pixels).permute(2, 0, 1), [20, 30], antialias=True
    ).permute(1, 2, 0)
    assert abs(out.astype(int) - wanted.numpy().astype(int)).max() <= 1


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("width", [1, 2, 5, 8, 224])
def test_pictures_of_any_width_are_turned_around(
    width: int, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiles:
        monkeypatch.setattr(kernels, "library", None)
    whole = np.random.default_rng(width).integers(0, 256, (6, 2 * width, 3), np.uint8)
    memory = np.zeros((8, width, 3), np.uint8)
    for part in (whole[:, :width].copy(), whole[:, width:], whole[:, ::2]):
        fit(part, memory[1:7], mirrored=True)
        assert np.array_equal(memory[1:7], part[:, ::-1, ::-1])
        assert not memory[0].any()
        assert not memory[7].any()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_flip_is_a_mirror_half_of_the_time(kind: str) -> None:
    data, field = picture(3, kind=kind), wt.image(size=(20, 24), augment="flip")
    pixels = decode_image(data)
    plain, flipped = np.empty_like(pixels), np.empty_like(pixels)
    draws = NO_DRAWS.copy()
    draws[22] = 0.7
    field.read("jpg", memoryview(data), plain, draws)
    draws[22] = 0.3
    field.read("jpg", memoryview(data), flipped, draws)
    assert np.array_equal(plain, pixels)
    assert np.array_equal(flipped, pixels[:, ::-1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: wt.image(augment="rrc"),
        lambda: wt.image(size=8, augment="spin"),
        lambda: wt.image(size=0),
        lambda: wt.image(size=(64,)),  # type: ignore[arg-type]
        lambda: wt.image(size="64"),  # type: ignore[arg-type]
        lambda: wt.label(" ; "),
    ],
)
def test_fields_that_cannot_be_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        make()


def test_pictures_without_a_size_come_as_they_are() -> None:
    assert value(wt.image(), picture(1)).shape == (3, 20, 24)


# --- a part of a picture ---------------------------------------------------------------------------------------------


def noise(width: int, height: int) -> npt.NDArray[Any]:
    """Noise and slopes, so that every block differs from its neighbours. uint8[height, width, 3]"""
    rows, columns = np.mgrid[:height, :width]
    grains = np.random.default_rng(width * height).integers(0, 60, (height, width, 3))
    return (np.stack([rows % 190, columns % 190, (rows + columns) % 190], axis=2) + grains).astype(
        np.uint8
    )


def photo(width: int, height: int, *, mode: str = "RGB", **options: Any) -> bytes:
    return encoded(Image.fromarray(noise(width, height)).convert(mode), "JPEG", **options)


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411", "Gray", "progressive"])
def test_a_part_is_exactly_that_part_of_the_whole(
    subsampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if jpeg_region._library() is None:
        pytest.skip(
            "libjpeg-turbo 3 is not here: pip install turbojpeg, or the system's libturbojpeg of version 3"
        )
    draws = np.random.default_rng(0)
    for width, height in ((1, 1), (7, 3), (16, 16), (129, 77), (333, 250)):
        pixels = (
            noise(width, height) if subsampling != "Gray" else noise(width, height)[..., :1].copy()
        )
        if subsampling == "progressive":
            data = photo(width, height, progressive=True)
        else:
            data = simplejpeg.encode_jpeg(
                pixels, 70, "GRAY" if subsampling == "Gray" else "RGB", subsampling
            )
        for _ in range(30):
            top, left = int(draws.integers(height)), int(draws.integers(width))
            box = (
                top,
                left,
                int(draws.integers(1, height - top + 1)),
                int(draws.integers(1, width - left + 1)),
            )
            part = jpeg_region.decode_part(data, box, 10**6)
            assert part is not None
            with monkeypatch.context() as without:
                without.setattr(jpeg_region, "_library", lambda: None)
                assert np.array_equal(part, decode_image(data, lambda h, w, box=box: box))


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_with_and_without_the_library_pixels_are_the_same(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, field = photo(190, 140, mode=mode), wt.image(size=64, augment="rrc+flip")
    with_it, exif = jpeg_region._library, Image.Exif()
    exif[0x0112] = 6
    turned = photo(190, 140, mode=mode, exif=exif)
    for number in range(20):
        draws, found = np.random.default_rng(number).random(DRAWS), []
        for library in (with_it, lambda: None):
            monkeypatch.setattr(jpeg_region, "_library", library)
            for one in (data, turned):
                out = np.zeros((64, 64, 3), np.uint8)
                field.read("jpg", memoryview(one), out, draws)
                found.append(out)
        assert np.array_equal(found[0], found[2])
        assert np.array_equal(found[1], found[3])


def test_a_picture_of_the_right_size_lands_where_it_is_wanted() -> None:
    data, field = photo(64, 48), wt.image(size=(48, 64), augment="flip")
    whole = decode_image(data)
    for flip in (0.2, 0.7):
        out, draws = np.zeros((48, 64, 3), np.uint8), np.full(DRAWS, flip)
        field.read("jpg", memoryview(data), out, draws)
        assert np.array_equal(out, whole[:, ::-1] if flip < 0.5 else whole)


def test_a_part_of_a_picture_that_was_cut_is_no_picture() -> None:
    """Also where the part lies above the cut."""
    data = photo(200, 200)
    for share in (0.3, 0.9, 0.999):
        with pytest.raises(SampleError):
            decode_image(data[: int(len(data) * share)], lambda height, width: (0, 0, 8, 8))


def test_a_good_picture_after_a_bad_one_is_good(data: Callable[[str], Path]) -> None:
    good, whole = photo(129, 77), (0, 0, 77, 129)
    wanted = decode_image(good)
    for path in sorted(data("difficult").rglob("*.jp*g")):
        jpeg_region.decode_part(path.read_bytes() + b"\xff\xd9", whole, 10**6)
        assert np.array_equal(decode_image(good), wanted), path.name
        assert (
            jpeg_region._library() is None
            or jpeg_region.decode_part(good, whole, 10**6) is not None
        )


def test_every_thread_decodes_for_itself() -> None:
    data = [photo(150 + n, 100, quality=80) for n in range(8)]
    wanted = [decode_image(one, lambda h, w: (10, 10, 50, 60)) for one in data]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            found = list(
                pool.map(lambda one: decode_image(one, lambda h, w: (10, 10, 50, 60)), data)
            )
            assert all(map(np.array_equal, found, wanted))


@pytest.mark.parametrize("library", [True, False])
def test_a_part_of_a_picture_that_has_the_size_of_the_batch(
    library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not resized from the memory it is resized into: with a byte behind its end, and without libjpeg-turbo 3."""
    data, field = photo(64, 64) + (b"x" if library else b""), wt.image(size=64, augment="rrc+flip")
    whole = decode_image(data)
    if not library:
        monkeypatch.setattr(jpeg_region, "_library", lambda: None)
    for number in range(300):
        draws = np.random.default_rng(number).random(DRAWS)
        out, expected = np.zeros((64, 64, 3), np.uint8), np.zeros((64, 64, 3), np.uint8)
        field.read("jpg", memoryview(data), out, draws)
        top, left, height, width = region(64, 64, (64, 64), Augment(rrc=True), draws)
        fit(whole[top : top + height, left : left + width].copy(), expected)
        assert np.array_equal(out, expected[:, ::-1] if draws[22] < 0.5 else expected), number
