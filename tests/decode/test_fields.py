"""Fields decode bytes to values. Nothing is unpickled; damaged and truncated data are errors."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

import wdstrain as wt
from tests.conftest import encoded, noise, npy, picture, write_tar
from tests.support.outcomes import result_or_refusal
from wdstrain.decode.codecs import decode_image, log_lost_levels
from wdstrain.decode.transforms import DRAWS, center_crop
from wdstrain.errors import SampleError, UsageError

NO_DRAWS = np.zeros(DRAWS)


def value(field: Any, data: bytes) -> Any:
    out = np.zeros(field.example.shape, field.example.dtype) if field.example else None
    returned = field.read(field.names[0], memoryview(data), out, NO_DRAWS)
    return out if out is not None else returned


def test_a_truncated_image_is_an_error() -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        data = encoded(Image.fromarray(noise(40, 40)), kind)
        for share in (0.1, 0.5, 0.9):
            with pytest.raises(SampleError):
                decode_image(data[: int(len(data) * share)])
    for data in (b"", b"hello", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"):
        with pytest.raises(SampleError, match="bytes, starting"):
            decode_image(data)


def test_labels_are_class_numbers_or_class_names() -> None:
    field = wt.label(classes=("cat", "dog"))
    assert [value(field, data) for data in (b"cat", b"dog")] == [0, 1]
    numbers = (b"7", b"7\n", b" 0 ", b"\xef\xbb\xbf12")
    assert [value(wt.label(), data) for data in numbers] == [7, 7, 0, 12]
    for data in (b"", b"1.5", b"-1", b"bird", b"\xff", b"99"):
        with pytest.raises((SampleError, UnicodeDecodeError)):
            value(field, data)


def test_a_number_that_is_no_class_is_an_error() -> None:
    """A whole number may be written with a point, as tables of other tools do."""
    field = wt.label("json.n", classes=["cat", "dog"])
    assert value(field, b'{"n": 1.0}') == 1
    for number in ("1.5", "0.25", "-1", "2", "1e3"):
        with pytest.raises(SampleError, match="is not"):
            value(field, f'{{"n": {number}}}'.encode())


def test_labels_and_numbers_are_read_from_json_columns() -> None:
    data = b'{"angle": -0.25, "kind": "dog", "n": 3}'
    assert value(wt.number("json.angle"), data) == np.float32(-0.25)
    assert value(wt.label("json.kind", classes=["cat", "dog"]), data) == 1
    assert value(wt.label("json.n"), data) == 3
    with pytest.raises(SampleError, match="it has no entry 'speed', but angle, kind, n"):
        value(wt.number("json.speed"), data)
    with pytest.raises(SampleError, match="'dog' is not a number"):
        value(wt.number("json.kind"), data)
    for number in (b"1e39", b"-1e39"):
        with pytest.raises(SampleError, match="more than a float32 holds"):
            value(wt.number("x"), number)


def test_a_crop_percentage_equals_resizing_and_cropping() -> None:
    assert center_crop(100, 200, 1.0, 0.5) == (25, 75, 50, 50)
    blocks = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    pixels = np.asarray(Image.fromarray(blocks).resize((384, 256), Image.Resampling.BICUBIC))
    cropped = value(wt.image(size=112, crop_pct=0.875), encoded(Image.fromarray(pixels), "PNG"))
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    reference = v2.functional.center_crop(v2.functional.resize(image, [128], antialias=True), [112])
    difference = np.abs(cropped.astype(int) - reference.permute(1, 2, 0).numpy().astype(int))
    assert difference[1:-1, 1:-1].max() <= 1  # edge pixels have fewer neighbors


@pytest.mark.parametrize(
    "make",
    [
        lambda: wt.image(augment="rrc"),
        lambda: wt.image(size=8, augment="spin"),
        lambda: wt.image(size=8, crop_pct=1.5),
        lambda: wt.image(size=8, scale=(0.5, 1.0)),
        lambda: wt.image(size=8, ratio=(2, 1)),
        lambda: wt.image(crop_pct=0.5),
        lambda: wt.image(size=0),
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
    data = encoded(Image.open(io.BytesIO(picture(7))).convert(mode), "JPEG")
    with pytest.raises(SampleError, match="no end marker"):
        decode_image(data[:-30] + bytes(1000))


@pytest.mark.parametrize(
    ("field", "data"),
    [
        (wt.json("json.gz"), b'{"n": 3}'),
        (wt.text("txt.gz"), b"three"),
        (wt.label("cls.gz"), b"3"),
        (wt.array("npy.gz"), npy(np.arange(3))),
        (wt.image("png.gz", size=8), picture(3)),
    ],
)
def test_a_gzipped_field_is_read_or_named_gzip(field: Any, data: bytes, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k", {field.names[0]: gzip.compress(data)})])
    loader = wt.Loader(tmp_path / "a.tar", {"x": field}, batch_size=1)
    outcome = result_or_refusal(lambda: next(iter(loader))["x"])
    assert not isinstance(outcome, str) or "gzip" in outcome


LEVELS = np.arange(4096, dtype=np.uint16).reshape(64, 64)


@pytest.mark.parametrize(
    ("kind", "levels"),
    [("PNG", LEVELS), ("TIFF", LEVELS.astype(np.int32)), ("TIFF", (LEVELS / 4095).astype("f4"))],
)
def test_gray_levels_of_deep_images_are_kept_or_their_loss_is_logged(
    kind: str, levels: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An image of 4096 levels keeps more than 16 of 256, or a message names the lost levels."""
    log_lost_levels.cache_clear()  # it speaks once in a process
    image = encoded(Image.fromarray(levels), kind)
    outcome = result_or_refusal(lambda: len(np.unique(value(wt.image(size=64), image))))
    texts = [outcome] if isinstance(outcome, str) else caplog.messages
    assert (isinstance(outcome, int) and outcome > 200) or any("bit" in text for text in texts)


@pytest.mark.parametrize(
    ("name", "data_of"),
    [
        ("json.second", lambda n: b'{"second": %d}' % (1_700_000_000 + n)),
        ("second", lambda n: b"%d" % (1_700_000_000 + n)),
        ("number.npy", lambda n: npy(np.int64(2**60 + n))),
    ],
)
def test_neighboring_numbers_stay_different_or_their_loss_is_logged(
    name: str, data_of: Callable[[int], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    field = wt.number(name)
    values = {float(value(field, data_of(n))) for n in range(8)}
    assert len(values) == 8 or "have more digits than float32 holds" in caplog.text
