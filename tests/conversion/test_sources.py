"""Complete conversion of tables, HDF5, arrays, Python samples, tars and torchvision sets."""

from __future__ import annotations

import gc
import gzip
import io
import itertools
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

import wdstrain as wt
from tests.conftest import (
    picture,
    read_with_webdataset,
    write_class_folder,
    write_shards,
    write_tar,
)
from wdstrain.cli import main
from wdstrain.errors import SourceError, UsageError
from wdstrain.shards.kinds import ColumnInfo


def samples(out: Path) -> dict[str, dict[str, bytes]]:
    return dict(read_with_webdataset(sorted(out.glob("*.tar"))))


def skipped(out: Path) -> dict[int, str]:
    """{row: reason} of the skipped samples."""
    rows = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
    return {row["row"]: row["reason"] for row in rows}


def array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


# --- tables ---


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    (tmp_path / "IMG").mkdir()
    for number in range(6):
        (tmp_path / "IMG" / f"{number}.png").write_bytes(picture(number))
    return tmp_path


ROWS: list[dict[str, Any]] = [
    {
        "file": f"IMG/{n}.png",
        "kind": ["dog", "cat"][n % 2],
        "tags": ["a", "b"][: n % 3],
        "good": n > 2,
        "x": n / 4,
        "when": f"d{n}",
    }
    for n in range(6)
]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "frame"])
def test_tables_of_any_format_give_the_same_samples(pictures: Path, form: str) -> None:
    frame, table = pandas.DataFrame(ROWS), str(pictures / f"t.{form}")
    root: str | None = None
    if form == "jsonl":
        Path(table).write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    elif form == "parquet":
        frame.to_parquet(table)
    else:
        table, root = frame, str(pictures)  # type: ignore[assignment]
    index = wt.convert_table(
        table, str(pictures / "out"), image="file", label=["kind", "tags", "good", "x"], root=root
    )
    assert [
        (label.name, label.kind, label.field, label.entry, label.classes) for label in index.labels
    ] == [
        ("kind", "class", "json", "kind", ("cat", "dog")),
        ("tags", "multi", "json", "tags", ("a", "b")),
        ("good", "flag", "json", "good", ("False", "True")),
        ("x", "number", "json", "x", ()),
    ]
    packed = samples(pictures / "out")
    for row in ROWS:
        fields = packed[row["file"].removesuffix(".png")]
        assert fields["png"] == (pictures / row["file"]).read_bytes()
        assert json.loads(fields["json"]) == {
            name: value for name, value in row.items() if name != "file"
        }
    batch = next(
        iter(
            wt.Loader(
                index,
                {
                    "tags": wt.label("json.tags", multi=True),  # the classes of the index
                    "good": wt.label("json.good"),
                },
                batch_size=6,
            )
        )
    )
    for key, tags, good in zip(
        batch["__key__"], batch["tags"].tolist(), batch["good"].tolist(), strict=True
    ):
        number = int(key.rpartition("/")[2])
        assert (tags, good) == ([[0, 0], [1, 0], [1, 1]][number % 3], number > 2)


def test_several_classes_in_a_cell_are_separated_by_bars(pictures: Path) -> None:
    (pictures / "t.csv").write_text("file,tags\nIMG/0.png,sun|sea\nIMG/1.png,\nIMG/2.png,sea\n")
    out = pictures / "out"
    index = wt.convert_table(
        pictures / "t.csv", out, image="file", label="tags:multi", on_error="skip"
    )
    assert index.labels[0].classes == ("sea", "sun")
    assert {key: json.loads(fields["json"])["tags"] for key, fields in samples(out).items()} == {
        "IMG/0": ["sun", "sea"],
        "IMG/2": ["sea"],
    }
    assert skipped(out) == {3: "the label column 'tags' is empty"}


def test_images_may_be_bytes_in_the_table(pictures: Path) -> None:
    data = [picture(n, kind=kind) for n, kind in enumerate(("PNG", "JPEG", "WEBP"))]
    frame = pandas.DataFrame(
        {"image": [{"bytes": data_, "path": None} for data_ in data], "label": [0, 1, 1]}
    )
    frame.to_parquet(pictures / "t.parquet")
    wt.convert_table(
        str(pictures / "t.parquet"), str(pictures / "out"), image="image", label="label"
    )
    packed = samples(pictures / "out")
    assert [set(packed[f"row-00000000{n}"]) for n in (1, 2, 3)] == [
        {"png", "cls"},
        {"jpg", "cls"},
        {"webp", "cls"},
    ]
    assert [
        data_
        for n in (1, 2, 3)
        for field, data_ in packed[f"row-00000000{n}"].items()
        if field != "cls"
    ] == data


def test_unusable_rows_are_skipped_with_their_numbers(pictures: Path) -> None:
    lines = [
        "file,n",
        "IMG/0.png,1",
        "IMG/gone.png,2",
        "IMG/1.png",
        ",3",
        "IMG/2.png,",
        "IMG/3.doc,1",
        "IMG/4.png,4",
    ]
    (pictures / "t.csv").write_text("\n".join(lines))
    words = [
        "convert",
        "table",
        str(pictures / "t.csv"),
        str(pictures / "out"),
        "--image",
        "file",
        "--label",
        "n:class",
    ]
    assert main(words) == 1
    assert main([*words, "--on-error", "skip"]) == 0
    rows = [
        json.loads(line) for line in (pictures / "out" / "skipped.jsonl").read_text().splitlines()
    ]
    assert {row["row"]: row["reason"].split(";")[0] for row in rows} == {
        3: "the image is not there",
        4: "it has 1 cells, but the table has 2 columns",
        5: "there is no path of an image",
        6: "the label column 'n' is empty",
        7: "the path has no extension of an image",
    }
    assert {row["source"] for row in rows} == {"t.csv"}
    assert len(samples(pictures / "out")) == 2
    (pictures / "t.jsonl").write_text('{"file": "IMG/0.png"}\nnot json\n[1]\n')
    index = wt.convert_table(pictures / "t.jsonl", pictures / "json", image="file", on_error="skip")
    assert (list(skipped(pictures / "json")), len(index)) == ([2, 3], 1)


def test_a_column_can_name_the_split_of_each_row(pictures: Path) -> None:
    (pictures / "t.csv").write_text(
        "file,part\n" + "".join(f"IMG/{n}.png,{'val' if n > 3 else 'train'}\n" for n in range(6))
    )
    index = wt.convert_table(
        str(pictures / "t.csv"), str(pictures / "out"), image="file", split_by="part"
    )
    assert {shard.split: shard.samples for shard in index.shards} == {"train": 4, "val": 2}
    (pictures / "t.csv").write_text("file,part\nIMG/0.png,../up\nIMG/1.png,\n")
    with pytest.raises(SourceError, match="row 3: IMG/1.png: the split column 'part' is empty"):
        wt.convert_table(
            str(pictures / "t.csv"), str(pictures / "out2"), image="file", split_by="part"
        )
    with pytest.raises(UsageError, match="'../up' cannot be the name of a split"):
        wt.convert_table(
            str(pictures / "t.csv"),
            str(pictures / "out2"),
            image="file",
            split_by="part",
            on_error="skip",
        )
    assert not (pictures / "out2").exists()


def test_columns_of_a_table_without_a_header_are_numbers(
    data: Callable[[str], Path], tmp_path: Path
) -> None:
    """The original driving log: no header, absolute Windows paths, blanks after commas."""
    folder = data("driving")
    words = [
        "convert",
        "table",
        str(folder / "driving_log.csv"),
        str(tmp_path / "out"),
        "--image",
        "0",
        "--label",
        "3",
    ]
    assert main(words) == 1
    assert (
        main(
            [
                *words,
                "--no-header",
                "--root",
                str(folder),
                "--limit",
                "300",
                "--max-shard-samples",
                "100",
            ]
        )
        == 0
    )
    packed = samples(tmp_path / "out")
    assert len(packed) == 300
    key, fields = next(iter(packed.items()))
    assert fields["jpg"] == (folder / f"{key}.jpg").read_bytes()
    assert set(json.loads(fields["json"])) == {"1", "2", "3", "4", "5", "6"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda p: (
                p.with_suffix(".parquet").write_bytes(b"PAR1 no") and p.with_suffix(".parquet")
            ),
            "cannot be read as Parquet",
        ),
        (
            lambda p: p.with_suffix(".jsonl").touch() or p.with_suffix(".jsonl"),
            "has no rows that can be read",
        ),
        (lambda p: pandas.DataFrame([[1, 2]], columns=["a", "a"]), "names a column twice"),
    ],
)
def test_a_file_that_is_not_a_table_is_refused(
    tmp_path: Path, make: Callable[[Path], Any], words: str
) -> None:
    with pytest.raises(SourceError, match=words):
        wt.convert_table(make(tmp_path / "t"), tmp_path / "out", image="file")


# --- HDF5 and arrays ---


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray]:
    bits = np.random.default_rng(0)
    return bits.integers(0, 255, (1000, 9, 7), np.uint8), bits.integers(0, 4, 1000)


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
    index = wt.convert_hdf5(
        str(tmp_path / "d.h5"),
        str(tmp_path / "out"),
        fields,
        key="/train/names",
        classes=list("abcd"),
    )
    for name, chunk in chunks.items():
        parts = hdf5_reads[name]
        assert all(part.start % chunk == 0 for part in parts)
        # Each chunk is read once: a run begins where the previous run ended.
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == 250
    assert len(hdf5_reads["/train/images"]) > 2
    assert index.labels[0].classes == ("a", "b", "c", "d")
    assert index.info["samples"]["train"] == {
        name: int((labels == i).sum()) for i, name in enumerate("abcd")
    }
    packed = samples(tmp_path / "out")
    for i in (0, 1, 124, 249):
        assert (array(packed[f"n {i}"]["image.npy"]) == images[i]).all()
        assert (packed[f"n {i}"]["cls"], packed[f"n {i}"]["note.txt"]) == (
            str(labels[i]).encode(),
            f"n {i}".encode(),
        )


def test_pytables_files_with_blosc_and_tables_are_read(
    tmp_path: Path, rows: tuple[np.ndarray, np.ndarray]
) -> None:
    tables = pytest.importorskip("tables")
    images, labels = rows
    with tables.open_file(str(tmp_path / "t.h5"), "w") as file:
        filters = tables.Filters(complevel=5, complib="blosc:lz4")
        file.create_carray("/", "images", obj=images, filters=filters)
        table = np.zeros(1000, [("energy", "f4"), ("hits", "i2", (3,)), ("kind", "u1")])
        table["energy"], table["hits"], table["kind"] = (
            np.arange(1000) / 8,
            np.arange(3000).reshape(1000, 3),
            labels,
        )
        file.create_table("/events", "table", obj=table, createparents=True, filters=filters)
    words = [
        "convert",
        "hdf5",
        str(tmp_path / "t.h5"),
        str(tmp_path / "out"),
        "--no-shuffle",
        "--label",
        "energy,kind",
    ]
    for pair in (
        "image=/images",
        "energy=/events/table/energy",
        "hits=/events/table/hits",
        "kind=/events/table/kind",
    ):
        words += ["--field", pair]
    assert main(words) == 0
    packed = list(samples(tmp_path / "out").values())
    assert [float(array(fields["energy.npy"])) for fields in packed] == [i / 8 for i in range(1000)]
    assert (array(packed[7]["image.npy"]) == images[7]).all()
    assert array(packed[7]["hits.npy"]).tolist() == [21, 22, 23]
    assert array(packed[7]["energy.npy"]).shape == ()
    batch = next(
        iter(
            wt.Loader(
                str(tmp_path / "out"),
                {
                    "e": wt.number("energy.npy"),
                    "k": wt.label("kind.npy"),
                    "x": wt.array("image.npy"),
                },
                batch_size=4,
                shuffle=False,
            )
        )
    )
    assert (batch["e"].tolist(), batch["k"].tolist()) == (
        [0, 0.125, 0.25, 0.375],
        labels[:4].tolist(),
    )
    assert torch.equal(batch["x"], torch.from_numpy(images[:4]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {},
            r"no data sets were named.*Use one of its data sets: /g/z \[10, 2\] float64; /t/p; /t/q; /x \[10\] int64; /y \[9\] int64",
        ),
        ({"a": "/nothing"}, "/nothing does not exist. Use one of its data sets: /g/z"),
        ({"a": "/g"}, "/g is a group"),
        ({"a": "/x", "b": "/y"}, "all arrays must have one row for each sample.*a .10., b .9."),
        ({"a": "/t"}, "/t is a group, or a table of several columns. Use .* /t/p; /t/q"),
    ],
)
def test_data_sets_that_cannot_be_packed_are_refused(
    tmp_path: Path, fields: dict[str, str], words: str
) -> None:
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["x"], file["y"], file["g/z"] = np.arange(10), np.arange(9), np.zeros((10, 2))
        file["t"] = np.zeros(10, [("p", "f4"), ("q", "i4")])
    with pytest.raises(UsageError, match=words):
        wt.convert_hdf5(str(tmp_path / "d.h5"), str(tmp_path / "out"), fields)
    with pytest.raises(SourceError, match="cannot be read as HDF5"):
        wt.convert_hdf5(__file__, str(tmp_path / "out"), {"a": "/x"})
    assert not (tmp_path / "out").exists()


def test_field_names_decide_if_arrays_become_images_classes_or_arrays(
    tmp_path: Path, rows: tuple[np.ndarray, np.ndarray]
) -> None:
    images, labels = rows
    np.save(tmp_path / "x.npy", images)
    np.savez_compressed(tmp_path / "y.npz", y=labels, other=labels)
    words = ["convert", "arrays", str(tmp_path / "out"), "--field", f"png={tmp_path / 'x.npy'}"]
    words += [
        "--field",
        f"cls={tmp_path / 'y.npz'}:y",
        "--field",
        f"raw={tmp_path / 'x.npy'}",
        "--no-shuffle",
    ]
    assert main(words) == 0
    packed = samples(tmp_path / "out")
    assert list(packed) == [f"{i:09d}" for i in range(1000)]
    for i, fields in enumerate(packed.values()):
        assert (np.asarray(Image.open(io.BytesIO(fields["png"]))) == images[i]).all()
        assert fields["cls"] == str(labels[i]).encode()
        assert (array(fields["raw.npy"]) == images[i]).all()
    in_memory = wt.convert_arrays(
        {"png": images, "cls": labels, "raw": images}, str(tmp_path / "memory"), shuffle=False
    )
    assert [shard.sha256 for shard in in_memory.shards] == [
        shard.sha256 for shard in wt.index(str(tmp_path / "out")).shards
    ]


def test_arrays_that_cannot_be_packed_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}, []], object), allow_pickle=True)
    np.savez(tmp_path / "two.npz", a=np.arange(3), b=np.arange(3))
    with pytest.raises(SourceError, match="cannot be read as an array.*Python objects"):
        wt.convert_arrays({"x": str(tmp_path / "objects.npy")}, str(tmp_path / "out"))
    for fields, words in (
        (
            {"x": str(tmp_path / "two.npz")},
            "has no member ''. Name one of its arrays, such as x=.*two.npz:a: a, b",
        ),
        ({"x": str(tmp_path / "two.npz") + ":c"}, "has no member 'c'"),
        ({"x": str(tmp_path / "gone.npy")}, "there is no such file"),
        ({"x": np.float64(3)}, "one row for each sample"),
        ({}, "no array was named"),
    ):
        with pytest.raises(UsageError, match=words):
            wt.convert_arrays(fields, str(tmp_path / "out"))
    with pytest.raises(
        UsageError,
        match="the label 'x' is an array of float64 .3, 2.. A label must be one number per row",
    ):
        wt.convert_arrays({"x": np.zeros((3, 2))}, str(tmp_path / "out"), label="x")
    with pytest.raises(SourceError, match="row 2: its y is nan"):
        wt.convert_arrays({"y": np.array([1.5, np.nan])}, str(tmp_path / "out"), label="y")


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


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(5):
            yield {
                "x.npy": torch.arange(3) * number,
                "txt": f"number {number}",
                "json": {"n": number},
                "cls": np.int64(number),
            }


def test_a_map_style_data_set_is_packed_with_its_classes(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match="samples, row 4: the data set raised OSError: a scratch on the disk"
    ):
        wt.pack(Digits(), str(tmp_path / "out"))
    index = wt.pack(Digits(), str(tmp_path / "out"), on_error="skip", overwrite=True, shuffle=False)
    assert (index.labels[0].classes, len(index)) == (("zero", "one", "two"), 6)
    packed = list(samples(tmp_path / "out").values())
    assert [np.asarray(Image.open(io.BytesIO(fields["png"])))[0, 0] for fields in packed] == [
        0,
        1,
        2,
        4,
        5,
        6,
    ]
    assert [fields["cls"] for fields in packed] == [b"0", b"1", b"2", b"1", b"2", b"0"]


def test_field_names_decide_how_an_iterable_of_dicts_is_packed(tmp_path: Path) -> None:
    index = wt.pack(
        Endless(),
        str(tmp_path / "out"),
        shuffle=False,
        labels=[wt.Label("n", "number", "json", "n")],
    )
    packed = list(samples(tmp_path / "out").values())
    assert [array(fields["x.npy"]).tolist() for fields in packed] == [
        [0, n, 2 * n] for n in range(5)
    ]
    assert [(fields["txt"], json.loads(fields["json"]), fields["cls"]) for fields in packed] == [
        (f"number {n}".encode(), {"n": n}, str(n).encode()) for n in range(5)
    ]
    assert [label.name for label in index.labels] == ["n", "label"]


def test_samples_of_webdataset_round_trip(tmp_path: Path) -> None:
    import webdataset

    write_shards(tmp_path / "in", [5, 3])
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ResourceWarning
        )  # webdataset leaves its files to the garbage collector
        shards = sorted(map(str, (tmp_path / "in").glob("*.tar")))
        wt.pack(webdataset.WebDataset(shards, shardshuffle=False), str(tmp_path / "out"))
        gc.collect()
    assert samples(tmp_path / "out") == samples(tmp_path / "in")


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
        ({"x.pyd": [1]}, "a shard is data, never code"),
        ({"x.npy": np.array([{}])}, "holds Python objects"),
        ({"json": {1, 2}}, "cannot be written as JSON"),
        ({"__key__": 7, "txt": "x"}, "its __key__ is 7"),
        ({"__key__": "only"}, "it has no fields, only '__key__'"),
    ],
)
def test_samples_that_cannot_be_packed_are_named_or_skipped(
    tmp_path: Path, sample: dict[str, Any], words: str
) -> None:
    with pytest.raises(SourceError, match=f"samples, row 2: .*{words}"):
        wt.pack([{"txt": "fine"}, sample], str(tmp_path / "out"))
    index = wt.pack(
        [{"txt": "fine"}, sample], str(tmp_path / "out"), on_error="skip", overwrite=True
    )
    assert (len(index), index.info["skipped"]) == (1, 1)


def test_repeated_keys_are_renamed_and_recorded(tmp_path: Path) -> None:
    names = ["a", "b", "A", "a", "a-2", "../up", "x.y"]
    wt.pack([{"__key__": key, "txt": str(n)} for n, key in enumerate(names)], str(tmp_path / "out"))
    key_by_text = {fields["txt"]: key for key, fields in samples(tmp_path / "out").items()}
    assert key_by_text == {
        b"0": "a",
        b"1": "b",
        b"2": "A-2",
        b"3": "a-3",
        b"4": "a-2-2",
        b"5": "up",
        b"6": "x_y",
    }
    renamed = [
        json.loads(line) for line in (tmp_path / "out" / "renamed.jsonl").read_text().splitlines()
    ]
    assert {row["key"]: row["name"] for row in renamed} == {
        "A-2": "A",
        "a-3": "a",
        "a-2-2": "a-2",
        "up": "../up",
        "x_y": "x.y",
    }


def test_a_key_repeated_five_thousand_times_is_numbered_in_linear_time(tmp_path: Path) -> None:
    index = wt.pack(
        ({"__key__": "a", "txt": "x"} for _ in range(5000)), str(tmp_path / "out"), shuffle=False
    )
    assert index.keys(np.arange(5000)) == ["a", *(f"a-{number}" for number in range(2, 5001))]


def test_an_endless_stream_is_read_up_to_the_limit(tmp_path: Path) -> None:
    index = wt.pack(
        ({"txt": str(number)} for number in itertools.count()), str(tmp_path / "out"), limit=50
    )
    assert sorted(int(fields["txt"]) for fields in samples(tmp_path / "out").values()) == list(
        range(50)
    )
    assert (index.info["listed"], len(index)) == (50, 50)


def test_python_samples_have_groups_and_splits(tmp_path: Path) -> None:
    rows = [{"__key__": f"k{n}", "txt": str(n)} for n in range(300)]
    index = wt.pack(
        rows,
        str(tmp_path / "out"),
        split={"a": 0.5, "b": 0.5},
        group=lambda row: str(int(row["txt"]) % 11),
    )
    assert index.splits == ("a", "b")
    sides = [
        {
            int(fields["txt"]) % 11
            for _, fields in read_with_webdataset(sorted((tmp_path / "out").glob(f"{s}-*.tar")))
        }
        for s in "ab"
    ]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("numbers", [[1, 2, 1_700_000_000], [1_000_000], [1, 2, 99_999]])
@pytest.mark.parametrize("kind", ["samples", "arrays"])
def test_ids_and_times_are_not_class_numbers(tmp_path: Path, kind: str, numbers: list[int]) -> None:
    out = str(tmp_path / "out")
    words = (
        "as classes counted from 0 they would make 100000"
        if numbers[-1] == 99_999
        else f"its cls is {numbers[-1]}"
    )
    pack: dict[str, Callable[[], Any]] = {
        "samples": lambda: wt.pack([{"txt": "a", "cls": number} for number in numbers], out),
        "arrays": lambda: wt.convert_arrays(
            {"x": np.zeros(len(numbers)), "cls": np.array(numbers)}, out
        ),
    }
    with pytest.raises((UsageError, SourceError), match=words):
        pack[kind]()
    assert not (tmp_path / "out" / "index.json").exists()


def test_declared_class_numbers_are_accepted(tmp_path: Path) -> None:
    some = [{"txt": "a", "cls": 97 * number} for number in range(300)]
    assert len(wt.pack(some, str(tmp_path / "a")).labels[0].classes) == 97 * 299 + 1
    arrays = {"x": np.zeros(3), "cls": np.array([1, 2, 99_999])}
    assert (
        len(wt.convert_arrays(arrays, str(tmp_path / "b"), label="cls:class").labels[0].classes)
        == 100_000
    )
    assert (
        wt.convert_arrays(arrays, str(tmp_path / "c"), label="cls:number").labels[0].kind
        == "number"
    )
    names = [f"person {number}" for number in range(20_000)]
    wt.pack(
        [{"__key__": name, "cls": name} for name in names[::97]], str(tmp_path / "d"), classes=names
    )
    assert {key: fields["cls"] for key, fields in samples(tmp_path / "d").items()} == {
        name: str(number).encode() for number, name in enumerate(names) if number % 97 == 0
    }


def test_objects_that_are_not_iterables_of_samples_are_refused(tmp_path: Path) -> None:
    for wrong, words in (
        (3, "samples is int: must be a data set"),
        ("path", "samples is str"),
        (pandas.DataFrame(ROWS), "use wt.convert_table"),
    ):
        with pytest.raises(UsageError, match=words):
            wt.pack(wrong, str(tmp_path / "out"))
    with pytest.raises(UsageError, match="a sample has 3 values, but 2 are named"):
        wt.pack([(1, 2, 3)], str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# --- tars ---


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Packed shards with classes and splits."""
    write_class_folder(tmp_path / "in", {"cat": 9, "dog": 12})
    wt.convert_folder(
        str(tmp_path / "in"),
        str(tmp_path / "old"),
        split={"train": 0.6, "val": 0.4},
        max_shard_samples=4,
    )
    return tmp_path / "old"


def test_shards_are_repacked_with_their_labels_and_splits(old: Path, tmp_path: Path) -> None:
    before = wt.index(str(old))
    index = wt.convert_tars(str(old), str(tmp_path / "new"), max_shard_samples=100, seed=3)
    assert samples(tmp_path / "new") == samples(old)
    assert (index.labels, index.splits, len(index.shards)) == (before.labels, ("train", "val"), 2)
    assert index.info["samples"]["train"].keys() == {"cat", "dog"}
    split_index = wt.convert_tars(str(old), str(tmp_path / "split"), split={"a": 0.5, "b": 0.5})
    assert split_index.splits == ("a", "b")
    assert wt.verify(str(tmp_path / "split")).ok


def test_shards_are_filtered_and_fields_are_dropped_kept_and_renamed(
    old: Path, tmp_path: Path
) -> None:
    everything = samples(old)
    words = [
        "convert",
        "tars",
        str(old / "*.tar"),
        str(tmp_path / "a"),
        "--where",
        "cls == 1 and not key.endswith('3')",
    ]
    assert main([*words, "--rename", "png=image.png"]) == 0
    expected = {
        key: {"image.png": fields["png"], "cls": b"1"}
        for key, fields in everything.items()
        if fields["cls"] == b"1" and not key.endswith("3")
    }
    assert samples(tmp_path / "a") == expected
    index = wt.convert_tars(str(old), str(tmp_path / "b"), drop=["cls"])
    assert (index.fields, index.labels) == (("png",), ())
    (tmp_path / "keys.txt").write_text("\n".join(sorted(everything)[:5]))
    wt.convert_tars(str(old), str(tmp_path / "c"), keys=str(tmp_path / "keys.txt"), keep=["png"])
    assert samples(tmp_path / "c") == {
        key: {"png": everything[key]["png"]} for key in sorted(everything)[:5]
    }
    (tmp_path / "keys.txt").write_text("cat/000\nnobody\n")
    with pytest.raises(SourceError, match="1 of 2 keys are in no shard, such as 'nobody'"):
        wt.convert_tars(str(old), str(tmp_path / "d"), keys=str(tmp_path / "keys.txt"))
    with pytest.raises(
        SourceError, match="1 of 2 keys are in no shard, such as 'nobody'"
    ):  # before any read
        wt.convert_tars(str(old), str(tmp_path / "d"), keys=str(tmp_path / "keys.txt"), limit=1)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("condition", "numbers"),
    [
        ("1 < cls < 4", [2, 3]),
        ("0 <= cls <= 3 != 2 < 9", [0, 1, 2, 3]),
        ("json.deep % 2 == 0", [0, 2, 4]),
        ("cls != 0 and txt == 'n'", [1, 2, 3, 4, 5]),
        ("txt.startswith('n') and json.deep > 3 and size.txt == 1", [4, 5]),
    ],
)
def test_conditions_choose_by_fields_that_have_no_columns(
    tmp_path: Path, condition: str, numbers: list[int]
) -> None:
    """Of shards made elsewhere, the fields and entries that a condition names are read."""
    fields = [
        {"cls": str(n).encode(), "txt": b"n", "json": json.dumps({"deep": n}).encode()}
        for n in range(6)
    ]
    write_tar(tmp_path / "set" / "a.tar", [(f"k{n}", part) for n, part in enumerate(fields)])
    chosen = wt.convert_tars(tmp_path / "set", tmp_path / "out", where=condition, shuffle=False)
    assert chosen.keys(np.arange(len(chosen))) == [f"k{n}" for n in numbers]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("len(long) > 1", "no column can hold"),
        ("json.absent == 1", "no sample has a value in json.absent"),
        ("cls > 9", "holds for none"),
        ("png == 1", "there is no column 'png'"),
    ],
)
def test_conditions_on_fields_that_no_column_can_hold_are_refused(
    tmp_path: Path, condition: str, message: str
) -> None:
    fields = {"cls": b"1", "json": b"{}", "long": b"long " * 99}
    write_tar(tmp_path / "set" / "a.tar", [("k", fields)])
    with pytest.raises(UsageError, match=message):
        wt.convert_tars(tmp_path / "set", tmp_path / "out", where=condition)


def test_selected_keys_are_packed_even_if_a_sample_is_bad(tmp_path: Path) -> None:
    index = wt.pack(
        ({"__key__": f"k{n}", "bin": b"x" * 600, "cls": n} for n in range(4)),
        str(tmp_path / "set"),
        shuffle=False,
    )
    tar = Path(index.shards[0].path)
    data = bytearray(tar.read_bytes())
    data[index.members(1)[0][1]] ^= 1  # of k1
    tar.write_bytes(data)
    (tmp_path / "keys.txt").write_text("k0\nk3\n")
    wt.convert_tars(str(tmp_path / "set"), str(tmp_path / "good"), keys=str(tmp_path / "keys.txt"))
    assert set(samples(tmp_path / "good")) == {"k0", "k3"}
    (tmp_path / "keys.txt").write_text("k0\nk1\n")
    repacked = wt.convert_tars(
        str(tmp_path / "set"),
        str(tmp_path / "some"),
        keys=str(tmp_path / "keys.txt"),
        on_error="skip",
    )
    assert (len(repacked), repacked.info["skipped"]) == (1, 1)


def test_sets_are_merged_and_equal_keys_are_renamed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tar(
            tmp_path / name / "s.tar", [(f"k{i}", {"txt": f"{name}{i}".encode()}) for i in range(5)]
        )
    wt.convert_tars([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "out"))
    packed = samples(tmp_path / "out")
    assert sorted(fields["txt"].decode() for fields in packed.values()) == [
        f"{name}{i}" for name in "ab" for i in range(5)
    ]
    assert set(packed) == {f"k{i}" for i in range(5)} | {f"k{i}-2" for i in range(5)}


def test_rows_of_a_virtual_data_set_with_a_missing_file_are_bad(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(3)
    with h5py.File(tmp_path / "all.h5", "w") as file:
        layout = h5py.VirtualLayout((6,), "i8")
        layout[:3], layout[3:] = (
            h5py.VirtualSource(f"{name}.h5", "x", shape=(3,)) for name in ("a", "b")
        )
        file.create_virtual_dataset("x", layout, fillvalue=-1)
    assert len(wt.convert_hdf5(tmp_path / "all.h5", tmp_path / "whole", {"x": "/x"})) == 6
    (tmp_path / "b.h5").unlink()
    with pytest.raises(
        SourceError,
        match=r"b\.h5 cannot be read \(there is no such file\). Its rows would be fill values",
    ):
        wt.convert_hdf5(tmp_path / "all.h5", tmp_path / "out", {"x": "/x"})
    (tmp_path / "a.h5").rename(tmp_path / "b.h5")
    with pytest.raises(SourceError, match=r"a\.h5 cannot be read"):
        wt.convert_hdf5(tmp_path / "all.h5", tmp_path / "out", {"x": "/x"})


def test_names_shared_by_two_splits_make_different_keys(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for number in range(6):
            path = tmp_path / "in" / split / "cat" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(number + 10 * (split == "val")))
    wt.convert_folder(str(tmp_path / "in"), str(tmp_path / "old"))
    assert (
        len({key for key, _ in read_with_webdataset(sorted((tmp_path / "old").glob("*.tar")))})
        == 12
    )
    wt.convert_tars(str(tmp_path / "old"), str(tmp_path / "new"), split={"all": 1.0})
    assert len(samples(tmp_path / "new")) == 12
    assert wt.verify(str(tmp_path / "new")).ok


def test_sets_that_number_their_classes_differently_are_not_merged(
    old: Path, tmp_path: Path
) -> None:
    write_class_folder(tmp_path / "in2", {"ant": 3, "bee": 3})
    wt.convert_folder(str(tmp_path / "in2"), str(tmp_path / "other"))
    with pytest.raises(UsageError, match="a class number would mean two classes"):
        wt.convert_tars([str(old), str(tmp_path / "other")], str(tmp_path / "out"))


def test_changed_bytes_of_packed_shards_are_bad_samples(old: Path, tmp_path: Path) -> None:
    index = wt.index(str(old))
    offset = next(at for name, at, _ in index.members(2) if name == "png") + 40
    with open(index.shards[0].path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(
        SourceError, match=r"the field png of sample .* has another crc32 than the index says"
    ):
        wt.convert_tars(str(old), str(tmp_path / "out"))
    done = wt.convert_tars(str(old), str(tmp_path / "out"), on_error="skip", overwrite=True)
    assert (done.info["skipped"], len(done)) == (1, 20)
    assert json.loads((tmp_path / "out" / "skipped.jsonl").read_text())["path"] == index.key(2)


CAPTIONS = {"a": "12", "b": "a dog", "c": "1e5", "d": "nan", "e": "007", "f": "1_000", "g": "0"}


def test_captions_that_look_like_numbers_are_text(tmp_path: Path) -> None:
    wt.pack(
        ({"__key__": key, "txt": caption} for key, caption in CAPTIONS.items()),
        str(tmp_path / "old"),
    )
    done = wt.convert_tars(
        str(tmp_path / "old"),
        str(tmp_path / "new"),
        where="len(txt) < 4",
        on_error="skip",
        shuffle=False,
    )
    assert sorted(done.key(i) for i in range(len(done))) == ["a", "c", "d", "e", "g"]
    assert done.info["skipped"] == 0


# --- torchvision ---


def test_a_torchvision_data_set_keeps_its_splits_classes_and_pixels(
    data: Callable[[str], Path], tmp_path: Path
) -> None:
    raw = tmp_path / "root" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for path in data("fashion-mnist").glob("*.gz"):
        with gzip.open(path) as packed, open(raw / path.stem, "wb") as file:
            shutil.copyfileobj(packed, file)
    words = [
        "convert",
        "torchvision",
        "FashionMNIST",
        str(tmp_path / "out"),
        "--root",
        str(tmp_path / "root"),
    ]
    assert main([*words, "--no-shuffle", "--splits", "test"]) == 0
    index = wt.index(str(tmp_path / "out"))
    assert (len(index), index.splits, index.labels[0].classes[9]) == (
        10_000,
        ("test",),
        "Ankle boot",
    )
    pixels = np.frombuffer((raw / "t10k-images-idx3-ubyte").read_bytes()[16:], np.uint8).reshape(
        -1, 28, 28
    )
    for number, fields in list(enumerate(samples(tmp_path / "out").values()))[::1000]:
        assert (np.asarray(Image.open(io.BytesIO(fields["png"]))) == pixels[number]).all()


def test_a_torchvision_data_set_of_files_keeps_their_bytes(tmp_path: Path) -> None:
    write_class_folder(tmp_path / "root" / "eurosat" / "2750", {"Forest": 3, "River": 4}, "jpg")
    index = wt.convert_torchvision("EuroSAT", str(tmp_path / "out"), str(tmp_path / "root"))
    assert index.labels[0].classes == ("Forest", "River")
    packed = {fields["jpg"] for fields in samples(tmp_path / "out").values()}
    assert packed == {path.read_bytes() for path in (tmp_path / "root").rglob("*.jpg")}


def test_a_missing_torchvision_name_or_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="torchvision.datasets has no data set 'Fasion'"):
        wt.convert_torchvision("Fasion", str(tmp_path / "out"), str(tmp_path))
    with pytest.raises(
        SourceError,
        match="the split 'train' is missing or .* as torchvision expects it .Dataset not found",
    ):
        wt.convert_torchvision("MNIST", str(tmp_path / "out"), str(tmp_path))
    with pytest.raises(
        SourceError, match="'test' is missing or .* as torchvision expects it .Dataset not found"
    ):
        wt.convert_torchvision("MNIST", str(tmp_path / "out"), str(tmp_path), splits=["test"])


def write_digits(folder: Path, name: str, count: int) -> None:
    """Write a split of torchvision's MNIST, with images of one color each."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.repeat(np.arange(count, dtype=np.uint8), 28 * 28).tobytes()
    head = b"\0\0\x08\x03" + count.to_bytes(4, "big") + 2 * (28).to_bytes(4, "big")
    (folder / f"{name}-images-idx3-ubyte").write_bytes(head + pixels)
    labels = (
        b"\0\0\x08\x01" + count.to_bytes(4, "big") + bytes(number % 10 for number in range(count))
    )
    (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)


def test_a_split_that_torchvision_cannot_read_is_an_error(tmp_path: Path) -> None:
    raw, out = tmp_path / "MNIST" / "raw", str(tmp_path / "out")
    write_digits(raw, "train", 20)
    write_digits(raw, "t10k", 10)
    images = raw / "t10k-images-idx3-ubyte"
    intact = images.read_bytes()
    images.write_bytes(intact[:3000])
    with pytest.raises(
        SourceError,
        match="the split 'test' is missing or cannot be read.*name the splits to convert",
    ):
        wt.convert_torchvision("MNIST", out, str(tmp_path))
    index = wt.convert_torchvision("MNIST", out, str(tmp_path), splits=["train"])
    assert index.info["samples"].keys() == {"train"}
    assert index.info["ignored"] == {"split test, which was not asked for": 1}
    images.write_bytes(intact)
    index = wt.convert_torchvision("MNIST", out, str(tmp_path), overwrite=True)
    assert {split: sum(counts.values()) for split, counts in index.info["samples"].items()} == {
        "train": 20,
        "test": 10,
    }
    assert index.info["ignored"] == {}


def test_all_torchvision_splits_are_packed_or_reported(tmp_path: Path) -> None:
    """The pets have the splits trainval and test, and neither train nor val."""
    folder = tmp_path / "oxford-iiit-pet"
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    for split, numbers in (("trainval", range(4)), ("test", range(4, 7))):
        lines = [f"Pug_{number} 1 2 3" for number in numbers]
        (folder / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")
        for number in numbers:
            (folder / "images" / f"Pug_{number}.jpg").write_bytes(picture(number, kind="JPEG"))
    index = wt.convert_torchvision("OxfordIIITPet", str(tmp_path / "out"), str(tmp_path))
    assert {split: sum(counts.values()) for split, counts in index.info["samples"].items()} == {
        "trainval": 4,
        "test": 3,
    }
    (folder / "annotations" / "test.txt").unlink()
    with pytest.raises(
        SourceError,
        match="the split 'test' is missing or cannot be read.*name the splits to convert",
    ):
        wt.convert_torchvision("OxfordIIITPet", str(tmp_path / "again"), str(tmp_path))


# --- edge cases ---


def test_class_names_that_look_like_numbers_are_read_as_in_the_table(pictures: Path) -> None:
    (pictures / "t.csv").write_text(
        "file,a,b,c\n"
        + "".join(
            f"IMG/{n}.png,{['01', '05', '10'][n % 3]},{['2', '3a'][n % 2]},{n % 3 - 1}\n"
            for n in range(6)
        )
    )
    index = wt.convert_table(
        str(pictures / "t.csv"),
        str(pictures / "out"),
        image="file",
        label=["a", "b:class", "c:class"],
        shuffle=False,
    )
    fields = {name: wt.label(f"json.{name}") for name in "abc"}
    batch = next(iter(wt.Loader(index, fields, batch_size=6, shuffle=False)))
    assert batch["a"].tolist() == [0, 1, 2, 0, 1, 2]
    assert batch["b"].tolist() == [0, 1, 0, 1, 0, 1]
    assert batch["c"].tolist() == [index.labels[2].classes.index(str(n % 3 - 1)) for n in range(6)]


def test_an_unclosed_quote_is_an_error(pictures: Path) -> None:
    (pictures / "t.csv").write_text('file,n\nIMG/0.png,"1\nIMG/1.png,2\nIMG/2.png,3\n')
    with pytest.raises(SourceError, match="a quote that is not closed"):
        wt.convert_table(pictures / "t.csv", pictures / "out", image="file")


def test_bytes_of_other_columns_become_fields(pictures: Path) -> None:
    frame = pandas.DataFrame(
        {
            "image": [picture(1)],
            "mask": [b"\x00\x01"],
            "Thumb.Nail": [{"bytes": picture(2), "path": "x"}],
            "n": [1],
        }
    )
    wt.convert_table(frame, str(pictures / "out"), image="image")
    ((_, fields),) = samples(pictures / "out").items()
    assert fields == {
        "png": picture(1),
        "mask.bin": b"\x00\x01",
        "thumb_nail.png": picture(2),
        "json": b'{"n": 1}',
    }


def test_keys_do_not_depend_on_the_folder_of_the_images(
    pictures: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(pictures / "IMG", other / "data" / "IMG")
    keys_by_folder = []
    for number, root in enumerate((pictures, other / "data")):
        (pictures / "t.csv").write_text(
            "file\n" + "".join(f"{root}/IMG/{n}.png\n" for n in range(6))
        )
        wt.convert_table(
            str(pictures / "t.csv"), str(pictures / f"out{number}"), image="file", root=str(root)
        )
        keys_by_folder.append(sorted(samples(pictures / f"out{number}")))
        assert not (pictures / f"out{number}" / "renamed.jsonl").exists()
    assert keys_by_folder == [[f"IMG/{n}" for n in range(6)]] * 2


def test_semicolons_and_lists_beside_single_values_are_supported(pictures: Path) -> None:
    (pictures / "t.csv").write_text("file;tag\nIMG/0.png;a\n")
    out = pictures / "semicolons"
    assert len(wt.convert_table(pictures / "t.csv", out, image="file", label="tag")) == 1
    with pytest.raises(UsageError, match="the kind must be one of class, number, multi"):
        wt.convert_table(pictures / "t.csv", pictures / "x", image="file", label="tag:klass")
    (pictures / "t.jsonl").write_text(
        '{"file": "IMG/0.png", "tags": ["a", "b"]}\n{"file": "IMG/1.png", "tags": "a"}\n'
    )
    index = wt.convert_table(
        str(pictures / "t.jsonl"), str(pictures / "out"), image="file", label="tags", shuffle=False
    )
    batch = next(
        iter(
            wt.Loader(index, {"t": wt.label("json.tags", multi=True)}, batch_size=2, shuffle=False)
        )
    )
    assert batch["t"].tolist() == [[1, 1], [1, 0]]


def test_text_that_is_not_utf8_is_a_bad_row(pictures: Path) -> None:
    (pictures / "t.jsonl").write_text(
        '{"file": "IMG/0.png", "a": "\\ud83d"}\n{"file": "IMG/1.png\\u0000", "a": 1}\n{"file": "IMG/2.png"}\n'
    )
    index = wt.convert_table(pictures / "t.jsonl", pictures / "out", image="file", on_error="skip")
    assert (list(skipped(pictures / "out")), len(index)) == ([1, 2], 1)


@pytest.mark.parametrize("words", [["--keep", "jpg,cls"], []])
def test_globs_of_sets_with_other_classes_are_not_merged(tmp_path: Path, words: list[str]) -> None:
    for name, classes in (("a", {"cat": 3, "dog": 3}), ("b", {"ant": 3, "bee": 3})):
        write_class_folder(tmp_path / f"in-{name}", classes, "jpg")
        wt.convert_folder(str(tmp_path / f"in-{name}"), str(tmp_path / name))
    command = [
        "convert",
        "tars",
        str(tmp_path / "a" / "*.tar"),
        str(tmp_path / "b" / "*.tar"),
        str(tmp_path / "out"),
    ]
    assert main([*command, *words]) == 2
    assert main([*command, "--keep", "jpg"]) == 0  # without classes the sets do not differ
    assert len(samples(tmp_path / "out")) == 12


def test_without_an_index_splits_come_from_shard_names(tmp_path: Path) -> None:
    for name in ("train-000", "train-001", "val-000"):
        write_tar(
            tmp_path / "s" / f"{name}.tar", [(f"{name}-{i}", {"txt": b"x"}) for i in range(4)]
        )
    index = wt.convert_tars(str(tmp_path / "s"), str(tmp_path / "out"))
    assert {shard.split: shard.samples for shard in index.shards} == {"train": 8, "val": 4}


def test_a_split_of_a_split_has_the_requested_shares(tmp_path: Path) -> None:
    rows = ({"__key__": f"k{n}", "txt": "x"} for n in range(3000))
    wt.pack(rows, str(tmp_path / "all"), split={"train": 0.8, "val": 0.2})
    index = wt.convert_tars(
        f"{tmp_path}/all/train-*.tar", str(tmp_path / "again"), split={"train": 0.8, "val": 0.2}
    )
    shares = {
        split: sum(s.samples for s in index.shards if s.split == split) / len(index)
        for split in index.splits
    }
    assert abs(shares["val"] - 0.2) < 0.03


def test_field_names_that_do_not_round_trip_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="'left/x.npy' cannot be the name of a field"):
        wt.pack([{"left/x.npy": np.zeros(2)}], str(tmp_path / "out"))
    with pytest.raises(SourceError, match="two of its fields have the same name: x.npy, x.npy"):
        wt.pack([{"x.npy": np.zeros(2), "X.npy": np.ones(2)}], str(tmp_path / "out2"))
    wt.pack([{"Depth.NPY": np.zeros(2)}], str(tmp_path / "out3"))
    assert next(
        iter(wt.Loader(str(tmp_path / "out3"), {"d": wt.array("Depth.npy")}, batch_size=1))
    )["d"].shape == (1, 2)
    with pytest.raises(UsageError, match="two fields would have the same name"):
        wt.convert_arrays({"x": np.zeros(3), "X": np.zeros(3)}, str(tmp_path / "out4"))


def test_pil_images_are_packed_upright_and_keep_gray_levels(
    data: Callable[[str], Path], tmp_path: Path
) -> None:
    with (
        Image.open(data("difficult") / "Landscape_6.jpg") as lying,
        Image.open(data("difficult") / "hopper_16bit.pgm") as deep,
    ):
        truth = np.asarray(deep, float).mean() / 256
        wt.pack(
            [{"__key__": "a", "jpg": lying}, {"__key__": "b", "jpg": deep}], str(tmp_path / "out")
        )
    packed = samples(tmp_path / "out")
    image = Image.open(io.BytesIO(packed["a"]["jpg"]))
    assert image.size[0] > image.size[1]
    assert abs(np.asarray(Image.open(io.BytesIO(packed["b"]["jpg"])), float).mean() - truth) < 2


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
    index = wt.convert_hdf5(str(tmp_path / "d.h5"), str(tmp_path / "out"), fields)
    assert len(index) == 20
    first, *parts = hdf5_reads["/blobs"]
    assert (first.start, first.stop) == (0, 16)  # to learn the size of rows
    assert parts[-1].stop == 20
    assert max(part.stop - part.start for part in parts) <= 5


def test_unknown_torchvision_splits_and_data_sets_are_errors(
    data: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="has no split 'banana'"):
        wt.convert_torchvision(
            "FashionMNIST", str(tmp_path / "out"), str(tmp_path), splits=["banana"]
        )
    for name in ("VisionDataset", "EMNIST"):
        assert main(
            ["convert", "torchvision", name, str(tmp_path / "out"), "--root", str(tmp_path)]
        ) in (1, 2)
    assert not (tmp_path / "out").exists()


def test_conditions_are_checked_before_reading_and_rejected_samples_counted(
    old: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main(["convert", "tars", str(old), str(tmp_path / "a"), "--where", "clss == 1"]) == 2
    assert "there is no column 'clss'" in capsys.readouterr().err
    assert main(["convert", "tars", str(old), str(tmp_path / "a"), "--where", "cls == 77"]) == 2
    assert "holds for none of 21 samples" in capsys.readouterr().err
    assert (
        main(
            [
                "convert",
                "tars",
                str(old),
                str(tmp_path / "a"),
                "--where",
                "cls == 1 and size.png < 9 or cls == 0",
                "--json",
            ]
        )
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert (document["samples"], document["skipped"], document["ignored"]) == (
        9,
        0,
        {"samples that do not meet the condition": 12},
    )


def test_files_beside_split_folders_are_counted_and_split_synonyms_refused(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        write_class_folder(tmp_path / "in" / split, {"a": 2})
    (tmp_path / "in" / "stray.png").write_bytes(picture(1))
    index = wt.convert_folder(str(tmp_path / "in"), str(tmp_path / "out"))
    assert (index.splits, index.info["ignored"]) == (
        ("train", "val"),
        {"files beside the splits": 1},
    )
    write_class_folder(tmp_path / "in" / "val", {"a": 2})
    with pytest.raises(SourceError, match="two of these folders mean the same split"):
        wt.convert_folder(str(tmp_path / "in"), str(tmp_path / "out2"))


# --- labels of samples and arrays ---


def test_a_class_as_bytes_is_a_class_name_or_number(tmp_path: Path) -> None:
    labels_in: list[Any] = [b"cat", b"dog", "cat", 1, b"0", b" dog\n", np.int64(1), b"7"]
    index = wt.pack(
        [{"txt": "x", "cls": label_} for label_ in labels_in],
        str(tmp_path / "out"),
        classes=["cat", "dog", "7"],
    )
    packed = samples(tmp_path / "out")
    assert [packed[key]["cls"] for key in sorted(packed)] == [
        b"0",
        b"1",
        b"0",
        b"1",
        b"0",
        b"1",
        b"1",
        b"2",
    ]
    assert [(label.name, label.classes) for label in index.labels] == [
        ("label", ("cat", "dog", "7"))
    ]
    assert index.info["samples"] == {"train": {"cat": 3, "dog": 4, "7": 1}}


def test_bytes_that_name_one_class_and_number_another_are_a_bad_sample(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError,
        match=r"row 2: its cls b'1' is the name of class 0 and also the number of class 1",
    ):
        wt.pack(
            [{"txt": "x", "cls": "1"}, {"txt": "y", "cls": b"1"}],
            str(tmp_path / "out"),
            classes=["1", "0"],
        )
    index = wt.pack([{"txt": "x", "cls": b"1"}], str(tmp_path / "same"), classes=["0", "1"])
    assert index.info["samples"] == {"train": {"1": 1}}


@pytest.mark.parametrize("cls", [b"bird", b"3", "bird", 3, -1, b"caf\xe9", b""])
def test_an_unknown_class_is_a_bad_sample(tmp_path: Path, cls: Any) -> None:
    samples_in = [{"txt": "x", "cls": 0}, {"txt": "y", "cls": cls}]
    with pytest.raises(SourceError, match="row 2: its cls is"):
        wt.pack(samples_in, str(tmp_path / "out"), classes=["cat", "dog"])
    assert (
        len(wt.pack(samples_in, str(tmp_path / "out"), classes=["cat", "dog"], on_error="skip"))
        == 1
    )


def test_class_numbers_and_names_are_not_mixed_without_declared_classes(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="row 2: its cls is 'cat', but others are numbers"):
        wt.pack([{"txt": "x", "cls": 1}, {"txt": "y", "cls": b"cat"}], str(tmp_path / "out"))
    with pytest.raises(SourceError, match="row 2: its cls is '1', but others are names"):
        wt.pack([{"txt": "x", "cls": b"cat"}, {"txt": "y", "cls": 1}], str(tmp_path / "out"))
    wt.pack([{"txt": "x", "cls": b"cat"}, {"txt": "y", "cls": b"dog"}], str(tmp_path / "out"))
    assert sorted(fields["cls"] for fields in samples(tmp_path / "out").values()) == [
        b"cat",
        b"dog",
    ]


def test_additional_labels_keep_the_class_in_the_index(tmp_path: Path) -> None:
    samples_in = [{"txt": "x", "cls": n % 2, "json": {"y": n / 2}} for n in range(4)]
    label = ColumnInfo("y", "number", "json", "y")
    index = wt.pack(samples_in, str(tmp_path / "out"), classes=["cat", "dog"], labels=[label])
    assert index.labels == (label, ColumnInfo("label", "class", "cls", classes=("cat", "dog")))
    arrays = {"cls": np.arange(4) % 2, "y": np.arange(4) / 2}
    index = wt.convert_arrays(arrays, str(tmp_path / "arrays"), label="y", classes=["cat", "dog"])
    assert index.labels == (
        ColumnInfo("y", "number", "y.npy"),
        ColumnInfo("label", "class", "cls", classes=("cat", "dog")),
    )
    assert index.info["samples"] == {"train": {"cat": 2, "dog": 2}}


class Named(list[Any]):
    """Samples with class names, like data sets of torchvision."""

    classes = ("cat", "cat")


@pytest.mark.parametrize(
    "pack",
    [
        lambda out: wt.pack([{"txt": "x", "cls": 0}], out, classes=["cat", "cat"]),
        lambda out: wt.pack(Named([{"txt": "x", "cls": 0}]), out),
        lambda out: wt.convert_arrays({"cls": np.arange(2)}, out, classes=["cat", "cat"]),
    ],
)
def test_two_classes_with_one_name_are_refused(
    tmp_path: Path, pack: Callable[[str], wt.Index]
) -> None:
    with pytest.raises(UsageError, match="classes has 'cat' at 0 and again later"):
        pack(str(tmp_path / "out"))
    with pytest.raises(UsageError, match="must be a list of names"):
        wt.pack([{"txt": "x", "cls": 0}], str(tmp_path / "out"), classes="ab")
    assert not (tmp_path / "out").exists()


def test_bytes_in_arrays_are_kept_as_text_or_bytes(tmp_path: Path) -> None:
    values_in = [b"caf\xe9", b"\xff\xd8\x00abc", "plain é".encode()]
    wt.convert_arrays({"caption": np.array(values_in)}, str(tmp_path / "out"), shuffle=False)
    packed = samples(tmp_path / "out")
    assert [packed[key]["caption.txt"] for key in sorted(packed)] == values_in
    assert len(wt.verify(tmp_path / "out", decode=True).findings) == 2


def test_a_narrow_tensor_is_a_channels_first_image(tmp_path: Path) -> None:
    pixels = torch.arange(3 * 8 * 4, dtype=torch.uint8).reshape(3, 8, 4)
    wt.pack([{"png": pixels}], str(tmp_path / "out"))
    (fields,) = samples(tmp_path / "out").values()
    read = np.asarray(Image.open(io.BytesIO(fields["png"])))
    assert read.tolist() == pixels.permute(1, 2, 0).tolist()


@pytest.mark.parametrize("name", ["x", "cls"])
def test_masked_values_are_bad_samples(tmp_path: Path, name: str) -> None:
    masked = np.ma.array([1, 2, 3], mask=[False, True, False])
    out = str(tmp_path / "out")
    index = wt.convert_arrays(
        {"n": np.arange(3), name: masked}, out, shuffle=False, on_error="skip"
    )
    assert (len(index), index.info["skipped"]) == (2, 1)
    assert "masked" in (tmp_path / "out" / "skipped.jsonl").read_text()
    with pytest.raises(wt.SourceError, match="masked"):
        wt.pack([{"__key__": "a", "x.npy": masked}], str(tmp_path / "packed"))


def test_hdf5_data_sets_without_rows_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["x"] = np.arange(4)
        file["nothing"] = h5py.Empty("f4")
        file["loop"] = h5py.SoftLink("/loop")
        file["text"] = ["a", "b", "c", "d"]
        file["wide"] = np.zeros((4, 2), np.int32)

    def pack(fields: dict[str, str], key: str | None = None) -> None:
        wt.convert_hdf5(tmp_path / "d.h5", tmp_path / "out", fields, key=key)

    with pytest.raises(UsageError, match=r"their shapes are x \[\]"):
        pack({"x": "/nothing"})
    with pytest.raises(SourceError, match="cannot be read as HDF5 .*symbolic links|too many"):
        pack({"x": "/loop"})
    with pytest.raises(SourceError, match=r"row 1: its x\.npy is text.*name the field x\.txt"):
        pack({"x.npy": "/text"})
    with pytest.raises(UsageError, match=r"the keys are an array of int32 \[4, 2\]"):
        pack({"x": "/x"}, key="/wide")
    with pytest.raises(UsageError, match="'__key__' cannot be the name of a field"):
        pack({"x": "/x", "__key__": "/text"})


@pytest.mark.filterwarnings("error")
def test_rows_of_variable_length_and_enums_are_arrays(tmp_path: Path) -> None:
    rows = [np.arange(n, dtype=np.uint8) for n in (3, 0, 5)]
    with h5py.File(tmp_path / "d.h5", "w") as file:
        for name, kind in (("small", np.uint8), ("wide", np.float32)):
            dataset = file.create_dataset(name, (3,), h5py.vlen_dtype(kind))
            for number, row in enumerate(rows):
                dataset[number] = row.astype(kind)
        file.create_dataset(
            "enum", data=[[0, 1]] * 3, dtype=h5py.enum_dtype({"no": 0, "yes": 1}, "u1")
        )
    fields = {"small": "/small", "wide": "/wide", "enum": "/enum"}
    wt.convert_hdf5(tmp_path / "d.h5", tmp_path / "out", fields, shuffle=False)
    packed = samples(tmp_path / "out")
    for number, row in enumerate(rows):
        sample = {name: np.load(io.BytesIO(data)) for name, data in packed[f"{number:09d}"].items()}
        np.testing.assert_array_equal(sample["small.npy"], row)
        np.testing.assert_array_equal(sample["wide.npy"], row.astype(np.float32))
        np.testing.assert_array_equal(sample["enum.npy"], [0, 1])
