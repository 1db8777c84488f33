"""Values, keys and names of fields are stored unchanged and read by every reader, or refused."""

from __future__ import annotations

import enum
import io
import re
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import picture, read_with_webdataset, write_tar
from tests.support.tables import (
    read_json,
    read_members,
    write_images,
    write_pictures,
    write_table,
)
from wdstrain.errors import SourceError, UsageError, WdstrainError


class Animal(str, enum.Enum):
    """A text enum, whose str() is another text."""

    CAT = "cat"


class Level(enum.IntEnum):
    """A number with a name."""

    LOW = 1


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (Animal.CAT, b"cat"),
        (Level.LOW, b"1"),
        (np.array("cat"), b"cat"),
        ("a\r\n\0b", b"a\r\n\0b"),
        (10**30, b"1" + b"0" * 30),
        (memoryview(b"c-a-t")[::2], b"cat"),
    ],
)
def test_a_text_is_stored_as_it_is(tmp_path: Path, value: Any, stored: bytes) -> None:
    wt.pack([{"__key__": "k", "txt": value}], tmp_path / "out")
    assert read_members(tmp_path / "out") == {"k.txt": stored}


def test_values_of_json_are_stored_as_they_are(tmp_path: Path) -> None:
    values = [Animal.CAT, Level.LOW, {"n": 2**53 + 1}, [1, 2]]
    wt.pack(({"json": value} for value in values), tmp_path / "out", shuffle=False)
    assert read_json(tmp_path / "out") == values


@pytest.mark.parametrize(
    "value", [{1: "a", "1": "b"}, {None: "a", "null": "b"}, {"inside": [{1: "a", "1": "b"}]}]
)
def test_names_of_json_that_would_become_one_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SourceError, match="row 1: its json .* names '(1|null)' twice"):
        wt.pack([{"txt": "x", "json": value}], tmp_path / "out")
    frame = pandas.DataFrame({"image": [picture(0)], "said": [value]})
    with pytest.raises(UsageError, match="names an entry twice"):
        wt.convert_table(frame, tmp_path / "out", image="image")


@pytest.mark.parametrize("value", [Image.new("L", (8, 8)), {"bytes": picture(1)}, [1, 2]])
def test_a_value_without_a_kind_and_a_row_of_other_names_have_helpful_messages(
    value: Any, tmp_path: Path
) -> None:
    """Rows as data sets of Hugging Face have them: `image` says nothing about the format."""
    kinds = "name an array image.npy, an image image.png, a dict or list image.json, or give bytes"
    with pytest.raises(SourceError, match=rf"row 1: its image is \w+, .*{kinds}"):
        wt.pack([{"image": value, "cls": 1}], tmp_path / "out")
    with pytest.raises(SourceError, match="row 1: it has no fields, only 'image', 'label'"):
        wt.pack([{"image": value, "label": 1}], tmp_path / "out", fields=("jpg", "cls"))


ROWS = [{f"k{number % 300}": number} for number in range(1200)]  # an index has fewer columns


def _packed_rows(folder: Path) -> None:
    wt.pack(({"json": row} for row in ROWS), folder / "out", max_shard_samples=600)


def _merged_sets(folder: Path) -> None:
    for half in range(2):
        samples = ({"__key__": f"{half}-{n}", "json": row} for n, row in enumerate(ROWS[half::2]))
        wt.pack(samples, folder / f"set{half}")
    wt.convert_tars([folder / "set0", folder / "set1"], folder / "out", max_shard_samples=600)


@pytest.mark.parametrize("make", [_packed_rows, _merged_sets])
def test_a_column_holds_all_values_of_its_entry(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path)
    index = wt.open(tmp_path / "out")
    stored = Counter(name for row in read_json(tmp_path / "out") for name in row)
    columns = [name for name in index.table.column_names if name in stored]
    held = {name: len(index) - index.table[name].null_count for name in columns}
    assert held == {name: stored[name] for name in columns}
    assert wt.verify(tmp_path / "out").ok


@pytest.mark.parametrize("label", [["heat:number"], []])
@pytest.mark.parametrize(
    "attributes",
    [
        {"scale_factor": 0.1, "add_offset": 273.15},
        {"_FillValue": np.int16(-999)},
        {"missing_value": np.int16(-999)},
        {"_Unsigned": "true"},
    ],
)
def test_a_line_says_that_packed_numbers_of_netcdf_are_stored_without_their_attributes(
    tmp_path: Path, attributes: dict[str, Any], label: list[str]
) -> None:
    with h5py.File(tmp_path / "t.nc", "w") as file:
        file["heat"] = np.array([100, 200, -999, 300], np.int16)
        file["heat"].attrs.update(attributes)
    index = wt.convert_hdf5(tmp_path / "t.nc", tmp_path / "out", {"heat": "/heat"}, label=label)
    message = f"heat: stored numbers are packed, without {', '.join(attributes)}"
    assert index.info["source"]["decided"] == [message]


def check_all_readers(out: Path, count: int) -> None:
    """Check that the index, webdataset, our stream and a new index give the same samples."""
    index = wt.open(out)
    keys = sorted(index.keys(range(len(index))))
    assert len(keys) == count
    assert wt.verify(out).ok
    shards = sorted(out.glob("*.tar"))
    for shard in shards:  # webdataset raises an error for a shard without samples
        with tarfile.open(shard) as tar:
            assert not all(re.match("__[^/]*__/", name) for name in tar.getnames())
    assert sorted(key for key, _ in read_with_webdataset(shards)) == keys
    streams = [wt.WebDataset(str(shard), shardshuffle=False) for shard in shards]
    assert sorted(sample["__key__"] for stream in streams for sample in stream) == keys
    for name in ("index.json", "index.arrow"):
        (out / name).unlink()
    again = wt.open(out)
    assert sorted(again.keys(range(len(again)))) == keys


def _pack(folder: Path, name: str) -> None:
    names = [f"{name}/1", "cat/2"]
    wt.pack([{"__key__": name, "txt": name} for name in names], folder / "out")


def _splits_of_class_folders(folder: Path, name: str) -> None:
    for number, (label, split) in enumerate(((name, "train"), ("cat", "val"))):
        write_pictures(folder / "in" / split / label, [number])
    wt.convert_folder(folder / "in", folder / "out")


def _table(folder: Path, name: str) -> None:
    for label in (name, "cat"):
        write_images(folder / label, 1)
    table = write_table(folder / "t", "csv", file=[f"{name}/0.png", "cat/0.png"])
    wt.convert_table(table, folder / "out", image="file")


@pytest.mark.parametrize("name", ["__background__", "_background_", "__background"])
@pytest.mark.parametrize("convert", [_pack, _splits_of_class_folders, _table])
def test_every_packed_sample_is_read_by_every_reader(
    tmp_path: Path, convert: Callable[[Path, str], None], name: str
) -> None:
    convert(tmp_path, name)
    check_all_readers(tmp_path / "out", 2)


def test_unusual_keys_are_read_by_every_reader(tmp_path: Path) -> None:
    names = ["a/__x__", "a/__x__/1", ".x/1", "./x", "/x", "a.b/c", "x y", "\u00e9", "plain"]
    wt.pack([{"__key__": name, "txt": name} for name in names], tmp_path / "out")
    check_all_readers(tmp_path / "out", len(names))


def _array_field(folder: Path, name: str) -> None:
    wt.convert_arrays({"x": np.zeros((2, 2)), name: np.ones((2, 2))}, folder / "out")


def _hdf5_field(folder: Path, name: str) -> None:
    with h5py.File(folder / "f.h5", "w") as file:
        file["x"] = np.zeros((2, 2))
    wt.convert_hdf5(folder / "f.h5", folder / "out", {"x": "x", name: "x"})


def _renamed_field(folder: Path, name: str) -> None:
    write_tar(folder / "old.tar", [("k", {"txt": b"1", "cls": b"0"})])
    wt.convert_tars(folder / "old.tar", folder / "out", rename={"txt": name})


def _column_of_bytes(folder: Path, name: str) -> None:
    table = write_table(folder / "t", "parquet", **{"image": [picture(0)], name: [b"1"]})
    wt.convert_table(table, folder / "out", image="image")


def _backslashes_in_a_tar(folder: Path, name: str) -> None:
    """One sample would come of three."""
    write_tar(folder / "a.tar", [(f"v1.{name}\\cat\\{n}", {"txt": b""}) for n in range(3)])
    wt.convert_tars(folder / "a.tar", folder / "out")


@pytest.mark.parametrize(
    "convert",
    [_array_field, _hdf5_field, _renamed_field, _column_of_bytes, _backslashes_in_a_tar],
)
@pytest.mark.parametrize("name", ["__x__", "__x", "a\\b"])
def test_a_field_that_readers_would_skip_or_divide_is_refused(
    tmp_path: Path, convert: Callable[[Path, str], None], name: str
) -> None:
    with pytest.raises(WdstrainError, match="cannot be the name of a field"):
        convert(tmp_path, name)


@pytest.mark.parametrize(("field", "kind"), [("gif", "GIF"), ("tif", "TIFF")])
def test_an_animation_is_not_resized_to_one_frame(tmp_path: Path, field: str, kind: str) -> None:
    frames = [Image.fromarray(np.full((60, 80, 3), 60 * n, np.uint8)) for n in range(4)]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    with pytest.raises(SourceError, match="has 4 frames, and one would be left"):
        wt.pack([{field: buffer.getvalue()}], tmp_path / "out", resize=20)
