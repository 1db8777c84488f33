"""Tables: paths of images, kinds and numbers of labels, cells, files, conditions, and refusals."""

from __future__ import annotations

import csv
import datetime
import json
import os
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import picture
from tests.support.tables import (
    Tables,
    labelled,
    pictured,
    read_samples,
    write_pictures,
    write_table,
)
from wdstrain.cli import main
from wdstrain.errors import SourceError, UsageError

# --- paths and rows ---


def test_the_rule_of_paths_and_the_kinds_are_printed(
    tables: Tables, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = ["cat ", "Cat", "dog", "dog", "n", ""]
    table = {"file": [f"IMG\\{n}.png" for n in range(6)], "y": cells}
    words = ["--label", "y", "--on-error", "skip"]
    assert tables.command(table, *words) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        f"images: files; relative paths begin at {tables.folder}",
        "label y: 4 classes (Cat, cat, dog, n), 5 of 6 values fit",
    ]
    assert tables.command(table, *words, "--overwrite", "--json") == 0
    assert json.loads(capsys.readouterr().out)["decided"] == lines[:2]


@pytest.mark.parametrize("absolute", [False, True])
def test_an_additional_row_changes_no_key_and_no_split(
    tables: Tables, tmp_path: Path, absolute: bool
) -> None:
    write_pictures(tmp_path / "day1", range(40))
    write_pictures(tmp_path / "day2", [99])
    before = tmp_path if absolute else f"../{tmp_path.name}"
    rows = [f"{before}/day1/{n}.png,{n % 2}" for n in range(40)]
    more = [*rows[:20], f"{before}/day2/99.png,1", *rows[20:], rows[3]]
    packed = []
    for some in (rows, more):
        index = tables("\n".join(["file,y", *some]), label="y", split={"train": 0.7, "val": 0.3})
        splits = [index.shards[n].split for n in index.shard_of(np.arange(len(index)))]
        split_of = dict(zip(index.keys(np.arange(len(index))), splits, strict=True))
        packed.append({(key, split_of[key], part["png"]) for key, part in tables.samples.items()})
    assert len(packed[1]) == 42
    assert packed[0] < packed[1]


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


def test_lines_of_ambiguous_or_no_json_are_bad_rows(tables: Tables) -> None:
    bad = {
        "not json": "",
        "[1]": "",
        '{"file": "IMG/1.png", "a": "\\ud83d"}': "",  # text that is not UTF-8
        '{"file": "IMG/1.png\\u0000"}': "",
        '{"file": "IMG/1.png", "y": 0, "y": 1}': "names 'y' twice",
        '{"file": "IMG/2.png", "z": {"a": 1, "a": 2}}': "names 'a' twice",
    }
    (tables.folder / "t.jsonl").write_text("\n".join(['{"file": "IMG/0.png"}', *bad]))
    assert len(tables(tables.folder / "t.jsonl", on_error="skip")) == 1
    reasons = tables.skipped
    assert sorted(reasons) == [2, 3, 4, 5, 6, 7]
    assert all(words in reasons[row] for row, words in enumerate(bad.values(), 2))


def test_columns_of_a_table_without_a_header_are_numbers(tables: Tables) -> None:
    text = "".join(f"IMG/{n}.png, {n}.5\n" for n in range(6))
    tables(text, image="0", label="1", header=False)
    assert tables.entries("1") == {f"IMG/{n}": n + 0.5 for n in range(6)}


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
    assert len(tables({"image": images}, "parquet", image="image", on_error="skip")) == 1
    assert tables.skipped == {2: "there are no bytes of an image"}
    tables({"image": images[1:]}, "parquet", image="image")
    assert tables.samples["IMG/2"]["png"] == picture(2)


def test_copies_of_an_image_in_two_splits_are_reported(
    tables: Tables, capsys: pytest.CaptureFixture[str]
) -> None:
    images = [picture(n % 6) for n in range(12)]  # each image is in both groups
    path = write_table(tables.folder / "t", "parquet", image=images, g=["a"] * 6 + ["b "] * 6)
    drawn = ["--image", "image", "--group-by", "g", "--split", "train=0.5,val=0.5"]
    for words in (drawn, ["--image", "image", "--split-by", "g", "--overwrite"]):
        assert tables.command(path, *words) == 0
        assert "6 images are in two splits or more" in " ".join(capsys.readouterr().out.split())
    for split, numbers in (("train", range(6)), ("val", range(4, 8))):
        write_pictures(tables.folder / "in" / split / "a", numbers)
    assert wt.convert_folder(tables.folder / "in", tables.folder / "o").info["divided"] == 2


# --- kinds of labels ---


@pytest.mark.parametrize(
    ("cells", "label", "classes", "bad"),
    [
        (["cat ", "cat", " dog", "dog"], "y", ("cat", "dog"), []),
        (["2", "0", "NA", "1", "0"], "y", ("0", "1", "2"), [4]),
        (["2", "0", "x", "1", "0"], "y:class", ("0", "1", "2", "x"), []),
        (["0", "1", "-1", "1", "0"], "y", ("0", "1"), [4]),
        (["0", "1", "-1", "1", "0"], "y:class", ("-1", "0", "1"), []),
        (["0", "3"], "y", ("0", "1", "2", "3"), []),  # class numbers are kept
        (["1", "2", "99999"], "y:class", ("1", "2", "99999"), []),
        (["007", "010", "100"], "y", ("007", "010", "100"), []),
        (["true", "False", "yes", "true"], "y", ("False", "True"), [4]),
        (["1.5", "2.5", "1.5"], "y:class", ("1.5", "2.5"), []),
        (["NA", "DE", "AT"], "y", ("AT", "DE", "NA"), []),
        (["cat", "dog", "7"], "y", ("7", "cat", "dog"), []),
        (["a|b", "b", "a"], "y", ("a", "a|b", "b"), []),
    ],
)
def test_the_kind_of_a_label_follows_nearly_all_cells(
    tables: Tables, cells: list[str], label: str, classes: tuple[str, ...], bad: list[int]
) -> None:
    index = tables(labelled(cells), label=label, on_error="skip")
    kind = "flag" if classes == ("False", "True") else "class"
    assert (index.labels[0].kind, index.labels[0].classes) == (kind, classes)
    assert list(tables.skipped) == bad
    for key, fields in tables.samples.items():
        cell = cells[int(key.rpartition("/")[2])].strip()
        assert classes[int(fields["cls"])].lower() == cell.lower()


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([str(n) for n in range(1001)], "1001 different numbers from 0 to 1000"),
        (["1", "2", "99999"], "3 different numbers from 1 to 99999"),
        (["1", "-1", "1"], "2 different numbers from -1 to 1"),
        (["1", "2", "a", "b"], "2 numbers and 2 texts, such as 'a'"),
        ([*["0", "1"] * 20, "0.5"], "3 different numbers from 0 to 1, all or nearly all of them w"),
    ],
)
def test_an_ambiguous_column_is_an_error_with_both_declarations(
    tables: Tables, cells: list[str], words: str
) -> None:
    table = labelled(cells)
    with pytest.raises(UsageError, match=f"{words}.*y:class.*y:number"):
        tables(table, label="y", on_error="skip")
    assert not tables.out.exists()
    assert set(tables(table, label="y:class", on_error="skip").labels[0].classes) == set(cells)
    if "a" not in cells:
        assert tables(table, label="y:number", on_error="skip").labels[0].kind == "number"


def test_two_names_of_one_number_stay_two_classes(tables: Tables) -> None:
    table = labelled(["1.1", "1.10", "1.2"])
    index = tables(table, label="y:class")
    assert index.labels[0].classes == ("1.1", "1.10", "1.2")
    assert set(index.table["y"].to_pylist()) == {"1.1", "1.10", "1.2"}
    assert tables(table, label="y").labels[0].kind == "number"
    (label,) = tables(labelled(["1", "1.0", "1e0", "0"]), label="y:class").labels
    assert label.classes == ("0", "1")


def test_lists_beside_single_values_are_several_classes(tables: Tables) -> None:
    rows = {"file": ["IMG/0.png", "IMG/1.png"], "tags": [["a", "b"], "a"]}
    index = tables(rows, "jsonl", label="tags", shuffle=False)
    field = wt.label("json.tags", multi=True)
    batch = next(iter(wt.Loader(index, {"t": field}, batch_size=2, shuffle=False)))
    assert batch["t"].tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize("several", [False, True])
def test_class_names_of_a_hugging_face_table_are_kept_and_minus_one_is_missing(
    tables: Tables, several: bool
) -> None:
    names = {"info": {"features": {"y": {"names": ["1", "0", "bird"], "_type": "ClassLabel"}}}}
    rows = pyarrow.table({"image": [*map(picture, range(4))], "y": [0, 2, -1, 1], "x": [0.5] * 4})
    rows = rows.replace_schema_metadata({"huggingface": json.dumps(names)})
    pyarrow.parquet.write_table(rows, path := tables.folder / "t.parquet")
    labels = ["y", "x"] if several else ["y"]
    index = tables(path, image="image", label=labels, on_error="skip", shuffle=False)
    assert index.labels[0].classes == ("1", "0", "bird")
    assert tables.skipped == {3: "the label column 'y' holds -1, which means no label"}
    field = wt.label("json.y") if several else wt.label()
    batch = next(iter(wt.Loader(index, {"y": field}, batch_size=3, shuffle=False)))
    assert batch["y"].tolist() == [0, 2, 1]


# --- declared classes ---


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
    index = tables(pictured(cells), image="image", label="y", classes=classes)
    assert index.labels[0].classes == tuple(classes)
    packed = tables.samples
    assert [int(packed[f"row-00000000{n}"]["cls"]) for n in (1, 2)] == numbers


def test_like_takes_the_class_numbers_of_an_earlier_set(tables: Tables) -> None:
    first = "file,y,tags,x\nIMG/0.png,cat,a|b,0.5\nIMG/1.png,dog,b,1.5\nIMG/2.png,owl,c,2.5\n"
    old = tables(first, label=["y", "tags:multi", "x"])
    like, tables.out = str(tables.out), tables.folder / "new"
    later = "file,y,tags,x\nIMG/3.png,owl,c,1\nIMG/4.png,dog,b|c,2\n"
    assert tables.command(later, "--label", "y,tags,x", "--like", like) == 0
    assert wt.open(tables.out).labels == old.labels
    with pytest.raises(UsageError, match="have no label 'z'. Use one of their labels: y, tags, x"):
        tables("file,z\nIMG/0.png,a\n", label="z", like=like)


def test_like_names_the_classes_of_folders_arrays_and_samples(tmp_path: Path) -> None:
    names, source, old = ("Pants", "Pants ", "hat"), tmp_path / "in", tmp_path / "old"
    wt.pack([{"txt": "a", "cls": 0}], old, classes=names)
    for place, name in enumerate(names[1:], 1):
        write_pictures(source / name, [place])
    assert main(["convert", "folder", str(source), str(tmp_path / "f"), "--like", str(old)]) == 0
    numbers = {key: fields["cls"] for key, fields in read_samples(tmp_path / "f").items()}
    assert numbers == {"Pants /1": b"1", "hat/2": b"2"}
    with pytest.raises(UsageError, match="class folder 'hat' is none of the 2 given classes"):
        wt.convert_folder(source, tmp_path / "x", classes=names[:2])
    wt.pack([{"txt": "b", "cls": "hat"}], tmp_path / "p", like=old)
    assert read_samples(tmp_path / "p")["000000000"]["cls"] == b"2"
    arrays = {"cls": np.array([1]), "x": np.zeros((1, 2))}
    assert wt.convert_arrays(arrays, tmp_path / "a", like=old).labels[0].classes == names


# --- cells ---


def test_cells_of_a_csv_may_be_of_any_size(tables: Tables) -> None:
    before = csv.field_size_limit()
    tables(f"file,y,note\nIMG/0.png,a,{'n' * 200_000}\n", label="y")
    assert tables.entries("note") == {"IMG/0": "n" * 200_000}
    assert csv.field_size_limit() == before


def test_bytes_in_columns_lists_and_objects_become_fields(tables: Tables) -> None:
    crops = [[picture(1), b"\xff\xd8 no"], []]
    rows = {
        "image": [picture(0), picture(9, kind="WEBP")],
        "crops": pyarrow.array(crops, pyarrow.list_(pyarrow.binary())),
        "a/b": [{"mask": picture(2), "n": 1}] * 2,
        "mask": [b"\x00\x01"] * 2,
        "Thumb.Nail": [{"bytes": picture(3), "path": "x"}] * 2,
    }
    tables(rows, "parquet", image="image")
    first, second = (tables.samples[f"row-00000000{n}"] for n in (1, 2))
    assert json.loads(first.pop("json")) == {
        "crops": ["crops.0.png", "crops.1.bin"],
        "a/b": {"mask": "a_b.mask.png", "n": 1},
    }
    kept = {"a_b.mask.png": picture(2), "mask.bin": b"\x00\x01", "thumb_nail.png": picture(3)}
    crop_fields = {"crops.0.png": picture(1), "crops.1.bin": b"\xff\xd8 no"}
    assert first == {"png": picture(0), **crop_fields, **kept}
    assert set(second) == {"webp", "json", *kept}


def test_values_that_text_cannot_represent_are_refused(tables: Tables) -> None:
    day = datetime.datetime(2024, 1, 2, 3)
    cells = [Decimal("1.10"), day, Path("a/b"), np.datetime64("2024-01-02"), b"\0x"]
    tables(pictured(cells, "x"), image="image")
    packed = tables.samples
    for number, text in enumerate(["1.10", "2024-01-02 03:00:00", "a/b", "2024-01-02"], 1):
        assert json.loads(packed[f"row-00000000{number}"]["json"])["x"] == text
    assert packed["row-000000005"]["x.bin"] == b"\0x"
    for odd in (object(), {1, 2}, 1j, Image.new("L", (2, 2))):
        with pytest.raises(UsageError, match=f"a cell of the table is {type(odd).__name__}"):
            tables(pictured([odd], "x"), image="image")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('file,said\nIMG/0.png,  a\n IMG/1.png," ""b"" "\n', ["a", ' "b" ']),
        ('file, said\nIMG/0.png, "a, b"\nIMG/1.png, c\n', ["a, b", "c"]),
        ('file;said\rIMG/0.png;"Käse ""2"""\r', ['Käse "2"']),
        *((f"file{d}said\nIMG/0.png{d}a, b\n", ["a, b"]) for d in ";|\t"),  # first line decides
    ],
)
def test_blanks_and_delimiters_in_cells_are_kept(
    tables: Tables, text: str, said: list[str]
) -> None:
    (path := tables.folder / "t.csv").write_text(text, encoding="utf-8", newline="")
    tables(path)
    assert [entry for _, entry in sorted(tables.entries("said").items())] == said


def test_a_table_may_come_through_a_pipe(tables: Tables) -> None:
    os.mkfifo(path := tables.folder / "t.csv")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(path.write_text, "file,y\nIMG/0.png,a\nIMG/1.png,b\n")
        index = tables(path, label="y")
    assert (len(index), index.labels[0].classes) == (2, ("a", "b"))


@pytest.mark.parametrize(
    ("name", "text", "encoding", "line"),
    [
        ("t.csv", "file,y\rIMG/0.png,a\rIMG/1.png,caf\u00e9\r", "latin-1", 3),
        ("t.csv", "file,y\nIMG/0.png,a\n", "utf-16", 1),
        ("t.jsonl", '{"file": "IMG/0.png"}\n{"file": "IMG/1.png", "y": "\u00e9"}\n', "latin-1", 2),
    ],
)
def test_a_table_that_is_not_utf_8_is_refused_with_its_line(
    tables: Tables, name: str, text: str, encoding: str, line: int
) -> None:
    path = tables.folder / name
    path.write_bytes(text.encode(encoding))
    words = f"{name} is not UTF-8: see line {line}. A table must be UTF-8."
    words += " Save it as UTF-8, or give its encoding" if name == "t.csv" else ""
    with pytest.raises(SourceError, match=words):
        tables(path, on_error="skip")
    path.write_bytes(text.encode("utf-8-sig"))
    assert len(tables(path)) > 0


def test_non_finite_numbers_outside_labels_are_counted_and_printed(tables: Tables) -> None:
    nan, inf = float("nan"), float("inf")
    cells: dict[str, list[Any]] = {
        "file": [f"IMG/{n}.png" for n in range(6)],
        "depth": [nan, 1.0, nan, inf, -inf, 2.0],
        "box": [[nan, 1.0], [2.0, inf], [inf, 0.0], None, [1.0, 2.0], [1.0, 2.0]],
    }
    expected = [
        "column depth: NaN became null in json (2 values)",
        "column depth: inf became the text 'inf' in json (1 value)",
        "column depth: -inf became the text '-inf' in json (1 value)",
        "column box: NaN became null in json (1 value)",
        "column box: inf became the text 'inf' in json (2 values)",
    ]
    for form in ("parquet", "jsonl", "frame"):
        decided = tables(cells, form).info["source"]["decided"]
        assert [line for line in decided if line.startswith("column")] == expected
    assert tables.entries("depth")["IMG/3"] == "inf"


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


def test_a_null_column_of_a_file_takes_the_type_of_the_others(tables: Tables) -> None:
    images = [[{"bytes": picture(n), "path": path}] for n, path in enumerate([None, "x.png"])]
    boxes: list[Any] = [[{"at": None, "of": [None]}], [{"of": [1], "at": 2}]]
    folder = tables.folder / "t"
    write_table(folder / "a", "parquet", n=[None], image=images[0], box=boxes[0])
    write_table(folder / "b", "parquet", n=[7], image=images[1], box=boxes[1])
    tables(folder, image="image")
    assert tables.entries("n") == {"a/row-000000001": None, "x": 7}
    assert tables.entries("box") == {"a/row-000000001": boxes[0][0], "x": boxes[1][0]}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"y": ["a"]}, "differs: Field y has incompatible types: string vs int64, unlike .*a.parq"),
        ({}, "has no column 'y', unlike .*a.parquet"),
        ({"y": [1], "z": [1]}, "has a column 'z' more"),
    ],
)
def test_parquet_files_with_other_schemas_are_one_clear_error(
    tables: Tables, other: dict[str, list[Any]], words: str
) -> None:
    write_table(tables.folder / "t" / "a", "parquet", y=[0], image=[picture(1)])
    write_table(tables.folder / "t" / "b", "parquet", **other, image=[picture(2)])
    with pytest.raises(SourceError, match=words):
        tables(tables.folder / "t", image="image")
    assert not tables.out.exists()


# --- where ---


# --- refusals ---

_TWO = "file,n\nIMG/0.png,1\n"  # with a second row
_COW = "file,n\nIMG/0.png,cat\nIMG/1.png,cow\n"
_COPIES = {"image": [picture(0)], "Mask": [picture(1)], "mask": [picture(2)]}
_SKIP = {"label": "y", "on_error": "skip"}


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        ("path,n\nIMG/0.png,1\n", {}, "has no column 'file'. Use one of its columns: path, n"),
        ("file,m\nIMG/0.png,1\n", {}, "has no column 'n'. Use one of its columns: file, m"),
        (f"{_TWO}IMG/zzz.png,1\n", {}, "row 3: IMG/zzz.png: the image is not there"),
        ('file,n\nIMG/0.png,"\n2"\nIMG/zzz.png,1\n', {}, "t.csv, row 4: IMG/zzz.png: the image is"),
        ("file,n\n\n\n", {}, "has no rows that can be read"),
        ("file,file\nIMG/0.png,1\n", {}, "names a column twice"),
        ("IMG/9.png,3\nIMG/0.png,1\n", {}, "its first line looks like data"),
        ("file,n\nIMG/0.png,0.5\nIMG/1.png,nan\n", {}, "row 3: .* 'n' holds 'nan'"),
        ('file,n\n0.png,"1\n1.png,2\n2.png,3\n', {}, "a quote that is not closed"),
        (_TWO, {"label": "file"}, "a column is named twice: file, file"),
        (_TWO, {"label": "n:klass"}, "the kind must be one of class, number, multi"),
        (_COW, {"classes": ["cat", "dog"]}, "row 3: .*column 'n' holds 'cow', none of the 2"),
        ("t.parquet", {}, "cannot be read as Parquet"),
        ("t.jsonl", {}, "has no rows that can be read"),
        ("nothing.csv", {}, "nothing.csv: there is no such file"),
        ("*.tsv", {}, "no file matches this pattern"),
        ("IMG", {}, "holds no tables. Check the path. Tables end in .csv"),
        (".", {}, "several formats, such as .*t.jsonl and .*t.parquet"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), {}, "names a column twice"),
        (
            pandas.DataFrame(_COPIES),
            {"image": "image", "label": [], "on_error": "skip"},
            "two of its columns would be one field: png, mask.png, mask.png; rename one",
        ),
        ("# made today\nfile,y\nIMG/0.png,a\n", {}, "row 2: it has 2 cells, but the table has 1 c"),
        ("file;y;z\nIMG/0.png,a,b\n", {}, "row 2: it has 1 cells, but the table has 3 columns"),
        ("file;y;z\nIMG/0.png,a,b\n", _SKIP, "has no rows that can be read"),
        (pictured([[0.1, 0.2], [0.3, 0.4]]), {}, "lists of 0.1 and the like"),
        (pictured([[0, 1, 0], [1, 0, 0]]), {}, "lists of 3 numbers each.*y:multi"),
        (pictured([{"a": 1}, {"a": 2}]), {}, "which is neither a class nor a number"),
        (pictured([[0.5]]), {"label": "y:multi"}, r"\[0.5\], which is not a list of classes"),
        (pictured([[1], [2]]), {"label": "y:class"}, r"holds \[1\], which is not a class"),
        (_TWO, {"where": "n > 99"}, "none of 1 rows meets where='n > 99'"),
        (_TWO, {"where": "size > 1"}, "there is no column 'size'. Use one of: file, n"),
        (_TWO, {"where": "n >"}, "is no condition"),
        (f"{_TWO}IMG/1.png,\n", {"split_by": "n"}, "row 3: IMG/1.png: the .* column 'n' is empty"),
        ("file,n\nIMG/0.png,../a\n", {"split_by": "n"}, "'../a' cannot be the name of a split"),
    ],
)
def test_an_unusable_table_is_refused(
    tables: Tables, table: Any, options: dict[str, Any], words: str
) -> None:
    (tables.folder / "t.parquet").write_text("PAR1 no")
    (tables.folder / "t.jsonl").write_text("")
    if isinstance(table, str):
        table = f"\ufeff{table}" if "\n" in table else tables.folder / table
        options = {"label": "n", **options}
    elif "image" in table:
        options = {"image": "image", "label": "y", **options}
    with pytest.raises((SourceError, UsageError), match=words):
        tables(table, **options)
