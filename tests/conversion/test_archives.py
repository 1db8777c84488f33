"""Archives that are no plain tars, and streams in their own order."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_class_folder
from wdstrain.errors import ShardError, WdstrainError

MEMBERS = {
    f"dir/k{n:02d}.{field}": f"{field} {n}".encode() for n in range(9) for field in ("txt", "cls")
}


@pytest.mark.parametrize("address", ["a.tar.gz", "."])
def test_a_compressed_tar_is_refused_or_packed_as_a_stream(tmp_path: Path, address: str) -> None:
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "a.tar.gz", mode="w:gz") as tar:
        for name, content in MEMBERS.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with pytest.raises(WdstrainError, match=r"a\.tar\.gz is .*Unpack it first"):
        wt.convert_tars(tmp_path / "in" / address, tmp_path / "out")
    index = wt.pack(wt.WebDataset(str(tmp_path / "in" / "a.tar.gz")), tmp_path / "out")
    packed = {
        f"{sample['__key__']}.{field}": sample[field]
        for sample in map(index.__getitem__, index.keys(np.arange(9)))
        for field in index.fields
    }
    assert packed == MEMBERS


def test_a_zip_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", b"1")
    with pytest.raises(ShardError, match="zip"):
        wt.convert_tars(tmp_path / "a.zip", tmp_path / "out")


@pytest.mark.parametrize("shuffle", [True, False])
def test_repeated_keys_are_renamed_in_linear_time(tmp_path: Path, shuffle: bool) -> None:
    same = ({"__key__": "Same" if n % 2 else "same", "txt": str(n)} for n in range(3000))
    index = wt.pack(same, tmp_path / "out", shuffle=shuffle)
    keys = {key.casefold() for key in index.keys(np.arange(3000))}
    assert keys == {"same", *(f"same-{n}" for n in range(2, 3001))}
    assert index.info["renamed"] == 2999


def test_repacking_keeps_the_source_of_a_set(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "in", {"cat": 3, "dog": 2}, "jpg")
    first = wt.convert_folder(tmp_path / "in", tmp_path / "a")
    second = wt.convert_tars(tmp_path / "a", tmp_path / "b")
    third = wt.convert_tars(tmp_path / "b", tmp_path / "c", shuffle=False)
    assert second.info["source"]["origin"][0]["source"] == first.info["source"]
    assert third.info["source"]["origin"][0]["source"]["origin"] == second.info["source"]["origin"]
