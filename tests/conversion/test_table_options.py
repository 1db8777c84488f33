"""Tables of several files, row filters, path templates, and fixed class numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import wdstrain as wt
from tests.conftest import picture
from tests.support.tables import Tables, read_samples, write_pictures, write_table
from wdstrain.cli.main import main
from wdstrain.errors import SourceError, UsageError

PARTS = {"train": 0.5, "val": 0.5}


# --- several files ---


@pytest.mark.parametrize("how", ["folder", "glob", "files"])
def test_column_types_of_several_files_come_from_all_files(tables: Tables, how: str) -> None:
    folder = tables.folder / "t"
    folder.mkdir()
    (folder / "a.csv").write_text("file,n,id\nIMG/0.png,1,001\nIMG/1.png,2,002\n")
    (folder / "b.csv").write_text("id,file,n\n3,IMG/2.png,x\n")
    files = [folder / "a.csv", folder / "b.csv"]
    given = {"folder": folder, "glob": str(folder / "*.csv"), "files": files}
    tables(given[how], root=tables.folder)
    assert tables.entries("n") == {"IMG/0": "1", "IMG/1": "2", "IMG/2": "x"}
    assert tables.entries("id") == {"IMG/0": "001", "IMG/1": "002", "IMG/2": "3"}


def test_a_bad_row_is_named_with_its_file_and_line(tables: Tables) -> None:
    (tables.folder / "a.csv").write_text("file,y\nIMG/0.png,1\n")
    (tables.folder / "b.csv").write_text('file,y\nIMG/1.png,"\n2"\nIMG/gone.png,3\n')
    with pytest.raises(SourceError, match=r"b.csv, row 4: IMG/gone.png: the image is not there"):
        tables(tables.folder / "*.csv")


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
    tables: Tables, other: dict[str, list[Any]], words: str
) -> None:
    write_table(tables.folder / "t" / "a", "parquet", y=[0], image=[picture(1)])
    write_table(tables.folder / "t" / "b", "parquet", **other)
    with pytest.raises(SourceError, match=words):
        tables(tables.folder / "t", image="image")
    assert not tables.out.exists()


def test_a_null_column_of_a_file_takes_the_type_of_the_others(tables: Tables) -> None:
    images = [[{"bytes": picture(n), "path": path}] for n, path in enumerate([None, "x.png"])]
    boxes: list[Any] = [[{"at": None, "of": [None]}], [{"of": [1], "at": 2}]]
    folder = tables.folder / "t"
    write_table(folder / "a", "parquet", n=[None], image=images[0], box=boxes[0])
    write_table(folder / "b", "parquet", n=[7], image=images[1], box=boxes[1])
    tables(folder, image="image")
    assert tables.entries("n") == {"a/row-000000001": None, "x": 7}
    assert tables.entries("box") == {"a/row-000000001": boxes[0][0], "x": boxes[1][0]}


def test_files_named_after_splits_give_the_splits(tables: Tables) -> None:
    folder = tables.folder / "t"
    write_table(folder / "train-0", "parquet", image=[picture(1), picture(2)])
    write_table(folder / "validation-0", "parquet", image=[picture(3)])
    index = tables(folder, image="image")
    assert {shard.split: shard.samples for shard in index.shards} == {"train": 2, "val": 1}
    assert "splits: those in the names of the files" in index.info["source"]["decided"][1]
    assert tables(folder, image="image", split={"all": 1.0}).splits == ("all",)


def _several_formats(path: Path) -> None:
    path.mkdir()
    (path / "a.csv").touch()
    (path / "b.parquet").touch()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (Path.mkdir, SourceError, "holds no tables. Check the path. Tables end in .csv"),
        (str, UsageError, "there is no such file"),
        (_several_formats, SourceError, "several formats, such as .*a.csv and .*b.parquet"),
    ],
)
def test_addresses_without_a_table_are_errors(
    tables: Tables, make: Callable[[Path], object], error: type[Exception], words: str
) -> None:
    make(tables.folder / "t")
    with pytest.raises(error, match=words):
        tables(tables.folder / "t")
    with pytest.raises(UsageError, match="no file matches this pattern"):
        tables(tables.folder / "t" / "*.tsv")


# --- images ---


def test_a_template_builds_image_paths_from_columns_and_keeps_the_columns(tables: Tables) -> None:
    images = {f"IMG/a-{number:03d}": picture(number) for number in (7, 10)}
    for name, data in images.items():
        (tables.folder / f"{name}.png").write_bytes(data)
    text = "id,part\n007,a\n010,a\n"
    tables(text, image="IMG/{part}-{id}.png")
    assert {key: fields["png"] for key, fields in tables.samples.items()} == images
    assert tables.entries("id") == {"IMG/a-007": "007", "IMG/a-010": "010"}
    with pytest.raises(UsageError, match="no column 'name'. Use one of its columns: id, part"):
        tables(text, image="IMG/{name}.png")


def test_bytes_and_paths_are_not_mixed_in_one_table(tables: Tables) -> None:
    images = [{"bytes": picture(1), "path": "a.png"}, {"bytes": None, "path": "IMG/2.png"}]
    index = tables({"image": images}, "parquet", image="image", on_error="skip")
    assert len(index) == 1
    assert tables.skipped == {2: "there are no bytes of an image"}
    tables({"image": images[1:]}, "parquet", image="image")
    assert tables.samples["IMG/2"]["png"] == picture(2)


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
    tables: Tables, form: str, where: str, chosen: list[int]
) -> None:
    columns: dict[str, list[Any]] = {
        "file": [f"IMG/{n}.png" for n in range(9)],
        "n": list(range(9)),
        "id": [f"{n:03d}" for n in range(9)],
        "kind": [*"abc"] * 3,
        "note": [None if n % 2 == 0 else "x" for n in range(9)],
    }
    complete = tables(columns, form)
    keys = {f"IMG/{n}" for n in chosen}
    assert set(complete.where(where).keys(np.arange(len(chosen)))) == keys
    index = tables(columns, form, where=where)
    assert set(tables.samples) == keys
    rejected = index.info["ignored"]["rows that do not meet the condition"]
    assert (rejected, index.info["listed"]) == (9 - len(chosen), len(chosen))


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
    tables: Tables, where: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        tables("file,n\nIMG/0.png,1\nIMG/1.png,2\n", where=where)


# --- classes ---


@pytest.mark.parametrize(
    ("cells", "classes", "numbers"),
    [
        (["dog", "cat"], ["owl", "cat", "dog"], [2, 1]),
        ([0, 2], ["owl", "cat", "dog"], [0, 2]),  # numbers that are no names are class numbers
        ([1, 2], ["2", "1", "0"], [1, 0]),  # numbers that are class names are names
        ([True, False], ["True", "False"], [0, 1]),
    ],
)
def test_declared_classes_fix_the_class_numbers(
    tables: Tables, cells: list[Any], classes: list[str], numbers: list[int]
) -> None:
    frame = pandas.DataFrame({"image": [picture(0), picture(1)], "y": cells})
    index = tables(frame, image="image", label="y", classes=classes)
    assert index.labels[0].classes == tuple(classes)
    packed = tables.samples
    assert [int(packed[f"row-00000000{n}"]["cls"]) for n in (1, 2)] == numbers


def test_a_value_outside_the_declared_classes_is_a_bad_row(tables: Tables) -> None:
    text = "file,y\nIMG/0.png,cat\nIMG/1.png,cow\n"
    with pytest.raises(
        SourceError, match="row 3: .*the label column 'y' holds 'cow', none of the 2"
    ):
        tables(text, label="y", classes=["cat", "dog"])


def test_like_takes_the_class_numbers_of_an_earlier_set(tables: Tables) -> None:
    first = "file,y,tags,x\nIMG/0.png,cat,a|b,0.5\nIMG/1.png,dog,b,1.5\nIMG/2.png,owl,c,2.5\n"
    old = tables(first, label=["y", "tags:multi", "x"])
    like, tables.out = str(tables.out), tables.folder / "new"
    later = "file,y,tags,x\nIMG/3.png,owl,c,1\nIMG/4.png,dog,b|c,2\n"
    assert tables.command(later, "--label", "y,tags,x", "--like", like) == 0
    assert wt.open(tables.out).labels == old.labels
    with pytest.raises(UsageError, match="have no label 'z'. Use one of their labels: y, tags, x"):
        tables("file,z\nIMG/0.png,a\n", label="z", like=like)


def test_class_folders_use_declared_classes(tmp_path: Path) -> None:
    names, source = ("Pants", "Pants ", "hat"), tmp_path / "in"
    for place, name in enumerate(names):
        write_pictures(source / name, [place])
    assert wt.convert_folder(source, tmp_path / "old").labels[0].classes == names
    (source / "Pants" / "0.png").unlink()
    assert main(["convert", "folder", str(source), str(tmp_path / "b")]) == 0
    words = ["convert", "folder", str(source), str(tmp_path / "new")]
    assert main([*words, "--like", str(tmp_path / "old")]) == 0
    packed = read_samples(tmp_path / "new")
    assert {key: fields["cls"] for key, fields in packed.items()} == {
        "Pants /1": b"1",
        "hat/2": b"2",
    }
    with pytest.raises(UsageError, match="class folder 'hat' is none of the 2 given classes"):
        wt.convert_folder(source, tmp_path / "x", classes=names[:2])


def test_like_names_the_classes_of_arrays_and_samples(tmp_path: Path) -> None:
    names, old = ("cat", "dog", "owl"), tmp_path / "old"
    wt.pack([{"txt": "a", "cls": 0}], old, classes=names)
    packed = wt.pack([{"txt": "b", "cls": "owl"}], tmp_path / "a", like=old)
    assert packed.labels[0].classes == names
    assert read_samples(tmp_path / "a")["000000000"]["cls"] == b"2"
    arrays = {"cls": np.array([1]), "x": np.zeros((1, 2))}
    assert wt.convert_arrays(arrays, tmp_path / "b", like=old).labels[0].classes == names


# --- splits ---


def test_copies_of_an_image_in_two_splits_are_reported(
    tables: Tables, capsys: pytest.CaptureFixture[str]
) -> None:
    images = [picture(n % 6) for n in range(12)]  # each image is in both groups
    path = write_table(tables.folder / "t", "parquet", image=images, g=["a"] * 6 + ["b"] * 6)
    words = ["--image", "image", "--group-by", "g", "--split", "train=0.5,val=0.5"]
    assert tables.command(path, *words) == 0
    assert "6 images are in two splits or more" in " ".join(capsys.readouterr().out.split())
    for split, numbers in (("train", range(6)), ("val", range(4, 8))):
        write_pictures(tables.folder / "in" / split / "a", numbers)
    assert wt.convert_folder(tables.folder / "in", tables.folder / "o").info["divided"] == 2


def test_stratify_names_a_column_of_the_table(tables: Tables) -> None:
    text = "\n".join(["file,n,kind", *(f"IMG/{n}.png,{n},{'ab'[n % 2]}" for n in range(9))])
    counts = tables(text, label="n:number", split=PARTS, stratify="kind").info["samples"]
    assert abs(counts["train"]["a"] - counts["val"]["a"]) <= 1
    assert counts["train"]["b"] == counts["val"]["b"] == 2
    with pytest.raises(UsageError, match="has no column 'none'"):
        tables(text, split=PARTS, stratify="none")
    with pytest.raises(UsageError, match="has no such label of classes, but 'label'"):
        wt.pack([{"txt": "a", "cls": 1}], tables.folder / "y", split=PARTS, stratify="kind")
