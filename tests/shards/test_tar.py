"""Shards are standard tars: other tools read ours, we read theirs, and truncation is detected."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from tarfile import DIRTYPE, LNKTYPE, REGTYPE, SYMTYPE

import pytest
import webdataset

import wdstrain as wt
from tests.conftest import Sample, picture, read_with_webdataset, write_tar
from tests.support.outcomes import result_or_refusal
from wdstrain.errors import ShardError, UsageError
from wdstrain.shards.tar import SkippedMembers, samples, split_name
from wdstrain.shards.tar_headers import header
from wdstrain.storage.files import open_source

LONG = "folder-" + "x" * 60 + "/" + "y" * 60 + "/" + "z" * 72  # fits prefix and name of ustar
ENDLESS = "n" * 200  # does not fit: no slash to split at

ODD: list[Sample] = [
    ("plain", {"jpg": picture(1, kind="JPEG"), "cls": b"1", "seg.png": picture(2), "json": b"{}"}),
    ("grüße/日本/ключ", {"jpg": b"x" * 511, "txt": "päckchen".encode()}),
    (LONG, {"jpg": b"x" * 512}),
    (ENDLESS, {"jpg": b"x" * 513, "cls": b"7"}),
    ("empty", {"txt": b""}),
]


def read(path: Path, skipped: SkippedMembers | None = None) -> list[Sample]:
    """Return all samples of a shard as the tar reader delivers them."""
    with open_source(str(path)) as source:
        actual = list(samples(source.bytes_at, source.size, str(path), skipped))
        return [
            (key, {name: source.bytes_at(m.offset, m.size) for name, m in fields.items()})
            for key, fields in actual
        ]


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "odd.tar", ODD)


def write_members(path: Path, *members: tuple[str, bytes, bytes], format: int = 1) -> Path:
    """Write a tar of members (name, kind, data) by tarfile. A link leads to a.png."""
    with tarfile.open(path, "w", format=format) as tar:
        for name, kind, data in members:
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, len(data)
            member.linkname = "a.png" if kind in (SYMTYPE, LNKTYPE) else ""
            member.mtime = 1.5 if format == tarfile.PAX_FORMAT else 1
            tar.addfile(member, io.BytesIO(data))
    return path


def gnu_tar(folder: Path, files: dict[str, bytes], *commands: str) -> Path:
    for name, data in files.items():
        (folder / f"{name}.bin").write_bytes(data)
    for command in commands:
        subprocess.run(["tar", *command.split()], cwd=folder, check=True)
    return folder / "t.tar"


def test_written_shards_are_read_back_by_the_package_webdataset_and_gnu_tar(odd: Path) -> None:
    assert read(odd) == read_with_webdataset([odd]) == ODD
    words = ["tar", "--quoting-style=literal", "-tf", odd]
    listed = subprocess.run(words, capture_output=True, check=True)
    assert listed.stderr == b""
    names = [f"{key}.{name}" for key, fields in ODD for name in fields]
    assert listed.stdout.decode().splitlines() == names


def test_shards_of_webdataset_with_pax_headers_are_read(tmp_path: Path) -> None:
    with webdataset.ShardWriter(str(tmp_path / "w-%06d.tar"), maxcount=3, verbose=0) as writer:
        for key, fields in ODD:
            writer.write({"__key__": key, **{n: d for n, d in fields.items() if n != "cls"}})
    paths = sorted(tmp_path.glob("w-*.tar"))
    assert b"mtime" in paths[0].read_bytes()  # the PAX header contains a float time
    actual = [sample for path in paths for sample in read(path)]
    assert [key for key, _ in actual] == [key for key, _ in ODD]
    assert actual[1][1]["jpg"] == b"x" * 511
    assert actual[0][1]["seg.png"] == picture(2)


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format_of_python_tarfile_is_read(tmp_path: Path, style: int) -> None:
    path = write_members(
        tmp_path / "t.tar",
        ("folder", DIRTYPE, b""),
        ("folder/a.JPG", REGTYPE, b"1" * 600),
        ("folder/a.cls", REGTYPE, b"2"),
        (f"{LONG[:150]}.txt", REGTYPE, b"3"),
        format=style,
    )
    skipped = SkippedMembers()
    assert read(path, skipped) == [
        ("folder/a", {"jpg": b"1" * 600, "cls": b"2"}),
        (LONG[:150], {"txt": b"3"}),
    ]
    assert skipped == {"a directory": 1}


def test_names_are_split_as_webdataset_splits_them() -> None:
    assert split_name("a/b.c/d.seg.PNG") == ("a/b.c/d", "seg.png")
    assert split_name("x.tar/y.jpg") == ("x.tar/y", "jpg")
    for path in ("a.jpg", "a/b.c/d.seg.png", "x.tar/y.jpg", "noext", ".b", "a.b/c", "a..b", "a/b."):
        assert (split_name(path) or (None, None)) == webdataset.tariterators.base_plus_ext(path)
    assert split_name("a/.hidden") is None  # here webdataset takes the folder for the key


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x1f\x8b\x08" + bytes(600), "gzip"),
        (b"<html>" + bytes(1018), "no valid tar header"),
        (header("a.jpg", 0) * 2 + bytes(1024), "two members named 'a.jpg'"),
        (
            b"".join(header(name, 1) + b"1" + bytes(511) for name in ("a.jpg", "b.jpg", "a.cls"))
            + bytes(1024),
            "'a' in two places, the second .'a.cls'. at offset 2048",
        ),
    ],
)
def test_a_file_that_is_not_a_shard_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "t.tar").write_bytes(data)
    with pytest.raises(ShardError, match=words):
        read(tmp_path / "t.tar")


def test_sizes_beyond_octal_round_trip_through_a_pax_header() -> None:
    size = 9 * 2**30
    blocks = header("big.bin", size)
    info = tarfile.TarInfo.frombuf(blocks[1024:1536], "utf-8", "strict")
    assert info.name == "big.bin"
    assert b"%d" % size in blocks[512:1024]
    with pytest.raises(ShardError, match=f"{size} bytes promised"):
        list(samples(lambda offset, length: blocks[offset : offset + length], len(blocks), "s"))


def test_a_member_needs_a_name() -> None:
    with pytest.raises(UsageError, match="cannot be a member name"):
        header("", 1)


@pytest.mark.parametrize(
    "commands",
    [
        "-b 2048 -cf t.tar a.bin b.bin c.bin",
        "-cf t.tar a.bin; -cf x.tar b.bin; -cf y.tar c.bin; -Af t.tar x.tar; -Af t.tar y.tar",
        "-b 64 -cf t.tar a.bin; -cf x.tar b.bin c.bin; -b 64 -Af t.tar x.tar",
        "-cf t.tar a.bin; -rf t.tar b.bin c.bin",
    ],
)
def test_tars_padded_or_joined_by_gnu_tar_are_intact(tmp_path: Path, commands: str) -> None:
    files = {"a": bytes(range(1, 251)) * 20, "b": b"label", "c": bytes(range(1, 251)) * 8}
    tar = gnu_tar(tmp_path, files, *commands.split("; "))
    expected = [(name, {"bin": data}) for name, data in files.items()]
    assert read(tar) == expected
    assert wt.verify(tar).ok
    assert wt.info(tar).samples == 3
    data = tar.read_bytes()
    ends = [512 * (end // 512) for end in (5632, 6656, 9216)]
    for at in range(512, 9216, 512):
        tar.write_bytes(data[:at])
        with pytest.raises(ShardError):
            read(tar)
        assert not wt.verify(tar).ok
        if at not in ends and len(data) - at > 10752:
            tar.write_bytes(data[:at] + bytes(len(data) - at))
            with pytest.raises(ShardError):
                read(tar)
            assert not wt.verify(tar).ok


@pytest.mark.parametrize(
    "commands",
    [
        "-b 41 -cf t.tar a.bin b.bin c.bin",
        "-b 63 -cf t.tar a.bin; -b 100 -rf t.tar b.bin c.bin",
    ],
)
def test_zeros_of_other_records_are_refused_and_repaired(tmp_path: Path, commands: str) -> None:
    """Only records of 20 blocks and of powers of two are known: others look like a lost end."""
    files = {"a": bytes(range(1, 251)) * 20, "b": b"b", "c": b"c" * 2000}
    with pytest.raises(ShardError, match="more than tar adds.*wdstrain repair"):
        read(gnu_tar(tmp_path, files, *commands.split("; ")))
    assert wt.repair(tmp_path / "t.tar", tmp_path / "repaired").samples == 3


_MEMBERS = [header(f"{n}.cls", 1) + b"1" + bytes(511) for n in range(4)]
_WHOLE, _ZEROS = b"".join(_MEMBERS), bytes(512)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(_WHOLE + bytes(1 << 20), id="a megabyte of zeros at the end"),
        pytest.param(_WHOLE + _ZEROS * 2 + b"x" * 512, id="bytes after the end"),
        pytest.param(_MEMBERS[0] + _ZEROS * 2 + _WHOLE[1024:] + _ZEROS * 2, id="joined"),
        pytest.param(_WHOLE, id="no end"),
        pytest.param(_WHOLE[:-300], id="padding of the last member cut"),
        pytest.param(_WHOLE + _ZEROS, id="one zero block"),
        pytest.param(_WHOLE + b"x" * 512, id="bytes instead of an end"),
        pytest.param(_MEMBERS[0] + _ZEROS + _WHOLE[1024:] + _ZEROS * 2, id="zero block between"),
    ],
)
def test_a_shard_of_whole_samples_is_read_or_can_be_repaired(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "shard.tar"
    path.write_bytes(data)
    assert wt.repair(path, tmp_path / "repaired").samples == 4
    outcome = result_or_refusal(lambda: len(wt.open(path)))
    assert outcome == 4 or "wdstrain repair" in str(outcome)


@pytest.mark.parametrize("kind", [LNKTYPE, SYMTYPE], ids=["hard", "symbolic"])
@pytest.mark.parametrize("has_label", [True, False])
def test_a_file_stored_as_link_is_read_or_named(
    has_label: bool, kind: bytes, tmp_path: Path
) -> None:
    """Tar stores the second name of a hard-linked file as a link: its sample must keep the file."""
    red = picture(1)
    members = [("a.png", REGTYPE, red), ("a.cls", REGTYPE, b"1")]
    members += [("b.png", kind, b""), ("b.cls", REGTYPE, b"1")]
    members = [member for member in members if has_label or "cls" not in member[0]]
    path = write_members(tmp_path / "a.tar", *members)
    index = wt.open(path)
    images = [index[number].get("png") for number in range(len(index))]
    findings = [finding.reason for finding in wt.verify(path).findings]
    assert images == [red, red] or any("link" in reason for reason in findings)
