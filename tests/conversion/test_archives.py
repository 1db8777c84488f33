"""Compressed tars as sources, and streams in their own order."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_class_folder
from wdstrain.cli import main
from wdstrain.errors import ShardError, UsageError
from wdstrain.shards.tar_headers import header

KINDS = ["tar", "tar.gz", "tgz", "tar.bz2", "tar.xz", "tar.zst", "tar.lz4"]
MEMBERS = {
    f"dir/k{n:02d}.{field}": f"{field} {n}".encode() for n in range(9) for field in ("txt", "cls")
}


def tar_of(members: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def compressed(data: bytes, kind: str) -> bytes:
    if kind == "tar.zst":
        zstd = pytest.importorskip(
            "backports.zstd" if sys.version_info < (3, 14) else "compression.zstd"
        )
        return bytes(zstd.compress(data))
    if kind == "tar.lz4":
        return bytes(pytest.importorskip("lz4.frame").compress(data))
    pack = {"tar.gz": gzip, "tgz": gzip, "tar.bz2": bz2, "tar.xz": lzma}.get(kind)
    return data if pack is None else pack.compress(data)  # type: ignore[attr-defined]


def write_archive(path: Path, kind: str, members: dict[str, bytes]) -> Path:
    path = path.with_name(f"{path.name}.{kind}")
    path.write_bytes(compressed(tar_of(members), kind))
    return path


def contents(out: Path) -> dict[str, bytes]:
    index = wt.open(out)
    members = {}
    for number in range(len(index)):
        sample = index[number]
        members |= {f"{sample['__key__']}.{field}": sample[field] for field in index.fields}
    return members


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_of_any_kind_of_archive_are_converted(
    tmp_path: Path, kind: str, shuffle: bool
) -> None:
    path = write_archive(tmp_path / "train-0", kind, MEMBERS)
    index = wt.convert_tars(path, tmp_path / "out", shuffle=shuffle, max_shard_samples=4)
    assert contents(tmp_path / "out") == MEMBERS
    assert [shard.samples for shard in index.shards] == [4, 4, 1]
    assert index.splits == ("train",)
    assert wt.verify(tmp_path / "out").ok


def test_archives_of_a_folder_are_filtered_and_split(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_archive(tmp_path / "in" / "a", "tar.gz", MEMBERS)
    other = {name.replace("k", "n"): data for name, data in MEMBERS.items()}
    write_archive(tmp_path / "in" / "b", "tar.xz", other)
    (tmp_path / "keys.txt").write_text("\n".join({name.partition(".")[0] for name in MEMBERS}))
    words = ["--drop", "cls", "--rename", "txt=text", "--keys", str(tmp_path / "keys.txt")]
    words += ["--no-shuffle"]
    assert main(["convert", "tars", str(tmp_path / "in"), str(tmp_path / "out"), *words]) == 0
    assert contents(tmp_path / "out") == {
        name.replace(".txt", ".text"): data for name, data in MEMBERS.items() if ".txt" in name
    }
    split = {"train": 0.5, "val": 0.5}
    index = wt.convert_tars(f"{tmp_path}/in/*", tmp_path / "two", split=split)
    assert contents(tmp_path / "two") == MEMBERS | other
    assert index.splits == ("train", "val")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_truncated_archive_is_an_error_with_its_name(tmp_path: Path, kind: str) -> None:
    path = write_archive(tmp_path / "a", kind, {"k.bin": bytes(range(256)) * 40})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ShardError, match=rf"a\.{kind}"):
        wt.convert_tars(path, tmp_path / "out")


@pytest.mark.slow
def test_a_tar_that_unpacks_to_a_huge_size_is_refused(tmp_path: Path) -> None:
    """1.3 GB of zeros in members of 16 MiB; the archive has a few KB."""
    zeros = bz2.compress(bytes(16 << 20))
    headers = (bz2.compress(header(f"k{n}.bin", 16 << 20)) for n in range(80))
    (tmp_path / "bomb.tar.bz2").write_bytes(b"".join(head + zeros for head in headers))
    with pytest.raises(ShardError, match="unpacks to more than 1000 times its size"):
        wt.convert_tars(tmp_path / "bomb.tar.bz2", tmp_path / "out", shuffle=False)
    assert not list((tmp_path / "out").glob("*.tar"))


def test_archives_without_an_index_have_no_columns_to_select_by(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a", "tar.gz", MEMBERS)
    with pytest.raises(UsageError, match="where and label need the columns of an index"):
        wt.convert_tars(path, tmp_path / "out", where="cls == 1")


def test_separated_members_of_a_key_are_an_error(tmp_path: Path) -> None:
    members = {"a.txt": b"1", "b.txt": b"2", "a.cls": b"0", "b.cls": b"1"}
    with pytest.raises(ShardError, match="members of 'a' in two places"):
        wt.convert_tars(str(write_archive(tmp_path / "a", "tgz", members)), tmp_path / "o")


def test_a_zip_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", b"1")
    with pytest.raises(ShardError, match="zip"):
        wt.convert_tars(tmp_path / "a.zip", tmp_path / "out")


@pytest.mark.parametrize("shuffle", [True, False])
def test_repeated_keys_are_renamed_in_linear_time(tmp_path: Path, shuffle: bool) -> None:
    same = ({"__key__": "Same" if n % 2 else "same", "txt": str(n)} for n in range(3000))
    index = wt.pack(same, tmp_path / "out", shuffle=shuffle)
    assert {key.casefold() for key in index.keys(np.arange(3000))} == {
        "same",
        *(f"same-{n}" for n in range(2, 3001)),
    }
    assert index.info["renamed"] == 2999


def test_repacking_keeps_the_source_of_a_set(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "in", {"cat": 3, "dog": 2}, "jpg")
    first = wt.convert_folder(tmp_path / "in", tmp_path / "a")
    second = wt.convert_tars(tmp_path / "a", tmp_path / "b")
    third = wt.convert_tars(tmp_path / "b", tmp_path / "c", shuffle=False)
    assert second.info["source"]["origin"][0]["source"] == first.info["source"]
    assert third.info["source"]["origin"][0]["source"]["origin"] == second.info["source"]["origin"]
