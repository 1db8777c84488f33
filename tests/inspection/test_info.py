"""`info`: exact counts for any shards, local or on a server, with or without an index."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image

import wdstrain as wt
from tests.cli.test_cli import wait_for
from tests.conftest import Sample, encoded, picture, write_class_folder, write_tar
from tests.support.servers import serving, stall
from wdstrain.cli import main
from wdstrain.errors import ShardError, StorageError, UsageError
from wdstrain.serve import Server

_SHARDS = 8  # remote shards whose beginning is read


def content(folder: Path, name: str, *values: bytes) -> Any:
    """Return the report of `info` about a field with these values."""
    rows: list[Sample] = [(f"k{i:03d}", {name: data}) for i, data in enumerate(values)]
    return wt.info(write_tar(folder / "values" / "a.tar", rows)).contents[0]


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, number = tmp_path_factory.mktemp("written"), 0
    bits, pictures = np.random.default_rng(1), [picture(i) for i in range(50)]
    for shard in range(12):
        with webdataset.TarWriter(str(folder / f"s-{shard:02d}.tar")) as writer:
            for _ in range(150):
                data = pictures[number % 50] + bits.bytes(int(bits.integers(7_000, 11_000)))
                fields = {
                    "png": data,
                    "cls": number % 3,
                    "json": {"n": number, "even": number % 2 == 0},
                }
                writer.write({"__key__": f"k{number:06d}", **fields})
                number += 1
    return folder


@pytest.fixture
def foreign(written: Path, tmp_path: Path) -> Path:
    """Twelve shards by webdataset, 150 samples of about 14 KB each, without an index."""
    return Path(shutil.copytree(written, tmp_path / "foreign"))


# --- with an index ---


def test_an_indexed_set_is_reported_exactly(tmp_path: Path) -> None:
    photos, out = write_class_folder(tmp_path / "photos", {"cat": 30, "dog": 10}), tmp_path / "out"
    wt.convert_folder(photos, out, split={"train": 0.8, "val": 0.2}, max_shard_samples=10)
    index, info = wt.index(out), wt.info(out)
    assert (info.exact, info.ok) == (True, True)
    assert (info.samples, info.shards, sum(info.splits.values())) == (40, len(index.shards), 40)
    assert info.bytes == sum(path.stat().st_size for path in out.glob("*.tar"))
    sizes = [path.stat().st_size for path in photos.rglob("*.png")]
    png, cls = info.contents
    assert (png.name, png.samples, cls.what) == ("png", 40, "number: 0 to 1, median 0")
    assert (png.total, png.smallest, png.largest) == (sum(sizes), min(sizes), max(sizes))
    assert (png.what, png.kinds) == ("PNG image, RGB: 24 x 20", {"PNG image, RGB": 40})
    (column,) = info.columns
    assert column.classes == {"cat": 30, "dog": 10}
    assert column.imbalance == 3
    assert info.made[0].startswith("kind folder; classes 2; ")
    assert "split train 0.8, val 0.2" in info.made[0]


def test_numbers_and_lists_of_classes_have_their_statistics(tmp_path: Path) -> None:
    angles = [json.dumps(float("nan") if i == 0 else i / 4) for i in range(9)]
    rows = [
        {
            "__key__": f"k{i}",
            "json": f'{{"angle": {angle}, "tags": {json.dumps(["a", "b"][: i % 3])}}}'.encode(),
        }
        for i, angle in enumerate(angles)
    ]
    labels = [
        wt.Label("angle", "number", "json", "angle"),
        wt.Label("tags", "multi", "json", "tags", ("a", "b", "c")),
    ]
    wt.pack(rows, str(tmp_path / "out"), labels=labels)
    angle, tags = wt.info(tmp_path / "out").columns
    values, found = np.arange(1, 9) / 4, angle.numbers
    assert found is not None
    assert found["mean"] == pytest.approx(values.mean())
    assert found["deviation"] == pytest.approx(values.std())
    assert (found["smallest"], found["largest"], found["not_finite"]) == (0.25, 2.0, 1)
    quartiles = np.quantile(values, (0.25, 0.5, 0.75), method="inverted_cdf")
    assert found["quartiles"] == tuple(quartiles)
    assert (tags.classes, tags.empty) == ({"a": 6, "b": 3, "c": 0}, ("c",))


def test_columns_that_are_not_labels_have_statistics(tmp_path: Path, capsys: Any) -> None:
    rows = [
        {"__key__": f"k{i}", "cls": i % 2, "json": {"age": i, "kids": i > 3, "town": f"t{i % 5}"}}
        for i in range(10)
    ]
    wt.pack(rows, str(tmp_path / "out"), classes=["a", "b"])
    label, *others = wt.info(tmp_path / "out").columns
    assert (label.name, label.is_label, label.classes) == ("label", True, {"a": 5, "b": 5})
    by_name = {column.name: column for column in others}
    age = by_name["age"].numbers
    assert age is not None
    assert (age["mean"], age["smallest"], age["largest"]) == (4.5, 0, 9)
    assert sum(count for _, _, count in age["bins"]) == 10
    assert by_name["kids"].classes == {"True": 6, "False": 4}
    assert by_name["town"].distinct == 5
    assert main(["info", str(tmp_path / "out")]) == 0
    assert "mean 4.5" in " ".join(capsys.readouterr().out.split())


# --- without an index ---


def test_unindexed_shards_are_counted_and_the_result_is_stored(
    foreign: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = wt.info(foreign)
    assert (info.exact, info.samples) == (True, 1800)
    assert info.bytes == sum(path.stat().st_size for path in foreign.glob("*.tar"))
    counts = [(item.name, item.samples) for item in info.contents]
    assert counts == [(name, 1800) for name in ("cls", "json", "png")]
    assert info.columns[0].classes == {"0": 600, "1": 600, "2": 600}
    assert info.columns[0].looked_at == 1800
    assert "1800 samples" in caplog.text
    assert "wdstrain index" in caplog.text
    assert wt.info(foreign).as_dict() == info.as_dict()
    assert len(caplog.messages) == 1


def test_labels_of_many_samples_are_read_from_a_part_unless_exact(tmp_path: Path) -> None:
    rows: list[Sample] = [(f"k{i:04d}", {"cls": str(i % 2).encode()}) for i in range(3000)]
    path = write_tar(tmp_path / "s" / "a.tar", rows)
    info = wt.info(path)
    assert (info.samples, info.exact) == (3000, False)
    (column,) = info.columns
    assert column.looked_at == 2000
    assert sum(column.classes.values()) == 2000
    assert "some labels were read; to read all: --exact" in repr(info)
    (column,) = wt.info(path, exact=True).columns
    assert column.classes == {"0": 1500, "1": 1500}


def test_large_values_are_counted_and_not_read(tmp_path: Path) -> None:
    rows: list[Sample] = [
        (f"k{i:02d}", {"mp4": bytes(4) + b"ftyp" + bytes(size), "cls": b"1"})
        for i, size in enumerate([3_000_000, 3_000_000, 30_000_000])
    ]
    info = wt.info(write_tar(tmp_path / "s" / "films.tar", rows))
    assert info.samples == 3
    films, cls = info.contents
    assert (films.what, films.kinds, cls.kinds) == ("MP4 video", {"MP4 video": 2}, {"number": 2})
    assert info.columns[0].classes == {"1": 3}
    path = write_tar(tmp_path / "t" / "long.tar", [("a", {"mp4": bytes(9_000_000), "txt": b"x"})])
    film, text = (item.what for item in wt.info(path).contents)
    assert (film, text) == ("not looked at", "text, characters: 1")


# --- on a server ---


def test_an_indexed_set_on_a_server_is_exact_with_few_requests(tmp_path: Path) -> None:
    photos = write_class_folder(tmp_path / "photos", {"cat": 120, "dog": 80})
    wt.convert_folder(photos, tmp_path / "out", max_shard_samples=15)
    local = wt.info(tmp_path / "out")
    with Server(tmp_path / "out") as server:
        remote = wt.info(server.url)
        assert server.requests <= 2 + _SHARDS
    assert remote.exact
    for name in ("samples", "shards", "bytes", "splits", "made", "columns", "keys"):
        assert getattr(remote, name) == getattr(local, name)
    assert [item.total for item in remote.contents] == [item.total for item in local.contents]
    assert list(remote.contents[0].kinds) == ["PNG image, RGB"]


def test_exact_counts_are_equal_on_a_server_and_on_disk(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Server(foreign) as server:
        remote = wt.info(f"{server.url}s-{{00..02}}.tar", exact=True)
        size = sum((foreign / f"s-{number:02d}.tar").stat().st_size for number in range(3))
        # scanned, read for its labels, and in flight when a connection ended
        assert server.bytes < 4 * size
    local = wt.info(f"{foreign}/s-0[0-2].tar", exact=True)
    assert remote.samples == local.samples == 450
    assert remote.columns == local.columns
    assert [item.total for item in remote.contents] == [item.total for item in local.contents]


def test_an_interrupt_does_not_wait_for_a_stalled_server(foreign: Path) -> None:
    released = threading.Event()
    try:
        with serving(foreign) as server:
            server.faults += [stall(1000, released) for _ in range(12)]
            command = [sys.executable, "-m", "wdstrain", "info", f"{server.url}/s-{{00..11}}.tar"]
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            with subprocess.Popen(command, **pipes) as process:
                asked = server.requests
                wait_for(lambda: any(path.endswith(".tar") for path, _ in list(asked)), process)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=10)  # a stalled read times out after 20 s
            released.set()
    finally:
        released.set()
    assert process.returncode == 130
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err


# --- damage ---


@pytest.mark.parametrize("exact", [False, True])
def test_a_damaged_shard_is_named(shards: Path, exact: bool, capsys: Any) -> None:
    os.truncate(shards / "part-001.tar", 4000)
    assert main(["info", str(shards), *["--exact"] * exact]) == 1
    printed = capsys.readouterr()
    assert "part-001.tar ends" in printed.err
    assert "hint: " in printed.err
    assert printed.out == ""


def test_a_truncated_shard_is_detected_by_its_end(foreign: Path) -> None:
    size = (foreign / "s-04.tar").stat().st_size
    os.truncate(foreign / "s-04.tar", size - 20_480)
    with Server(foreign) as server:
        for urls in (foreign, f"{server.url}s-{{04..05}}.tar"):
            with pytest.raises(ShardError, match=r"s-04.tar ends"):
                wt.info(urls)


def test_a_shard_that_differs_from_its_index_is_named(shards: Path) -> None:
    wt.index(shards)
    os.truncate(shards / "part-000.tar", 1024)
    with pytest.raises(ShardError, match=r"part-000.tar has 1024 bytes, its index says"):
        wt.info(shards)
    (shards / "part-000.tar").unlink()
    with pytest.raises(ShardError, match=r"part-000.tar is in the index but cannot be found"):
        wt.info(shards)


def test_compressed_tars_html_pages_and_empty_folders_are_refused(
    tmp_path: Path, shards: Path
) -> None:
    none, packed, page = (tmp_path / name for name in ("none", "packed.tar", "page.tar"))
    none.mkdir()
    packed.write_bytes(gzip.compress((shards / "part-000.tar").read_bytes()))
    page.write_bytes(b"<html>" + bytes(2000))
    with Server(shards) as server:
        refused: list[tuple[Any, type[Exception], str]] = [
            (none, UsageError, "holds no index.json and no .tar file"),
            (packed, ShardError, "is a gzip file, not a plain tar"),
            (page, ShardError, "no valid tar header at offset 0"),
            (f"{server.url}none.tar", StorageError, "404"),
            ([packed, page], ShardError, "is a gzip file"),
            ([shards, shards / "part-000.tar"], UsageError, "named twice"),
        ]
        for urls, error, message in refused:
            with pytest.raises(error, match=message):
                wt.info(urls)


def test_indexed_and_unindexed_shards_are_reported_together(shards: Path, foreign: Path) -> None:
    wt.index(shards)
    info = wt.info([shards, foreign])
    assert info.exact
    assert (info.shards, info.samples) == (15, 1821)
    assert info.columns[0].looked_at == 1821
    assert [item.samples for item in info.contents if item.name == "txt"] == [21]


# --- values ---


@pytest.mark.parametrize(
    ("name", "values", "description"),
    [
        ("cls", [b"3", b"12\n"], "number: 3 to 12"),
        ("score", [b"0.5", b"-2"], "number: -2 to 0.5"),
        ("txt", ["größe".encode(), "\ufeffab".encode()], "text, characters: 2 to 5"),
        ("score", [b"0.5", b"-2", b"7"], "number: -2 to 7, median 0.5"),
        (
            "txt",
            [b"a few", b"1"],
            "text, characters: 5 (1 of 2); number: 1 (1 of 2)",
        ),
        ("txt", [b""], "empty"),
        (
            "npy",
            [npy(np.zeros((2, 3), np.uint8)), npy(np.zeros((4, 3), np.uint8))],
            "uint8 array [2, 3] (1 of 2); uint8 array [4, 3] (1 of 2)",
        ),
        ("npy", [npy(np.float32(2)), npy(np.float32(5))], "float32 array []"),
        ("npy", [npy(np.array([{}], object))], "invalid array (it holds Python objects"),
        ("pyd", [pickle.dumps({"a": 1})], "pickle (never loaded)"),
        ("bin", [pickle.dumps({"a": 1})], "pickle (never loaded)"),
        ("json", [b"[1, 2.5]"], "JSON"),
        ("json", [b'{"a": 1, "b": null}', b'{"a": 2.5}'], "JSON: a, b"),
        ("json", [b"{"], "invalid JSON"),
        ("bin", [b"\x00\x01\x02"], "binary data of unknown type"),
    ],
)
def test_a_field_is_described_by_its_bytes(
    name: str, values: list[bytes], description: str, tmp_path: Path
) -> None:
    assert content(tmp_path, name, *values).what.startswith(description)


def test_info_unpickles_no_value(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    data = pickle.dumps(Trap())
    fields = {"pyd": data, "npy": npy(np.array([Trap()], object)), "cls": data}
    path = write_tar(tmp_path / "s" / "a.tar", [("a", fields)])
    assert wt.info(path, exact=True).samples == 1
    assert not (tmp_path / "sprung").exists()


def test_images_are_described_by_their_headers(tmp_path: Path) -> None:
    plain, exif = Image.new("RGB", (40, 30)), Image.Exif()
    exif[274] = 6
    values = [
        encoded(plain, "JPEG", exif=exif),
        encoded(plain, "JPEG", icc_profile=bytes(200_000)),  # its size comes after 64 KB
        picture(1, size=(600, 400), kind="JPEG")[:2000],  # truncated before its pixels
        encoded(Image.new("L", (10, 10)), "PNG"),
        b"\xff\xd8\xff\xe0 no picture",
    ]
    images = content(tmp_path, "jpg", *values)
    assert images.kinds == {
        "JPEG image, RGB, rotated by EXIF": 1,
        "JPEG image, RGB": 2,
        "PNG image, L": 1,
        "unreadable image": 1,
    }
    assert images.what.startswith("JPEG image, RGB: 40 x 30 to 600 x 400, median 40 x 30 (2 of 5)")


def test_images_that_break_decoders_are_described(data: Any, tmp_path: Path) -> None:
    files = [
        path
        for path in sorted(data("difficult").iterdir())
        if path.suffix.lower() in (".jpg", ".png", ".gif", ".webp", ".tif") and path.stat().st_size
    ]
    kinds = content(tmp_path, "jpg", *(path.read_bytes() for path in files)).kinds
    assert sum(kinds.values()) == len(files)
    assert kinds["unreadable image"] < len(files) / 3
    formats = {kind.partition(" image, ")[0] for kind in kinds}
    assert {"JPEG", "PNG", "GIF", "WEBP", "TIFF"} <= formats


# --- output ---


def test_a_table_is_readable_at_eighty_columns(
    foreign: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["info", str(foreign)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    words = ("1800", "png", "PNG image, RGB: 24 x 20", "█", "median", "99 %", "by another program")
    assert all(word in "\n".join(lines) for word in words)


def test_json_contains_the_complete_report(foreign: Path, capsys: Any) -> None:
    assert main(["info", str(foreign), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fields"] == ["cls", "json", "png"]
    assert document["contents"][0]["total"] == document["samples"]
    assert document == json.loads(json.dumps(wt.info(foreign).as_dict()))


def test_many_classes_are_shown_as_twenty_and_a_remainder(tmp_path: Path, capsys: Any) -> None:
    rows: list[Sample] = [(f"k{i:04d}", {"cls": str(min(i % 40, 29)).encode()}) for i in range(400)]
    write_tar(tmp_path / "s" / "a.tar", rows)
    assert main(["info", str(tmp_path / "s")]) == 0
    text = capsys.readouterr().out
    assert "10 others" in text
    assert text.count("█") > 20
    assert len([line for line in text.splitlines() if line.endswith("%") and "." in line]) == 21


def test_a_shard_without_samples_is_reported(tmp_path: Path, capsys: Any) -> None:
    path = write_tar(tmp_path / "s" / "a.tar", [])
    assert main(["info", str(path)]) == 0
    assert "samples" in capsys.readouterr().out
    assert (wt.info(path).samples, wt.info(path).exact) == (0, True)


def test_terminal_escapes_are_not_printed(tmp_path: Path, capsys: Any) -> None:
    name = b"k\x1b[31m\xff"
    rows: list[Sample] = [
        (name.decode("utf-8", "surrogateescape"), {"json": b'{"\\u001b[2J": 1}', "cls": b"\x1b"})
    ]
    path = write_tar(tmp_path / "s" / "a.tar", rows)
    for words in ([], ["--json"]):
        assert main(["info", str(path), *words]) == 0
        assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("other", ["unlabelled", "numbered"])
def test_a_label_that_differs_between_sets_is_shown_with_the_difference(
    tmp_path: Path, other: str, capsys: Any
) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    wt.pack([{"__key__": f"k{n}", "cls": n % 2} for n in range(6)], a, classes=["cat", "dog"])
    fields = [{"txt": "x"} if other == "unlabelled" else {"cls": n % 2} for n in range(6)]
    wt.pack([{"__key__": f"m{n}", **own} for n, own in enumerate(fields)], b)
    why = {"unlabelled": "no label", "numbered": "2 classes without names"}[other]
    for urls in ([a, b], [b, a]):
        info = wt.info(urls)
        assert (info.ok, info.labels) == (True, ())
        assert list(info.disagreements) == list(info.as_dict()["disagreements"]) == ["cls"]
        assert "0 cat, 1 dog" in info.disagreements["cls"]
        assert why in info.disagreements["cls"]
        assert info.disagreements["cls"] in repr(info)
        assert main(["info", *urls]) == 0
        lines = capsys.readouterr().out.split()  # a long path wraps the sentence anywhere
        assert "0cat,1dog" in "".join(lines)
    assert wt.info(a).disagreements == {}
