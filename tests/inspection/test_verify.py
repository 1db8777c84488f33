"""Damage is reported with its place, and repair saves all intact samples byte for byte."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import Sample, images_with_equal_crc32, npy, picture, write_shards, write_tar
from tests.support.os_faults import small_files
from tests.support.scenes import NAMES, scene
from tests.support.servers import serving
from tests.support.tables import Tables, read_samples
from wdstrain.cli import main
from wdstrain.shards.tar_headers import END, header, padding


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """The only shard of a set of 12 samples of two fields, with checksums in its index."""
    fields = [{"bin": bytes([i + 1]) * (300 + 97 * i), "cls": i % 3} for i in range(12)]
    samples = [{"__key__": f"k{i:02d}", **own} for i, own in enumerate(fields)]
    wt.pack(samples, tmp_path / "set", shuffle=False)
    (path,) = (tmp_path / "set").glob("*.tar")
    return path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Path of a shard without an index."""
    (tmp_path / "bare").mkdir()
    return tmp_path / "bare" / "x.tar"


def member(name: str, data: bytes) -> bytes:
    return header(name, len(data)) + data + bytes(padding(len(data)))


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]


def flip(path: Path, at: int) -> None:
    path.write_bytes(flipped(path.read_bytes(), at))


def places(report: Any) -> list[tuple[str, str]]:
    """Return key and field of each finding."""
    return [(finding.key, finding.field) for finding in report.findings]


# --- shards without an index ---


def test_a_shard_truncated_at_any_byte_is_reported_with_its_intact_samples(
    shard: Path, bare: Path
) -> None:
    data, stops = shard.read_bytes(), wt.open(shard.parent).offsets.stop.tolist()
    for size in (*range(0, len(data), 64), *range(1, len(data), 509), stops[-1], len(data)):
        bare.write_bytes(data[:size])
        report = wt.verify(bare)
        reasons = [finding.reason for finding in report.findings if not finding.key]
        assert len(reasons) == (size < len(data))
        assert all("was cut" in reason or "ends inside" in reason for reason in reasons), reasons
        inside = sum(stop <= size for stop in stops)
        assert inside <= report.samples <= inside + 1
    assert report.fields == {"bin": 12, "cls": 12}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d[:-1024], "without the two zero blocks"),
        (lambda d: d[:-512], "within the two zero blocks"),
        (lambda d: d + bytes(20_000), "bytes before the file does"),
        (lambda d: d[:3072] + bytes(512) + d[3584:], "zero block|no valid tar header"),
        (lambda d: d + d, r"several tars in one.*bytes \d+ to \d+ hold no sample"),
        (lambda d: b"\x1f\x8b" + d[2:257] + bytes(6) + d[263:], "is a gzip file"),
        (lambda d: b"no tar at all" * 99, "no valid tar header at offset 0"),
        (lambda d: b"", "ends at byte 0"),
        (
            lambda d: header("x" * 200 + ".bin", 9)[:1024] + END,
            "ends at offset 1024 after an extension header",
        ),
    ],
)
def test_every_kind_of_damage_is_named(shard: Path, bare: Path, make: Any, words: str) -> None:
    bare.write_bytes(make(shard.read_bytes()))
    findings = wt.verify(bare).findings
    assert re.search(words, findings[0].reason), findings


def test_hostile_shards_are_read_once_and_damage_is_one_finding(bare: Path) -> None:
    claim = header("a.bin", 1 << 32)
    empty = header("a.bin", 0) * 4000 + END
    for data in (claim * 4000, bytes(8 << 20), (claim + b"x") * 4000, b"ustar" * 300_000, empty):
        bare.write_bytes(data)
        report = wt.verify(bare)
        assert report.bytes == len(data)
        assert sum("hold no sample" in finding.reason for finding in report.findings) <= 1
        assert 0 < len(report.findings) <= 1001


def test_members_of_a_key_in_two_places_are_reported_and_joined_by_repair(tmp_path: Path) -> None:
    names = ["a.jpg", "b.jpg", "a.cls", "b.cls", "c.jpg", "c.jpg", "c.cls", "a.txt", "a.jpg"]
    data = b"".join(member(name, name.encode()) for name in names) + END
    (tmp_path / "x.tar").write_bytes(data)
    findings = wt.verify(tmp_path / "x.tar").findings
    assert [(sample.key, sample.field, sample.offset) for sample in findings] == [
        ("a", "", 2 * 1024),
        ("b", "", 3 * 1024),
        ("c", "jpg", 5 * 1024 + 512),
        ("a", "", 7 * 1024),
    ]
    done = wt.repair(tmp_path / "x.tar", tmp_path / "out")
    assert read_samples(tmp_path / "out") == {
        key: {"jpg": f"{key}.jpg".encode(), "cls": f"{key}.cls".encode()} for key in "ab"
    }
    assert [str(finding) for finding in done.findings] == [
        f"{tmp_path}/x.tar: {place}: a member of this key and name came before."
        for place in ("'c', the sample at offset 4096", "'a', the sample at offset 7168")
    ]


# --- the shards and their index ---


def cut_a_shard(folder: Path) -> None:
    os.truncate(folder / "part-002.tar", 100)


def rename_a_sample(folder: Path) -> None:
    path, old, new = folder / "part-000.tar", *(header(f"s00000{n}.cls", 1) for n in (3, 9))
    path.write_bytes(path.read_bytes().replace(old, new))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut_a_shard, "part-002.tar has 100 bytes, its index says"),
        (rename_a_sample, "part-000.tar holds other samples than its index says"),
        (lambda folder: (folder / "part-001.tar").unlink(), "part-001.tar cannot be opened: No su"),
        (lambda folder: (folder / "index.json").unlink(), "index.json"),
        (lambda folder: (folder / "index.arrow").unlink(), "index.arrow"),
    ],
)
def test_shards_that_differ_from_the_index_are_reported_by_any_number_of_threads(
    shards: Path, change: Any, words: str
) -> None:
    wt.index(shards)
    report = wt.verify(f"{shards}/part-*.tar")
    assert (report.ok, report.shards, report.samples) == (True, 3, 21)
    change(shards)
    reports = [wt.verify(shards, num_workers=count) for count in (1, 2, 7)]
    assert words in " ".join(map(str, reports[0].findings))
    assert reports[0] == reports[1] == reports[2]


def test_a_tar_beside_an_index_is_reported_by_any_address(shards: Path) -> None:
    wt.index(shards)
    stray = write_tar(shards / "part-009.tar", [("k", {"txt": b"1"})])
    for urls in (shards, f"{shards}/part-*.tar", stray):
        (finding,) = wt.verify(urls).findings
        assert f"{stray} lies beside the index" in str(finding)


def test_shards_without_checksums_are_counted(shards: Path, shard: Path) -> None:
    assert wt.verify(shard.parent).unindexed == 0
    said = "3 of 3 shards have no checksums: only their structure was checked"
    assert wt.verify(shards).notes == [said]
    wt.index(shards)
    assert wt.verify(shards).unindexed == 3  # a scan of headers has no checksums


def test_a_column_that_differs_from_its_field_is_reported_without_checksums(tmp_path: Path) -> None:
    samples = [(f"k{n}", {"txt": b"t", "cls": b"%d" % n}) for n in range(5)]
    path = write_tar(tmp_path / "a.tar", samples)
    index = wt.index(tmp_path, label="cls", classes=list("abcde"))
    assert wt.verify(tmp_path).ok
    _, offset, _ = index.members(2)[1]
    data = path.read_bytes()
    path.write_bytes(data[:offset] + b"4" + data[offset + 1 :])
    (finding,) = wt.verify(tmp_path).findings
    assert finding[1:4] == ("k2", "cls", offset)
    assert "the index has 'c' in its column label, the shard 'e'" in finding.reason
    wt.index(tmp_path, label="cls", classes=list("abcde"))
    assert wt.verify(tmp_path).ok


# --- the complete set ---


def test_missing_fields_are_reported_up_to_a_thousand_and_rare_ones_counted(tmp_path: Path) -> None:
    samples: list[Sample] = [
        (f"k{i:03d}", {"jpg" if i % 2 else "png": b"p", "cls": b"1"}) for i in range(200)
    ]
    for i in range(60):
        samples[i][1]["txt"] = b"t"
    del samples[77][1]["cls"]
    write_tar(tmp_path / "a.tar", samples)
    report = wt.verify(tmp_path)
    (lacking,) = report.findings
    assert (lacking.key, lacking.reason) == ("k077", "it has no cls, which 199 of 200 samples have")
    assert report.fields == {"cls": 199, "jpg": 100, "png": 100, "txt": 60}
    assert places(wt.verify(tmp_path, need="jpg; PNG, cls")) == [("k077", "")]
    reasons = [finding.reason for finding in wt.verify(tmp_path, need=["txt"]).findings]
    assert sum("no txt" in reason for reason in reasons) == 140 == len(reasons) - 1
    write_tar(tmp_path / "a.tar", [(f"k{i:04d}", {"txt": b"t"}) for i in range(1030)])
    findings = wt.verify(tmp_path, need="cls").findings
    assert len([finding for finding in findings if finding.key]) == 1000
    more = f"{tmp_path}/a.tar holds the first of 30 more samples: it has no cls."
    assert str(findings[-1]) == more


def test_missing_and_empty_images_and_labels_are_reported(tmp_path: Path) -> None:
    samples = [{"__key__": f"k{i}", "txt": "t", **({"cls": i % 2} if i else {})} for i in range(5)]
    wt.pack(samples, tmp_path / "s", classes=["a", "b"])
    assert [finding.reason for finding in wt.verify(tmp_path / "s").findings] == ["it has no cls"]
    rows: list[Sample] = [("a", {"jpg": b"", "txt": b""}), ("b", {"png": b"", "cls": b""})]
    report = wt.verify(write_tar(tmp_path / "bare" / "a.tar", rows), decode=True)
    assert places(report) == [("a", "jpg"), ("b", "png"), ("b", "cls")]


@pytest.mark.parametrize("indexed", [False, True])
def test_an_image_in_two_splits_is_reported(tmp_path: Path, indexed: bool) -> None:
    for split, numbers in {"train": [0, 1, 2, 2], "val": [3, 1, 4, 2], "test": [5, 6]}.items():
        samples = [
            (f"{split}{n}", {"png": picture(number), "mask.png": picture(50), "cls": b"0"})
            for n, number in enumerate(numbers)
        ]
        write_tar(tmp_path / f"{split}-000000.tar", samples)
    if indexed:
        wt.index(tmp_path)
    train, val = (f"{tmp_path}/{name}-000000.tar" for name in ("train", "val"))
    findings = wt.verify(tmp_path).findings
    assert [(finding.shard, finding.key, finding.reason) for finding in findings] == [
        (val, f"val{n}", f"its image is also in split 'train': key 'train{n}' in {train}")
        for n in (1, 3)
    ]
    assert wt.verify(train).ok


def test_different_images_with_equal_size_and_crc32_are_not_reported(tmp_path: Path) -> None:
    first, second = images_with_equal_crc32()
    train = [(key, {"png": data, "cls": b"0"}) for key, data in (("a", first), ("b", second))]
    write_tar(tmp_path / "train-000000.tar", train)
    write_tar(tmp_path / "val-000000.tar", [("a", {"png": second, "cls": b"0"})])
    (finding,) = wt.verify(tmp_path).findings
    assert finding.key == "a"
    assert "its image is also in split 'train': key 'b' in" in finding.reason


def test_a_sample_in_two_shards_is_reported_and_an_equal_key_is_not(tmp_path: Path) -> None:
    twin = {"txt": b"a", "cls": b"1"}
    a = write_tar(tmp_path / "a.tar", [("k0", twin), ("k1", {"txt": b"b"}), ("k2", {"txt": b"c"})])
    b = write_tar(tmp_path / "b.tar", [("k1", {"txt": b"other"}), ("k0", twin)])
    report = wt.verify(tmp_path)
    (found,) = report.findings
    assert (found.shard, found.key, found.offset) == (str(b), "k0", 1024)
    assert f"is in {a} at offset 0" in found.reason


def test_a_group_in_two_splits_is_reported_and_only_selected_shards_are_read(
    tmp_path: Path, capsys: Any
) -> None:
    tables = Tables(tmp_path)
    rows = [f"IMG/{i}.png,p{i // 3},{i % 2},{'val' if i % 3 == 2 else 'train'}" for i in range(12)]
    table = "\n".join(["file,patient,label,part", *rows])
    tables(table, label="label:class", split_by="part")
    assert wt.verify(tables.out).ok
    report = wt.verify(tables.out, group_by="patient")
    assert report.groups == {"patient": 4}
    assert len({finding.key for finding in report.findings}) == 4
    for finding in report.findings:
        assert "its group of 'patient' is also in split 'train'" in finding.reason
        assert finding.shard.endswith("val-000000.tar")
    assert main(["verify", str(tables.out), "--group-by", "patient"]) == 1
    assert "'patient'" in capsys.readouterr().err
    assert main(["verify", str(tables.out), "--group-by", "doctor"]) == 2
    tables(table, label="label:class", split={"train": 0.5, "val": 0.5}, group_by="patient")
    report = wt.verify(tables.out)  # by the groups of the conversion
    assert (report.ok, report.groups) == (True, {"patient": 4})
    assert wt.verify(tables.out, where="patient == 'p0'").shards == 1
    assert main(["verify", str(tables.out), "--where", "patient != 'p0'", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shards"] == 2


# --- decoding ---


def test_a_jpeg_that_is_followed_by_another_image_is_intact(
    tmp_path: Path, data: Callable[[str], Path]
) -> None:
    """Multi-picture files (MPO) hold several JPEGs. Only the first is decoded."""
    first, second = (picture(n, size=(160, 120), kind="JPEG") for n in (1, 2))
    multiple, images = io.BytesIO(), [Image.open(io.BytesIO(item)) for item in (first, second)]
    images[0].save(multiple, "MPO", save_all=True, append_images=images[1:])
    real = (data("difficult") / "sugarshack.mpo").read_bytes()
    only_headers = (data("difficult") / "ultrahdr.jpg").read_bytes()  # ends where its pixels begin
    intact = [first + second, multiple.getvalue(), first + second[:-99], real]
    cut = [only_headers, real[: len(real) // 4], first[:-99] + second]
    for files, findings in ((intact, 0), (cut, 3)):
        rows = [(f"k{n}", {"jpg": item}) for n, item in enumerate(files)]
        report = wt.verify(write_tar(tmp_path / "a.tar", rows), decode=True)
        assert places(report) == [(f"k{n}", "jpg") for n in range(findings)]


def test_decoding_reports_intact_bytes_that_have_no_value(tmp_path: Path) -> None:
    good = picture(1)
    whole = {"png": good, "json": b"{}", "txt": b"t", "cls": b"1", "bin": b"?"}
    bad = {"png": good[:-40], "json": b"{", "txt": b"\xff", "cls": b" "}
    rows = [("a", whole), ("b", {**bad, "npy": npy(np.array([{"code": 1}], object))})]
    write_tar(tmp_path / "a.tar", rows)
    assert wt.verify(tmp_path).ok
    report = wt.verify(tmp_path, decode=True)
    assert {*places(report)} == {("b", name) for name in ("png", "json", "txt", "cls", "npy")}
    assert any("allow_pickle=False" in finding.reason for finding in report.findings)


def test_decoding_reports_labels_that_are_not_classes_of_the_index(tmp_path: Path) -> None:
    for classes in (2, 3):  # the shard is replaced after it was indexed
        samples = [(f"k{n:02d}", {"cls": str(n % classes).encode()}) for n in range(6)]
        write_tar(tmp_path / "a.tar", samples)
        if classes == 2:
            wt.index(tmp_path, label="cls", classes=["a", "b"])
    findings = wt.verify(tmp_path, decode=True).findings
    assert [f.key for f in findings if "not a class" in f.reason] == ["k02", "k05"]


def test_decoding_reports_targets_that_are_not_finite(tmp_path: Path) -> None:
    texts = ["1.5", "nan", "inf", "2", "-inf", "NaN"]
    samples = [
        {"__key__": f"k{n}", "y": text, "json": b'{"z": NaN}' if n == 3 else b'{"z": 1}'}
        for n, text in enumerate(texts)
    ]
    labels = [wt.Label("y", "number", "y"), wt.Label("z", "number", "json", "z")]
    wt.pack(samples, tmp_path / "set", labels=labels, shuffle=False)
    assert wt.verify(tmp_path / "set").ok
    findings = wt.verify(tmp_path / "set", decode=True).findings
    reason = "its {} is NaN or infinite, and cannot be trained on"
    assert {(finding.key, finding.reason) for finding in findings} == {
        *((f"k{n}", reason.format("y")) for n in (1, 2, 4, 5)),
        ("k3", reason.format("z")),
    }


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"boxes": [[0, -1.5, 13, 5]], "labels": ["red"]}, "reaches beyond its upright image"),
        ({"boxes": [[5, 0, 5, 5]], "labels": ["red"]}, "x0 < x1"),
        ({"boxes": [[0, 0, 5, float("inf")]], "labels": ["red"]}, "finite"),
        ({"boxes": [[0, 0, 5]], "labels": ["red"]}, "four finite numbers"),
        ({"boxes": [[0, 0, 5, 5]], "labels": ["pink"]}, "'pink' is none of the 3 classes"),
        ({"boxes": [[0, 0, 5, 5]], "labels": []}, "as many labels as boxes"),
        ({"boxes": [[-0.9, 0, 120.9, 60.9]], "labels": [2]}, ""),
    ],
)
@pytest.mark.parametrize("orientation", [1, 6])
def test_wrong_boxes_are_findings(
    document: Any, message: str, orientation: int, tmp_path: Path
) -> None:
    image = scene(np.random.default_rng(0), 60, 120).file("PNG", orientation)
    fields = {"png": image, "boxes.json": json.dumps(document).encode()}
    write_tar(tmp_path / "a.tar", [("k", fields)])
    wt.index(tmp_path, label="boxes.json", classes=NAMES)
    report = wt.verify(tmp_path, decode=True)
    assert len(report.findings) == bool(message)
    assert all(message in finding.reason for finding in report.findings)


# --- the verb ---


def test_many_findings_are_grouped_by_kind_and_complete_in_json(
    tmp_path: Path, capsys: Any
) -> None:
    rows: list[Sample] = [(f"k{i}", {"png": b"no picture", "json": b"{"}) for i in range(30)]
    path = str(write_tar(tmp_path / "a.tar", rows))
    assert main(["verify", path, "--decode"]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 4  # a note, two kinds, and their number
    assert "30 x " in printed.err
    assert "60 findings of 2 kinds" in printed.err
    assert main(["verify", path, "--decode", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 60


@pytest.mark.parametrize("decode", [False, True])
def test_an_interrupt_ends_a_running_verification(tmp_path: Path, decode: bool) -> None:
    """A sparse shard that takes many seconds to read and no disk space."""
    size = (1 << 35) + 2048
    with open(tmp_path / "a.tar", "wb") as file:
        file.write(header("big.bin", 1 << 35))
        file.truncate(size)

    class Steps:
        def step(self, title: str, done: int, total: int, text: str = "", unit: str = "") -> None:
            assert (title, total, unit) == ("verifying", size // 10**6, "MB")
            assert done < total
            if done:
                raise KeyboardInterrupt

        def line(self, text: str) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        wt.verify(tmp_path, num_workers=3, decode=decode, progress=Steps())
    assert not [item.name for item in threading.enumerate() if item.name.startswith("wdstrain")]


# --- repair ---


def test_without_an_index_only_neighbors_of_the_damage_are_lost(
    shard: Path, bare: Path, tmp_path: Path
) -> None:
    intact, data, index = read_samples(shard.parent), shard.read_bytes(), wt.open(shard.parent)
    keys = index.keys(np.arange(12))
    extents = list(zip(index.offsets.start.tolist(), index.offsets.stop.tolist(), strict=True))
    heads = [at - 512 for number in range(12) for _, at, _ in index.members(number)]
    random = np.random.default_rng(0)
    flips = [(at, at + 512, flipped(data, at + random.integers(148))) for at in heads]
    cuts = [(size, len(data), data[:size]) for size in random.integers(3000, len(data), 12)]
    at = extents[4][0] + 512
    gaps = [(at, at + gap, data[:at] + data[at + gap :]) for gap in (512, 1536, 4608)]
    for start, stop, damaged in flips + cuts + gaps:
        bare.write_bytes(damaged)
        assert not wt.repair(bare, tmp_path / "out", overwrite=True).ok
        saved = read_samples(tmp_path / "out")
        assert all(intact[key] == fields for key, fields in saved.items())
        hit = [i for i, (a, b) in enumerate(extents) if a < stop and b > start]
        near = {keys[i] for h in hit for i in (h - 1, h, h + 1) if 0 <= i < 12}
        assert set(keys) - set(saved) <= near
        assert wt.verify(tmp_path / "out").ok


def test_an_index_without_checksums_names_the_lost_samples_and_shards(
    shards: Path, tmp_path: Path
) -> None:
    wt.index(shards)
    flip(shards / "part-001.tar", 4 * 2048 + 5)
    done = wt.repair(shards, tmp_path / "out")
    assert [finding.key for finding in done.findings if finding.key] == ["s000011"]
    assert (done.samples, done.lost) == (20, 1)
    (shards / "part-001.tar").unlink()
    done = wt.repair(shards, tmp_path / "other")
    assert (done.samples, done.lost, done.shards) == (8, 13, 2)
    assert "part-001.tar cannot be opened" in str(done.findings[0])
    assert "held 13 samples, of which 13 are lost" in str(done.findings[1])


def test_a_changed_byte_is_reported_and_its_sample_left_out(
    shard: Path, tmp_path: Path, capsys: Any
) -> None:
    folder, out = str(shard.parent), str(tmp_path / "out")
    assert main(["repair", folder, "-o", out, "-q"]) == 0
    capsys.readouterr()
    with serving(shard.parent) as server:
        assert wt.verify(f"{server.url}/index.json").ok
        assert len([path for path, _ in server.requests if path.endswith(".tar")]) == 1
    flip(shard, 600)
    (finding,) = wt.verify(folder).findings
    changed = (
        f"{shard}: 'k00', field 'bin' at offset 512: the bytes are not those that were packed."
    )
    assert finding[:4] == (str(shard), "k00", "bin", 512)
    assert str(finding) == finding.sentence == changed
    assert main(["verify", folder, "--json"]) == 1
    (document,) = json.loads(capsys.readouterr().out)["findings"]
    assert document == {**finding._asdict(), "sentence": changed}
    assert main(["repair", folder, "-o", out]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["repair", folder, "-o", out, "--overwrite", "--json"]) == 1
    printed = capsys.readouterr()
    assert changed in printed.err
    assert json.loads(printed.out)["lost"] == 1
    with serving(shard.parent) as server:
        assert wt.verify(f"{server.url}/index.json").findings[0].key == "k00"
        done = wt.repair(f"{server.url}/index.json", tmp_path / "local")
    assert (done.samples, done.lost) == (11, 1)


def test_impossible_repairs_are_refused_and_leave_no_files(
    shard: Path, shards: Path, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", write_shards(tmp_path / "other", [3])
    with small_files(8192), pytest.raises(wt.StorageError, match="cannot be written: File too lar"):
        wt.repair(shard.parent, out)
    os.truncate(shard, 600)
    for urls, to, words in (
        (shard.parent, out, "none of 1 shard holds an intact sample"),
        ([shards, other], out, "two shards are named part-000.tar"),
        (shards, shards, "is the folder of the shards"),
    ):
        with pytest.raises((wt.ShardError, wt.UsageError), match=words):
            wt.repair(urls, to)
    assert not out.exists()


def test_a_read_error_is_not_reported_as_a_write_error(
    tmp_path: Path, shard: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".tar"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    shutil.copy(shard, bare)
    monkeypatch.setattr(os, "preadv", failing)
    message = "cannot be read at offset [0-9]+: Input/output error"
    for urls in (shard.parent, bare):
        with pytest.raises(wt.WdstrainError, match=message):
            wt.convert_tars(str(urls), str(tmp_path / "again"))
        with pytest.raises(wt.WdstrainError, match=message):
            wt.repair(urls, tmp_path / "repaired")
        (finding,) = wt.verify(urls).findings
        assert re.search(message, finding.sentence)
    with pytest.raises(wt.StorageError, match=message):
        wt.Loader(bare, batch_size=4)
