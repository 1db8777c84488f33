"""Complete conversion of HDF5, arrays, Python samples, tars and torchvision sets."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import tarfile
from functools import reduce
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import Dataset

import wdstrain as wt
from tests.conftest import (
    encoded,
    read_with_webdataset,
    write_class_folder,
    write_shards,
    write_tar,
)
from tests.support.servers import serving
from tests.support.tables import read_samples
from wdstrain.cli import main
from wdstrain.errors import SourceError, UsageError, WdstrainError


def array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def pixels(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)))


# --- HDF5 and arrays ---

BITS = np.random.default_rng(0)
IMAGES, LABELS = BITS.integers(0, 255, (100, 9, 7), np.uint8), BITS.integers(0, 4, 100)


def test_hdf5_rows_are_read_by_chunks_and_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 16 MB at a time, also beside a column whose only chunk has all rows."""
    reads: dict[str, list[slice]] = {}
    get = h5py.Dataset.__getitem__

    def recorded(self: h5py.Dataset, rows: Any) -> Any:
        if isinstance(rows, slice):
            reads.setdefault(self.name, []).append(rows)
        return get(self, rows)

    images = np.empty((250, 400, 400), np.uint8)  # 40 MB, more than two reads
    images[:] = np.arange(250)[:, None, None]
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("images", data=images, chunks=(30, 400, 400), compression="lzf")
        file.create_dataset("labels", data=np.arange(250) % 7, chunks=(250,))
    monkeypatch.setattr(h5py.Dataset, "__getitem__", recorded)
    wt.convert_hdf5(tmp_path / "d.h5", tmp_path / "out", {"image": "/images", "cls": "labels"})
    parts = reads["/images"]
    assert len(parts) > 2
    assert max(part.stop - part.start for part in parts) * 160_000 <= 16_000_000
    assert all(part.start % 30 == 0 for part in parts)
    # Each chunk is read once: a run begins where the previous run ended.
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == 250
    assert (array(read_samples(tmp_path / "out")["000000249"]["image.npy"]) == 249).all()


def test_pytables_files_with_blosc_and_tables_are_read(tmp_path: Path) -> None:
    tables = pytest.importorskip("tables")
    table = np.zeros(100, [("energy", "f4"), ("hits", "i2", (3,)), ("kind", "u1")])
    table["energy"], table["kind"] = np.arange(100) / 8, LABELS
    table["hits"] = np.arange(300).reshape(100, 3)
    with tables.open_file(str(tmp_path / "t.h5"), "w") as file:
        filters = tables.Filters(complevel=5, complib="blosc:lz4")
        file.create_carray("/", "images", obj=IMAGES, filters=filters)
        file.create_table("/events", "table", obj=table, createparents=True, filters=filters)
    sets = {name: f"/events/table/{name}" for name in ("energy", "hits", "kind")}
    sets["image"], labels = "/images", ["energy", "kind"]
    wt.convert_hdf5(tmp_path / "t.h5", tmp_path / "out", sets, label=labels, shuffle=False)
    fields = {"energy": wt.number("energy.npy"), "kind": wt.label("kind.npy")}
    fields |= {"image": wt.array("image.npy"), "hits": wt.array("hits.npy")}
    batch = next(iter(wt.Loader(tmp_path / "out", fields, batch_size=100, shuffle=False)))
    for name in fields:
        assert batch[name].tolist() == (IMAGES if name == "image" else table[name]).tolist()


@pytest.mark.parametrize(
    ("fields", "key", "words"),
    [
        ({}, None, "no data sets were named.*its data sets: empty, .*g/z"),
        ({"a": "/nothing"}, None, "/nothing does not exist. Use one of its data sets: "),
        ({"a": "/x", "b": "/y"}, None, "all arrays must have one row .*a .10., b .9."),
        ({"a": "/t"}, None, "/t is a group, or a table of several columns. Use .*: empty, .*t"),
        ({"x": "/empty"}, None, r"their shapes are x \[\]"),
        ({"x": "/loop"}, None, "cannot be read as HDF5 .*symbolic links|too many"),
        ({"x.npy": "/text"}, None, r"row 1: its x\.npy is text.*name the field x\.txt"),
        ({"x": "/x"}, "/g/z", r"the keys are an array of float64 \[10, 2\]"),
    ],
)
def test_data_sets_that_cannot_be_packed_are_refused(
    tmp_path: Path, fields: dict[str, str], key: str | None, words: str
) -> None:
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["x"], file["y"], file["g/z"] = np.arange(10), np.arange(9), np.zeros((10, 2))
        file["t"] = np.zeros(10, [("p", "f4"), ("q", "i4")])
        file["empty"], file["loop"] = h5py.Empty("f4"), h5py.SoftLink("/loop")
        file["text"] = [*"abcdefghij"]
    with pytest.raises((UsageError, SourceError), match=words):
        wt.convert_hdf5(tmp_path / "d.h5", tmp_path / "out", fields, key=key)
    with pytest.raises(SourceError, match="cannot be read as HDF5"):
        wt.convert_hdf5(__file__, tmp_path / "out", {"a": "/x"})


def test_a_missing_file_of_a_virtual_data_set_is_an_error_and_no_fill_values(
    tmp_path: Path,
) -> None:
    layout = h5py.VirtualLayout((6,), "i8")
    for number, name in enumerate("ab"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(3)
        layout[3 * number : 3 * number + 3] = h5py.VirtualSource(f"{name}.h5", "x", shape=(3,))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=-1)
    assert len(wt.convert_hdf5(tmp_path / "all.h5", tmp_path / "whole", {"x": "/x"})) == 6
    (tmp_path / "b.h5").unlink()
    words = r"b\.h5 cannot be read \(there is no such file\). Its rows would be fill values"
    with pytest.raises(SourceError, match=words):
        wt.convert_hdf5(tmp_path / "all.h5", tmp_path / "out", {"x": "/x"})


@pytest.mark.filterwarnings("error")
def test_rows_of_variable_length_and_enums_are_arrays(tmp_path: Path) -> None:
    rows = [np.arange(n, dtype=np.float32) for n in (3, 0, 5)]
    with h5py.File(tmp_path / "d.h5", "w") as file:
        dataset = file.create_dataset("long", (3,), h5py.vlen_dtype(np.float32))
        for number, row in enumerate(rows):
            dataset[number] = row
        answers = h5py.enum_dtype({"no": 0, "yes": 1}, "u1")
        file.create_dataset("enum", data=[[0, 1]] * 3, dtype=answers)
    fields = {name: f"/{name}" for name in ("long", "enum")}
    wt.convert_hdf5(tmp_path / "d.h5", tmp_path / "out", fields, shuffle=False)
    packed = read_samples(tmp_path / "out")
    for number, row in enumerate(rows):
        sample = {name: array(data) for name, data in packed[f"{number:09d}"].items()}
        np.testing.assert_array_equal(sample["long.npy"], row)
        np.testing.assert_array_equal(sample["enum.npy"], [0, 1])


def test_field_names_decide_if_arrays_become_images_classes_or_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES)
    np.savez_compressed(tmp_path / "y.npz", y=LABELS, other=LABELS)
    words = ["convert", "arrays", str(tmp_path / "out"), "--no-shuffle"]
    for pair in ("png={0}/x.npy", "cls={0}/y.npz:y", "raw={0}/x.npy"):
        words += ["--field", pair.format(tmp_path)]
    assert main(words) == 0
    for i, fields in enumerate(read_samples(tmp_path / "out").values()):
        assert (pixels(fields["png"]) == IMAGES[i]).all()
        assert fields["cls"] == b"%d" % LABELS[i]
        assert (array(fields["raw.npy"]) == IMAGES[i]).all()


# Class numbers that would make too many classes, and their messages.
FAR: list[tuple[list[int], str]] = [
    ([1, 2, 1_700_000_000], "its cls is 1700000000"),
    ([1, 2, 99_999], "as classes counted from 0 they would make 100000"),
]


@pytest.mark.parametrize(
    ("fields", "options", "words"),
    [
        ({"x": "objects.npy"}, {}, "cannot be read as an array.*Python objects"),
        ({"x": "two.npz"}, {}, "has no member ''. Name one of its arrays, .* x=.*two.npz:a: a, b"),
        ({"x": "gone.npy"}, {}, "there is no such file"),
        ({"x": np.float64(3)}, {}, "one row for each sample"),
        ({}, {}, "no array was named"),
        ({"x": np.zeros((3, 2))}, {"label": "x"}, "A label must be one number per row"),
        ({"y": np.array([1.5, np.nan])}, {"label": "y"}, "row 2: its y is nan"),
        ({"x": np.zeros(3), "X": np.zeros(3)}, {}, "two fields would have the same name"),
        ({"cls": np.arange(2)}, {"classes": ["cat"] * 2}, "classes has 'cat' twice"),
        *(
            ({"x": np.zeros(len(numbers)), "cls": np.array(numbers)}, {}, words)
            for numbers, words in FAR
        ),
    ],
)
def test_arrays_that_cannot_be_packed_are_refused(
    tmp_path: Path, fields: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}, []], object), allow_pickle=True)
    np.savez(tmp_path / "two.npz", a=np.arange(3), b=np.arange(3))
    for name, value in fields.items():
        fields = {**fields, name: f"{tmp_path}/{value}"} if isinstance(value, str) else fields
    with pytest.raises((UsageError, SourceError), match=words):
        wt.convert_arrays(fields, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("name", ["x", "cls"])
def test_masked_values_are_bad_samples(tmp_path: Path, name: str) -> None:
    masked, out = np.ma.array([1, 2, 3], mask=[False, True, False]), tmp_path / "out"
    index = wt.convert_arrays({"n": np.arange(3), name: masked}, out, on_error="skip")
    assert (len(index), index.info["skipped"]) == (2, 1)
    with pytest.raises(wt.SourceError, match="masked"):
        wt.pack([{"__key__": "a", "x.npy": masked}], tmp_path / "packed")


# --- Python samples ---


class Digits(Dataset[Any]):
    """A map-style data set of (image, class); item 3 cannot be read."""

    classes = ("zero", "one", "two")

    def __len__(self) -> int:
        return 7

    def __getitem__(self, number: int) -> Any:
        if number == 3:
            raise OSError("a scratch on the disk")
        return Image.fromarray(np.full((4, 5), number, np.uint8)), number % 3


def test_a_map_style_data_set_is_packed_with_its_classes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(SourceError, match="row 4: the data set raised OSError: a scratch on the"):
        wt.pack(Digits(), out)
    index = wt.pack(Digits(), out, on_error="skip", overwrite=True, shuffle=False)
    assert index.labels[0].classes == ("zero", "one", "two")
    for number, fields in zip((0, 1, 2, 4, 5, 6), read_samples(out).values(), strict=True):
        assert (pixels(fields["png"]) == number).all()
        assert fields["cls"] == b"%d" % (number % 3)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # files of webdataset
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_samples_of_webdataset_round_trip(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", [5, 3])
    shards = sorted(map(str, (tmp_path / "in").glob("*.tar")))
    wt.pack(webdataset.WebDataset(shards, shardshuffle=False), tmp_path / "out")
    assert read_samples(tmp_path / "out") == read_samples(tmp_path / "in")


class Lazy:
    """An array whose reading fails."""

    def __array__(self, *_: object, **__: object) -> Any:
        raise RuntimeError("the server is gone")


DEEP = reduce(lambda inner, _: [inner], range(100_000), list[Any]())


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"cls": "cat"}, "its cls is 'cat', but a class must be a number, or a name if classes"),
        ({"cls": -1}, "its cls is -1"),
        ({"x": object()}, "its x is object, which a field of this name"),
        ({"x": np.arange(3)}, "name an array x.npy"),
        ({"jpg": np.zeros((3, 3))}, "its jpg is an array of float64 .*, but pixels must be uint8"),
        ({"jpg": "path.jpg"}, "its jpg is str, but must be an image"),
        ({"x.pyd": [1]}, "its x.pyd is list, which a field of this name cannot hold"),
        ({"x.npy": np.array([{}])}, "holds Python objects"),
        ({"json": {1, 2}}, "cannot be written as JSON"),
        ({"__key__": 7, "txt": "x"}, "its __key__ is 7"),
        ({"txt": None}, "its txt is None; leave out the fields that a sample does not have"),
        ({"__key__": "only"}, "it has no fields, only '__key__'"),
        ({"x.npy": torch.ones(3, dtype=torch.bfloat16)}, "BFloat16"),
        ({"x.npy": torch.eye(3).to_sparse()}, "to_dense"),
        ({"x.npy": [[1], [1, 2], [3]]}, "inhomogeneous"),
        ({"x.npy": Lazy()}, "the server is gone"),
        ({"json": DEEP}, ""),
        ({"__key__": "\ud800", "txt": "x"}, ""),
        ({"txt": "\ud800"}, ""),
        ({"\ud800": b"x"}, ""),
    ],
)
def test_samples_that_cannot_be_packed_are_named_or_skipped(
    tmp_path: Path, sample: dict[str, Any], words: str
) -> None:
    with pytest.raises(SourceError, match=f"samples, row 2: .*{words}"):
        wt.pack([{"txt": "fine"}, sample], tmp_path / "out")
    index = wt.pack([{"txt": "fine"}, sample], tmp_path / "out", on_error="skip", overwrite=True)
    assert (len(index), index.info["skipped"]) == (1, 1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_repeated_keys_are_renamed_and_recorded(tmp_path: Path, shuffle: bool) -> None:
    names = ["a", "b", "A", "a", "a-2", "../up", "x.y"]
    samples = ({"__key__": key, "txt": str(n)} for n, key in enumerate(names))
    wt.pack(samples, tmp_path / "out", shuffle=shuffle)
    by_text = {int(fields["txt"]): key for key, fields in read_samples(tmp_path / "out").items()}
    keys = [by_text[number] for number in range(7)]
    assert keys == ["a", "b", "A-2", "a-3", "a-2-2", "up", "x_y"]
    renamed = map(json.loads, (tmp_path / "out" / "renamed.jsonl").read_text().splitlines())
    changed = {key: name for key, name in zip(keys, names, strict=True) if key != name}
    assert {row["key"]: row["name"] for row in renamed} == changed


def test_the_stored_key_decides_the_split_and_a_repeated_key_stays_with_its_first(
    tmp_path: Path,
) -> None:
    def splits(keys: list[str], out: str) -> dict[str, str]:
        rows = ({"__key__": key, "txt": str(n)} for n, key in enumerate(keys))
        index = wt.pack(rows, tmp_path / out, split={"train": 0.5, "val": 0.5})
        return {index.key(n): index.shard_with(n).split for n in range(len(index))}

    numbers = range(60)
    given = splits([f"a.{n}" for n in [*numbers, *numbers]], "given")
    stored = splits([f"a_{n}" for n in numbers], "stored")
    assert set(stored.values()) == {"train", "val"}
    assert given == stored | {f"{key}-2": split for key, split in stored.items()}


def test_an_endless_stream_is_read_up_to_the_limit(tmp_path: Path) -> None:
    stream = ({"x.npy": torch.arange(3) * n, "txt": str(n)} for n in itertools.count())
    index = wt.pack(stream, tmp_path / "out", limit=50)
    packed = read_samples(tmp_path / "out").values()
    read = sorted((int(fields["txt"]), array(fields["x.npy"]).tolist()) for fields in packed)
    assert read == [(n, [0, n, 2 * n]) for n in range(50)]
    assert (index.info["listed"], len(index)) == (50, 50)


def test_images_are_packed_upright_with_their_gray_levels_and_channels_last(
    tmp_path: Path,
) -> None:
    exif = Image.Exif()
    exif[0x112] = 6  # shown turned by 90 degrees
    turned = encoded(Image.new("RGB", (80, 40)), "JPEG", exif=exif)
    deep = Image.fromarray(np.full((4, 4), 300 << 4, np.uint16))
    narrow = torch.arange(3 * 8 * 4, dtype=torch.uint8).reshape(3, 8, 4)
    with Image.open(io.BytesIO(turned)) as lying:
        wt.pack([{"jpg": lying}, {"jpg": deep}, {"png": narrow}], tmp_path / "out", shuffle=False)
    upright, gray, tensor = read_samples(tmp_path / "out").values()
    assert pixels(upright["jpg"]).shape == (80, 40, 3)
    assert abs(pixels(gray["jpg"]).astype(float).mean() - 300 / 16) < 2
    assert pixels(tensor["png"]).tolist() == narrow.permute(1, 2, 0).tolist()


# --- classes of samples and arrays ---


def test_a_class_as_bytes_is_a_class_name_or_number(tmp_path: Path) -> None:
    wt.pack([{"txt": "x", "cls": b"cat"}, {"txt": "y", "cls": b"dog"}], tmp_path / "names")
    packed = read_samples(tmp_path / "names").values()
    assert sorted(fields["cls"] for fields in packed) == [b"cat", b"dog"]
    values: list[Any] = [b"cat", b"dog", "cat", 1, b"0", b" dog\n", np.int64(1), b"7"]
    rows, classes = [{"txt": "x", "cls": value} for value in values], ["cat", "dog", "7"]
    index = wt.pack(rows, tmp_path / "out", classes=classes)
    by_key = read_samples(tmp_path / "out")
    assert b"".join(by_key[key]["cls"] for key in sorted(by_key)) == b"01010112"
    assert [(label.name, label.classes) for label in index.labels] == [("label", tuple(classes))]
    assert index.info["samples"] == {"train": {"cat": 3, "dog": 4, "7": 1}}


@pytest.mark.parametrize("cls", [b"bird", 3, -1, b"caf\xe9", b""])
def test_an_unknown_class_is_a_bad_sample(tmp_path: Path, cls: Any) -> None:
    samples_in = [{"txt": "x", "cls": 0}, {"txt": "y", "cls": cls}]
    with pytest.raises(SourceError, match="row 2: its cls is"):
        wt.pack(samples_in, tmp_path / "out", classes=["cat", "dog"])
    assert len(wt.pack(samples_in, tmp_path / "out", classes=["cat", "dog"], on_error="skip")) == 1


class Named(list[Any]):
    """Samples with class names, like data sets of torchvision."""

    classes = ("cat", "cat")


ONE = {"txt": "x", "cls": 0}


@pytest.mark.parametrize(
    ("packed", "options", "words"),
    [
        (3, {}, "samples is int: must be a data set"),
        (pandas.DataFrame({"a": [1]}), {}, "use wt.convert_table"),
        ([], {}, "samples holds no samples"),
        ([(1, 2, 3)], {}, "a sample has 3 values, but 2 are named"),
        ([{"left/x.npy": np.zeros(2)}], {}, "'left/x.npy' cannot be the name of a field"),
        ([{"x.npy": 1, "X.npy": 2}], {}, "two of its fields have the same name: x.npy, x.npy"),
        (Named([ONE]), {}, "classes has 'cat' twice"),
        ([ONE, {"txt": "y", "cls": b"cat"}], {}, "row 2: its cls is 'cat', but others are numbers"),
        ([{"cls": b"cat"}, {"cls": 1}], {}, "row 2: its cls is '1', but others are names"),
        *(([{"txt": "a", "cls": n} for n in numbers], {}, words) for numbers, words in FAR),
    ],
)
def test_objects_that_are_not_iterables_of_samples_are_refused(
    tmp_path: Path, packed: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((UsageError, SourceError), match=words):
        wt.pack(packed, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "index.json").exists()


# --- tars ---


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed shards with classes and splits."""
    folder = tmp_path_factory.mktemp("old")
    write_class_folder(folder / "in", {"cat": 9, "dog": 12})
    split = {"train": 0.6, "val": 0.4}
    wt.convert_folder(folder / "in", folder / "old", split=split, max_shard_samples=4)
    return folder / "old"


def test_shards_are_repacked_with_their_labels_splits_and_origin(old: Path, tmp_path: Path) -> None:
    before = wt.open(old)
    index = wt.convert_tars(old, tmp_path / "new", max_shard_samples=100, seed=3)
    assert read_samples(tmp_path / "new") == read_samples(old)
    assert (index.labels, index.splits, len(index.shards)) == (before.labels, ("train", "val"), 2)
    assert index.info["samples"]["train"].keys() == {"cat", "dog"}
    assert index.info["source"]["origin"][0]["source"] == before.info["source"]
    again = wt.convert_tars(tmp_path / "new", tmp_path / "split", split={"a": 0.5, "b": 0.5})
    assert again.splits == ("a", "b")
    assert again.info["source"]["origin"][0]["source"]["origin"] == index.info["source"]["origin"]


def test_a_split_of_a_split_has_the_requested_shares(tmp_path: Path) -> None:
    rows, split = ({"txt": "x"} for _ in range(3000)), {"train": 0.8, "val": 0.2}
    wt.pack(rows, tmp_path / "all", split=split)
    index = wt.convert_tars(f"{tmp_path}/all/train-*.tar", tmp_path / "again", split=split)
    samples = sum(shard.samples for shard in index.shards if shard.split == "val")
    assert abs(samples / len(index) - 0.2) < 0.03


@pytest.mark.parametrize(
    ("condition", "numbers"),
    [
        ("0 <= cls <= 3 != 2 < 9", [0, 1, 2, 3]),
        ("json.deep % 2 == 0", [0, 2, 4]),
        ("txt.startswith('n') and json.deep > 3 and size.txt == 1", [4]),
        ("len(txt) < 4 and cls < 2", [0, 1]),
        # A missing field makes only its own comparison unknown.
        ("has.txt or cls < 9", [0, 1, 2, 3, 4]),
        ("not (cls < 3 and json.deep > 0)", [0, 3, 5]),
        ("cls not in [1, 5] and has.json", [0, 2, 3]),
        ("len(long) > 1", "no column can hold"),
        ("json.absent == 1", "no sample has a value in json.absent"),
        ("cls > 9", "holds for none"),
        ("png == 1", "there is no column 'png'"),
    ],
)
def test_conditions_choose_by_fields_that_have_no_columns(
    tmp_path: Path, condition: str, numbers: list[int] | str
) -> None:
    """Of shards made elsewhere, the fields and entries that a condition names are read."""
    common = {"txt": b"n", "long": b"long " * 99}
    samples = [
        (f"k{n}", {**common, "cls": b"%d" % n, "json": json.dumps({"deep": n}).encode()})
        for n in range(5)
    ]
    del samples[4][1]["cls"]
    write_tar(tmp_path / "set" / "a.tar", [*samples, ("k5", {"json": b'{"deep": -1}'})])
    options: dict[str, Any] = {"where": condition, "shuffle": False}
    if isinstance(numbers, str):
        with pytest.raises(UsageError, match=numbers):
            wt.convert_tars(tmp_path / "set", tmp_path / "out", **options)
    else:
        chosen = wt.convert_tars(tmp_path / "set", tmp_path / "out", **options)
        assert chosen.keys(np.arange(len(chosen))) == [f"k{n}" for n in numbers]


def test_captions_that_look_like_numbers_are_text(tmp_path: Path) -> None:
    captions = dict(zip("abcdefg", ["12", "a dog", "1e5", "nan", "007", "1_000", "0"], strict=True))
    wt.pack(({"__key__": key, "txt": text} for key, text in captions.items()), tmp_path / "old")
    done = wt.convert_tars(tmp_path / "old", tmp_path / "new", where="len(txt) < 4")
    assert sorted(done.keys(np.arange(5))) == ["a", "c", "d", "e", "g"]


def test_sets_are_merged_and_equal_keys_are_renamed(tmp_path: Path) -> None:
    for name in "ab":
        samples = [(f"k{i}", {"txt": f"{name}{i}".encode()}) for i in range(5)]
        write_tar(tmp_path / name / "s.tar", samples)
    wt.convert_tars([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    packed = read_samples(tmp_path / "out")
    texts = sorted(fields["txt"].decode() for fields in packed.values())
    assert texts == [f"{name}{i}" for name in "ab" for i in range(5)]
    assert set(packed) == {f"k{i}{end}" for i in range(5) for end in ("", "-2")}


def test_sets_that_number_their_classes_differently_are_not_merged(
    tmp_path: Path, capsys: Any
) -> None:
    for name, classes in (("a", {"cat": 3, "dog": 3}), ("b", {"ant": 3, "bee": 3})):
        write_class_folder(tmp_path / f"in-{name}", classes)
        wt.convert_folder(tmp_path / f"in-{name}", tmp_path / name)
    command = ["convert", "tars", f"{tmp_path}/a", f"{tmp_path}/b", str(tmp_path / "out")]
    for words in ([], ["--keep", "png,cls"]):
        assert main([*command, *words]) == 2
        assert "a class number would mean two classes" in capsys.readouterr().err
    assert main([*command, "--keep", "png"]) == 0  # without classes the sets do not differ
    assert len(read_samples(tmp_path / "out")) == 12


def test_shards_are_filtered_by_keys_and_fields_are_kept(old: Path, tmp_path: Path) -> None:
    everything, keys = read_samples(old), tmp_path / "keys.txt"
    chosen = sorted(everything)[:5]
    keys.write_text("\n".join(chosen))
    index = wt.convert_tars(old, tmp_path / "c", keys=str(keys), keep=["png"])
    assert index.labels == ()
    assert read_samples(tmp_path / "c") == {key: {"png": everything[key]["png"]} for key in chosen}
    keys.write_text("cat/000\nnobody\n")
    for options in ({}, {"limit": 1}):  # the second: before any read
        with pytest.raises(SourceError, match="1 of 2 keys are in no shard, such as 'nobody'"):
            wt.convert_tars(old, tmp_path / "d", keys=str(keys), **options)
    assert not (tmp_path / "d").exists()


def test_changed_bytes_of_packed_shards_are_bad_samples(old: Path, tmp_path: Path) -> None:
    """Also of a selection, which takes the other samples without a question."""
    shutil.copytree(old, tmp_path / "set")
    index = wt.open(tmp_path / "set")
    place = next(at for name, at, _ in index.members(2) if name == "png") + 40
    with open(index.shards[0].path, "r+b") as file:
        file.seek(place)
        file.write(b"!")
    good, bad = (f"key == '{index.key(number)}'" for number in (0, 2))
    with pytest.raises(SourceError, match=r"the field png of sample .* has another crc32 than the"):
        wt.convert_tars(tmp_path / "set", tmp_path / "out")
    for where, count, skipped in ((None, 20, 1), (good, 1, 0), (f"{good} or {bad}", 1, 1)):
        options = {"where": where} if where else {}
        done = wt.convert_tars(
            tmp_path / "set", tmp_path / "out", on_error="skip", overwrite=True, **options
        )
        assert (len(done), done.info["skipped"]) == (count, skipped)


@pytest.mark.parametrize("address", ["a.tar.gz", "."])
def test_a_compressed_tar_is_refused_or_packed_as_a_stream(tmp_path: Path, address: str) -> None:
    samples = [(f"dir/k{n:02d}", {"txt": b"t%d" % n, "cls": b"%d" % n}) for n in range(9)]
    write_tar(tmp_path / "a.tar", samples)
    (tmp_path / "in").mkdir()
    with (
        tarfile.open(tmp_path / "a.tar") as old,
        tarfile.open(tmp_path / "in" / "a.tar.gz", mode="w:gz") as new,
    ):
        for member in old:
            new.addfile(member, old.extractfile(member))
    with pytest.raises(WdstrainError, match=r"a\.tar\.gz is .*Unpack it first"):
        wt.convert_tars(tmp_path / "in" / address, tmp_path / "out")
    wt.pack(wt.WebDataset(str(tmp_path / "in" / "a.tar.gz")), tmp_path / "out")
    assert read_samples(tmp_path / "out") == dict(samples)


@pytest.mark.parametrize("choice", ["all", "where", "keys"])
def test_a_remote_shard_takes_few_requests(tmp_path: Path, choice: str) -> None:
    """At most 3: for the size, the bytes, and once more after a broken connection."""
    samples = ({"__key__": f"k{n:02d}", "bin": bytes([n]) * 1_000_000} for n in range(40))
    wt.pack(samples, tmp_path / "set", shuffle=False)  # more than a conversion reads at once
    (tmp_path / "keys").write_text("k03\n")
    options = {"where": "key == 'k03'", "keys": str(tmp_path / "keys"), "all": ""}[choice]
    chosen = {choice: options} if options else {}
    with serving(tmp_path / "set") as served:
        index = wt.convert_tars(f"{served.url}/index.json", tmp_path / "out", **chosen)
    assert len(index) == (1 if options else 40)
    assert sum(path.endswith(".tar") for path, _ in served.requests) <= 3


# --- torchvision ---


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Fasion", {}, "torchvision.datasets has no data set 'Fasion'"),
        ("MNIST", {}, "'train' is missing or .* as torchvision expects it .Dataset not found"),
        ("FashionMNIST", {"splits": ["banana"]}, "has no split 'banana'"),
        ("VisionDataset", {}, "VisionDataset"),
    ],
)
def test_a_missing_torchvision_name_split_or_folder_is_an_error(
    tmp_path: Path, name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((UsageError, SourceError), match=words):
        wt.convert_torchvision(name, tmp_path / "out", tmp_path, **options)
    assert not (tmp_path / "out").exists()


def test_torchvision_splits_are_packed_by_name_or_reported(tmp_path: Path) -> None:
    """The pets have the splits trainval and test, and neither train nor val."""
    folder, out = tmp_path / "oxford-iiit-pet", tmp_path / "out"
    numbers_of = {"trainval": range(4), "test": range(4, 7)}
    for name in ("images", "annotations"):
        (folder / name).mkdir(parents=True)
    for split, numbers in numbers_of.items():
        lines = [f"{['Pug', 'Beagle'][n % 2]}_{n} {2 - n % 2} 2 3\n" for n in numbers]
        (folder / "annotations" / f"{split}.txt").write_text("".join(lines))
        for line, n in zip(lines, numbers, strict=True):
            path = folder / "images" / f"{line.split()[0]}.jpg"
            Image.new("L", (8, 8), 20 * n).convert("RGB").save(path)
    with pytest.raises(SourceError, match="trainval.*name the splits to convert"):
        wt.convert_torchvision("OxfordIIITPet", out, tmp_path)
    some = wt.convert_torchvision("OxfordIIITPet", tmp_path / "some", tmp_path, splits=["test"])
    assert (len(some), some.splits) == (3, ("test",))
    words = ["convert", "torchvision", "OxfordIIITPet", str(out), "--root", str(tmp_path)]
    assert main([*words, "--splits", "trainval,test", "--no-shuffle"]) == 0
    index = wt.open(out)
    assert index.labels[0].classes == ("Beagle", "Pug")
    for shard in index.shards:
        numbers = numbers_of[shard.split]
        packed = read_with_webdataset([Path(shard.path)])
        for n, (_, fields) in zip(numbers, packed, strict=True):
            assert abs(pixels(fields["png"]).astype(float).mean() - 20 * n) < 2
            assert fields["cls"] == b"%d" % (1 - n % 2)
    (folder / "annotations" / "test.txt").unlink()
    with pytest.raises(SourceError, match="the split 'test' is missing or cannot be read"):
        wt.convert_torchvision("OxfordIIITPet", tmp_path / "o", tmp_path, splits=["test"])
