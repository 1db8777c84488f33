"""`info`: exact counts for any shards, local or on a server, with or without an index."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image

import wdstrain as wt
from tests.conftest import (
    Sample,
    encoded,
    npy,
    picture,
    write_class_folder,
    write_shards,
    write_tar,
)
from wdstrain.cli import main
from wdstrain.serve import Server


def content(folder: Path, name: str, *values: bytes) -> Any:
    """Return the report of `info` about a field with these values."""
    rows: list[Sample] = [(f"k{i:03d}", {name: data}) for i, data in enumerate(values)]
    return wt.info(write_tar(folder / "values" / "a.tar", rows)).contents[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, bits = tmp_path_factory.mktemp("written"), np.random.default_rng(1)
    pictures = [picture(i) for i in range(50)]
    for shard in range(12):
        with webdataset.TarWriter(str(folder / f"s-{shard:02d}.tar")) as writer:
            for number in range(shard * 150, shard * 150 + 150):
                png = pictures[number % 50] + bits.bytes(int(bits.integers(7_000, 11_000)))
                entries = {"n": number, "even": number % 2 == 0}
                fields = {"png": png, "cls": number % 3, "json": entries}
                writer.write({"__key__": f"k{number:06d}", **fields})
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
    assert info.exact
    assert (info.samples, info.shards, sum(info.splits.values())) == (40, len(index.shards), 40)
    assert info.bytes == sum(path.stat().st_size for path in out.glob("*.tar"))
    sizes = [path.stat().st_size for path in photos.rglob("*.png")]
    png, cls = info.contents
    assert (png.name, png.samples, cls.what) == ("png", 40, "number: 0 to 1, median 0")
    assert (png.total, png.smallest, png.largest) == (sum(sizes), min(sizes), max(sizes))
    assert (png.what, png.kinds) == ("PNG image, RGB: 24 x 20", {"PNG image, RGB": 40})
    (column,) = info.columns
    assert (column.classes, column.imbalance) == ({"cat": 30, "dog": 10}, 3)
    assert info.made[0].startswith("kind folder; classes 2; ")
    assert "split train 0.8, val 0.2" in info.made[0]


def test_numbers_flags_texts_and_lists_of_classes_have_their_statistics(
    tmp_path: Path, capsys: Any
) -> None:
    entries = [
        {
            "angle": i / 4 if i else float("nan"),
            "tags": ["a", "b"][: i % 3],
            "kids": i > 3,
            "town": f"t{i % 5}",
        }
        for i in range(9)
    ]
    labels = [
        wt.Label("angle", "number", "json", "angle"),
        wt.Label("tags", "multi", "json", "tags", ("a", "b", "c")),
    ]
    samples = [{"__key__": f"{n}", "json": json.dumps(e).encode()} for n, e in enumerate(entries)]
    wt.pack(samples, tmp_path / "out", labels=labels)
    columns = {column.name: column for column in wt.info(tmp_path / "out").columns}
    values, found, tags = np.arange(1, 9) / 4, columns["angle"].numbers, columns["tags"]
    assert found is not None
    assert found["mean"] == pytest.approx(values.mean())
    assert found["deviation"] == pytest.approx(values.std())
    assert (found["smallest"], found["largest"], found["not_finite"]) == (0.25, 2.0, 1)
    assert sum(count for _, _, count in found["bins"]) == 8
    quartiles = np.quantile(values, (0.25, 0.5, 0.75), method="inverted_cdf")
    assert found["quartiles"] == tuple(quartiles)
    assert (tags.classes, tags.empty) == ({"a": 6, "b": 3, "c": 0}, ("c",))
    assert (columns["angle"].is_label, columns["kids"].is_label) == (True, False)
    assert (columns["kids"].classes, columns["town"].distinct) == ({"True": 5, "False": 4}, 5)
    assert main(["info", str(tmp_path / "out")]) == 0
    assert "mean 1.125" in " ".join(capsys.readouterr().out.split())


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


def test_an_indexed_set_on_a_server_is_exact_with_few_requests(tmp_path: Path) -> None:
    photos = write_class_folder(tmp_path / "photos", {"cat": 120, "dog": 80})
    wt.convert_folder(photos, tmp_path / "out", max_shard_samples=15)
    local = wt.info(tmp_path / "out")
    with Server(tmp_path / "out") as server:
        remote = wt.info(server.url)
        assert server.requests <= 2 + 8  # the index, and the beginning of eight shards
    assert remote.exact
    for name in ("samples", "shards", "bytes", "splits", "made", "columns", "keys"):
        assert getattr(remote, name) == getattr(local, name)
    assert [item.total for item in remote.contents] == [item.total for item in local.contents]
    assert list(remote.contents[0].kinds) == ["PNG image, RGB"]


def test_a_label_that_differs_between_sets_is_shown_with_the_difference(
    tmp_path: Path, capsys: Any
) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    wt.pack([{"__key__": f"k{n}", "cls": n % 2} for n in range(6)], a, classes=["cat", "dog"])
    wt.pack([{"__key__": f"m{n}", "txt": "x"} for n in range(6)], b)
    wt.pack([{"__key__": f"m{n}", "cls": n % 2} for n in range(6)], c)
    for other, why in ((b, "no label"), (c, "2 classes without names")):
        for urls in ([a, other], [other, a]):
            info = wt.info(urls)
            assert info.labels == ()
            assert list(info.disagreements) == ["cls"]
            assert "0 cat, 1 dog" in info.disagreements["cls"]
            assert why in info.disagreements["cls"]
            assert main(["info", *urls]) == 0
            lines = capsys.readouterr().out.split()  # a long path wraps the sentence anywhere
            assert "0cat,1dog" in "".join(lines)
    assert wt.info(a).disagreements == {}


# --- damage ---


def test_a_damaged_shard_is_named(shards: Path, capsys: Any) -> None:
    os.truncate(shards / "part-001.tar", 4000)
    for words in ([], ["--exact"]):
        assert main(["info", str(shards), *words]) == 1
        printed = capsys.readouterr()
        assert all(text in printed.err for text in ("part-001.tar ends", "hint: "))
        assert printed.out == ""
    write_shards(shards, [7, 13, 1])
    wt.index(shards)
    os.truncate(shards / "part-000.tar", 1024)
    with pytest.raises(wt.ShardError, match=r"part-000.tar has 1024 bytes, its index says"):
        wt.info(shards)
    (shards / "part-000.tar").unlink()
    with pytest.raises(wt.ShardError, match=r"part-000.tar is in the index but cannot be found"):
        wt.info(shards)


def test_a_truncated_shard_is_detected_by_its_end(foreign: Path) -> None:
    os.truncate(foreign / "s-04.tar", (foreign / "s-04.tar").stat().st_size - 20_480)
    with Server(foreign) as server:
        for urls in (foreign, f"{server.url}s-{{04..05}}.tar"):
            with pytest.raises(wt.ShardError, match=r"s-04.tar ends"):
                wt.info(urls)


def test_pages_empty_folders_and_repeated_shards_are_refused(tmp_path: Path, shards: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "page.tar").write_bytes(b"<html>" + bytes(2000))
    refused: list[tuple[Any, type[Exception], str]] = [
        (tmp_path / "none", wt.UsageError, "holds no index.json and no .tar file"),
        (tmp_path / "page.tar", wt.ShardError, "no valid tar header at offset 0"),
        ([shards, shards / "part-000.tar"], wt.UsageError, "named twice"),
    ]
    for urls, error, message in refused:
        with pytest.raises(error, match=message):
            wt.info(urls)


# --- values ---


@pytest.mark.parametrize(
    ("name", "values", "description"),
    [
        ("cls", [b"3", b"12\n"], "number: 3 to 12"),
        ("score", [b"0.5", b"-2", b"7"], "number: -2 to 7, median 0.5"),
        ("txt", ["größe".encode(), "\ufeffab".encode()], "text, characters: 2 to 5"),
        ("txt", [b"a few", b"1"], "text, characters: 5 (1 of 2); number: 1 (1 of 2)"),
        ("txt", [b""], "empty"),
        ("npy", [npy(np.zeros((2, 3), np.uint8))], "uint8 array [2, 3]"),
        ("npy", [npy(np.float32(2)), npy(np.float32(5))], "float32 array []"),
        ("npy", [npy(np.array([{}], object))], "invalid array (it holds Python objects"),
        ("pyd", [pickle.dumps({"a": 1})], "pickle (never loaded)"),
        ("json", [b'{"a": 1, "b": null}', b'{"a": 2.5}'], "JSON: a, b"),
        ("json", [b"{"], "invalid JSON"),
        ("bin", [b"\x00\x01\x02"], "binary data of unknown type"),
    ],
)
def test_a_field_is_described_by_its_bytes(
    name: str, values: list[bytes], description: str, tmp_path: Path
) -> None:
    assert content(tmp_path, name, *values).what.startswith(description)


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


# --- output ---


def test_a_table_is_readable_at_eighty_columns_and_json_is_the_complete_report(
    foreign: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["info", str(foreign)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    words = ("1800", "png", "PNG image, RGB: 24 x 20", "█", "median", "99 %", "by another program")
    assert all(word in text for word in words)
    assert main(["info", str(foreign), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(wt.info(foreign).as_dict()))


def test_many_classes_are_shown_as_twenty_and_a_remainder(tmp_path: Path, capsys: Any) -> None:
    rows: list[Sample] = [(f"k{i:04d}", {"cls": str(min(i % 40, 29)).encode()}) for i in range(400)]
    path = write_tar(tmp_path / "s" / "a.tar", rows)
    assert main(["info", str(path)]) == 0
    text = capsys.readouterr().out
    assert "10 others" in text
    assert len([line for line in text.splitlines() if line.endswith("%") and "." in line]) == 21
    info = wt.info(write_tar(path, []))
    assert (info.samples, info.exact) == (0, True)
