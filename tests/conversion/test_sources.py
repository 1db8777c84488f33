"""Complete conversion of tables, HDF5, arrays, Python samples, tars and torchvision sets."""

from __future__ import annotations

import gc
import io
import itertools
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import wdstrain as wt
from tests.conftest import (
    picture,
    read_with_webdataset,
    write_class_folder,
    write_shards,
    write_tar,
)
from tests.support.tables import Tables, read_samples, write_pictures
from wdstrain.cli import main
from wdstrain.errors import SourceError, UsageError
from wdstrain.shards.kinds import ColumnInfo


def array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def pixels(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)))


# --- tables ---


def test_images_may_be_bytes_in_the_table(tables: Tables) -> None:
    data = [picture(n, kind=kind) for n, kind in enumerate(("PNG", "JPEG", "WEBP"))]
    frame = pandas.DataFrame({"image": [{"bytes": some, "path": None} for some in data]})
    tables(frame, image="image")
    expected = zip((1, 2, 3), ("png", "jpg", "webp"), data, strict=True)
    assert tables.samples == {f"row-00000000{n}": {field: some} for n, field, some in expected}


def test_unusable_rows_are_skipped_with_their_numbers(tables: Tables) -> None:
    rows = ["IMG/0.png,1", "IMG/gone.png,2", "IMG/1.png", ",3", "IMG/2.png,", "IMG/3.doc,1"]
    text = "\n".join(["file,n", *rows, "IMG/4.png,4"])
    assert tables.command(text, "--label", "n:class") == 1
    assert tables.command(text, "--label", "n:class", "--on-error", "skip") == 0
    assert {row: reason.split(";")[0] for row, reason in tables.skipped.items()} == {
        3: "the image is not there",
        4: "it has 1 cells, but the table has 2 columns",
        5: "there is no path of an image",
        6: "the label column 'n' is empty",
        7: "the path has no extension of an image",
    }
    assert (tables.out / "skipped.jsonl").read_text().count('"source": "t.csv"') == 5
    assert len(tables.samples) == 2


@pytest.mark.parametrize(
    ("lines", "bad"),
    [
        (['{"file": "IMG/0.png"}', "not json", "[1]"], [2, 3]),
        # Text that is not UTF-8.
        (
            [
                '{"file": "IMG/0.png", "a": "\\ud83d"}',
                '{"file": "IMG/1.png\\u0000", "a": 1}',
                '{"file": "IMG/2.png"}',
            ],
            [1, 2],
        ),
    ],
)
def test_lines_that_are_no_json_text_are_bad_rows(
    tables: Tables, lines: list[str], bad: list[int]
) -> None:
    (tables.folder / "t.jsonl").write_text("\n".join(lines))
    index = tables(tables.folder / "t.jsonl", on_error="skip")
    assert (list(tables.skipped), len(index)) == (bad, 1)


def test_a_split_column_must_name_a_split_in_every_row(tables: Tables) -> None:
    text = "file,part\nIMG/0.png,../up\nIMG/1.png,\n"
    for on_error, words in (
        ("raise", "row 3: IMG/1.png: the split column 'part' is empty"),
        ("skip", "'../up' cannot be the name of a split"),
    ):
        with pytest.raises((SourceError, UsageError), match=words):
            tables(text, split_by="part", on_error=on_error)
        assert not tables.out.exists()


def test_columns_of_a_table_without_a_header_are_numbers(
    data: Callable[[str], Path], tmp_path: Path
) -> None:
    """The original driving log: no header, absolute Windows paths, blanks after commas."""
    folder, out = data("driving"), tmp_path / "out"
    words = ["convert", "table", str(folder / "driving_log.csv"), str(out)]
    words += ["--image", "0", "--label", "3"]
    assert main(words) == 1
    words += ["--no-header", "--limit", "300", "--max-shard-samples", "100"]
    assert main([*words, "--root", str(folder)]) == 1  # as docs/convert.md says
    text = (folder / "driving_log.csv").read_text()
    words[2] = str(tmp_path / "log.csv")
    Path(words[2]).write_text(re.sub(r"D:[^,]*\\data\\IMG", "IMG", text))
    assert main([*words, "--root", str(folder)]) == 0
    packed = read_samples(out)
    assert len(packed) == 300
    key, fields = next(iter(packed.items()))
    assert fields["jpg"] == (folder / f"{key}.jpg").read_bytes()
    assert set(json.loads(fields["json"])) == {"1", "2", "3", "4", "5", "6"}


def test_keys_do_not_depend_on_the_folder_of_the_images(tables: Tables, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "IMG", tmp_path / "other" / "data" / "IMG")
    for root in (tmp_path, tmp_path / "other" / "data"):
        tables("\n".join(["file", *(f"{root}/IMG/{n}.png" for n in range(6))]), root=root)
        assert sorted(tables.samples) == [f"IMG/{n}" for n in range(6)]
        assert not (tables.out / "renamed.jsonl").exists()


def test_lists_beside_single_values_are_several_classes(tables: Tables) -> None:
    rows = {"file": ["IMG/0.png", "IMG/1.png"], "tags": [["a", "b"], "a"]}
    index = tables(rows, "jsonl", label="tags", shuffle=False)
    field = wt.label("json.tags", multi=True)
    batch = next(iter(wt.Loader(index, {"t": field}, batch_size=2, shuffle=False)))
    assert batch["t"].tolist() == [[1, 1], [1, 0]]


# --- HDF5 and arrays ---

BITS = np.random.default_rng(0)
IMAGES, LABELS = BITS.integers(0, 255, (100, 9, 7), np.uint8), BITS.integers(0, 4, 100)


@pytest.fixture
def hdf5_reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[slice]]:
    """Record the rows that h5py reads from now on, by the path of the data set."""
    reads: dict[str, list[slice]] = {}
    get = h5py.Dataset.__getitem__

    def recorded(self: h5py.Dataset, rows: Any) -> Any:
        if isinstance(rows, slice):
            reads.setdefault(self.name, []).append(rows)
        return get(self, rows)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", recorded)
    return reads


def test_hdf5_data_sets_are_packed_row_by_row_and_read_by_chunks(
    tmp_path: Path, hdf5_reads: dict[str, list[slice]]
) -> None:
    images = np.empty((250, 400, 400), np.uint8)  # 40 MB, more than two reads
    images[:] = np.arange(250)[:, None, None]
    labels = np.random.default_rng(0).integers(0, 4, 250)
    chunks = {"/train/images": 30, "/train/labels": 20}
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("train/images", data=images, chunks=(30, 400, 400), compression="lzf")
        file.create_dataset("train/labels", data=labels, chunks=(20,))
        file.create_dataset("train/names", data=[f"n {i}" for i in range(250)])
    fields = {"image": "/train/images", "cls": "train/labels", "note": "/train/names"}
    options: dict[str, Any] = {"key": "/train/names", "classes": list("abcd")}
    index = wt.convert_hdf5(tmp_path / "d.h5", tmp_path / "out", fields, **options)
    for name, chunk in chunks.items():
        parts = hdf5_reads[name]
        assert all(part.start % chunk == 0 for part in parts)
        # Each chunk is read once: a run begins where the previous run ended.
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == 250
    assert len(hdf5_reads["/train/images"]) > 2
    assert index.labels[0].classes == ("a", "b", "c", "d")
    counts = {name: int((labels == i).sum()) for i, name in enumerate("abcd")}
    assert index.info["samples"]["train"] == counts
    packed = read_samples(tmp_path / "out")
    for i in (0, 1, 124, 249):
        fields_ = packed[f"n {i}"]
        assert (array(fields_["image.npy"]) == images[i]).all()
        assert (fields_["cls"], fields_["note.txt"]) == (b"%d" % labels[i], b"n %d" % i)


def test_rows_of_bytes_and_wide_chunks_are_read_within_bounds(
    tmp_path: Path, hdf5_reads: dict[str, list[slice]]
) -> None:
    """Rows of 3 MB beside a column whose only chunk has all rows: at most 16 MB at a time."""
    with h5py.File(tmp_path / "d.h5", "w") as file:
        blobs = file.create_dataset("blobs", (20,), h5py.vlen_dtype(np.uint8))
        for number in range(20):
            blobs[number] = np.full(3 << 20, number, np.uint8)
        file.create_dataset("labels", data=np.arange(20) % 7, chunks=(20,))
    fields = {"bin": "/blobs", "cls": "/labels"}
    assert len(wt.convert_hdf5(tmp_path / "d.h5", tmp_path / "out", fields)) == 20
    first, *parts = hdf5_reads["/blobs"]
    assert (first.start, first.stop) == (0, 16)  # to learn the size of rows
    assert parts[-1].stop == 20
    assert max(part.stop - part.start for part in parts) <= 5


def test_pytables_files_with_blosc_and_tables_are_read(tmp_path: Path) -> None:
    tables = pytest.importorskip("tables")
    out, names = tmp_path / "out", ("energy", "hits", "kind")
    with tables.open_file(str(tmp_path / "t.h5"), "w") as file:
        filters = tables.Filters(complevel=5, complib="blosc:lz4")
        file.create_carray("/", "images", obj=IMAGES, filters=filters)
        table = np.zeros(100, [("energy", "f4"), ("hits", "i2", (3,)), ("kind", "u1")])
        table["energy"], table["kind"] = np.arange(100) / 8, LABELS
        table["hits"] = np.arange(300).reshape(100, 3)
        file.create_table("/events", "table", obj=table, createparents=True, filters=filters)
    words = ["convert", "hdf5", str(tmp_path / "t.h5"), str(out), "--no-shuffle"]
    words += ["--label", "energy,kind", "--field", "image=/images"]
    for name in names:
        words += ["--field", f"{name}=/events/table/{name}"]
    assert main(words) == 0
    packed = list(read_samples(out).values())
    assert [float(array(fields["energy.npy"])) for fields in packed] == [i / 8 for i in range(100)]
    assert (array(packed[7]["image.npy"]) == IMAGES[7]).all()
    assert array(packed[7]["hits.npy"]).tolist() == [21, 22, 23]
    assert array(packed[7]["energy.npy"]).shape == ()
    fields = {"e": wt.number("energy.npy"), "k": wt.label("kind.npy"), "x": wt.array("image.npy")}
    batch = next(iter(wt.Loader(out, fields, batch_size=4, shuffle=False)))
    assert batch["e"].tolist() == [0, 0.125, 0.25, 0.375]
    assert batch["k"].tolist() == LABELS[:4].tolist()
    assert torch.equal(batch["x"], torch.from_numpy(IMAGES[:4]))


@pytest.mark.parametrize(
    ("fields", "key", "words"),
    [
        ({}, None, "no data sets were named.*its data sets: empty, .*g/z"),
        ({"a": "/nothing"}, None, "/nothing does not exist. Use one of its data sets: "),
        ({"a": "/g"}, None, "/g is a group"),
        ({"a": "/x", "b": "/y"}, None, "all arrays must have one row .*a .10., b .9."),
        (
            {"a": "/t"},
            None,
            "/t is a group, or a table of several columns. Use one of its data sets: .*t",
        ),
        ({"x": "/empty"}, None, r"their shapes are x \[\]"),
        ({"x": "/loop"}, None, "cannot be read as HDF5 .*symbolic links|too many"),
        ({"x.npy": "/text"}, None, r"row 1: its x\.npy is text.*name the field x\.txt"),
        ({"x": "/x"}, "/g/z", r"the keys are an array of float64 \[10, 2\]"),
        ({"x": "/x", "__key__": "/text"}, None, "'__key__' cannot be the name of a field"),
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


def test_rows_of_a_virtual_data_set_with_a_missing_file_are_bad(tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((6,), "i8")
    for number, name in enumerate("ab"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(3)
        layout[3 * number : 3 * number + 3] = h5py.VirtualSource(f"{name}.h5", "x", shape=(3,))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=-1)

    def converted(name: str) -> int:
        return len(wt.convert_hdf5(tmp_path / "all.h5", tmp_path / name, {"x": "/x"}))

    assert converted("whole") == 6
    (tmp_path / "b.h5").unlink()
    words = r"b\.h5 cannot be read \(there is no such file\). Its rows would be fill values"
    with pytest.raises(SourceError, match=words):
        converted("out")
    (tmp_path / "a.h5").rename(tmp_path / "b.h5")
    with pytest.raises(SourceError, match=r"a\.h5 cannot be read"):
        converted("out")


@pytest.mark.filterwarnings("error")
def test_rows_of_variable_length_and_enums_are_arrays(tmp_path: Path) -> None:
    rows = [np.arange(n, dtype=np.uint8) for n in (3, 0, 5)]
    with h5py.File(tmp_path / "d.h5", "w") as file:
        for name, kind in (("small", np.uint8), ("wide", np.float32)):
            dataset = file.create_dataset(name, (3,), h5py.vlen_dtype(kind))
            for number, row in enumerate(rows):
                dataset[number] = row.astype(kind)
        answers = h5py.enum_dtype({"no": 0, "yes": 1}, "u1")
        file.create_dataset("enum", data=[[0, 1]] * 3, dtype=answers)
    fields = {name: f"/{name}" for name in ("small", "wide", "enum")}
    wt.convert_hdf5(tmp_path / "d.h5", tmp_path / "out", fields, shuffle=False)
    packed = read_samples(tmp_path / "out")
    for number, row in enumerate(rows):
        sample = {name: array(data) for name, data in packed[f"{number:09d}"].items()}
        np.testing.assert_array_equal(sample["small.npy"], row)
        np.testing.assert_array_equal(sample["wide.npy"], row.astype(np.float32))
        np.testing.assert_array_equal(sample["enum.npy"], [0, 1])


def test_field_names_decide_if_arrays_become_images_classes_or_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES)
    np.savez_compressed(tmp_path / "y.npz", y=LABELS, other=LABELS)
    words = ["convert", "arrays", str(tmp_path / "out"), "--no-shuffle"]
    for pair in ("png={0}/x.npy", "cls={0}/y.npz:y", "raw={0}/x.npy"):
        words += ["--field", pair.format(tmp_path)]
    assert main(words) == 0
    packed = read_samples(tmp_path / "out")
    assert list(packed) == [f"{i:09d}" for i in range(100)]
    for i, fields in enumerate(packed.values()):
        assert (pixels(fields["png"]) == IMAGES[i]).all()
        assert fields["cls"] == b"%d" % LABELS[i]
        assert (array(fields["raw.npy"]) == IMAGES[i]).all()
    arrays = {"png": IMAGES, "cls": LABELS, "raw": IMAGES}
    in_memory = wt.convert_arrays(arrays, tmp_path / "memory", shuffle=False)
    stored = wt.index(tmp_path / "out").shards
    assert [shard.sha256 for shard in in_memory.shards] == [shard.sha256 for shard in stored]


# Class numbers that would make too many classes, and their messages.
FAR: list[tuple[list[int], str]] = [
    ([1, 2, 1_700_000_000], "its cls is 1700000000"),
    ([1_000_000], "its cls is 1000000"),
    ([1, 2, 99_999], "as classes counted from 0 they would make 100000"),
]


@pytest.mark.parametrize(
    ("fields", "options", "words"),
    [
        ({"x": "objects.npy"}, {}, "cannot be read as an array.*Python objects"),
        ({"x": "two.npz"}, {}, "has no member ''. Name one of its arrays, .* x=.*two.npz:a: a, b"),
        ({"x": "two.npz:c"}, {}, "has no member 'c'"),
        ({"x": "gone.npy"}, {}, "there is no such file"),
        ({"x": np.float64(3)}, {}, "one row for each sample"),
        ({}, {}, "no array was named"),
        (
            {"x": np.zeros((3, 2))},
            {"label": "x"},
            "the label 'x' is an array of float64 .3, 2.. A label must be one number per row",
        ),
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


def test_bytes_in_arrays_are_kept_as_text_or_bytes(tmp_path: Path) -> None:
    values_in = [b"caf\xe9", b"\xff\xd8\x00abc", "plain é".encode()]
    wt.convert_arrays({"caption": np.array(values_in)}, tmp_path / "out", shuffle=False)
    packed = read_samples(tmp_path / "out")
    assert [packed[key]["caption.txt"] for key in sorted(packed)] == values_in
    assert len(wt.verify(tmp_path / "out", decode=True).findings) == 2


@pytest.mark.parametrize("name", ["x", "cls"])
def test_masked_values_are_bad_samples(tmp_path: Path, name: str) -> None:
    masked, out = np.ma.array([1, 2, 3], mask=[False, True, False]), tmp_path / "out"
    arrays = {"n": np.arange(3), name: masked}
    index = wt.convert_arrays(arrays, str(out), shuffle=False, on_error="skip")
    assert (len(index), index.info["skipped"]) == (2, 1)
    assert "masked" in (out / "skipped.jsonl").read_text()
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
    assert (index.labels[0].classes, len(index)) == (("zero", "one", "two"), 6)
    for number, fields in zip((0, 1, 2, 4, 5, 6), read_samples(out).values(), strict=True):
        assert (pixels(fields["png"]) == number).all()
        assert fields["cls"] == b"%d" % (number % 3)


def test_samples_of_webdataset_round_trip(tmp_path: Path) -> None:
    import webdataset

    write_shards(tmp_path / "in", [5, 3])
    shards = sorted(map(str, (tmp_path / "in").glob("*.tar")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the collector closes its files
        wt.pack(webdataset.WebDataset(shards, shardshuffle=False), tmp_path / "out")
        gc.collect()
    assert read_samples(tmp_path / "out") == read_samples(tmp_path / "in")


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"cls": "cat"}, "its cls is 'cat', but a class must be a number, or a name if classes"),
        ({"cls": -1}, "its cls is -1"),
        ({"x": object()}, "its x is object, which a field of this name"),
        ({"x": np.arange(3)}, "name an array x.npy"),
        (
            {"jpg": np.zeros((3, 3))},
            "its jpg is an array of float64 .3, 3., but pixels must be uint8",
        ),
        ({"jpg": "path.jpg"}, "its jpg is str, but must be an image"),
        ({"x.pyd": [1]}, "its x.pyd is list, which a field of this name cannot hold"),
        ({"x.npy": np.array([{}])}, "holds Python objects"),
        ({"json": {1, 2}}, "cannot be written as JSON"),
        ({"__key__": 7, "txt": "x"}, "its __key__ is 7"),
        ({"txt": None}, "its txt is NoneType, which a field of this name cannot hold"),
        ({"__key__": "only"}, "it has no fields, only '__key__'"),
    ],
)
def test_samples_that_cannot_be_packed_are_named_or_skipped(
    tmp_path: Path, sample: dict[str, Any], words: str
) -> None:
    with pytest.raises(SourceError, match=f"samples, row 2: .*{words}"):
        wt.pack([{"txt": "fine"}, sample], tmp_path / "out")
    index = wt.pack([{"txt": "fine"}, sample], tmp_path / "out", on_error="skip", overwrite=True)
    assert (len(index), index.info["skipped"]) == (1, 1)


def test_repeated_keys_are_renamed_and_recorded(tmp_path: Path) -> None:
    names = ["a", "b", "A", "a", "a-2", "../up", "x.y"]
    wt.pack([{"__key__": key, "txt": str(n)} for n, key in enumerate(names)], tmp_path / "out")
    by_text = {int(fields["txt"]): key for key, fields in read_samples(tmp_path / "out").items()}
    keys = [by_text[number] for number in range(7)]
    assert keys == ["a", "b", "A-2", "a-3", "a-2-2", "up", "x_y"]
    renamed = map(json.loads, (tmp_path / "out" / "renamed.jsonl").read_text().splitlines())
    changed = {key: name for key, name in zip(keys, names, strict=True) if key != name}
    assert {row["key"]: row["name"] for row in renamed} == changed


def test_an_endless_stream_is_read_up_to_the_limit(tmp_path: Path) -> None:
    stream = ({"x.npy": torch.arange(3) * n, "txt": str(n)} for n in itertools.count())
    index = wt.pack(stream, tmp_path / "out", limit=50)
    packed = read_samples(tmp_path / "out").values()
    read = sorted((int(fields["txt"]), array(fields["x.npy"]).tolist()) for fields in packed)
    assert read == [(n, [0, n, 2 * n]) for n in range(50)]
    assert (index.info["listed"], len(index)) == (50, 50)


def test_field_names_keep_their_capitals_before_a_lowered_ending(tmp_path: Path) -> None:
    wt.pack([{"Depth.NPY": np.zeros(2)}], tmp_path / "out")
    loader = wt.Loader(tmp_path / "out", {"d": wt.array("Depth.npy")}, batch_size=1)
    assert next(iter(loader))["d"].shape == (1, 2)


def test_pil_images_are_packed_upright_and_keep_gray_levels(
    data: Callable[[str], Path], tmp_path: Path
) -> None:
    with (
        Image.open(data("difficult") / "Landscape_6.jpg") as lying,
        Image.open(data("difficult") / "hopper_16bit.pgm") as deep,
    ):
        truth = np.asarray(deep, float).mean() / 256
        wt.pack([{"__key__": "a", "jpg": lying}, {"__key__": "b", "jpg": deep}], tmp_path / "out")
    packed = read_samples(tmp_path / "out")
    height, width = pixels(packed["a"]["jpg"]).shape[:2]
    assert width > height
    assert abs(pixels(packed["b"]["jpg"]).astype(float).mean() - truth) < 2


def test_a_narrow_tensor_is_a_channels_first_image(tmp_path: Path) -> None:
    tensor = torch.arange(3 * 8 * 4, dtype=torch.uint8).reshape(3, 8, 4)
    wt.pack([{"png": tensor}], tmp_path / "out")
    (fields,) = read_samples(tmp_path / "out").values()
    assert pixels(fields["png"]).tolist() == tensor.permute(1, 2, 0).tolist()


# --- classes of samples and arrays ---


def test_class_names_as_text_need_no_declaration(tmp_path: Path) -> None:
    wt.pack([{"txt": "x", "cls": b"cat"}, {"txt": "y", "cls": b"dog"}], tmp_path / "out")
    packed = read_samples(tmp_path / "out").values()
    assert sorted(fields["cls"] for fields in packed) == [b"cat", b"dog"]


def test_declared_class_numbers_are_accepted(tmp_path: Path) -> None:
    some = [{"txt": "a", "cls": 97 * number} for number in range(300)]
    assert len(wt.pack(some, tmp_path / "a").labels[0].classes) == 97 * 299 + 1
    arrays = {"x": np.zeros(3), "cls": np.array([1, 2, 99_999])}
    (label,) = wt.convert_arrays(arrays, tmp_path / "b", label="cls:class").labels
    assert len(label.classes) == 100_000
    (label,) = wt.convert_arrays(arrays, tmp_path / "c", label="cls:number").labels
    assert label.kind == "number"
    names = [f"person {number}" for number in range(20_000)]
    wt.pack([{"__key__": n, "cls": n} for n in names[::97]], tmp_path / "d", classes=names)
    numbers = {key: fields["cls"] for key, fields in read_samples(tmp_path / "d").items()}
    assert numbers == {names[number]: b"%d" % number for number in range(0, 20_000, 97)}


def test_a_class_as_bytes_is_a_class_name_or_number(tmp_path: Path) -> None:
    values: list[Any] = [b"cat", b"dog", "cat", 1, b"0", b" dog\n", np.int64(1), b"7"]
    rows, classes = [{"txt": "x", "cls": value} for value in values], ["cat", "dog", "7"]
    index = wt.pack(rows, tmp_path / "out", classes=classes)
    packed = read_samples(tmp_path / "out")
    assert b"".join(packed[key]["cls"] for key in sorted(packed)) == b"01010112"
    assert [(label.name, label.classes) for label in index.labels] == [("label", tuple(classes))]
    assert index.info["samples"] == {"train": {"cat": 3, "dog": 4, "7": 1}}
    same = wt.pack([{"txt": "x", "cls": b"1"}], tmp_path / "same", classes=["0", "1"])
    assert same.info["samples"] == {"train": {"1": 1}}


@pytest.mark.parametrize("cls", [b"bird", b"3", "bird", 3, -1, b"caf\xe9", b""])
def test_an_unknown_class_is_a_bad_sample(tmp_path: Path, cls: Any) -> None:
    samples_in = [{"txt": "x", "cls": 0}, {"txt": "y", "cls": cls}]
    with pytest.raises(SourceError, match="row 2: its cls is"):
        wt.pack(samples_in, tmp_path / "out", classes=["cat", "dog"])
    assert len(wt.pack(samples_in, tmp_path / "out", classes=["cat", "dog"], on_error="skip")) == 1


def test_additional_labels_keep_the_class_in_the_index(tmp_path: Path) -> None:
    classes, number = ["cat", "dog"], ColumnInfo("y", "number", "json", "y")
    label = ColumnInfo("label", "class", "cls", classes=("cat", "dog"))
    samples_in = [{"txt": "x", "cls": n % 2, "json": {"y": n / 2}} for n in range(4)]
    index = wt.pack(samples_in, tmp_path / "out", classes=classes, labels=[number])
    assert index.labels == (number, label)
    arrays = {"cls": np.arange(4) % 2, "y": np.arange(4) / 2}
    index = wt.convert_arrays(arrays, tmp_path / "arrays", label="y", classes=classes)
    assert index.labels == (ColumnInfo("y", "number", "y.npy"), label)
    assert index.info["samples"] == {"train": {"cat": 2, "dog": 2}}


class Named(list[Any]):
    """Samples with class names, like data sets of torchvision."""

    classes = ("cat", "cat")


ONE = {"txt": "x", "cls": 0}
TWICE = "classes has 'cat' twice"


@pytest.mark.parametrize(
    ("packed", "options", "words"),
    [
        (3, {}, "samples is int: must be a data set"),
        ("path", {}, "samples is str"),
        (pandas.DataFrame({"a": [1]}), {}, "use wt.convert_table"),
        ([], {}, "samples holds no samples"),
        ([(1, 2, 3)], {}, "a sample has 3 values, but 2 are named"),
        ([{"left/x.npy": np.zeros(2)}], {}, "'left/x.npy' cannot be the name of a field"),
        (
            [{"x.npy": np.zeros(2), "X.npy": np.ones(2)}],
            {},
            "two of its fields have the same name: x.npy, x.npy",
        ),
        ([ONE], {"classes": ["cat", "cat"]}, TWICE),
        (Named([ONE]), {}, TWICE),
        ([ONE], {"classes": ["ab", 1]}, "must be Sequence"),
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


def test_shards_are_repacked_with_their_labels_and_splits(old: Path, tmp_path: Path) -> None:
    before = wt.index(old)
    index = wt.convert_tars(old, tmp_path / "new", max_shard_samples=100, seed=3)
    assert read_samples(tmp_path / "new") == read_samples(old)
    assert (index.labels, index.splits, len(index.shards)) == (before.labels, ("train", "val"), 2)
    assert index.info["samples"]["train"].keys() == {"cat", "dog"}
    split_index = wt.convert_tars(old, tmp_path / "split", split={"a": 0.5, "b": 0.5})
    assert split_index.splits == ("a", "b")
    assert wt.verify(tmp_path / "split").ok


def test_without_an_index_splits_come_from_shard_names(tmp_path: Path) -> None:
    for name in ("train-000", "train-001", "val-000"):
        samples = [(f"{name}-{i}", {"txt": b"x"}) for i in range(4)]
        write_tar(tmp_path / "s" / f"{name}.tar", samples)
    index = wt.convert_tars(tmp_path / "s", tmp_path / "out")
    assert {shard.split: shard.samples for shard in index.shards} == {"train": 8, "val": 4}


def test_a_split_of_a_split_has_the_requested_shares(tmp_path: Path) -> None:
    rows, split = (
        ({"__key__": f"k{n}", "txt": "x"} for n in range(3000)),
        {"train": 0.8, "val": 0.2},
    )
    wt.pack(rows, tmp_path / "all", split=split)
    index = wt.convert_tars(f"{tmp_path}/all/train-*.tar", tmp_path / "again", split=split)
    samples = sum(shard.samples for shard in index.shards if shard.split == "val")
    assert abs(samples / len(index) - 0.2) < 0.03


@pytest.mark.parametrize(
    ("condition", "numbers"),
    [
        ("1 < cls < 4", [2, 3]),
        ("0 <= cls <= 3 != 2 < 9", [0, 1, 2, 3]),
        ("json.deep % 2 == 0", [0, 2, 4]),
        ("cls != 0 and txt == 'n'", [1, 2, 3, 4, 5]),
        ("txt.startswith('n') and json.deep > 3 and size.txt == 1", [4, 5]),
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
        for n in range(6)
    ]
    write_tar(tmp_path / "set" / "a.tar", samples)
    options: dict[str, Any] = {"where": condition, "shuffle": False}
    if isinstance(numbers, str):
        with pytest.raises(UsageError, match=numbers):
            wt.convert_tars(tmp_path / "set", tmp_path / "out", **options)
    else:
        chosen = wt.convert_tars(tmp_path / "set", tmp_path / "out", **options)
        assert chosen.keys(np.arange(len(chosen))) == [f"k{n}" for n in numbers]


def test_conditions_are_checked_before_reading_and_rejected_samples_counted(
    old: Path, tmp_path: Path, capsys: Any
) -> None:
    words = ["convert", "tars", str(old), str(tmp_path / "a"), "--json", "--where"]
    assert main([*words, "clss == 1"]) == 2
    assert "there is no column 'clss'" in capsys.readouterr().err
    assert main([*words, "cls == 77"]) == 2
    assert "holds for none of 21 samples" in capsys.readouterr().err
    assert main([*words, "cls == 1 and size.png < 9 or cls == 0", "--rename", "png=x.png"]) == 0
    document = json.loads(capsys.readouterr().out)
    rejected = {"samples that do not meet the condition": 12}
    assert [document[name] for name in ("samples", "skipped", "ignored")] == [9, 0, rejected]
    assert {tuple(sorted(fields)) for fields in read_samples(tmp_path / "a").values()} == {
        ("cls", "x.png")
    }


def test_sets_are_merged_and_equal_keys_are_renamed(tmp_path: Path) -> None:
    for name in "ab":
        samples = [(f"k{i}", {"txt": f"{name}{i}".encode()}) for i in range(5)]
        write_tar(tmp_path / name / "s.tar", samples)
    wt.convert_tars([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    packed = read_samples(tmp_path / "out")
    texts = sorted(fields["txt"].decode() for fields in packed.values())
    assert texts == [f"{name}{i}" for name in "ab" for i in range(5)]
    assert set(packed) == {f"k{i}{end}" for i in range(5) for end in ("", "-2")}


@pytest.mark.parametrize("words", [["--keep", "jpg,cls"], []])
def test_sets_that_number_their_classes_differently_are_not_merged(
    tmp_path: Path, words: list[str], capsys: Any
) -> None:
    for name, classes in (("a", {"cat": 3, "dog": 3}), ("b", {"ant": 3, "bee": 3})):
        write_class_folder(tmp_path / f"in-{name}", classes, "jpg")
        wt.convert_folder(tmp_path / f"in-{name}", tmp_path / name)
    sets = [f"{tmp_path}/{name}/*.tar" for name in "ab"]
    command = ["convert", "tars", *sets, str(tmp_path / "out")]
    assert main([*command, *words]) == 2
    assert "a class number would mean two classes" in capsys.readouterr().err
    assert main([*command, "--keep", "jpg"]) == 0  # without classes the sets do not differ
    assert len(read_samples(tmp_path / "out")) == 12


def test_shards_are_filtered_by_keys_and_fields_are_kept(old: Path, tmp_path: Path) -> None:
    everything, keys = read_samples(old), tmp_path / "keys.txt"
    index = wt.convert_tars(old, tmp_path / "b", drop=["cls"])
    assert (index.fields, index.labels) == (("png",), ())
    chosen = sorted(everything)[:5]
    keys.write_text("\n".join(chosen))
    wt.convert_tars(old, tmp_path / "c", keys=str(keys), keep=["png"])
    assert read_samples(tmp_path / "c") == {key: {"png": everything[key]["png"]} for key in chosen}
    keys.write_text("cat/000\nnobody\n")
    for options in ({}, {"limit": 1}):  # the second: before any read
        with pytest.raises(SourceError, match="1 of 2 keys are in no shard, such as 'nobody'"):
            wt.convert_tars(old, tmp_path / "d", keys=str(keys), **options)
    assert not (tmp_path / "d").exists()


def test_changed_bytes_of_packed_shards_are_bad_samples(old: Path, tmp_path: Path) -> None:
    """Also of a selection, which takes the other samples without a question."""
    shutil.copytree(old, tmp_path / "set")
    index, keys = wt.index(tmp_path / "set"), tmp_path / "keys.txt"
    tar = Path(index.shards[0].path)
    data = bytearray(tar.read_bytes())
    data[next(at for name, at, _ in index.members(2) if name == "png") + 40] ^= 1
    tar.write_bytes(data)

    def convert(out: str, *chosen: int, **options: Any) -> wt.Index:
        keys.write_text("".join(f"{index.key(number)}\n" for number in chosen))
        options |= {"keys": str(keys)} if chosen else {}
        return wt.convert_tars(tmp_path / "set", tmp_path / out, **options)

    with pytest.raises(SourceError, match=r"the field png of sample .* has another crc32 than the"):
        convert("out")
    done = convert("out", on_error="skip", overwrite=True)
    assert (done.info["skipped"], len(done)) == (1, 20)
    assert json.loads((tmp_path / "out" / "skipped.jsonl").read_text())["path"] == index.key(2)
    convert("good", 0, 3)
    assert set(read_samples(tmp_path / "good")) == {index.key(0), index.key(3)}
    some = convert("some", 0, 2, on_error="skip")
    assert (len(some), some.info["skipped"]) == (1, 1)


def test_captions_that_look_like_numbers_are_text(tmp_path: Path) -> None:
    captions = dict(zip("abcdefg", ["12", "a dog", "1e5", "nan", "007", "1_000", "0"], strict=True))
    samples = ({"__key__": key, "txt": caption} for key, caption in captions.items())
    wt.pack(samples, tmp_path / "old")
    options: dict[str, Any] = {"where": "len(txt) < 4", "on_error": "skip"}
    done = wt.convert_tars(tmp_path / "old", tmp_path / "new", **options)
    assert sorted(done.key(i) for i in range(len(done))) == ["a", "c", "d", "e", "g"]
    assert done.info["skipped"] == 0


def test_files_beside_split_folders_are_counted_and_split_synonyms_refused(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        write_class_folder(tmp_path / "in" / split, {"a": 2})
    write_pictures(tmp_path / "in", [1])
    index = wt.convert_folder(tmp_path / "in", tmp_path / "out")
    assert index.splits == ("train", "val")
    assert index.info["ignored"] == {"files beside the splits": 1}
    write_class_folder(tmp_path / "in" / "val", {"a": 2})
    with pytest.raises(SourceError, match="two of these folders mean the same split"):
        wt.convert_folder(tmp_path / "in", tmp_path / "out2")


# --- torchvision ---


def folder_of_digits(folder: Path) -> None:
    """Write torchvision's MNIST: 20 training and 10 test images of one color each."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 20), ("t10k", 10)):
        images = np.repeat(np.arange(count, dtype=np.uint8), 28 * 28).tobytes()
        size = count.to_bytes(4, "big")
        head = b"\0\0\x08\x03" + size + 2 * (28).to_bytes(4, "big")
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + images)
        labels = bytes(number % 10 for number in range(count))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + size + labels)


def counts(index: wt.Index) -> dict[str, int]:
    """{split: number of samples}"""
    return {split: sum(numbers.values()) for split, numbers in index.info["samples"].items()}


def test_a_torchvision_set_keeps_its_splits_classes_and_pixels_or_is_an_error(
    tmp_path: Path,
) -> None:
    folder_of_digits(tmp_path)
    images, out = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte", tmp_path / "out"
    intact = images.read_bytes()
    images.write_bytes(intact[:3000])
    message = "the split 'test' is missing or cannot be read.*name the splits to convert"
    with pytest.raises(SourceError, match=message):
        wt.convert_torchvision("MNIST", out, tmp_path)
    index = wt.convert_torchvision("MNIST", out, tmp_path, splits=["train"])
    assert counts(index) == {"train": 20}
    assert index.info["ignored"] == {"split test, which was not asked for": 1}
    images.write_bytes(intact)
    words = ["convert", "torchvision", "MNIST", str(out), "--root", str(tmp_path), "--overwrite"]
    assert main([*words, "--no-shuffle"]) == 0
    index = wt.index(out)
    assert (counts(index), index.info["ignored"]) == ({"train": 20, "test": 10}, {})
    assert index.labels[0].classes[9] == "9 - nine"
    for shard in index.shards:
        for number, (_, fields) in enumerate(read_with_webdataset([Path(shard.path)])):
            assert (pixels(fields["png"]) == number).all()
            assert int(fields["cls"]) == number % 10


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Fasion", {}, "torchvision.datasets has no data set 'Fasion'"),
        ("MNIST", {}, "'train' is missing or .* as torchvision expects it .Dataset not found"),
        ("MNIST", {"splits": ["test"]}, "'test' is missing or .* torchvision expects it"),
        ("FashionMNIST", {"splits": ["banana"]}, "has no split 'banana'"),
        ("VisionDataset", {}, "VisionDataset"),
        ("EMNIST", {}, "EMNIST"),
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
    folder = tmp_path / "oxford-iiit-pet"
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    numbers_of = {"trainval": range(4), "test": range(4, 7)}
    for split, numbers in numbers_of.items():
        lines = [f"Pug_{number} 1 2 3\n" for number in numbers]
        (folder / "annotations" / f"{split}.txt").write_text("".join(lines))
        for number in numbers:
            (folder / "images" / f"Pug_{number}.jpg").write_bytes(picture(number, kind="JPEG"))
    with pytest.raises(SourceError, match="trainval.*name the splits to convert"):
        wt.convert_torchvision("OxfordIIITPet", tmp_path / "out", tmp_path)
    splits = [*numbers_of]
    index = wt.convert_torchvision("OxfordIIITPet", tmp_path / "out", tmp_path, splits=splits)
    assert counts(index) == {"trainval": 4, "test": 3}
    (folder / "annotations" / "test.txt").unlink()
    with pytest.raises(SourceError, match="the split 'test' is missing or cannot be read"):
        wt.convert_torchvision("OxfordIIITPet", tmp_path / "again", tmp_path, splits=splits)
