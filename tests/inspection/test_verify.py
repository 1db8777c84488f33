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
from tests.conftest import Sample, images_with_equal_crc32, picture, write_shards, write_tar
from tests.support.os_faults import small_files
from tests.support.servers import serving
from tests.support.tables import read_samples
from wdstrain.cli import main
from wdstrain.errors import StorageError, UsageError
from wdstrain.order.rng import bits
from wdstrain.shards.tar_headers import END, header, padding


def member(name: str, data: bytes) -> bytes:
    return header(name, len(data)) + data + bytes(padding(len(data)))


def content(number: int) -> dict[str, bytes]:
    return {"bin": bytes([number + 1]) * (300 + 97 * number), "cls": str(number % 3).encode()}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A set of one shard of 12 samples of two fields, with checksums in its index."""
    samples = [{"__key__": f"k{i:02d}", **content(i)} for i in range(12)]
    wt.pack(samples, tmp_path / "set", shuffle=False)
    return tmp_path / "set"


def shard_of(folder: Path) -> Path:
    (actual,) = folder.glob("*.tar")
    return actual


def flipped(data: bytes, at: int, mask: int = 0x41) -> bytes:
    damaged = bytearray(data)
    damaged[at] ^= mask
    return bytes(damaged)


def extents(folder: Path) -> list[tuple[str, int, int, list[int]]]:
    """Return (key, start, stop, offsets of the members) of the samples of a set."""
    index = wt.open(folder)
    keys, rows = index.keys(np.arange(len(index))), index.offsets
    offsets = [[at for _, at, _ in index.members(number)] for number in range(len(index))]
    return list(zip(keys, rows.start.tolist(), rows.stop.tolist(), offsets, strict=True))


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Path of a shard without an index."""
    (tmp_path / "bare").mkdir()
    return tmp_path / "bare" / "x.tar"


def places(count: int, below: int, *words: str) -> list[int]:
    """Return offsets spread over a range, the same on every machine."""
    return sorted(
        set((bits(np.arange(count, dtype=np.uint64), *words) % np.uint64(below)).tolist())
    )


# --- shards without an index ---


def test_a_shard_truncated_at_any_byte_is_reported_with_its_intact_samples(
    packed: Path, bare: Path
) -> None:
    data, samples = shard_of(packed).read_bytes(), extents(packed)
    bare.write_bytes(data)
    report = wt.verify(bare)
    assert (report.ok, report.fields) == (True, {"bin": 12, "cls": 12})
    sizes = [*range(0, len(data), 64), *range(1, len(data), 509)]
    for size in (*sizes, len(data) - 1, samples[-1][2], samples[3][2] + 700):
        bare.write_bytes(data[:size])
        report = wt.verify(bare)
        (found,) = [finding.reason for finding in report.findings if not finding.key]
        assert "was cut" in found or "ends inside" in found, found
        inside = sum(stop <= size for _, _, stop, _ in samples)
        assert inside <= report.samples <= inside + 1


@pytest.mark.parametrize("gap", [512, 1536, 4608])
def test_samples_after_a_gap_are_recovered(
    packed: Path, bare: Path, tmp_path: Path, gap: int
) -> None:
    """Blocks were lost in the middle."""
    data, samples, intact = shard_of(packed).read_bytes(), extents(packed), read_samples(packed)
    cut = samples[4][1] + 512
    bare.write_bytes(data[:cut] + data[cut + gap :])
    assert not wt.verify(bare).ok
    assert not wt.repair(bare, tmp_path / "out").ok
    saved = read_samples(tmp_path / "out")
    assert all(intact[key] == fields for key, fields in saved.items())
    behind = [key for key, start, _, _ in samples if start >= cut + gap][1:]
    assert {f"k{i:02d}" for i in range(4)} | {*behind} <= saved.keys()


def test_concatenated_tars_are_reported_with_the_offset(packed: Path, bare: Path) -> None:
    data = shard_of(packed).read_bytes()
    bare.write_bytes(data + data)
    report = wt.verify(bare)
    first, end = report.findings[0], len(data) - 1024
    assert (report.samples, first.key, first.offset) == (24, "", end)
    assert "several tars in one" in first.reason
    assert f"bytes {end} to {len(data)} hold no sample" in first.reason


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d[:-1024], "without the two zero blocks"),
        (lambda d: d[:-512], "within the two zero blocks"),
        (lambda d: d + bytes(20_000), "bytes before the file does"),
        (lambda d: d[:3072] + bytes(512) + d[3584:], "zero block|no valid tar header"),
        (lambda d: b"\x1f\x8b" + d[2:257] + bytes(6) + d[263:], "is a gzip file"),
        (lambda d: b"no tar at all" * 99, "no valid tar header at offset 0"),
        (lambda d: b"", "ends at byte 0"),
        (
            lambda d: header("x" * 200 + ".bin", 9)[:1024] + END,
            "ends at offset 1024 after an extension header",
        ),
    ],
)
def test_every_kind_of_damage_is_named(packed: Path, bare: Path, make: Any, words: str) -> None:
    bare.write_bytes(make(shard_of(packed).read_bytes()))
    findings = wt.verify(bare).findings
    assert re.search(words, findings[0].reason), findings


def test_hostile_shards_are_read_once_and_damage_is_one_finding(bare: Path) -> None:
    """Impossible sizes, and only zeros."""
    claim = header("a.bin", 1 << 32)
    for data in (
        claim * 4000,
        bytes(8 << 20),
        (claim + b"x") * 4000,
        b"ustar" * 300_000,
        header("a.bin", 0) * 4000 + END,
    ):
        bare.write_bytes(data)
        report = wt.verify(bare)
        assert report.bytes == len(data)
        assert sum("hold no sample" in finding.reason for finding in report.findings) <= 1
        assert 0 < len(report.findings) <= 1001


# --- verify: one shard ---


def test_a_cut_shard_is_reported_with_its_size(shards: Path) -> None:
    wt.index(shards)
    report = wt.verify(f"{shards}/part-*.tar")
    assert (report.ok, report.shards, report.samples) == (True, 3, 21)
    os.truncate(shards / "part-002.tar", 100)
    findings = map(str, wt.verify(shards).findings)
    assert any("part-002.tar has 100 bytes, its index says" in finding for finding in findings)


def test_samples_that_differ_from_the_index_are_reported(shards: Path) -> None:
    wt.index(shards)
    path = shards / "part-000.tar"
    old, new = (header(f"s00000{n}.cls", 1) for n in (3, 9))
    path.write_bytes(path.read_bytes().replace(old, new))
    (finding,) = wt.verify(shards).findings
    assert "holds other samples than its index says" in str(finding)


def test_a_tar_beside_an_index_that_does_not_list_it_is_reported_by_any_address(
    shards: Path,
) -> None:
    wt.index(shards)
    stray = write_tar(shards / "part-009.tar", [("k", {"txt": b"1"})])
    for urls in (shards, f"{shards}/part-*.tar", stray):
        (finding,) = wt.verify(urls).findings
        assert finding.shard == str(stray)
        assert "part-009.tar lies beside the index" in str(finding)


def test_an_index_without_one_of_its_files_is_reported(packed: Path, tmp_path: Path) -> None:
    for lost in ("index.json", "index.arrow"):
        folder = shutil.copytree(packed, tmp_path / lost)
        (folder / lost).unlink()
        (finding,) = wt.verify(folder).findings
        assert lost in finding.sentence


CHANGED = "{}: 'k00', field 'bin' at offset 512: the bytes are not those that were packed."


def test_a_finding_has_a_place_a_text_and_a_json_form(packed: Path, capsys: Any) -> None:
    path = shard_of(packed)
    path.write_bytes(flipped(path.read_bytes(), 512))
    (finding,) = wt.verify(packed).findings
    assert finding[:4] == (str(path), "k00", "bin", 512)
    assert str(finding) == finding.sentence == CHANGED.format(path)
    assert main(["verify", str(packed), "--json"]) == 1
    (document,) = json.loads(capsys.readouterr().out)["findings"]
    assert document == {**finding._asdict(), "sentence": finding.sentence}


def test_a_remote_shard_is_read_once(packed: Path) -> None:
    with serving(packed) as server:
        assert wt.verify(f"{server.url}/index.json").ok
        requested = [path for path, _ in server.requests if path.endswith(".tar")]
    assert len(requested) == 1


def test_any_number_of_threads_reports_the_same_findings(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "s", [7, 13, 9, 4])
    wt.index(folder)
    for number in (0, 2):
        path = folder / f"part-{number:03d}.tar"
        path.write_bytes(flipped(path.read_bytes(), 1024))
    reports = [wt.verify(folder, num_workers=jobs) for jobs in (1, 2, 7)]
    assert [finding.shard for finding in reports[0].findings] == [
        str(folder / "part-000.tar"),
        str(folder / "part-002.tar"),
    ]
    assert reports[0] == reports[1] == reports[2]


def test_a_missing_shard_is_reported_and_the_others_are_verified(shards: Path) -> None:
    wt.index(shards)
    (shards / "part-001.tar").unlink()
    report = wt.verify(shards)
    assert [str(finding) for finding in report.findings] == [
        f"{shards}/part-001.tar cannot be opened: No such file or directory."
    ]
    assert (report.shards, report.samples) == (3, 8)


def test_shards_without_checksums_are_counted(shards: Path, packed: Path) -> None:
    assert wt.verify(shards).unindexed == 3
    said = "3 of 3 shards have no checksums: only their structure was checked"
    assert wt.verify(shards).notes == [said]
    wt.index(shards)
    assert wt.verify(shards).unindexed == 3  # a scan of headers has no checksums
    assert wt.verify(packed).unindexed == 0


def test_repeated_keys_and_members_are_reported(tmp_path: Path) -> None:
    names = ["a.jpg", "b.jpg", "a.cls", "b.cls", "c.jpg", "c.jpg", "c.cls", "a.txt"]
    data = b"".join(member(name, b"x") for name in names) + END
    (tmp_path / "x.tar").write_bytes(data)
    findings = wt.verify(tmp_path / "x.tar").findings
    assert [(sample.key, sample.field, sample.offset) for sample in findings] == [
        ("a", "", 2 * 1024),
        ("b", "", 3 * 1024),
        ("c", "jpg", 5 * 1024 + 512),
        ("a", "", 7 * 1024),
    ]


# --- verify: the complete set ---


def test_missing_fields_are_reported_and_a_rare_field_is_counted(tmp_path: Path) -> None:
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
    assert [item.key for item in wt.verify(tmp_path, need="jpg; PNG, cls").findings] == ["k077"]
    reasons = [finding.reason for finding in wt.verify(tmp_path, need=["txt"]).findings]
    assert sum("no txt" in reason for reason in reasons) == 140 == len(reasons) - 1


def test_findings_of_a_missing_field_are_limited_to_a_thousand(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [(f"k{i:04d}", {"txt": b"t"}) for i in range(1030)])
    findings = wt.verify(tmp_path, need="cls").findings
    assert len([sample for sample in findings if sample.key]) == 1000
    more = f"{tmp_path}/a.tar holds the first of 30 more samples: it has no cls."
    assert str(findings[-1]) == more


def test_missing_and_empty_images_and_labels_are_reported(tmp_path: Path) -> None:
    samples = [{"__key__": f"k{i}", "txt": "t", **({"cls": i % 2} if i else {})} for i in range(5)]
    wt.pack(samples, tmp_path / "s", classes=["a", "b"])
    assert [finding.reason for finding in wt.verify(tmp_path / "s").findings] == ["it has no cls"]
    rows: list[Sample] = [("a", {"jpg": b"", "txt": b""}), ("b", {"png": b"", "cls": b""})]
    found = wt.verify(write_tar(tmp_path / "bare" / "a.tar", rows), decode=True).findings
    assert [(sample.key, sample.field) for sample in found] == [
        ("a", "jpg"),
        ("b", "png"),
        ("b", "cls"),
    ]


@pytest.mark.parametrize("indexed", [False, True])
def test_an_image_in_two_splits_is_reported(tmp_path: Path, indexed: bool) -> None:
    mask = picture(50)
    names = {"train": [0, 1, 2, 2], "val": [3, 1, 4, 2], "test": [5, 6]}
    for split, numbers in names.items():
        samples = [
            (f"{split}{n}", {"png": picture(finding), "mask.png": mask, "cls": b"0"})
            for n, finding in enumerate(numbers)
        ]
        write_tar(tmp_path / f"{split}-000000.tar", samples)
    if indexed:
        wt.index(tmp_path)
    report = wt.verify(tmp_path)
    assert not report.ok
    train, val = (f"{tmp_path}/{name}-000000.tar" for name in ("train", "val"))
    assert [(finding.shard, finding.key, finding.reason) for finding in report.findings] == [
        (val, f"val{n}", f"its image is also in split 'train': key 'train{n}' in {train}")
        for n in (1, 3)
    ]
    assert wt.verify(tmp_path / "train-000000.tar").ok


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
    rows = [("k0", twin), ("k1", {"txt": b"b"}), ("k2", {"txt": b"c"})]
    a = write_tar(tmp_path / "a.tar", rows)
    b = write_tar(tmp_path / "b.tar", [("k1", {"txt": b"other"}), ("k0", twin)])
    report = wt.verify(tmp_path)
    (found,) = report.findings
    assert (found.shard, found.key, found.offset) == (str(b), "k0", 1024)
    assert f"is in {a} at offset 0" in found.reason


def test_a_jpeg_that_is_followed_by_another_image_is_intact(
    tmp_path: Path, data: Callable[[str], Path]
) -> None:
    """Multi-picture files (MPO) hold several JPEGs. Only the first is decoded."""
    first, second = (picture(n, size=(160, 120), kind="JPEG") for n in (1, 2))
    multiple = io.BytesIO()
    images = [Image.open(io.BytesIO(item)) for item in (first, second)]
    images[0].save(multiple, "MPO", save_all=True, append_images=images[1:])
    real = (data("difficult") / "sugarshack.mpo").read_bytes()
    intact = {"a": first + second, "b": multiple.getvalue(), "c": first + second[:-99], "d": real}
    write_tar(tmp_path / "whole.tar", [(key, {"jpg": item}) for key, item in intact.items()])
    assert wt.verify(tmp_path / "whole.tar", decode=True).findings == []
    only_headers = (data("difficult") / "ultrahdr.jpg").read_bytes()  # ends where its pixels begin
    cut = {"a": only_headers, "b": real[: len(real) // 4], "c": first[:-99] + second}
    write_tar(tmp_path / "cut.tar", [(key, {"jpg": item}) for key, item in cut.items()])
    findings = wt.verify(tmp_path / "cut.tar", decode=True).findings
    assert [sample.key for sample in findings] == ["a", "b", "c"]


def test_decoding_reports_intact_bytes_that_are_not_an_image(tmp_path: Path) -> None:
    good, arrays = picture(1), io.BytesIO()
    np.save(arrays, np.array([{"code": 1}], dtype=object), allow_pickle=True)
    whole = {"png": good, "json": b"{}", "txt": b"t", "cls": b"1", "bin": b"?"}
    bad = {"png": good[:-40], "json": b"{", "txt": b"\xff", "cls": b" "}
    rows = [("a", whole), ("b", {**bad, "npy": arrays.getvalue()})]
    write_tar(tmp_path / "a.tar", rows)
    assert wt.verify(tmp_path).ok
    report = wt.verify(tmp_path, decode=True)
    places = {(finding.key, finding.field) for finding in report.findings}
    assert places == {("b", name) for name in ("png", "json", "txt", "cls", "npy")}
    assert any("allow_pickle=False" in finding.reason for finding in report.findings)


def test_decoding_reports_labels_that_are_not_classes_of_the_index(tmp_path: Path) -> None:
    for classes in (2, 3):  # the shard is replaced after it was indexed
        samples = [(f"k{n:02d}", {"cls": str(n % classes).encode()}) for n in range(6)]
        write_tar(tmp_path / "a.tar", samples)
        if classes == 2:
            wt.index(tmp_path, label="cls", classes=["a", "b"])
    findings = wt.verify(tmp_path, decode=True).findings
    refused = [finding.key for finding in findings if "not a class" in finding.reason]
    assert refused == ["k02", "k05"]
    assert not [finding for finding in wt.verify(tmp_path).findings if "a class" in finding.reason]


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


def test_invalid_options_are_wrong_usage(shards: Path, capsys: Any) -> None:
    folder = str(shards)
    for words, message in (
        (["verify", folder, "--num-workers", "0"], "--num-workers 0: must be an integer >= 1"),
        (["repair", folder, "-o", folder], "is the folder of the shards"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


class Steps:
    """Receives the progress of a verb."""

    def __init__(self, is_interrupting: bool = False) -> None:
        self.seen: list[tuple[str, int, int | None]] = []
        self.is_interrupting = is_interrupting

    def step(
        self, title: str, done: int, total: int | None, text: str = "", unit: str = ""
    ) -> None:
        assert unit == "MB"
        self.seen.append((title, done, total))
        if self.is_interrupting and done:
            raise KeyboardInterrupt

    def line(self, text: str) -> None:
        raise AssertionError(text)


def test_progress_is_reported_in_megabytes_with_its_stage(tmp_path: Path) -> None:
    wt.pack([{"__key__": f"k{n}", "bin": bytes(1 << 20)} for n in range(9)], tmp_path / "set")
    verifying, repairing = Steps(), Steps()
    wt.verify(tmp_path / "set", progress=verifying)
    assert verifying.seen[-1] == ("verifying", 9, 9)
    wt.repair(tmp_path / "set", tmp_path / "out", progress=repairing)
    assert repairing.seen[-1] == ("repairing", 9, 9)


@pytest.mark.parametrize("decode", [False, True])
def test_an_interrupt_ends_a_running_verification(tmp_path: Path, decode: bool) -> None:
    """A sparse shard that takes many seconds to read and no disk space."""
    size = (1 << 35) + 2048
    with open(tmp_path / "a.tar", "wb") as file:
        file.write(header("big.bin", 1 << 35))
        file.truncate(size)
    steps = Steps(is_interrupting=True)
    with pytest.raises(KeyboardInterrupt):
        wt.verify(tmp_path, num_workers=3, decode=decode, progress=steps)
    _, read, total = steps.seen[-1]
    assert total == size // 10**6
    assert 0 < read < total
    assert not [item.name for item in threading.enumerate() if item.name.startswith("wdstrain")]


# --- repair ---


def test_without_an_index_only_neighbors_of_the_damage_are_lost(
    packed: Path, tmp_path: Path
) -> None:
    intact, data = read_samples(packed), shard_of(packed).read_bytes()
    samples = extents(packed)
    keys = [key for key, *_ in samples]
    heads = [at - 512 for *_, members in samples for at in members]
    path, out = tmp_path / "foreign" / "x.tar", tmp_path / "out"
    path.parent.mkdir()
    damaged = [
        (flipped(data, at + place % 148), at, at + 512)
        for at in heads
        for place in places(2, 512, "head", at)
    ]
    damaged += [
        (data[:size], size, len(data)) for size in places(25, len(data), "cut") if size > 3000
    ]
    for bad, start, stop in damaged:
        path.write_bytes(bad)
        done = wt.repair(path, out, overwrite=True)
        saved = read_samples(out)
        assert all(intact[key] == fields for key, fields in saved.items())
        hit = [i for i, (_, a, b, _) in enumerate(samples) if a < stop and b > start]
        near = {keys[i] for h in hit for i in (h - 1, h, h + 1) if 0 <= i < len(keys)}
        assert set(keys) - set(saved) <= near
        assert not done.ok
        assert any(
            "hold no sample" in str(finding) or "was cut" in str(finding)
            for finding in done.findings
        )
        assert wt.verify(out).ok


def test_separated_members_of_a_sample_are_joined(tmp_path: Path) -> None:
    names = ["a.jpg", "b.jpg", "a.cls", "b.cls", "a.jpg"]
    (tmp_path / "x.tar").write_bytes(b"".join(member(name, name.encode()) for name in names) + END)
    done = wt.repair(tmp_path / "x.tar", tmp_path / "out")
    assert read_samples(tmp_path / "out") == {
        key: {"jpg": f"{key}.jpg".encode(), "cls": f"{key}.cls".encode()} for key in "ab"
    }
    assert [str(finding) for finding in done.findings] == [
        f"{tmp_path}/x.tar: 'a', the sample at offset 4096: a member of this key and name "
        "came before."
    ]


def test_an_index_without_checksums_names_the_lost_samples(shards: Path, tmp_path: Path) -> None:
    wt.index(shards)
    path = shards / "part-001.tar"
    path.write_bytes(flipped(path.read_bytes(), 4 * 2048 + 5))
    done = wt.repair(shards, tmp_path / "out")
    assert [finding.key for finding in done.findings if finding.key] == ["s000011"]
    assert (done.samples, done.lost) == (20, 1)


def test_a_missing_shard_is_reported_with_its_number_of_samples(
    shards: Path, tmp_path: Path
) -> None:
    wt.index(shards)
    (shards / "part-001.tar").unlink()
    done = wt.repair(shards, tmp_path / "out")
    assert (done.samples, done.lost, done.shards) == (8, 13, 2)
    assert "part-001.tar cannot be opened" in str(done.findings[0])
    assert "held 13 samples, of which 13 are lost" in str(done.findings[1])


def test_shards_on_a_server_are_repaired_locally(packed: Path, tmp_path: Path) -> None:
    path = shard_of(packed)
    path.write_bytes(flipped(path.read_bytes(), 600))
    with serving(packed) as server:
        done = wt.repair(f"{server.url}/index.json", tmp_path / "out")
    assert (done.samples, done.lost) == (11, 1)
    assert wt.verify(tmp_path / "out").ok


def test_repair_reports_losses_and_exits_with_their_status(
    packed: Path, tmp_path: Path, capsys: Any
) -> None:
    out, path = tmp_path / "out", shard_of(packed)
    assert main(["repair", str(packed), "-o", str(out)]) == 0
    assert main(["repair", str(packed), "-o", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    path.write_bytes(flipped(path.read_bytes(), 600))
    assert main(["repair", str(packed), "-o", str(out), "--overwrite"]) == 1
    assert CHANGED.format(path) in capsys.readouterr().err
    assert main(["repair", str(packed), "-o", str(out), "--overwrite", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["lost"] == 1


def test_a_full_disk_leaves_no_files(packed: Path, tmp_path: Path) -> None:
    with small_files(8192), pytest.raises(StorageError, match="cannot be written: File too large"):
        wt.repair(packed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_set_without_an_intact_sample_is_not_repaired(packed: Path, tmp_path: Path) -> None:
    os.truncate(shard_of(packed), 600)
    with pytest.raises(wt.ShardError, match="none of 1 shard holds an intact sample"):
        wt.repair(packed, tmp_path / "out")


def test_two_shards_with_equal_names_are_not_repaired_into_one_folder(
    shards: Path, tmp_path: Path
) -> None:
    other = write_shards(tmp_path / "other", [3])
    with pytest.raises(UsageError, match=r"two shards are named part-000.tar"):
        wt.repair([shards, other], tmp_path / "out")


def test_a_read_error_is_not_reported_as_a_write_error(
    tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".tar"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(shard_of(packed), bare)
    message = "cannot be read at offset [0-9]+: Input/output error"
    for urls in (packed, bare):
        with pytest.raises(wt.WdstrainError, match=message):
            wt.convert_tars(str(urls), str(tmp_path / "again"))
        with pytest.raises(wt.WdstrainError, match=message):
            wt.repair(urls, tmp_path / "repaired")
        (finding,) = wt.verify(urls).findings
        assert re.search(message, finding.sentence)
    with pytest.raises(StorageError, match=message):
        wt.Loader(bare, batch_size=4)


def test_non_finite_targets_are_findings(tmp_path: Path) -> None:
    """Repair keeps such numbers."""
    texts = ["1.5", "nan", "inf", "2", "-inf", "NaN"]
    samples = [
        {"__key__": f"k{n}", "y": texts[n % 6], "json": b'{"z": NaN}' if n == 3 else b'{"z": 1}'}
        for n in range(12)
    ]
    labels = [wt.Label("y", "number", "y"), wt.Label("z", "number", "json", "z")]
    wt.pack(samples, tmp_path / "set", labels=labels, shuffle=False, max_shard_samples=6)
    assert wt.verify(tmp_path / "set").ok
    findings = wt.verify(tmp_path / "set", decode=True).findings
    bad = {("k3", "json"): "z"}
    bad |= {(f"k{n}", "y"): "y" for n in range(12) if texts[n % 6] not in ("1.5", "2")}
    reason = "its {} is NaN or infinite, and cannot be trained on"
    assert {(finding.key, finding.field): finding.reason for finding in findings} == {
        place: reason.format(name) for place, name in bad.items()
    }


def test_columns_are_compared_with_the_bytes_of_their_fields(tmp_path: Path) -> None:
    """Columns may have another type in one shard than in the set, and missing values."""
    samples = []
    for n in range(40):
        entries = {"p": n / 2 if n % 5 else None, "tags": ["a"] * (n % 2)}
        entries |= {"mixed": n if n < 9 else "z"} | ({"rare": True} if n > 30 else {})
        samples.append({"__key__": f"k{n:02d}", "bin": b"x" * n, "cls": n % 3, "json": entries})
    labels, out = [wt.Label("p", "number", "json", "p")], tmp_path / "set"
    wt.pack(samples, out, shuffle=False, max_shard_samples=7, labels=labels)
    assert wt.verify(out).ok
    index = wt.open(out)
    changed = {("k08", "cls"): b"1", ("k20", "cls"): b"0"}
    for (key, _), data in changed.items():
        overwrite(index, int(key[1:]), "cls", data)
    report = wt.verify(out)
    assert {(finding.key, finding.field) for finding in report.findings} == set(changed)
    assert all("not those that were packed" in finding.reason for finding in report.findings)


def overwrite(index: wt.Index, number: int, field: str, data: bytes) -> int:
    """Change the bytes of a field in its shard. Returns its offset."""
    offset = next(at for name, at, _ in index.members(number) if name == field)
    with open(index.shard_with(number).path, "r+b") as file:
        file.seek(offset)
        assert file.read(len(data)) != data
        file.seek(offset)
        file.write(data)
    return offset


def test_a_column_that_differs_from_its_field_is_reported(tmp_path: Path) -> None:
    """The shards have no checksums, so only the columns show that labels were changed."""
    for number in range(3):
        write_tar(
            tmp_path / f"s-{number}.tar",
            [(f"k{number}{i}", {"txt": b"t", "cls": str(i).encode()}) for i in range(5)],
        )
    index = wt.index(str(tmp_path), label="cls", classes=list("abcde"))
    assert wt.verify(str(tmp_path)).ok
    offset = overwrite(index, 7, "cls", b"4")
    report = wt.verify(str(tmp_path))
    assert [(finding.key, finding.field, finding.offset) for finding in report.findings] == [
        ("k12", "cls", offset)
    ]
    assert "the index has 'c' in its column label, the shard 'e'" in report.findings[0].reason
    wt.index(str(tmp_path), label="cls", classes=list("abcde"))
    assert wt.verify(str(tmp_path)).ok


# --- groups of a split ---


def table_of_patients(folder: Path, splits: list[str]) -> Path:
    """Convert a table of 12 images of 4 patients, whose rows alternate between these splits."""
    folder.mkdir()
    rows = ["f,patient,label,part"]
    for i in range(12):
        (folder / f"{i}.png").write_bytes(picture(i))
        rows.append(f"{i}.png,p{i // 3},{i % 2},{splits[i % len(splits)]}")
    (folder / "t.csv").write_text("\n".join(rows))
    wt.convert_table(
        str(folder / "t.csv"),
        str(folder / "out"),
        image="f",
        label="label:class",
        split_by="part",
    )
    return folder / "out"


def test_a_group_in_two_splits_is_reported(tmp_path: Path, capsys: Any) -> None:
    out = table_of_patients(tmp_path / "a", ["train", "train", "val"])
    assert wt.verify(out).ok
    report = wt.verify(out, group_by="patient")
    assert report.groups == {"patient": 4}
    assert len({finding.key for finding in report.findings}) == 4
    for finding in report.findings:
        assert "its group of 'patient' is also in split 'train'" in finding.reason
        assert finding.shard.endswith("val-000000.tar")
    assert main(["verify", str(out), "--group-by", "patient"]) == 1
    assert "'patient'" in capsys.readouterr().err
    assert main(["verify", str(out), "--group-by", "doctor"]) == 2
    one_split = table_of_patients(tmp_path / "b", ["train"])
    assert wt.verify(one_split, group_by="patient").ok


def test_the_groups_by_which_a_conversion_split_are_checked(tmp_path: Path) -> None:
    table_of_patients(tmp_path / "a", ["train"])
    out = tmp_path / "grouped"
    wt.convert_table(
        str(tmp_path / "a" / "t.csv"),
        str(out),
        image="f",
        label="label:class",
        split={"train": 0.5, "val": 0.5},
        group_by="patient",
    )
    report = wt.verify(out)
    assert report.ok
    assert report.groups == {"patient": 4}
    assert wt.verify(out, where="patient == 'p0'").shards == 1


def test_only_shards_with_selected_samples_are_read(tmp_path: Path, capsys: Any) -> None:
    wt.pack(
        [{"__key__": f"k{i:02d}", "json": {"age": i}} for i in range(12)],
        str(tmp_path / "set"),
        shuffle=False,
        max_shard_samples=4,
    )
    assert wt.verify(tmp_path / "set", where="age < 3").samples == 4
    assert main(["verify", str(tmp_path / "set"), "--where", "age >= 4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shards"] == 2
