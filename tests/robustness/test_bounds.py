"""Bounded memory for data that claims to be, or unpacks to, a huge size.

The bounds: a scan of a shard holds 2 bytes for each byte of its headers. Decoding holds, for each
sample decoded at a time (one per core or worker), 12 bytes per pixel of an image (20 for WebP and
AVIF), with at most 178 956 970 pixels, and 12 bytes per byte of any other value, 48 for JSON
(Python objects). Waiting samples, those of the next epoch included, and 16 MB for other work come
on top.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import encoded, write_shards, write_tar
from tests.support.servers import Fault, Handler, serving
from wdstrain import SampleError, ShardError, SourceError, StorageError, WdstrainError
from wdstrain.decode.codecs import decode_image
from wdstrain.shards.tar_headers import END, header

BESIDE = 16 << 20  # bytes for other work
PER_HEADER_BYTE, PER_PIXEL, PER_VALUE_BYTE, PER_JSON_BYTE = 2, 12, 12, 48

PROBE = """
import json, os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one sample at a time is decoded
import wdstrain as wt
from wdstrain.errors import WdstrainError

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

fields = {"image": wt.image("img", size=32), "json": wt.json("doc"), "label": wt.label("txt"),
          "deep": wt.label("doc.json.k"), "number": wt.number("txt"), "text": wt.text("txt"), "array": wt.array("npy")}
results = {}
cases = json.load(sys.stdin)
for path, name in cases[:1] + cases:  # the first twice, so that imports do not count
    open("/proc/self/clear_refs", "w").write("5")  # reset the peak
    before = status("VmRSS")
    message = ""
    try:
        index = wt.info(path, exact=True) if not name else None
        if name:
            list(wt.Loader(path, {"x": fields[name]}, batch_size=1))
    except WdstrainError as error:
        message = f"{type(error).__name__}: {error}"
    results[f"{path} {name}"] = (status("VmHWM") - before, message)
print(json.dumps(results))
"""


def probed(cases: list[tuple[Path, str]]) -> dict[tuple[str, str], tuple[int, str]]:
    """Return (peak bytes, message) by file name for shards that are scanned, or read by field."""
    words = json.dumps([(str(path), name) for path, name in cases])
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=words, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    return {(path.name, name): tuple(results[f"{path} {name}"]) for path, name in cases}


def sealed(block: bytes) -> bytes:
    blank = block[:148] + b" " * 8 + block[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]


def head(name: str = "a.txt", size: bytes = b"00000000000\0", kind: bytes = b"0") -> bytes:
    block = header(name, 0)
    return sealed(block[:124] + size.ljust(12, b"\0") + block[136:156] + kind + block[157:])


def pax(records: bytes, claimed: int | None = None) -> bytes:
    size = octal(len(records) if claimed is None else claimed)
    return head("././@PaxHeader", size, b"x") + records + bytes(-len(records) % 512)


def octal(number: int) -> bytes:
    return b"%011o\0" % number


def base256(number: int) -> bytes:
    return b"\x80" + number.to_bytes(11, "big")


# Headers before one of 'a.txt', and the error.
OCTAL, PAX = "must be an octal number", "malformed PAX header"
HEADERS: list[tuple[bytes, str]] = [
    (head(size=base256(1 << 60)), "ends inside 'a.txt': 1152921504606846976 bytes promised"),
    (head(size=b"\x80" + b"\xff" * 11), "claims an impossible size at offset 0"),
    (head(size=b"-0000000001\0"), OCTAL),
    (pax(b"29 size=18446744073709551615\n"), "ends inside 'a.txt': 18446744073709551615 bytes"),
    (pax(b"11 size=-1\n"), "claims a size of b'-1' at offset 0"),
    (pax(b"99999999999 path=x\n"), f"{PAX} at offset 0"),
    (pax(b"-5 path=x\n"), PAX),
    (pax(b"", 1 << 30), "an extension header of 1073741824 bytes at offset 0; 1 MiB is the limit"),
    (head(kind=b"S"), "holds the sparse file 'a.txt' at offset 0"),
    (pax(b"22 GNU.sparse.major=1\n"), "holds the sparse file|malformed PAX"),
]


@pytest.mark.parametrize(("begin", "words"), HEADERS, ids=range(len(HEADERS)))
def test_impossible_headers_are_named_by_offset(tmp_path: Path, begin: bytes, words: str) -> None:
    begin += head() if b"PaxHeader" in begin else b""
    (tmp_path / "a.tar").write_bytes(begin + bytes(512) + END)
    with pytest.raises(ShardError, match=words):
        wt.Loader(tmp_path / "a.tar")


@pytest.mark.parametrize("size", [1 << 40, 1 << 43])
def test_a_sample_larger_than_memory_is_refused_before_a_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.tar"
    with open(path, "wb") as file:  # a sparse file: a few KB on disk
        file.write(head("k.bin", base256(size)))
        file.seek(512 + size)
        file.write(END)
    refused = f"a.tar: 'k' at offset 0 has {size + 512} bytes, and a sample is held as a whole"
    with pytest.raises(ShardError, match=refused):
        next(iter(wt.Loader(path, batch_size=1)))


def test_batches_larger_than_memory_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k", {"png": b"x"})])
    refused = "bytes of memory cannot be reserved .* Lower shuffle_buffer= or batch_size="
    with pytest.raises(WdstrainError, match=refused):
        next(iter(wt.Loader(tmp_path, {"image": wt.image(size=50_000_000)}, batch_size=1)))


def test_special_files_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tar")
    (tmp_path / "folder.tar").mkdir()
    for name in ("pipe.tar", "folder.tar"):
        with pytest.raises(WdstrainError, match=name):
            wt.Loader(tmp_path / name)
    with pytest.raises(StorageError, match="is a folder, a pipe or a device"):
        wt.Loader(tmp_path)


def test_names_that_are_not_utf8_are_delivered_unchanged(tmp_path: Path) -> None:
    write_tar(tmp_path / "\udcfe.tar", [("k\udcff", {"a\udcfe": b"x", "b": b"y"})])
    for _ in range(2):  # scanned, then from the cache
        (batch,) = wt.Loader(tmp_path, batch_size=1)
        assert batch == {"__key__": ["k\udcff"], "a\udcfe": [b"x"], "b": [b"y"]}
    wt.index(tmp_path)
    document = json.loads((tmp_path / "index.json").read_text(encoding="utf-8"))
    assert document["wdstrain"]["fields"] == ["a\udcfe", "b"]
    (batch,) = wt.Loader(tmp_path, batch_size=1, num_workers=1)
    assert batch["a\udcfe"] == [b"x"]


# --- memory ---


def bombs(folder: Path, members: int) -> list[tuple[Path, str]]:
    folder.mkdir(exist_ok=True)
    few, end = min(members, 60_000), header("k.a", 0) + END
    name = b"1048576 path=" + b"a/" * 524_280 + b"k.a"
    long = pax(b"%b\n" % name.ljust(1_048_575, b"a"))
    shards = {
        "keys": b"".join(header(f"{i:07d}.a", 0) for i in range(members)) + END,
        "fields": b"".join(header(f"k.{i:07d}", 0) for i in range(few)) + END,
        "links": head(kind=b"2") * members + end,
        "headers": pax(b"20 comment=aaaaaaaa\n") * (members // 2) + end,
        "names": (long + head()) * (members // 10_000) + END,
    }
    for name_, data in shards.items():
        (folder / f"{name_}.tar").write_bytes(data)
    return [(path, "") for path in sorted(folder.glob("*.tar"))]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("members", [60_000, 1_000_000])
def test_memory_of_a_scan_is_bounded_by_its_headers(tmp_path: Path, members: int) -> None:
    cases = bombs(tmp_path / "bombs", members)
    for (name, _), (peak, message) in probed(cases).items():
        size = next(path for path, _ in cases if path.name == name).stat().st_size
        assert peak < PER_HEADER_BYTE * size + BESIDE, (name, peak, size, message)


def png_claiming(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    ihdr = chunk(b"IHDR", size + b"\x08\x02\0\0\0")
    idat = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + ihdr + idat + chunk(b"IEND", b"")


SIDE = 2500
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


@pytest.mark.slow
def test_a_picture_holds_a_dozen_bytes_a_pixel_at_most(tmp_path: Path) -> None:
    """Most files have a few KB; memory is a hundredth of that of the largest allowed image."""
    cases, exif = [], Image.Exif()
    exif[274] = 6
    more = [Image.new("RGB", (SIDE, SIDE), i) for i in range(3)]
    fine: dict[str, Any] = {"progressive": True, "subsampling": 0}
    # name, mode, format, and options of Pillow
    files: list[tuple[str, str, str, dict[str, Any]]] = [
        *((f"png-{mode.replace(';', '')}", mode, "PNG", {}) for mode in MODES),
        ("jpeg", "RGB", "JPEG", {}),
        ("jpeg-progressive-444", "RGB", "JPEG", {**fine, "exif": exif}),
        ("jpeg-progressive-cmyk", "CMYK", "JPEG", fine),
        ("tiff-deep", "I;16", "TIFF", {"compression": "tiff_adobe_deflate"}),
        ("jpeg-cmyk", "CMYK", "JPEG", {}),
        ("gif-many", "RGB", "GIF", {"save_all": True, "append_images": more}),
        ("tiff", "RGB", "TIFF", {"compression": "tiff_lzw"}),
        ("webp", "RGB", "WEBP", {}),
        *([("avif", "RGB", "AVIF", {"speed": 10})] if "AVIF" in Image.SAVE else []),
    ]
    for name, mode, kind, options in files:
        data = encoded(Image.new(mode, (SIDE, SIDE)), kind, **options)
        cases.append((write_tar(tmp_path / f"{name}.tar", [("k", {"img": data})]), "image"))
    for (name, _), (peak, message) in probed(cases).items():
        size = (tmp_path / name).stat().st_size
        assert message == "", (name, message)
        each = PER_PIXEL * (5 / 3 if name.startswith(("webp", "avif")) else 1)
        assert peak < each * SIDE * SIDE + 6 * size + BESIDE, (name, peak)


def test_images_with_huge_claimed_sizes_take_no_memory(
    tmp_path: Path, data: Callable[[str], Path]
) -> None:
    bmp = encoded(Image.new("RGB", (8, 8)), "BMP")[:18] + (65535).to_bytes(4, "little") * 2
    tiff, huge = encoded(Image.new("L", (60000, 8)), "TIFF"), (65535).to_bytes(2, "little")
    claims = {
        "png": png_claiming(65535, 65535),
        "png-max": png_claiming((1 << 31) - 1, (1 << 31) - 1),
        "ppm": b"P6 65535 65535 255\n" + bytes(1000),
        "bmp": bmp + bytes(1000),
        "tiff": tiff.replace((8).to_bytes(2, "little"), huge),
    }
    for name in ("max_size.jpg", "decompression_bomb.gif", "png_decompression_dos.png"):
        claims[name] = (data("difficult") / name).read_bytes()
    cases = [
        (write_tar(tmp_path / f"{name}.tar", [("k", {"img": raw})]), "image")
        for name, raw in claims.items()
    ]
    for (name, _), (peak, message) in probed(cases).items():
        assert message.startswith("SampleError: "), (name, message)
        assert f"{name}: 'k', field 'img' at offset 512: " in message
        assert peak < 6 * (tmp_path / name).stat().st_size + BESIDE, (name, peak)


def test_a_jpeg_with_thousands_of_scans_is_refused(tmp_path: Path) -> None:
    """A scan of a progressive JPEG visits all pixels in a dozen bytes: 90 KB take a minute.

    Bytes after the end of the image do not count: images of phones may have a video appended.
    """
    intact = encoded(Image.new("L", (4000, 4000), 128), "JPEG", progressive=True)
    last = intact.rfind(b"\xff\xda")
    data = intact[:last] + intact[last:-2] * 1000 + intact[-2:]
    assert len(data) < 100_000
    write_tar(tmp_path / "set" / "a.tar", [("k", {"jpg": data})])
    scans = "1005 scans of 16000000 pixels"
    slow = f"'k', field 'jpg' at offset 512: {scans} would take too long"
    with pytest.raises(SampleError, match=slow):
        list(wt.Loader(tmp_path / "set", {"image": wt.image(size=64)}, batch_size=1))
    with pytest.raises(SourceError, match=scans):
        wt.convert_tars(str(tmp_path / "set"), str(tmp_path / "small"), resize=64)
    assert decode_image(intact + b"\xff\xda\0\x08" * 100_000).shape == (4000, 4000, 3)


def test_tiles_larger_than_their_image_are_refused() -> None:
    """An image of 16 x 16 pixels may have a tile of 2 GB, which libtiff decodes completely."""

    def tiled(width: int, height: int) -> bytes:
        tile = zlib.compress(bytes(width * height))
        entries = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: width, 323: height}
        entries |= {324: 8, 325: len(tile)}
        rows = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries.items())
        start = struct.pack("<I", 8 + len(tile))
        return b"II*\0" + start + tile + struct.pack("<H", len(entries)) + rows + bytes(4)

    assert decode_image(tiled(16, 16)).shape == decode_image(tiled(256, 256)).shape == (16, 16, 3)
    with pytest.raises(SampleError, match="tiles of 4096 x 2048 pixels for a picture of 16 x 16"):
        decode_image(tiled(4096, 2048))


def npy(head_: str) -> bytes:
    text = head_.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64)


@pytest.mark.slow
def test_memory_of_decoded_values_is_a_bounded_multiple_of_their_size(tmp_path: Path) -> None:
    size = 10 << 20
    shape = "{'descr': '<f8', 'fortran_order': False, 'shape': (%s,), }"
    values: list[tuple[str, str, bytes]] = [
        ("depth", "json", b"[" * size),
        ("depth-in-a-column", "deep", b"[" * size),
        ("names", "deep", json.dumps({f"k{i}": 0 for i in range(size // 16)}).encode()),
        ("dicts", "deep", b"[" + (b'{"":' * 60 + b"0" + b"}" * 60 + b",") * (size // 302) + b"0]"),
        ("digits", "label", b"9" * size),
        ("no-number", "number", b"x" * size),
        ("long-number", "json", b"1" * size),
        ("encoding", "text", b"x" * size + b"\xff"),
        ("npy", "array", npy(shape % (1 << 60))),
        ("npy-nested", "array", npy("(" * 100)),
    ]
    cases = []
    for name, field, raw in values:
        tar = {"json": "doc", "deep": "doc.json", "array": "npy"}.get(field, "txt")
        cases.append((write_tar(tmp_path / f"{name}.tar", [("k", {tar: raw})]), field))
    for (name, field), (peak, message) in probed(cases).items():
        assert message.startswith("SampleError: "), (name, message)
        assert f"{name}: 'k', field '" in message
        assert len(message) < 1500, name
        most = PER_JSON_BYTE if field in ("json", "deep") else PER_VALUE_BYTE
        assert peak < most * (tmp_path / name).stat().st_size + BESIDE, (name, peak)


def _without_end(handler: Handler, path: Path, start: int, stop: int) -> bool:
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client closes it
        for _ in range(1 << 14):  # 16 GB
            handler.wfile.write(bytes(1 << 20))
    return True


def _unfolding(handler: Handler, path: Path, start: int, stop: int) -> bool:
    data = gzip.compress(bytes(200 << 20), 1)  # about 200 KB
    handler.answer(200, data, {"Content-Encoding": "gzip"})
    return True


def machine_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    values = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": size}
    sysconf = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: values.get(name) or sysconf(name))


@pytest.mark.parametrize("answer", [_without_end, _unfolding])
def test_an_endless_index_is_refused(
    answer: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_memory(monkeypatch, 256 << 20)
    (tmp_path / "index.json").touch()
    with (
        serving(tmp_path, faults=[answer], faulty=(".json",)) as server,
        pytest.raises(StorageError, match="has more than 67108864 bytes, too many to hold at once"),
    ):
        wt.Loader(f"{server.url}/index.json")


def test_an_index_is_parsed_only_if_it_fits_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wt.index(write_shards(tmp_path / "set", [8]))
    machine_memory(monkeypatch, 128 * 200)
    with pytest.raises(ShardError, match="bytes of JSON; 200 is the limit"):
        wt.Loader(tmp_path / "set")


def test_reasons_of_bad_samples_are_truncated(shards: Path) -> None:
    def verbose(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no" * 1_000_000)

    with pytest.raises(SampleError, match="transform raised ValueError: no") as raised:
        list(wt.Loader(shards, transform=verbose, batch_size=2))
    assert len(str(raised.value)) < 1500
