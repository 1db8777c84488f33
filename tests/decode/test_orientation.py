"""EXIF and XMP orientation is applied as by Pillow's exif_transpose, on every way to pixels."""

from __future__ import annotations

import io
import random
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps

import wdstrain as wt
from tests.conftest import ROOT, encoded, noise

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow warns of unusual metadata

Pixels = npt.NDArray[np.uint8]

BYTE, ASCII, SHORT, LONG, RATIONAL, FLOAT = 1, 2, 3, 4, 5, 11
SIDE = 24  # of full images, so that no pixel is resized


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
    camera = entry(271, ASCII, 6, struct.pack(order + "I", 120), order)
    resolution = entry(282, RATIONAL, 1, struct.pack(order + "I", 130), order)
    entries = [camera, entry(274, kind, 1, value_of(kind, number, order), order), resolution]
    return in_exif(tiff(entries, order, tail=bytes(200), **words))


def xmp(text: str) -> bytes:
    return segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + text.encode())


def places(picture: bytes) -> list[int]:
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


def packed(pictures: list[bytes], folder: Path, field: str = "jpg") -> Path:
    samples = ({"__key__": f"k{n:05d}", field: image} for n, image in enumerate(pictures))
    wt.pack(samples, folder, shuffle=False)
    return folder


def delivered(folder: Path, num_workers: int = 0, **options: Any) -> list[Pixels]:
    how: dict[str, Any] = {"batch_size": 16, "shuffle": False, "tail": "keep"}
    with wt.Loader(folder, {"x": wt.image(**options)}, num_workers=num_workers, **how) as loader:
        return [image.permute(1, 2, 0).numpy() for batch in loader for image in batch["x"]]


def check(pictures: list[bytes], folder: Path, names: list[Any]) -> None:
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
    upright_files = [encoded(Image.fromarray(by_pillow(image)), "PNG") for image in pictures]
    packed(upright_files, tmp_path / "png", "png")
    for size in ((40, 40), (60, 101), (48, 48)):
        words: dict[str, Any] = {"size": size, "augment": augment, "num_workers": num_workers}
        rotated, upright = (delivered(tmp_path / kind, **words) for kind in ("jpg", "png"))
        for n, (image, expected) in enumerate(zip(rotated, upright, strict=True)):
            assert np.array_equal(image, expected), (n, size)


SIX, XMP_THREE = exif(6), xmp('<x tiff:Orientation="3"/>')
ORIENTED = [entry(274, SHORT, 1, bytes([number])) for number in range(9)]
CASES = {
    "XMP alone": xmp('<x tiff:Orientation="6"/>'),
    "XMP, an element": xmp("<tiff:Orientation>8</tiff:Orientation>"),
    "XMP, no number": xmp('<x tiff:Orientation="x"/><y tiff:Orientation="3"/>'),
    "XMP, none": xmp("<x O tiff:Orientation"),
    "XMP, zero": xmp('<x tiff:Orientation="0"/><y tiff:Orientation="3"/>'),
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


def test_random_segments_are_read_as_by_pillow(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    bits = random.Random(seed)
    plain = [jpeg(), jpeg(progressive=True), jpeg(mode="L")]
    pictures: list[Any] = []
    while len(pictures) < 200:
        try:
            image = drawn(bits, plain)
            by_pillow(image)
        except Exception:  # Pillow raises any exception its parsers meet
            continue
        pictures.append(image)
    check(pictures, tmp_path / "set", [f"seed {seed}, number {n}" for n in range(200)])


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_orientation_of_other_formats_is_applied(tmp_path: Path, kind: str) -> None:
    pictures: list[bytes] = []
    for number in range(10):
        tags = Image.Exif()
        tags[274] = number
        pictures.append(encoded(Image.fromarray(noise(31, 20)), kind, exif=tags))
    packed(pictures, tmp_path / "set", kind.lower())
    for image, expected in zip(delivered(tmp_path / "set"), map(by_pillow, pictures), strict=True):
        assert np.array_equal(image, expected)


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
