"""Tables of several files, row filters, path templates, and fixed class numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import wdstrain as wt
from tests.conftest import picture
from tests.support.tables import read_samples, write_pictures, write_table
from wdstrain.cli.main import main
from wdstrain.errors import SourceError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with IMG/0.png to IMG/8.png."""
    write_pictures(tmp_path / "IMG", range(9))
    return tmp_path


def entries(out: Path, name: str) -> dict[str, Any]:
    """{key: the json entry `name`}"""
    return {key: json.loads(fields["json"])[name] for key, fields in read_samples(out).items()}


# --- several files ---


@pytest.mark.parametrize("how", ["folder", "glob", "files"])
def test_column_types_of_several_files_come_from_all_files(folder: Path, how: str) -> None:
    (folder / "t").mkdir()
    (folder / "t" / "a.csv").write_text("file,n,id\nIMG/0.png,1,001\nIMG/1.png,2,002\n")
    (folder / "t" / "b.csv").write_text("id,file,n\n3,IMG/2.png,x\n")
    tables = {
        "folder": folder / "t",
        "glob": str(folder / "t" / "*.csv"),
        "files": [folder / "t" / "a.csv", folder / "t" / "b.csv"],
    }
    wt.convert_table(tables[how], folder / "out", image="file", root=folder)
    assert entries(folder / "out", "n") == {"IMG/0": "1", "IMG/1": "2", "IMG/2": "x"}
    assert entries(folder / "out", "id") == {"IMG/0": "001", "IMG/1": "002", "IMG/2": "3"}


def test_a_bad_row_is_named_with_its_file_and_line(folder: Path) -> None:
    (folder / "a.csv").write_text("file,y\nIMG/0.png,1\n")
    (folder / "b.csv").write_text('file,y\nIMG/1.png,"\n2"\nIMG/gone.png,3\n')
    with pytest.raises(SourceError, match=r"b.csv, row 4: IMG/gone.png: the image is not there"):
        wt.convert_table(folder / "*.csv", folder / "out", image="file")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"y": ["a"], "image": [picture(2)]},
            "differs: Field y has incompatible types: string vs int64, unlike .*a.parquet",
        ),
        ({"image": [picture(2)]}, "has no column 'y', unlike .*a.parquet"),
        ({"y": [1], "image": [picture(2)], "z": [1]}, "has a column 'z' more"),
    ],
)
def test_parquet_files_with_other_schemas_are_one_clear_error(
    tmp_path: Path, other: dict[str, list[Any]], words: str
) -> None:
    write_table(tmp_path / "t" / "a", "parquet", y=[0], image=[picture(1)])
    write_table(tmp_path / "t" / "b", "parquet", **other)
    with pytest.raises(SourceError, match=words):
        wt.convert_table(tmp_path / "t", tmp_path / "out", image="image")
    assert not (tmp_path / "out").exists()


def test_a_null_column_of_a_file_takes_the_type_of_the_others(tmp_path: Path) -> None:
    images = [[{"bytes": picture(n), "path": path}] for n, path in enumerate([None, "x.png"])]
    boxes: list[Any] = [[{"at": None, "of": [None]}], [{"of": [1], "at": 2}]]
    write_table(tmp_path / "t" / "a", "parquet", n=[None], image=images[0], box=boxes[0])
    write_table(tmp_path / "t" / "b", "parquet", n=[7], image=images[1], box=boxes[1])
    wt.convert_table(tmp_path / "t", tmp_path / "out", image="image")
    assert entries(tmp_path / "out", "n") == {"a/row-000000001": None, "x": 7}
    assert entries(tmp_path / "out", "box") == {"a/row-000000001": boxes[0][0], "x": boxes[1][0]}


def test_files_named_after_splits_give_the_splits(tmp_path: Path) -> None:
    write_table(tmp_path / "t" / "train-0", "parquet", image=[picture(1), picture(2)])
    write_table(tmp_path / "t" / "validation-0", "parquet", image=[picture(3)])
    index = wt.convert_table(tmp_path / "t", tmp_path / "out", image="image")
    assert {shard.split: shard.samples for shard in index.shards} == {"train": 2, "val": 1}
    assert "splits: those in the names of the files" in index.info["source"]["decided"][1]
    drawn = wt.convert_table(tmp_path / "t", tmp_path / "o", image="image", split={"all": 1.0})
    assert drawn.splits == ("all",)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "holds no tables. Check the path. Tables end in .csv"),
        (lambda path: None, "there is no such file"),
        (
            lambda path: [path.mkdir(), (path / "a.csv").touch(), (path / "b.parquet").touch()],
            "several formats, such as .*a.csv and .*b.parquet",
        ),
    ],
)
def test_addresses_without_a_table_are_errors(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path / "t")
    missing = not (tmp_path / "t").exists()
    with pytest.raises(UsageError if missing else SourceError, match=words):
        wt.convert_table(tmp_path / "t", tmp_path / "out", image="file")
    with pytest.raises(UsageError, match="no file matches this pattern"):
        wt.convert_table(tmp_path / "t" / "*.tsv", tmp_path / "out", image="file")


# --- images ---


def test_a_template_builds_image_paths_from_columns_and_keeps_the_columns(folder: Path) -> None:
    for number in (7, 10):
        (folder / "IMG" / f"a-{number:03d}.png").write_bytes(picture(number))
    (folder / "t.csv").write_text("id,part\n007,a\n010,a\n")
    index = wt.convert_table(folder / "t.csv", folder / "out", image="IMG/{part}-{id}.png")
    assert "2 of 2 paths exist" in index.info["source"]["decided"][0]
    assert {key: fields["png"] for key, fields in read_samples(folder / "out").items()} == {
        "IMG/a-007": picture(7),
        "IMG/a-010": picture(10),
    }
    assert entries(folder / "out", "id") == {"IMG/a-007": "007", "IMG/a-010": "010"}
    with pytest.raises(UsageError, match="no column 'name'. Use one of its columns: id, part"):
        wt.convert_table(folder / "t.csv", folder / "x", image="IMG/{name}.png")


def test_bytes_and_paths_are_not_mixed_in_one_table(folder: Path) -> None:
    images = [{"bytes": picture(1), "path": "a.png"}, {"bytes": None, "path": "IMG/2.png"}]
    write_table(folder / "t", "parquet", image=images)
    index = wt.convert_table(folder / "t.parquet", folder / "out", image="image", on_error="skip")
    assert len(index) == 1
    row = json.loads((folder / "out" / "skipped.jsonl").read_text())
    assert (row["row"], row["reason"]) == (2, "there are no bytes of an image")
    write_table(folder / "t", "parquet", image=images[1:])
    index = wt.convert_table(folder / "t.parquet", folder / "out", image="image", overwrite=True)
    assert read_samples(folder / "out")["IMG/2"]["png"] == picture(2)


def test_a_table_with_bytes_is_resumed_only_with_the_same_rows(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t", "parquet", n=[1, 2], image=[picture(1), picture(2)])
    wt.convert_table(path, tmp_path / "out", image="image", where="n > 0")
    wt.convert_table(path, tmp_path / "out", image="image", where="n > 0", resume=True)
    with pytest.raises(UsageError, match="where was 'n > 0', is 'n > 1'"):
        wt.convert_table(path, tmp_path / "out", image="image", where="n > 1", resume=True)


# --- where ---


@pytest.mark.parametrize("form", ["csv", "frame"])
@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        ("n >= 3 and kind != 'b'", [3, 5, 6, 8]),
        ("kind in ['a', 'c'] and not n == 0", [2, 3, 5, 6, 8]),
        ("id == '004'", [4]),
        ("note is None", [0, 2, 4, 6, 8]),
        ("json.n < 1 or id.startswith('008')", [0, 8]),
    ],
)
def test_where_selects_the_rows_of_index_where(
    folder: Path, form: str, where: str, chosen: list[int]
) -> None:
    frame = pandas.DataFrame(
        {
            "file": [f"IMG/{n}.png" for n in range(9)],
            "n": range(9),
            "id": [f"{n:03d}" for n in range(9)],
            "kind": [*"abc"] * 3,
            "note": [None if n % 2 == 0 else "x" for n in range(9)],
        }
    )
    frame.to_csv(folder / "t.csv", index=False)
    table: Any = folder / "t.csv" if form == "csv" else frame
    root = str(folder)
    index = wt.convert_table(table, folder / "out", image="file", where=where, root=root)
    assert set(read_samples(folder / "out")) == {f"IMG/{n}" for n in chosen}
    rejected = index.info["ignored"]["rows that do not meet the condition"]
    assert (rejected, index.info["listed"]) == (9 - len(chosen), len(chosen))
    complete = wt.convert_table(table, folder / "whole", image="file", root=root)
    assert set(complete.where(where).keys(np.arange(len(chosen)))) == {f"IMG/{n}" for n in chosen}


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ("n > 99", SourceError, "none of 2 rows meets where='n > 99'"),
        ("m > 1", UsageError, "there is no column 'm'.*file, n"),
        ("flie == ''", UsageError, "there is no column 'flie'. Use one of: "),
        ("size > 1", UsageError, "there is no column 'size'"),
        ("n >", UsageError, "is no condition"),
    ],
)
def test_invalid_conditions_and_empty_selections_are_errors(
    folder: Path, where: str, error: type[Exception], words: str
) -> None:
    (folder / "t.csv").write_text("file,n\nIMG/0.png,1\nIMG/1.png,2\n")
    with pytest.raises(error, match=words):
        wt.convert_table(folder / "t.csv", folder / "out", image="file", where=where)


# --- classes ---


@pytest.mark.parametrize(
    ("cells", "classes", "numbers"),
    [
        (["dog", "cat"], ["owl", "cat", "dog"], [2, 1]),
        (
            [0, 2],
            ["owl", "cat", "dog"],
            [0, 2],
        ),  # numbers that are not class names are class numbers
        ([1, 2], ["2", "1", "0"], [1, 0]),  # numbers that are class names are names
        ([True, False], ["True", "False"], [0, 1]),
    ],
)
def test_declared_classes_fix_the_class_numbers(
    tmp_path: Path, cells: list[Any], classes: list[str], numbers: list[int]
) -> None:
    frame = pandas.DataFrame({"image": [picture(0), picture(1)], "y": cells})
    index = wt.convert_table(frame, tmp_path / "out", image="image", label="y", classes=classes)
    assert index.labels[0].classes == tuple(classes)
    packed = read_samples(tmp_path / "out")
    assert [int(packed[f"row-00000000{n}"]["cls"]) for n in (1, 2)] == numbers


def test_a_value_outside_the_declared_classes_is_a_bad_row(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"image": [picture(0), picture(1)], "y": ["cat", "cow"]})
    with pytest.raises(SourceError, match="row 2: the label column 'y' holds 'cow', none of the 2"):
        wt.convert_table(frame, tmp_path / "out", image="image", label="y", classes=["cat", "dog"])


def test_like_takes_the_class_numbers_of_an_earlier_set(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = "file,y,tags,x\nIMG/0.png,cat,a|b,0.5\nIMG/1.png,dog,b,1.5\nIMG/2.png,owl,c,2.5\n"
    (folder / "first.csv").write_text(first)
    (folder / "later.csv").write_text("file,y,tags,x\nIMG/3.png,owl,c,1\nIMG/4.png,dog,b|c,2\n")
    out = str(folder / "old")
    labels = ["y", "tags:multi", "x"]
    old = wt.convert_table(folder / "first.csv", out, image="file", label=labels)
    words = [str(folder / "later.csv"), str(folder / "new"), "--image", "file"]
    assert main(["convert", "table", *words, "--label", "y,tags,x", "--like", out]) == 0
    new = wt.open(folder / "new")
    assert new.labels == old.labels
    with pytest.raises(UsageError, match="have no label 'z'. Use one of their labels: y, tags, x"):
        wt.convert_table(
            pandas.DataFrame({"image": [picture(0)], "z": ["a"]}),
            folder / "x",
            image="image",
            label="z",
            like=out,
        )


def test_class_folders_use_declared_classes(tmp_path: Path) -> None:
    for place, name in enumerate(("Pants", "Pants ", "hat")):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "0.png").write_bytes(picture(place))
    index = wt.convert_folder(tmp_path / "in", tmp_path / "old")
    assert index.labels[0].classes == ("Pants", "Pants ", "hat")
    (tmp_path / "in" / "Pants" / "0.png").unlink()
    assert main(["convert", "folder", str(tmp_path / "in"), str(tmp_path / "b")]) == 0
    words = ["convert", "folder", str(tmp_path / "in"), str(tmp_path / "new")]
    assert main([*words, "--like", str(tmp_path / "old")]) == 0
    assert {key: fields["cls"] for key, fields in read_samples(tmp_path / "new").items()} == {
        "Pants /0": b"1",
        "hat/0": b"2",
    }
    with pytest.raises(UsageError, match="class folder 'hat' is none of the 2 given classes"):
        wt.convert_folder(tmp_path / "in", tmp_path / "x", classes=["Pants", "Pants "])


def test_like_names_the_classes_of_arrays_and_samples(tmp_path: Path) -> None:
    names = ("cat", "dog", "owl")
    old = tmp_path / "old"
    wt.pack([{"txt": "a", "cls": 0}], old, classes=names)
    packed = wt.pack([{"txt": "b", "cls": "owl"}], tmp_path / "a", like=old)
    assert packed.labels[0].classes == names
    assert read_samples(tmp_path / "a")["000000000"]["cls"] == b"2"
    arrays = {"cls": np.array([1]), "x": np.zeros((1, 2))}
    assert wt.convert_arrays(arrays, tmp_path / "b", like=old).labels[0].classes == names


# --- splits ---


def test_copies_of_an_image_in_two_groups_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = [picture(n % 6) for n in range(12)]  # each image is in both groups
    path = write_table(tmp_path / "t", "parquet", image=images, g=["a"] * 6 + ["b"] * 6)
    words = ["convert", "table", str(path), str(tmp_path / "out"), "--image", "image"]
    assert main([*words, "--group-by", "g", "--split", "train=0.5,val=0.5"]) == 0
    assert "6 images are in two splits or more" in " ".join(capsys.readouterr().out.split())


def test_stratify_names_a_column_of_the_table(folder: Path) -> None:
    rows = [f"IMG/{n % 9}.png,{n},{'ab'[n % 2]}" for n in range(9)]
    (folder / "t.csv").write_text("\n".join(["file,n,kind", *rows]))
    split = {"train": 0.5, "val": 0.5}
    table, out = folder / "t.csv", folder / "out"
    wt.convert_table(table, out, image="file", label="n:number", split=split, stratify="kind")
    counts = wt.open(out).info["samples"]
    assert abs(counts["train"]["a"] - counts["val"]["a"]) <= 1
    assert counts["train"]["b"] == counts["val"]["b"] == 2
    with pytest.raises(UsageError, match="has no column 'none'"):
        wt.convert_table(table, folder / "x", image="file", split=split, stratify="none")
    with pytest.raises(UsageError, match="has no such label of classes, but 'label'"):
        wt.pack([{"txt": "a", "cls": 1}], folder / "y", split=split, stratify="kind")


def test_copies_of_a_file_in_two_splits_are_counted_for_folders(tmp_path: Path) -> None:
    for split, numbers in (("train", range(6)), ("val", range(4, 8))):
        (tmp_path / "in" / split / "a").mkdir(parents=True)
        for number in numbers:
            (tmp_path / "in" / split / "a" / f"{split}{number}.png").write_bytes(picture(number))
    index = wt.convert_folder(tmp_path / "in", tmp_path / "out")
    assert index.info["divided"] == 2
