"""Names of keys and fields: every sample and field that is packed is read by every reader."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import picture, read_with_webdataset, write_tar
from tests.support.tables import attempt, write_images, write_table


def check_all_readers(out: Path, count: int) -> None:
    """Check that the index, webdataset, our stream and a new index give the same samples."""
    index = wt.open(out)
    keys = sorted(index.key(n) for n in range(len(index)))
    assert len(keys) == count
    assert wt.verify(out).ok
    shards = sorted(out.glob("*.tar"))
    for shard in shards:  # webdataset raises an error for a shard without samples
        assert not all(re.match("__[^/]*__/", name) for name in member_names(shard))
    assert sorted(key for key, _ in read_with_webdataset(shards)) == keys
    streams = [wt.WebDataset(str(shard), shardshuffle=False) for shard in shards]
    assert sorted(sample["__key__"] for stream in streams for sample in stream) == keys
    for name in ("index.json", "index.arrow"):
        (out / name).unlink()
    again = wt.open(out)
    assert sorted(again.key(n) for n in range(len(again))) == keys


def member_names(shard: Path) -> list[str]:
    with tarfile.open(shard) as tar:
        return tar.getnames()


# --- keys ---


def _pack(tmp_path: Path, names: list[str], out: Path) -> wt.Index:
    return wt.pack([{"__key__": name, "txt": name} for name in names], out)


def _folder(tmp_path: Path, names: list[str], out: Path) -> wt.Index:
    for number, name in enumerate(names):
        path = tmp_path / "in" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, size=(4, 4)))
    return wt.convert_folder(tmp_path / "in", out, flat=True)


def _class_folders(tmp_path: Path, names: list[str], out: Path) -> wt.Index:
    for name in names:
        write_images(tmp_path / "in" / name.partition("/")[0], 1)
    return wt.convert_folder(tmp_path / "in", out)


def _splits_of_class_folders(tmp_path: Path, names: list[str], out: Path) -> wt.Index:
    for number, (name, split) in enumerate(zip(names, ("train", "val"), strict=True)):
        folder = tmp_path / "in" / split / name.partition("/")[0]
        folder.mkdir(parents=True)
        (folder / "0.png").write_bytes(picture(number, size=(4, 4)))
    return wt.convert_folder(tmp_path / "in", out)


def _table(tmp_path: Path, names: list[str], out: Path) -> wt.Index:
    for name in names:
        write_images((tmp_path / name).parent, 1)
    files = [f"{name.rpartition('/')[0]}/0.png" for name in names]
    return wt.convert_table(write_table(tmp_path / "t", "csv", file=files), out, image="file")


def _hdf5(tmp_path: Path, names: list[str], out: Path) -> wt.Index:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["x"], file["names"] = np.zeros((len(names), 2)), [name.encode() for name in names]
    return wt.convert_hdf5(tmp_path / "f.h5", out, {"x": "x"}, key="names")


@pytest.mark.parametrize(
    "name", ["__background__/1", "_background_/1", "__background/1", "background__/1"]
)
@pytest.mark.parametrize(
    "source", [_pack, _folder, _class_folders, _splits_of_class_folders, _table, _hdf5]
)
def test_every_packed_sample_is_read_by_every_reader(
    tmp_path: Path, source: Callable[..., wt.Index], name: str
) -> None:
    result = attempt(lambda: source(tmp_path, [name, "cat/2"], tmp_path / "out"))
    if not isinstance(result, str):
        check_all_readers(tmp_path / "out", 2)


@pytest.mark.parametrize(
    "name", ["a/__x__", "a/__x__/1", ".x/1", "./x", "/x", "a.b/c", "x y", "\u00e9"]
)
def test_unusual_keys_are_read_by_every_reader(tmp_path: Path, name: str) -> None:
    _pack(tmp_path, [name, "plain"], tmp_path / "out")
    check_all_readers(tmp_path / "out", 2)


# --- fields ---


def _pack_field(tmp_path: Path, name: str) -> wt.Index:
    return wt.pack([{"__key__": "k", "txt": "x", name: b"1"}], tmp_path / "out")


def _array_field(tmp_path: Path, name: str) -> wt.Index:
    return wt.convert_arrays({"x": np.zeros((2, 2)), name: np.ones((2, 2))}, tmp_path / "out")


def _hdf5_field(tmp_path: Path, name: str) -> wt.Index:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["x"] = np.zeros((2, 2))
    return wt.convert_hdf5(tmp_path / "f.h5", tmp_path / "out", {"x": "x", name: "x"})


def _renamed_field(tmp_path: Path, name: str) -> wt.Index:
    write_tar(tmp_path / "old.tar", [("k", {"txt": b"1", "cls": b"0"})])
    return wt.convert_tars(tmp_path / "old.tar", tmp_path / "out", rename={"txt": name})


def _column_of_bytes(tmp_path: Path, name: str) -> wt.Index:
    columns: dict[str, list[Any]] = {"image": [picture(0, size=(4, 4))], name: [b"1"]}
    table = write_table(tmp_path / "t", "parquet", **columns)
    return wt.convert_table(table, tmp_path / "out", image="image")


FIELD_SOURCES = [_array_field, _hdf5_field, _renamed_field, _column_of_bytes]


@pytest.mark.parametrize("source", FIELD_SOURCES)
@pytest.mark.parametrize("name", ["__x__", "__x"])
def test_no_field_gets_a_name_that_readers_take_for_a_note(
    tmp_path: Path, source: Callable[..., wt.Index], name: str
) -> None:
    result = attempt(lambda: source(tmp_path, name))
    if not isinstance(result, str):
        assert len(result.fields) >= 2
        assert not any(field.startswith("__") for field in result.fields)


@pytest.mark.parametrize("source", [_pack_field, *FIELD_SOURCES])
@pytest.mark.parametrize("name", ["a/b", "a\\b"])
def test_no_field_has_a_slash_or_a_backslash_in_its_name(
    tmp_path: Path, source: Callable[..., wt.Index], name: str
) -> None:
    result = attempt(lambda: source(tmp_path, name))
    assert isinstance(result, str) or not any(set("/\\") & set(f) for f in result.fields)


# --- backslashes ---


def test_backslashes_in_a_tar_do_not_merge_samples_silently(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(3):
            member = tarfile.TarInfo(f"v1.2\\cat\\{number}.txt")
            archive.addfile(member)
    result = attempt(lambda: wt.convert_tars(tmp_path / "a.tar", tmp_path / "out"))
    assert isinstance(result, str) or len(result) == 3
