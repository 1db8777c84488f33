"""EXIF and XMP orientation is applied as by Pillow's exif_transpose, on every way to pixels."""

from __future__ import annotations

import io
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps

import wdstrain as wt
from tests.conftest import ROOT, encoded
from wdstrain.native import kernels

Pixels = npt.NDArray[np.uint8]

BYTE, ASCII, SHORT, LONG, RATIONAL, FLOAT = 1, 2, 3, 4, 5, 11
SIDE = 24  # of full images, so that no pixel is resized


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore Pillow's warnings about unusual metadata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def noise(width: int, height: int) -> Pixels:
    return np.random.default_rng(width).integers(0, 255, (height, width, 3), np.uint8)


def jpeg(width: int = SIDE, height: int = SIDE, mode: str = "RGB", **options: Any) -> bytes:
    return encoded(Image.fromarray(noise(width, height)).convert(mode), "JPEG", **options)


def segment(marker: int, data: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data


def entry(tag: int, kind: int, count: int, value: bytes, order: str = "<") -> bytes:
    return struct.pack(order + "HHI", tag, kind, count) + value.ljust(4, b"\0")


def tiff(entries: list[bytes], order: str = "<", at: int = 8, tail: bytes = b"") -> bytes:
    """Return a TIFF directory that begins at byte `at`."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", at) + bytes(at - 8)
    return head + struct.pack(order + "H", len(entries)) + b"".join(entries) + bytes(4) + tail


def value_of(kind: int, number: int, order: str) -> bytes:
    return struct.pack(order + {BYTE: "B", SHORT: "H", LONG: "I", FLOAT: "f"}[kind], number)


def in_exif(data: bytes) -> bytes:
    return segment(0xE1, b"Exif\0\0" + data)


def exif(number: int, order: str = "<", kind: int = SHORT, **words: Any) -> bytes:
    """Return an EXIF segment as cameras write it: the orientation among other entries."""
    camera = entry(271, ASCII, 6, struct.pack(order + "I", 120), order)
    resolution = entry(282, RATIONAL, 1, struct.pack(order + "I", 130), order)
    entries = [camera, entry(274, kind, 1, value_of(kind, number, order), order), resolution]
    return in_exif(tiff(entries, order, tail=bytes(200), **words))


def xmp(text: str) -> bytes:
    return segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + text.encode())


def places(picture: bytes) -> list[int]:
    """Return the offsets of the segments of a JPEG."""
    at, starts = 2, [2]
    while picture[at + 1] != 0xDA:
        at += 2 + int.from_bytes(picture[at + 2 : at + 4], "big")
        starts.append(at)
    return starts


def inserted(picture: bytes, segment_: bytes, place: int = 0) -> bytes:
    at = places(picture)[place]
    return picture[:at] + segment_ + picture[at:]


def by_pillow(data: bytes) -> Pixels:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


def png(pixels: Pixels) -> bytes:
    return encoded(Image.fromarray(pixels), "PNG")


def packed(pictures: list[bytes], folder: Path, field: str = "jpg") -> Path:
    samples = ({"__key__": f"k{n:05d}", field: image} for n, image in enumerate(pictures))
    wt.pack(samples, folder, shuffle=False)
    return folder


def delivered(folder: Path, num_workers: int = 0, **options: Any) -> list[Pixels]:
    """Return the delivered images, uint8[height, width, 3] each, in the order of the shard."""
    how: dict[str, Any] = {"batch_size": 16, "shuffle": False, "tail": "keep"}
    with wt.Loader(folder, {"x": wt.image(**options)}, num_workers=num_workers, **how) as loader:
        return [image.permute(1, 2, 0).numpy() for batch in loader for image in batch["x"]]


def check(pictures: list[bytes], folder: Path, names: list[Any]) -> None:
    """Compare square images with Pillow, decoded one by one and as rows of a batch."""
    expected = list(map(by_pillow, pictures))
    packed(pictures, folder)
    for options in ({}, {"size": SIDE}):
        for name, image, upright in zip(names, delivered(folder, **options), expected, strict=True):
            assert np.array_equal(image, upright), (name, options)


@pytest.mark.parametrize(("augment", "num_workers"), [("none", 0), ("flip", 1), ("rrc+flip", 0)])
def test_crops_of_rotated_images_equal_crops_of_upright_images(
    tmp_path: Path, augment: str, num_workers: int
) -> None:
    """Every orientation in both byte orders, for color, gray and progressive images."""
    plain = [jpeg(101, 60), jpeg(64, 80, "L"), jpeg(70, 50, progressive=True)]
    plain.append(jpeg(48, 48, subsampling=0))
    segments = [exif(number, order) for number in range(10) for order in "<>"]
    pictures = [inserted(image, each) for each in segments for image in plain]
    packed(pictures, tmp_path / "jpg")
    packed([png(by_pillow(image)) for image in pictures], tmp_path / "png", "png")
    for size in ((40, 40), (60, 101), (48, 48)):
        words: dict[str, Any] = {"size": size, "augment": augment, "num_workers": num_workers}
        rotated, upright = (delivered(tmp_path / kind, **words) for kind in ("jpg", "png"))
        for n, (image, expected) in enumerate(zip(rotated, upright, strict=True)):
            assert np.array_equal(image, expected), (n, size)


def test_orientation_is_read_from_any_type_at_any_offset(tmp_path: Path) -> None:
    names = [
        (number, order, kind, at)
        for number in (0, 1, 2, 5, 6, 8, 9, 300)
        for order in "<>"
        for kind in (BYTE, SHORT, LONG, FLOAT)
        for at in (8, 9, 31)
        if kind != BYTE or number < 256
    ]
    pictures = [inserted(jpeg(), exif(*words, at=at)) for *words, at in names]
    check(pictures, tmp_path / "set", names)


SIX, XMP_THREE = exif(6), xmp('<x tiff:Orientation="3"/>')
ORIENTED = [entry(274, SHORT, 1, bytes([number])) for number in range(9)]
CASES = {
    "XMP alone": xmp('<x tiff:Orientation="6"/>'),
    "XMP, an element": xmp("<tiff:Orientation>8</tiff:Orientation>"),
    "XMP, single quotes": xmp("<x tiff:Orientation='6'/>"),
    "XMP, no number": xmp('<x tiff:Orientation="x"/><y tiff:Orientation="3"/>'),
    "XMP, none": xmp("<x O tiff:Orientation"),
    "XMP, zero": xmp('<x tiff:Orientation="0"/><y tiff:Orientation="3"/>'),
    "two of XMP": xmp('<x tiff:Orientation="6"/>') + XMP_THREE,
    "EXIF before XMP": SIX + XMP_THREE,
    "EXIF after XMP": XMP_THREE + SIX,
    "EXIF that says nothing, and XMP": exif(0) + XMP_THREE,
    "EXIF without it, and XMP": in_exif(tiff([])) + XMP_THREE,
    "EXIF of no bytes, and XMP": in_exif(b"") + XMP_THREE,
    "EXIF twice": exif(1) + SIX,
    "EXIF in two segments": SIX[:2] + struct.pack(">H", 40) + SIX[4:42] + in_exif(SIX[42:]),
    "fill bytes": b"\xff\xff\xff" + SIX,
    "bytes between": segment(0xFE, b"x") + b"\0\0" + SIX,
    "a comment": segment(0xFE, SIX),
    "a long profile": segment(0xE2, b"y" * 60000) * 3 + SIX,
    "capitals": segment(0xE1, b"EXIF" + SIX[8:]),
    "two at once": in_exif(tiff([ORIENTED[6], ORIENTED[3]])),
    "two values": in_exif(tiff([entry(274, SHORT, 2, b"\6\0\3\0")])),
    "no value": in_exif(tiff([entry(274, SHORT, 0, b"\6"), ORIENTED[3]])),
    "after a value beyond the end": in_exif(tiff([entry(271, ASCII, 90, b"\x20"), ORIENTED[6]])),
    "after a type that is none": in_exif(tiff([entry(271, 99, 9, b"\x20"), ORIENTED[6]])),
    "a directory that is cut": in_exif(tiff([ORIENTED[6]])[:-5]),
    "a directory beyond the end": in_exif(b"II*\0\xff\xff\0\0"),
}


@pytest.mark.parametrize("place", [0, 1, 3, -1])
def test_orientation_is_read_at_any_place(tmp_path: Path, place: int) -> None:
    """At the front, after the first segment, after tables and the frame, right before the scan."""
    check([inserted(jpeg(), case, place) for case in CASES.values()], tmp_path / "set", list(CASES))


TYPES = [1, 2, 3, 4, 5, 7, 10, 12] * 5 + [0, 14, 99]


def drawn_tiff(bits: random.Random) -> bytes:
    """Return a random directory with the orientation among its entries."""
    order, at = bits.choice("<>"), 8 + bits.choice([0, 0, 1, 5, 20])
    entries = []
    for n in range(count := bits.choice([1, 1, 2, 3, 8])):
        if n == count // 2 or bits.random() < 0.1:
            kind, size = bits.choice([SHORT] * 6 + [LONG, LONG, BYTE, FLOAT]), bits.choice(SIZES)
            value = value_of(kind, bits.randrange(10), order)
            entries.append(entry(274, kind, size, value, order))
        else:
            kind, size = bits.choice(TYPES), bits.choice([0, 1, 4, 5, 20])
            value = struct.pack(order + "I", bits.randrange(60))
            entries.append(entry(bits.randrange(65536), kind, size, value, order))
    data = bytearray(tiff(entries, order, at, bytes(bits.choice([0, 8, 200]))))
    if bits.random() < 0.15:
        data[bits.randrange(len(data))] = bits.randrange(256)
    return bytes(data[: bits.randrange(len(data))] if bits.random() < 0.1 else data)


SIZES = [1] * 9 + [0, 2, 3]  # numbers of values
TEXTS = ['tiff:Orientation="{}"', "tiff:Orientation>{}", "tiff:Orientation", "Orientation={}"]
RARE = [segment(0xFE, SIX), b"\xff", b"\xff\xd0", segment(0xE0, b"JFIF\0")]


def drawn(bits: random.Random, plain: list[bytes]) -> bytes:
    picture = bits.choice(plain)
    for at in sorted(bits.choices(places(picture), k=bits.choice([1, 1, 1, 2, 3])), reverse=True):
        text = xmp(bits.choice(TEXTS).format(bits.randrange(10)) * 2)
        inside = bits.choice([in_exif(drawn_tiff(bits))] * 6 + [text, *RARE])
        picture = picture[:at] + inside + picture[at:]
    return picture


def compare_drawn(count: int, seed: int, folder: Path) -> None:
    print(f"seed {seed}")
    bits = random.Random(seed)
    plain = [jpeg(), jpeg(progressive=True), jpeg(mode="L")]
    pictures: list[Any] = []
    while len(pictures) < count:
        try:
            image = drawn(bits, plain)
            by_pillow(image)
        except Exception:  # Pillow raises any exception its parsers meet
            continue
        pictures.append(image)
    check(pictures, folder, [f"seed {seed}, number {n}" for n in range(count)])


def test_random_segments_are_read_as_by_pillow(tmp_path: Path) -> None:
    compare_drawn(200, random.randrange(1 << 32), tmp_path / "set")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_thousands_of_random_segments_are_read_as_by_pillow(tmp_path: Path, part: int) -> None:
    compare_drawn(1000, random.randrange(1 << 32), tmp_path / "set")


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_orientation_of_other_formats_is_applied(tmp_path: Path, kind: str) -> None:
    pictures: list[Any] = []
    for number in range(10):
        tags = Image.Exif()
        tags[274] = number
        pictures.append(encoded(Image.fromarray(noise(31, 20)), kind, exif=tags))
    packed(pictures, tmp_path / "set", kind.lower())
    for image, expected in zip(delivered(tmp_path / "set"), map(by_pillow, pictures), strict=True):
        assert np.array_equal(image, expected)


DELIVERED = """
import logging, sys
if "jpeg" in sys.argv[3]:
    sys.modules["turbojpeg"] = None  # as where the package is not installed
how = "%(levelname)s %(name)s %(message)s"
logging.basicConfig(level=logging.INFO, format=how, stream=sys.stdout)
import numpy as np
import wdstrain as wt
fields = {"x": wt.image(size=(30, 40), augment="rrc+flip"), "whole": wt.image(size=24)}
found = {"x": [], "whole": []}
for _ in range(2):
    for batch in wt.Loader(sys.argv[1], fields, batch_size=16, shuffle=False, tail="keep"):
        for name in found:
            found[name].append(batch[name].numpy())
np.savez(sys.argv[2], **{name: np.concatenate(values) for name, values in found.items()})
"""


@pytest.mark.slow
@pytest.mark.skipif(
    kernels.library is None or kernels.libjpeg_turbo() is None,
    reason="no compiler, or no libjpeg-turbo 3",
)
def test_without_compiled_code_pixels_are_equal_and_one_line_is_logged(tmp_path: Path) -> None:
    """Without the package's C kernels, without libjpeg-turbo, and without both."""
    pictures = [
        inserted(image, exif(number))
        for number in range(1, 9)
        for image in (jpeg(), jpeg(101, 60), jpeg(61, 90), jpeg(70, 50, progressive=True))
    ]
    pictures += [jpeg(190, 140, "L"), jpeg(190, 140, "CMYK"), jpeg(190, 140, progressive=True)]
    packed([*pictures, *(inserted(jpeg(), case) for case in CASES.values())], tmp_path / "set")
    bare = tmp_path / "bare" / "wdstrain"
    shutil.copytree(ROOT / "wdstrain", bare, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    outputs = []
    for variant in ("all", "no jpeg", "no c", "no c, no jpeg"):
        package = tmp_path / "bare" if "no c" in variant else ROOT
        words = [str(tmp_path / "set"), str(tmp_path / f"{variant}.npz"), variant]
        options: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": str(package)}}
        options |= {"cwd": tmp_path}  # python -c imports from there before PYTHONPATH
        run = [sys.executable, "-c", DELIVERED, *words]
        ended = subprocess.run(run, capture_output=True, text=True, **options)
        assert ended.returncode == 0, ended.stderr
        outputs.append(dict(np.load(tmp_path / f"{variant}.npz")))
        lines = ended.stdout.splitlines()
        warnings = [line for line in lines if line.startswith("WARNING wdstrain ")]
        infos = [line for line in lines if "libjpeg-turbo 3 was not found" in line]
        assert len(warnings) == ("no c" in variant), ended.stdout
        assert all("install a C compiler and reinstall" in line for line in warnings)
        assert len(infos) == ("no jpeg" in variant), ended.stdout
        assert all(re.match("INFO wdstrain .*pip install turbojpeg", line) for line in infos)
    for other in outputs[1:]:
        assert all(np.array_equal(outputs[0][name], other[name]) for name in ("x", "whole"))


def test_images_downscaled_by_packing_are_rotated(tmp_path: Path) -> None:
    cases = [exif(6), exif(6, kind=BYTE), xmp('<x tiff:Orientation="6"/>')]
    packed([inserted(jpeg(100, 60), case) for case in cases], tmp_path / "set")
    wt.convert_tars(str(tmp_path / "set"), str(tmp_path / "small"), resize=30, shuffle=False)
    shapes = [image.shape[:2] for image in delivered(tmp_path / "small")]
    assert shapes == [(50, 30), (30, 50), (50, 30)]


DRIVER = """
#include <stdio.h>
int main(void) {
    unsigned char size[4];
    long long sum = 0;
    while (fread(size, 1, 4, stdin) == 4) {
        int64_t count = size[0] | size[1] << 8 | size[2] << 16 | (int64_t)size[3] << 24;
        unsigned char *data = malloc(count ? count : 1); /* reads beyond its end are detected */
        if (!data || fread(data, 1, count, stdin) != (size_t)count)
            return 2;
        sum += orientation(data, count);
        free(data);
    }
    printf("%lld", sum);
    return 0;
}
"""


def test_the_parser_never_reads_beyond_its_bytes(tmp_path: Path) -> None:
    """Random and truncated images, under the address and undefined behavior sanitizers."""
    (tmp_path / "it.c").write_text(
        f'#define SOURCE 1ULL\n#include "{ROOT / "wdstrain" / "native" / "kernels.c"}"\n{DRIVER}'
    )
    command = "cc -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -pthread -o"
    files = [str(tmp_path / "it"), str(tmp_path / "it.c")]
    try:
        subprocess.run([*command.split(), *files], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no C compiler with sanitizers")
    seed = random.randrange(1 << 32)
    bits, plain = random.Random(seed), [jpeg(8, 8)]
    pictures = [drawn(bits, plain) for _ in range(1000)]
    for case in [*CASES.values(), exif(6, ">"), xmp("tiff:Orientation=")]:
        image = inserted(plain[0], case)[: len(case) + 40 if len(case) < 400 else 60]
        pictures += [image[:stop] for stop in range(len(image))]
    stdin = b"".join(struct.pack("<I", len(image)) + image for image in pictures)
    ended = subprocess.run([str(tmp_path / "it")], input=stdin, capture_output=True)
    assert ended.returncode == 0, f"seed {seed}: {ended.stderr.decode(errors='replace')[-2000:]}"
