"""Fields decode bytes to values. Nothing is unpickled; damaged and truncated data are errors."""

from __future__ import annotations

import gzip
import io
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

import wdstrain as wt
from tests.conftest import encoded, noise, npy, picture, write_tar
from tests.support.outcomes import result_or_refusal
from wdstrain.decode.codecs import decode_image, log_lost_levels, resize
from wdstrain.decode.transforms import DRAWS, FLIP_DRAW, Augment, center_crop, region
from wdstrain.errors import SampleError, UsageError

NO_DRAWS = np.zeros(DRAWS)


def value(field: Any, data: bytes) -> Any:
    """Return the value that a field decodes."""
    out = np.zeros(field.example.shape, field.example.dtype) if field.example else None
    returned = field.read(field.names[0], memoryview(data), out, NO_DRAWS)
    return out if out is not None else returned


def test_a_truncated_image_is_an_error() -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
        data = encoded(Image.fromarray(noise), kind)
        for share in (0.1, 0.5, 0.9):
            with pytest.raises(SampleError):
                decode_image(data[: int(len(data) * share)])


@pytest.mark.parametrize("data", [b"", b"hello", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"])
def test_data_that_is_not_an_image_is_an_error(data: bytes) -> None:
    with pytest.raises(SampleError, match="bytes, starting"):
        decode_image(data)


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"7", 7), (b"7\n", 7), (b" 0 ", 0), (b"\xef\xbb\xbf12", 12), (b"dog", 1), (b"cat", 0)],
)
def test_labels_are_class_numbers_or_class_names(data: bytes, expected: int) -> None:
    classes = ("cat", "dog") if data.isalpha() else ()
    assert value(wt.label(classes=classes), data) == expected


@pytest.mark.parametrize("number", ["1.5", "0.25", "-1", "2", "1e3"])
def test_a_number_that_is_no_class_is_an_error(number: str) -> None:
    """A whole number may be written with a point, as tables of other tools do."""
    field = wt.label("json.n", classes=["cat", "dog"])
    assert value(field, b'{"n": 1.0}') == 1
    with pytest.raises(SampleError, match="is not"):
        value(field, f'{{"n": {number}}}'.encode())


@pytest.mark.parametrize("data", [b"", b"1.5", b"-1", b"bird", b"\xff", b"99"])
def test_text_that_is_not_a_class_is_an_error(data: bytes) -> None:
    with pytest.raises((SampleError, UnicodeDecodeError)):
        value(wt.label(classes=("cat", "dog")), data)


def test_labels_and_numbers_are_read_from_json_columns() -> None:
    data = b'{"angle": -0.25, "kind": "dog", "n": 3}'
    assert value(wt.number("json.angle"), data) == np.float32(-0.25)
    assert value(wt.label("json.kind", classes=["cat", "dog"]), data) == 1
    assert value(wt.label("json.n"), data) == 3
    with pytest.raises(SampleError, match="it has no entry 'speed', but angle, kind, n"):
        value(wt.number("json.speed"), data)
    with pytest.raises(SampleError, match="'dog' is not a number"):
        value(wt.number("json.kind"), data)


@pytest.mark.parametrize("number", ["1e39", "-1e39", "-1e400"])
def test_a_number_beyond_float32_is_an_error(number: str) -> None:
    for field, data in ((wt.number("x"), number), (wt.number("json.n"), f'{{"n": {number}}}')):
        with pytest.raises(SampleError, match=r"more than a float32 holds|is not a number"):
            value(field, data.encode())


def test_a_number_may_be_infinite() -> None:
    assert value(wt.number("x"), b"-inf") == -np.inf
    assert value(wt.number("json.n"), b'{"n": Infinity}') == np.inf
    assert value(wt.number("x"), npy(np.float64("inf"))) == np.inf


def test_text_json_and_arrays() -> None:
    assert value(wt.text(), "grüß\n".encode()) == "grüß\n"
    assert value(wt.json(), b'{"a": [1, 2]}') == {"a": [1, 2]}
    array = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(value(wt.array(), npy(array)), array)


def test_a_center_crop_has_the_requested_aspect_ratio() -> None:
    assert center_crop(100, 200, 1.0) == (0, 50, 100, 100)
    assert center_crop(200, 100, 1.0) == (50, 0, 100, 100)
    assert center_crop(100, 100, 2.0) == (25, 0, 50, 100)
    assert center_crop(1, 1, 7.0) == (0, 0, 1, 1)


def test_a_crop_percentage_equals_resizing_and_cropping(tmp_path: Path) -> None:
    assert center_crop(512, 512, 1.0, 0.875) == (32, 32, 448, 448)
    assert center_crop(100, 200, 1.0, 0.5) == (25, 75, 50, 50)
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (8, 12, 3), np.uint8)
    pixels = np.asarray(Image.fromarray(blocks).resize((384, 256), Image.Resampling.BICUBIC))
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    write_tar(tmp_path / "s.tar", [("a", {"png": file.getvalue()})])
    fields = {"image": wt.image(size=112, crop_pct=0.875)}
    with wt.Loader(tmp_path / "s.tar", fields, batch_size=1) as loader:
        cropped = next(iter(loader))["image"][0]
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    reference = v2.functional.center_crop(v2.functional.resize(image, [128], antialias=True), [112])
    difference = (cropped.int() - reference.int()).abs()[
        :, 1:-1, 1:-1
    ]  # edge pixels have fewer neighbors
    assert int(difference.max()) <= 1
    for wrong in ({"crop_pct": 0.0}, {"crop_pct": 1.5}, {"scale": (0.5, 1.0)}, {"ratio": (2, 1)}):
        with pytest.raises(UsageError):
            wt.image(size=8, **wrong)
    with pytest.raises(UsageError, match="needs a size"):
        wt.image(crop_pct=0.5)


def test_resizing_equals_that_of_torchvision() -> None:
    pixels = decode_image(picture(3, size=(60, 40)))
    out = np.empty((20, 30, 3), np.uint8)
    assert region(pixels.shape[0], pixels.shape[1], (20, 30), Augment(), NO_DRAWS) == (0, 0, 40, 60)
    resize(pixels, out)
    expected = v2.functional.resize(
        torch.from_numpy(pixels).permute(2, 0, 1), [20, 30], antialias=True
    ).permute(1, 2, 0)
    assert abs(out.astype(int) - expected.numpy().astype(int)).max() <= 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("width", [1, 2, 5, 8, 24, 224])
def test_a_flip_mirrors_half_of_the_images(kind: str, width: int) -> None:
    data = encoded(Image.fromarray(noise(width, 20)), kind)
    field = wt.image(size=(20, width), augment="flip")
    pixels = decode_image(data)
    memory = np.zeros((2, 22, width, 3), np.uint8)  # with a row before and after each image
    for number, draw in enumerate((0.7, 0.3)):
        draws = NO_DRAWS.copy()
        draws[FLIP_DRAW] = draw
        field.read("jpg", memoryview(data), memory[number, 1:21], draws)
    assert np.array_equal(memory[0, 1:21], pixels)
    assert np.array_equal(memory[1, 1:21], pixels[:, ::-1])
    assert not memory[:, [0, 21]].any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: wt.image(augment="rrc"),
        lambda: wt.image(size=8, augment="spin"),
        lambda: wt.image(size=0),
        lambda: wt.image(size=(64,)),
        lambda: wt.image(size="64"),
        lambda: wt.label(" ; "),
        lambda: wt.array(shape=(3,)),
        lambda: wt.array(shape=(3,), dtype="text"),
        lambda: wt.array(shape=(-1,), dtype="uint8"),
    ],
)
def test_invalid_options_of_fields_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        make()


def test_images_without_a_size_keep_their_own() -> None:
    assert value(wt.image(), picture(1)).shape == (3, 20, 24)


# --- a region of a JPEG ---


def photo(width: int, height: int, *, mode: str = "RGB", **options: Any) -> bytes:
    return encoded(Image.fromarray(noise(width, height)).convert(mode), "JPEG", **options)


def test_a_truncated_jpeg_is_an_error_although_its_region_is_complete() -> None:
    data = photo(200, 200)
    field, draws = wt.image(size=8, augment="rrc"), np.zeros(DRAWS)  # a small region at the top
    field.read("jpg", memoryview(data), np.zeros((8, 8, 3), np.uint8), draws)
    for share in (0.3, 0.9, 0.999):
        truncated = memoryview(data[: int(len(data) * share)])
        with pytest.raises(SampleError):
            field.read("jpg", truncated, np.zeros((8, 8, 3), np.uint8), draws)


def test_an_intact_jpeg_is_decoded_after_a_damaged_one(data: Callable[[str], Path]) -> None:
    field, draws, good = wt.image(size=(77, 129)), np.zeros(DRAWS), photo(129, 77)
    expected = decode_image(good)
    for path in sorted(data("difficult").rglob("*.jp*g")):
        out = np.zeros((77, 129, 3), np.uint8)
        with suppress(SampleError):
            field.read("jpg", memoryview(path.read_bytes() + b"\xff\xd9"), out, draws)
        field.read("jpg", memoryview(good), out, draws)
        assert np.array_equal(out, expected), path.name


def test_threads_decode_at_the_same_time() -> None:
    field, draws = wt.image(size=(50, 60), augment="rrc+flip"), np.full(DRAWS, 0.4)
    images = [photo(150 + n, 100, quality=80) for n in range(8)]

    def decoded(data: bytes) -> npt.NDArray[Any]:
        out = np.zeros((50, 60, 3), np.uint8)
        field.read("jpg", memoryview(data), out, draws)
        return out

    expected = [decoded(data) for data in images]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            assert all(map(np.array_equal, pool.map(decoded, images), expected))


# Bytes behind a JPEG: the video of a motion photo with the marker of a scan among its bytes, a
# second picture that was cut, zeros.
_VIDEO = b"\0\0\0\x18ftypmp42" + bytes(20) + b"\xff\xda" + bytes(9)
_TAILS = {"video": _VIDEO, "cut picture": picture(3, kind="JPEG")[:-20], "zeros": bytes(100)}


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("tail", _TAILS)
def test_bytes_behind_the_end_of_a_jpeg_are_ignored(mode: str, tail: str) -> None:
    data = encoded(Image.open(io.BytesIO(picture(7))).convert(mode), "JPEG")
    assert np.array_equal(decode_image(data + _TAILS[tail]), decode_image(data))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_truncated_jpeg_that_is_padded_with_zeros_is_an_error(mode: str) -> None:
    """libjpeg fills the missing part with gray."""
    data = encoded(Image.open(io.BytesIO(picture(7))).convert(mode), "JPEG")
    with pytest.raises(SampleError, match="no end marker"):
        decode_image(data[:-30] + bytes(1000))


@pytest.mark.parametrize(
    ("field", "data"),
    [
        (wt.json("json.gz"), b'{"n": 3}'),
        (wt.number("json.gz.n"), b'{"n": 3}'),
        (wt.text("txt.gz"), b"three"),
        (wt.label("cls.gz"), b"3"),
        (wt.number("cls.gz"), b"3.5"),
        (wt.array("npy.gz"), npy(np.arange(3))),
        (wt.image("png.gz", size=8), picture(3)),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, bytes) else "",
)
def test_a_gzipped_field_is_read_or_named_gzip(field: Any, data: bytes, tmp_path: Path) -> None:
    """webdataset writes and decodes fields such as json.gz."""
    name, plain = field.names[0], field.names[0].removesuffix(".gz")
    pack = [(f"k{n}", {name: gzip.compress(data), plain: data}) for n in range(2)]
    write_tar(tmp_path / "a.tar", pack)

    def values() -> Any:
        with wt.Loader(tmp_path / "a.tar", {"x": field}, batch_size=2) as loader:
            return next(iter(loader))["x"]

    outcome = result_or_refusal(values)
    assert not isinstance(outcome, str) or "gzip" in outcome


def _gray(kind: str) -> bytes:
    levels = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    arrays = {"16 bits": levels * 16, "12 of 16 bits": levels, "32 bits": levels.astype(np.int32)}
    arrays["floats up to 1"] = (levels / 4095).astype(np.float32)
    return encoded(Image.fromarray(arrays[kind]), "TIFF" if kind[0] in "3f" else "PNG")


@pytest.mark.parametrize("kind", ["16 bits", "12 of 16 bits", "32 bits", "floats up to 1"])
def test_gray_levels_of_deep_images_are_kept_or_their_loss_is_logged(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An image of 4096 levels keeps more than 16 of 256, or a message names the lost levels."""
    ending = "tif" if kind[0] in "3f" else "png"
    write_tar(tmp_path / "a.tar", [("k", {ending: _gray(kind)})])
    log_lost_levels.cache_clear()  # it speaks once in a process

    def levels() -> int:
        with wt.Loader(tmp_path / "a.tar", {"x": wt.image(size=64)}, batch_size=1) as it:
            return len(np.unique(next(iter(it))["x"]))

    outcome = result_or_refusal(levels)
    said = [record.getMessage() for record in caplog.records if "scanned" not in record.msg]
    told = [outcome] if isinstance(outcome, str) else said
    assert (isinstance(outcome, int) and outcome > 200) or any("bit" in text for text in told)


@pytest.mark.parametrize(
    ("first", "column", "pack"),
    [
        (1_000_000, "t", lambda n: {"json": {"t": n}}),
        (1_700_000_000, "t", lambda n: {"json": {"t": n}}),
        (1_700_000_000, "t", lambda n: {"json": {"t": n + 0.5}}),
        (1_700_000_000, None, lambda n: {"t": str(n)}),
        (1_700_000_000, None, lambda n: {"t.npy": np.int64(n)}),
        (2**60, None, lambda n: {"t.npy": np.int64(n)}),
    ],
    ids=["small", "json", "fraction", "text", "int64", "beyond float64"],
)
def test_neighboring_numbers_stay_different_or_are_refused(
    tmp_path: Path,
    first: int,
    column: str | None,
    pack: Callable[[int], dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning of the conversion or of the loader counts as a refusal, too."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            labels = [wt.Label("t", "number", "json", "t")] if column else []
            samples = ({"__key__": str(i), **pack(first + i)} for i in range(8))
            wt.pack(samples, tmp_path / "set", labels=labels)
            fields = {"t": wt.number("json.t" if column else "t;t.npy")}
            with wt.Loader(tmp_path / "set", fields, batch_size=8) as loader:
                values = next(iter(loader))["t"].tolist()
        except wt.WdstrainError as error:
            values, warned = [], [error]  # type: ignore[list-item]
    assert len(set(values)) == 8 or re.search("float32|digits|exact", f"{warned} {caplog.text}")
